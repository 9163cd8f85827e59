//! The plainest decoder, made of the numbers that every configuration gives.

use std::path::Path;

use octavo_kernels::{Activation, Heads};

use crate::error::LoadError;
use crate::model::rope::Rope;
use crate::model::spec::{Biases, DecoderSpec, LayerSpec, QkNorm};

/// No model is wider or deeper; what is larger would only cost memory before the weights' shapes refuse it.
pub(super) const MAX_SIZE: u64 = 1 << 24;
/// See [`MAX_SIZE`].
pub(super) const MAX_LAYERS: u64 = 4096;
/// See [`MAX_SIZE`].
pub(super) const MAX_POSITIONS: u64 = 1 << 31;

/// What every configuration says.
pub(super) struct Sizes {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub heads: Heads,
    pub layers: usize,
    pub rope: Rope,
    pub max_positions: usize,
    pub norm_eps: f32,
    pub tied_embeddings: bool,
    pub activation: Activation,
}

/// Llama: norms before each sub-layer, no biases, every layer sees everything.
pub(super) fn plain(sizes: Sizes) -> DecoderSpec {
    DecoderSpec {
        vocab_size: sizes.vocab_size,
        hidden_size: sizes.hidden_size,
        intermediate_size: sizes.intermediate_size,
        heads: sizes.heads,
        layers: vec![LayerSpec { window: None, rope: 0, sparse: false }; sizes.layers],
        ropes: vec![sizes.rope],
        experts: None,
        max_positions: sizes.max_positions,
        norm_eps: sizes.norm_eps,
        norm_weight_offset: 0.0,
        pre_norms: true,
        post_norms: false,
        qk_norm: QkNorm::None,
        biases: Biases::default(),
        tied_embeddings: sizes.tied_embeddings,
        activation: sizes.activation,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        attention_scale: (sizes.heads.head_dim as f32).powf(-0.5),
        attention_soft_cap: None,
        logits_scale: 1.0,
        logits_soft_cap: None,
    }
}

/// An error that names what was found and what would do.
pub(super) fn unsupported(path: &Path, what: &'static str, found: &str, supported: &str) -> LoadError {
    LoadError::Unsupported { path: path.to_owned(), what, found: found.to_owned(), supported: supported.to_owned() }
}
