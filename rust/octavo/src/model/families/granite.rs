//! Granite: Llama with four multipliers.

use super::gguf::GgufConfig;
use super::hf::HfDecoder;
use super::{Family, llama};
use crate::error::LoadError;
use crate::model::spec::DecoderSpec;

pub(super) const FAMILY: Family = Family {
    hf_architecture: "GraniteForCausalLM",
    gguf_architecture: Some("granite"),
    from_hf,
    from_gguf,
    ..llama::FAMILY
};

fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let number = |key: &str| Ok::<_, LoadError>(config.number(key)?.unwrap_or(1.0) as f32);
    Ok(DecoderSpec {
        embedding_scale: number("embedding_multiplier")?,
        residual_scale: number("residual_multiplier")?,
        attention_scale: number("attention_multiplier")?,
        logits_scale: 1.0 / number("logits_scaling")?,
        ..llama::from_hf(config)?
    })
}

fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    let spec = llama::from_gguf(config)?;
    // 0 means "not set".
    let number = |key: &str, otherwise: f32| {
        let found = config.number(key)?.filter(|&scale| scale != 0.0);
        Ok::<_, LoadError>(found.map_or(otherwise, |scale| scale as f32))
    };
    Ok(DecoderSpec {
        embedding_scale: number("embedding_scale", 1.0)?,
        residual_scale: number("residual_scale", 1.0)?,
        attention_scale: number("attention.scale", spec.attention_scale)?,
        logits_scale: 1.0 / number("logit_scale", 1.0)?,
        ..spec
    })
}
