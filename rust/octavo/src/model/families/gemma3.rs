//! Gemma 3, text: norms around every sub-layer, embeddings scaled up, and mostly local layers with a rotary embedding of
//! their own; every sixth layer sees everything.

use octavo_kernels::{Activation, RopeSpec, RopeStyle};

use super::gguf::GgufConfig;
use super::hf::HfDecoder;
use super::{Family, names};
use crate::error::LoadError;
use crate::model::rope::RopeScaling;
use crate::model::spec::DecoderSpec;

pub(super) const FAMILY: Family = Family {
    hf_architecture: "Gemma3ForCausalLM",
    gguf_architecture: Some("gemma3"),
    from_hf,
    from_gguf,
    hf_names: &names::HF_SANDWICH,
    gguf_names: &names::GGUF,
};

const PATTERN: u64 = 6;
const LOCAL_THETA: f64 = 10_000.0;
/// Index of the rotary embedding of local layers; global ones have the first.
const LOCAL_ROPE: usize = 1;

fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = gemma(config.decoder()?);
    spec.norm_weight_offset = 1.0;
    spec.tied_embeddings = config.bool("tie_word_embeddings")?.unwrap_or(true);
    let scalar = config.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    spec.attention_scale = scalar.powf(-0.5) as f32;
    spec.attention_soft_cap = config.number("attn_logit_softcapping")?.map(|cap| cap as f32);
    spec.logits_soft_cap = config.number("final_logit_softcapping")?.map(|cap| cap as f32);

    let pattern = match config.integer("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => config.integer("_sliding_window_pattern")?.unwrap_or(PATTERN),
    };
    config.set_windows(&mut spec, |layer| is_local(layer, pattern))?;
    let local = config.local_rope(LOCAL_THETA, spec.heads.head_dim)?;
    Ok(with_local_rope(spec, local))
}

fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = gemma(config.decoder()?);
    // The file does not say what queries are scaled by. The largest model is the odd one, as in llama.cpp.
    let scalar = if spec.layers.len() == 62 { spec.hidden_size / spec.heads.query } else { spec.heads.head_dim };
    spec.attention_scale = (scalar as f32).powf(-0.5);
    spec.logits_soft_cap = config.number("final_logit_softcapping")?.map(|cap| cap as f32);

    let window = config.size("attention.sliding_window")?;
    let pattern = config.integer("attention.sliding_window_pattern")?.unwrap_or(PATTERN);
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        layer.window = is_local(i, pattern).then_some(window);
    }
    let theta = config.number("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA) as f32;
    let inv_freq = RopeScaling::Default.inv_freq(theta, spec.heads.head_dim);
    Ok(with_local_rope(spec, RopeSpec { style: RopeStyle::Halves, inv_freq, scale: 1.0 }))
}

/// What both formats leave unsaid.
fn gemma(spec: DecoderSpec) -> DecoderSpec {
    DecoderSpec {
        pre_norms: true,
        post_norms: true,
        qk_norm: true,
        activation: Activation::GeluTanh,
        // transformers rounds this to the embedding's type; it is kept exact here, as in llama.cpp.
        embedding_scale: (spec.hidden_size as f32).sqrt(),
        ..spec
    }
}

fn is_local(layer: usize, pattern: u64) -> bool {
    pattern == 0 || !(layer as u64 + 1).is_multiple_of(pattern)
}

fn with_local_rope(mut spec: DecoderSpec, local: RopeSpec) -> DecoderSpec {
    spec.ropes.truncate(LOCAL_ROPE);
    spec.ropes.push(local);
    for layer in spec.layers.iter_mut().filter(|layer| layer.window.is_some()) {
        layer.rope = LOCAL_ROPE;
    }
    spec
}
