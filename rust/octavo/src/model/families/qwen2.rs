//! Qwen2 and Qwen2.5: biases on queries, keys and values.

use super::gguf::GgufConfig;
use super::hf::HfDecoder;
use super::{Family, names};
use crate::error::LoadError;
use crate::model::spec::{Biases, DecoderSpec};

pub(super) const FAMILY: Family = Family {
    hf_architecture: "Qwen2ForCausalLM",
    gguf_architecture: Some("qwen2"),
    from_hf,
    from_gguf,
    hf_names: &names::HF,
    gguf_names: &names::GGUF,
};

const BIASES: Biases = Biases { qkv: true, output: false, mlp: false };

fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = DecoderSpec { biases: BIASES, ..config.decoder()? };
    set_windows(config, &mut spec)?;
    Ok(spec)
}

fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    Ok(DecoderSpec { biases: BIASES, ..config.decoder()? })
}

/// Qwen's window is off unless switched on, and then holds from one layer upwards.
pub(super) fn set_windows(config: &HfDecoder<'_>, spec: &mut DecoderSpec) -> Result<(), LoadError> {
    if !config.bool("use_sliding_window")?.unwrap_or(false) {
        return Ok(());
    }
    let first = config.integer("max_window_layers")?.unwrap_or(28);
    config.set_windows(spec, |layer| layer as u64 >= first)
}
