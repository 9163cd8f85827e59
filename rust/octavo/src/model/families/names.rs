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
    /// The ways in which a mixture of experts is stored.
    pub experts: &'static [ExpertNames],
}

/// Names of a mixture of experts: full ones but for the layer, except the router's. Where a name has a
/// [`ExpertNames::NUMBER`], every expert has a tensor of its own; where not, it is one tensor, experts outermost.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct ExpertNames {
    pub router: &'static str,
    pub gate_up: &'static [&'static str],
    pub down: &'static str,
}

impl ExpertNames {
    /// Stands for an expert's number.
    pub const NUMBER: &str = "{}";

    /// Of the ways that `names` knows, the one that the files use, told by the first expert; or the first, whose absence is
    /// then the error.
    pub fn of(names: &WeightNames, exists: impl Fn(&str) -> bool) -> &'static Self {
        let used = |way: &&Self| exists(&way.gate_up[0].replace(Self::NUMBER, "0"));
        names.experts.iter().find(used).unwrap_or(&names.experts[0])
    }
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
    experts: &[
        ExpertNames {
            router: "mlp.gate",
            gate_up: &["mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"],
            down: "mlp.experts.{}.down_proj.weight",
        },
        HF_STACKED_EXPERTS,
    ],
};

/// Experts as transformers 5 holds them in memory, and may save them.
const HF_STACKED_EXPERTS: ExpertNames =
    ExpertNames { router: "mlp.gate", gate_up: &["mlp.experts.gate_up_proj"], down: "mlp.experts.down_proj" };

/// Hugging Face checkpoints of Mixtral.
pub(super) const HF_MIXTRAL: WeightNames = WeightNames {
    experts: &[
        ExpertNames {
            router: "block_sparse_moe.gate",
            gate_up: &["block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"],
            down: "block_sparse_moe.experts.{}.w2.weight",
        },
        HF_STACKED_EXPERTS,
    ],
    ..HF
};

/// Hugging Face checkpoints of Phi-3, whose parts are stacked already.
pub(super) const HF_FUSED: WeightNames =
    WeightNames { qkv: &["self_attn.qkv_proj"], gate_up: &["mlp.gate_up_proj"], ..HF };

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
    experts: &[
        ExpertNames {
            router: "ffn_gate_inp",
            gate_up: &["ffn_gate_exps.weight", "ffn_up_exps.weight"],
            down: "ffn_down_exps.weight",
        },
        ExpertNames { router: "ffn_gate_inp", gate_up: &["ffn_gate_up_exps.weight"], down: "ffn_down_exps.weight" },
        // As converters wrote them in the beginning.
        ExpertNames {
            router: "ffn_gate_inp",
            gate_up: &["ffn_gate.{}.weight", "ffn_up.{}.weight"],
            down: "ffn_down.{}.weight",
        },
    ],
};

/// GGUF files of Phi-3, whose parts are stacked already.
pub(super) const GGUF_FUSED: WeightNames = WeightNames { qkv: &["attn_qkv"], gate_up: &["ffn_up"], ..GGUF };
