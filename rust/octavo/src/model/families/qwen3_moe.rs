//! Qwen3 with a mixture of experts, in every layer or in some.

use super::gguf::GgufConfig;
use super::hf::HfDecoder;
use super::{Family, qwen3};
use crate::error::LoadError;
use crate::model::spec::{DecoderSpec, Experts};

pub(super) const FAMILY: Family = Family {
    hf_architecture: "Qwen3MoeForCausalLM",
    gguf_architecture: Some("qwen3moe"),
    from_hf,
    from_gguf,
    ..qwen3::FAMILY
};

fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = qwen3::without_windows(config)?;
    // Unlike the dense family's, a window that is switched on holds for every layer.
    if config.bool("use_sliding_window")?.unwrap_or(false) {
        config.set_windows(&mut spec, |_| true)?;
    }
    // The newer spelling, then the older one.
    let count = match config.integer("num_local_experts")? {
        Some(count) => count,
        None => config.need("num_experts", config.integer("num_experts")?)?,
    };
    if count == 0 {
        return Ok(spec);
    }
    spec.experts = Some(Experts {
        count: count as usize,
        per_token: config.size("num_experts_per_tok")?,
        intermediate_size: config.size("moe_intermediate_size")?,
        renormalise: config.bool("norm_topk_prob")?.unwrap_or(false),
    });
    let dense = config.integers("mlp_only_layers")?.unwrap_or_default();
    let step = config.size_or("decoder_sparse_step", 1)?;
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        layer.sparse = !dense.contains(&(i as u64)) && (i + 1).is_multiple_of(step);
    }
    Ok(spec)
}

fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = qwen3::from_gguf(config)?;
    config.set_experts(&mut spec)?;
    Ok(spec)
}
