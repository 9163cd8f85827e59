//! Gemma 3, text: Gemma 2 with norms on query and key heads in place of soft-caps, and mostly local layers with a rotary
//! embedding of their own; every sixth layer sees everything.

use octavo_kernels::RopeStyle;

use super::gemma2::{base_from_gguf, base_from_hf, is_local};
use super::gguf::GgufConfig;
use super::hf::HfDecoder;
use super::{Family, names};
use crate::error::LoadError;
use crate::model::rope::{Rope, RopeScaling};
use crate::model::spec::{DecoderSpec, QkNorm};

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
/// Layers of the largest model.
const LARGEST: usize = 62;
/// Index of the rotary embedding of local layers; global ones have the first.
const LOCAL_ROPE: usize = 1;

fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    if config.bool("use_bidirectional_attention")?.unwrap_or(false) {
        return Err(config.unsupported("attention", "use_bidirectional_attention", "causal"));
    }
    // Configurations carry Gemma 2's cap of attention scores, and the family does not apply it.
    let mut spec = DecoderSpec { qk_norm: QkNorm::PerHead, attention_soft_cap: None, ..base_from_hf(config)? };
    let pattern = match config.integer("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => config.integer("_sliding_window_pattern")?.unwrap_or(PATTERN),
    };
    config.set_windows(&mut spec, |layer| is_local(layer, pattern))?;
    let local = config.local_rope(LOCAL_THETA, spec.heads.head_dim)?;
    Ok(with_local_rope(spec, local))
}

fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = DecoderSpec { qk_norm: QkNorm::PerHead, ..base_from_gguf(config, LARGEST)? };
    spec.logits_soft_cap = config.number("final_logit_softcapping")?.map(|cap| cap as f32);
    let window = config.size("attention.sliding_window")?;
    let pattern = config.integer("attention.sliding_window_pattern")?.unwrap_or(PATTERN);
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        layer.window = is_local(i, pattern).then_some(window);
    }
    let local = Rope {
        style: RopeStyle::Halves,
        theta: config.number("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA),
        rotary_dim: spec.heads.head_dim,
        scaling: RopeScaling::Default,
    };
    Ok(with_local_rope(spec, local))
}

fn with_local_rope(mut spec: DecoderSpec, local: Rope) -> DecoderSpec {
    spec.ropes.truncate(LOCAL_ROPE);
    spec.ropes.push(local);
    for layer in spec.layers.iter_mut().filter(|layer| layer.window.is_some()) {
        layer.rope = LOCAL_ROPE;
    }
    spec
}
