//! What weights are called: the same parts under two conventions, and the few words by which families differ.

/// Names without `.weight` or `.bias`. Those of a layer follow `layers.N.`; several names are parts of one matrix, in
/// the order in which their outputs are stacked.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct WeightNames {
    pub embedding: &'static str,
    pub final_norm: &'static str,
    pub head: &'static str,
    /// What precedes a layer's number.
    pub layers: &'static str,
    pub attention_norm: &'static str,
    pub qkv: &'static [&'static str],
    pub query_norm: &'static str,
    pub key_norm: &'static str,
    pub output: &'static str,
    pub post_attention_norm: &'static str,
    pub mlp_norm: &'static str,
    pub gate_up: &'static [&'static str],
    pub down: &'static str,
    pub post_mlp_norm: &'static str,
}

/// Hugging Face checkpoints.
pub(super) const HF: WeightNames = WeightNames {
    embedding: "model.embed_tokens",
    final_norm: "model.norm",
    head: "lm_head",
    layers: "model.layers",
    attention_norm: "input_layernorm",
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    query_norm: "self_attn.q_norm",
    key_norm: "self_attn.k_norm",
    output: "self_attn.o_proj",
    // Where there are no norms after the sub-layers, this one is the norm before the second: see `post_attention_norm`.
    mlp_norm: "post_attention_layernorm",
    gate_up: &["mlp.gate_proj", "mlp.up_proj"],
    down: "mlp.down_proj",
    post_attention_norm: "post_attention_layernorm",
    post_mlp_norm: "post_feedforward_layernorm",
};

/// Hugging Face checkpoints with norms before and after each sub-layer.
pub(super) const HF_SANDWICH: WeightNames = WeightNames { mlp_norm: "pre_feedforward_layernorm", ..HF };

/// GGUF files.
pub(super) const GGUF: WeightNames = WeightNames {
    embedding: "token_embd",
    final_norm: "output_norm",
    head: "output",
    layers: "blk",
    attention_norm: "attn_norm",
    qkv: &["attn_q", "attn_k", "attn_v"],
    query_norm: "attn_q_norm",
    key_norm: "attn_k_norm",
    output: "attn_output",
    post_attention_norm: "post_attention_norm",
    mlp_norm: "ffn_norm",
    gate_up: &["ffn_gate", "ffn_up"],
    down: "ffn_down",
    post_mlp_norm: "post_ffw_norm",
};
