//! Phi-3 and Phi-4: Llama with stacked weights, a part of each head rotated, and frequencies for long contexts.

use super::gguf::GgufConfig;
use super::{Family, mistral, names};
use crate::error::LoadError;
use crate::model::spec::DecoderSpec;

pub(super) const FAMILY: Family = Family {
    hf_architecture: "Phi3ForCausalLM",
    gguf_architecture: Some("phi3"),
    from_hf: mistral::from_hf,
    from_gguf,
    hf_names: &names::HF_FUSED,
    gguf_names: &names::GGUF_FUSED,
};

fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = config.decoder()?;
    let window = config.window()?;
    spec.layers.iter_mut().for_each(|layer| layer.window = window);
    Ok(spec)
}
