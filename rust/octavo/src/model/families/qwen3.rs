//! Qwen3: norms on query and key heads, no biases.

use super::gguf::GgufConfig;
use super::hf::HfDecoder;
use super::{Family, names, qwen2};
use crate::error::LoadError;
use crate::model::spec::{Biases, DecoderSpec, QkNorm};

pub(super) const FAMILY: Family = Family {
    hf_architecture: "Qwen3ForCausalLM",
    gguf_architecture: Some("qwen3"),
    from_hf,
    from_gguf,
    hf_names: &names::HF,
    gguf_names: &names::GGUF,
};

fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = without_windows(config)?;
    qwen2::set_windows(config, &mut spec)?;
    Ok(spec)
}

pub(super) fn without_windows(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let attention = config.bool("attention_bias")?.unwrap_or(false);
    let biases = Biases { qkv: attention, output: attention, mlp: false };
    Ok(DecoderSpec { qk_norm: QkNorm::PerHead, biases, ..config.decoder()? })
}

pub(super) fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    Ok(DecoderSpec { qk_norm: QkNorm::PerHead, ..config.decoder()? })
}
