//! What decoders differ in, as data.

use octavo_kernels::{Activation, Heads, Mask, RopeSpec};

/// A decoder-only transformer. Every field is one that more than one family sets.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// Rows of the embedding, and logits per position. May exceed what the tokenizer knows.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated layer between its two halves.
    pub intermediate_size: usize,
    /// Attention heads of every layer.
    pub heads: Heads,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The rotary embeddings that layers choose from.
    pub ropes: Vec<RopeSpec>,
    /// Positions that the model was made for.
    pub max_positions: usize,

    /// Added to the mean square under every norm's root.
    pub norm_eps: f32,
    /// Added to every norm's stored weight: Gemma's checkpoints store `w` and mean `1 + w`.
    pub norm_weight_offset: f32,
    /// A norm before each sub-layer.
    pub pre_norms: bool,
    /// A norm after each sub-layer, before it joins the residual stream.
    pub post_norms: bool,
    /// A norm over each query head and each key head before they are rotated.
    pub qk_norm: bool,

    /// Which products have a bias.
    pub biases: Biases,
    /// The output head is the embedding matrix.
    pub tied_embeddings: bool,
    /// The gate's non-linearity.
    pub activation: Activation,

    /// Multiplies the embedding.
    pub embedding_scale: f32,
    /// Multiplies what a sub-layer adds to the residual stream.
    pub residual_scale: f32,
    /// Multiplies `q·k`.
    pub attention_scale: f32,
    /// `cap · tanh(score / cap)` on attention scores.
    pub attention_soft_cap: Option<f32>,
    /// Multiplies the logits.
    pub logits_scale: f32,
    /// `cap · tanh(logit / cap)` on the logits.
    pub logits_soft_cap: Option<f32>,
}

/// What layers of one model differ in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Positions that a query sees, itself included; `None`: all before it.
    pub window: Option<usize>,
    /// Index of its rotary embedding.
    pub rope: usize,
}

/// Which products have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// The attention's output.
    pub output: bool,
    /// Gate, up and down.
    pub mlp: bool,
}

impl DecoderSpec {
    /// What queries of `layer` may see.
    pub fn mask(&self, layer: &LayerSpec) -> Mask {
        Mask { scale: self.attention_scale, window: layer.window, soft_cap: self.attention_soft_cap }
    }

    /// Checks what the numbers owe each other. The error says what was wanted and what was found.
    pub fn check(&self) -> Result<(), String> {
        let Heads { query, kv, head_dim } = self.heads;
        if kv == 0 || !query.is_multiple_of(kv) {
            return Err(format!("{query} query heads cannot share {kv} key heads evenly"));
        }
        for rope in &self.ropes {
            if 2 * rope.inv_freq.len() > head_dim || rope.inv_freq.is_empty() {
                return Err(format!("{} rotated pairs in heads of {head_dim}", rope.inv_freq.len()));
            }
            if !rope.inv_freq.iter().all(|frequency| frequency.is_finite()) || !rope.scale.is_finite() {
                return Err("a rotary frequency is no number".into());
            }
        }
        let scales = [
            ("norm epsilon", self.norm_eps),
            ("embedding scale", self.embedding_scale),
            ("logits scale", self.logits_scale),
            ("residual scale", self.residual_scale),
            ("attention scale", self.attention_scale),
            ("attention soft-cap", self.attention_soft_cap.unwrap_or(1.0)),
            ("logits soft-cap", self.logits_soft_cap.unwrap_or(1.0)),
        ];
        for (name, value) in scales {
            if !value.is_finite() || value < 0.0 {
                return Err(format!("the {name} is {value}"));
            }
        }
        if [self.attention_soft_cap, self.logits_soft_cap].contains(&Some(0.0)) {
            return Err("a soft-cap of 0 leaves nothing of what it caps".into());
        }
        if self.layers.iter().any(|layer| layer.window == Some(0)) {
            return Err("a sliding window of 0 positions".into());
        }
        Ok(())
    }
}
