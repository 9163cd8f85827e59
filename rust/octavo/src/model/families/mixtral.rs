//! Mixtral: Mistral with a mixture of experts in every layer. Its GGUF files call themselves `llama`.

use super::hf::HfDecoder;
use super::{Family, mistral, names};
use crate::error::LoadError;
use crate::model::spec::{DecoderSpec, Experts};

pub(super) const FAMILY: Family =
    Family { hf_architecture: "MixtralForCausalLM", from_hf, hf_names: &names::HF_MIXTRAL, ..mistral::FAMILY };

fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = mistral::from_hf(config)?;
    spec.experts = Some(Experts {
        count: config.size_or("num_local_experts", 8)?,
        per_token: config.size_or("num_experts_per_tok", 2)?,
        intermediate_size: spec.intermediate_size,
        renormalise: true,
    });
    spec.layers.iter_mut().for_each(|layer| layer.sparse = true);
    Ok(spec)
}
