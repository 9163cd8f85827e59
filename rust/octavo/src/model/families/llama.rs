//! Llama, and everything that its class runs (SmolLM, TinyLlama, Yi …). The plainest decoder: the others are said by how
//! they differ from it.

use octavo_kernels::RopeStyle;

use super::gguf::GgufConfig;
use super::hf::HfDecoder;
use super::{Family, names};
use crate::error::LoadError;
use crate::model::spec::{Biases, DecoderSpec};

pub(super) const FAMILY: Family = Family {
    hf_architecture: "LlamaForCausalLM",
    gguf_architecture: Some("llama"),
    from_hf,
    from_gguf,
    hf_names: &names::HF,
    gguf_names: &names::GGUF,
};

pub(super) fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let attention = config.bool("attention_bias")?.unwrap_or(false);
    let mlp = config.bool("mlp_bias")?.unwrap_or(false);
    Ok(DecoderSpec { biases: Biases { qkv: attention, output: attention, mlp }, ..config.decoder()? })
}

pub(super) fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = DecoderSpec { biases: config.biases(), ..config.decoder()? };
    // Converters reorder the query and key rows of this family to RoFormer's pairs.
    for rope in &mut spec.ropes {
        rope.style = RopeStyle::Interleaved;
    }
    // Mixtral's files are of this family.
    config.set_experts(&mut spec)?;
    Ok(spec)
}
