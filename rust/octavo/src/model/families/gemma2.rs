//! Gemma 2: norms around every sub-layer, embeddings scaled up, soft-caps on scores and logits, every other layer local.

use octavo_kernels::Activation;

use super::gguf::GgufConfig;
use super::hf::HfDecoder;
use super::{Family, names};
use crate::error::LoadError;
use crate::model::spec::DecoderSpec;

pub(super) const FAMILY: Family = Family {
    hf_architecture: "Gemma2ForCausalLM",
    gguf_architecture: Some("gemma2"),
    from_hf,
    from_gguf,
    hf_names: &names::HF_SANDWICH,
    gguf_names: &names::GGUF,
};

const PATTERN: u64 = 2;
/// What a GGUF file means when it does not say.
const WINDOW: usize = 4096;
const ATTENTION_SOFT_CAP: f64 = 50.0;
const LOGITS_SOFT_CAP: f64 = 30.0;
/// Layers of the largest model, whose queries are scaled by another number than the others'.
const LARGEST: usize = 46;

fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = base_from_hf(config)?;
    config.set_windows(&mut spec, |layer| is_local(layer, PATTERN))?;
    Ok(spec)
}

fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = base_from_gguf(config, LARGEST)?;
    let cap = |found: Option<f64>, otherwise: f64| Some(found.unwrap_or(otherwise) as f32);
    spec.attention_soft_cap = cap(config.number("attn_logit_softcapping")?, ATTENTION_SOFT_CAP);
    spec.logits_soft_cap = cap(config.number("final_logit_softcapping")?, LOGITS_SOFT_CAP);
    let window = config.window()?.unwrap_or(WINDOW);
    let pattern = config.integer("attention.sliding_window_pattern")?.unwrap_or(PATTERN);
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        layer.window = is_local(i, pattern).then_some(window);
    }
    Ok(spec)
}

/// What Gemma 2 and 3 have in common.
pub(super) fn base_from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = gemma(config.decoder()?);
    let attention = config.bool("attention_bias")?.unwrap_or(false);
    (spec.biases.qkv, spec.biases.output) = (attention, attention);
    spec.norm_weight_offset = 1.0;
    spec.tied_embeddings = config.bool("tie_word_embeddings")?.unwrap_or(true);
    let scalar = config.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    spec.attention_scale = scalar.powf(-0.5) as f32;
    spec.attention_soft_cap = config.number("attn_logit_softcapping")?.map(|cap| cap as f32);
    spec.logits_soft_cap = config.number("final_logit_softcapping")?.map(|cap| cap as f32);
    Ok(spec)
}

/// What Gemma 2 and 3 have in common; `largest` is the number of layers of the largest model.
pub(super) fn base_from_gguf(config: &GgufConfig<'_>, largest: usize) -> Result<DecoderSpec, LoadError> {
    let mut spec = gemma(config.decoder()?);
    // The file does not say what queries are scaled by. The largest model is the odd one, as in llama.cpp.
    let scalar = if spec.layers.len() == largest { spec.hidden_size / spec.heads.query } else { spec.heads.head_dim };
    spec.attention_scale = (scalar as f32).powf(-0.5);
    Ok(spec)
}

/// What both formats leave unsaid.
fn gemma(spec: DecoderSpec) -> DecoderSpec {
    DecoderSpec {
        pre_norms: true,
        post_norms: true,
        activation: Activation::GeluTanh,
        // transformers rounds this to the embedding's type; it is kept exact here, as in llama.cpp.
        embedding_scale: (spec.hidden_size as f32).sqrt(),
        ..spec
    }
}

/// Every layer but the last of `pattern`.
pub(super) fn is_local(layer: usize, pattern: u64) -> bool {
    pattern == 0 || !(layer as u64 + 1).is_multiple_of(pattern)
}
