//! The fixtures' models as other files: GGUF files of families of which the fixtures have none, made as llama.cpp's converter
//! makes them, and checkpoints whose experts are stored another way. They must give what the originals give.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use octavo::error::LoadError;
use octavo::load::ModelFiles;
use octavo::model::rope::{RopeScaling, Yarn};
use octavo::model::{Model, weights};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

use crate::files::Scratch;
use crate::oracle;
use crate::tiny::{assert_agrees, cpu, outcomes, reference};

/// A tensor in f32.
#[derive(Clone)]
struct Tensor {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Tensor {
    fn map(mut self, f: impl Fn(f32) -> f32) -> Self {
        self.values.iter_mut().for_each(|value| *value = f(*value));
        self
    }

    /// Query or key rows in the order of RoFormer's pairs.
    fn interleaved(self, heads: usize) -> Self {
        let (rows, cols) = (self.shape[0], self.shape[1]);
        let half = rows / heads / 2;
        let row = |i: usize| {
            let (head, pair, side) = (i / (2 * half), i % (2 * half) / 2, i % 2);
            &self.values[(head * 2 * half + side * half + pair) * cols..][..cols]
        };
        Self { values: (0..rows).flat_map(row).copied().collect(), shape: self.shape.clone() }
    }

    /// One after another, along a new outermost axis.
    fn stacked(tensors: &[Self]) -> Self {
        let shape = [&[tensors.len()], tensors[0].shape.as_slice()].concat();
        Self { shape, values: tensors.iter().flat_map(|tensor| tensor.values.clone()).collect() }
    }

    /// One after another, along the axis that is outermost.
    fn joined(mut self, other: &Self) -> Self {
        self.shape[0] += other.shape[0];
        self.values.extend(&other.values);
        self
    }
}

type Tensors = BTreeMap<String, Tensor>;

fn read(folder: &Path) -> (Value, Tensors) {
    let config = serde_json::from_str(&fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let tensor = |(name, view): (String, TensorView<'_>)| {
        let values = match view.dtype() {
            Dtype::F32 => view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            _ => view
                .data()
                .as_chunks::<2>()
                .0
                .iter()
                .map(|b| f32::from_bits(u32::from_le_bytes([0, 0, b[0], b[1]])))
                .collect(),
        };
        (name, Tensor { shape: view.shape().to_vec(), values })
    };
    (config, SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(tensor).collect())
}

/// Names of a layer's parts in the two formats.
const PARTS: [(&str, &str); 18] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.experts", "experts"),
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("lm_head", "output"),
];

/// What GGUF calls a tensor of a folder.
fn renamed(name: &str) -> String {
    let name = name.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd");
    let name = name.replace("model.norm", "output_norm");
    PARTS.iter().fold(name, |name, (theirs, ours)| match name.find(&format!("{theirs}.")) {
        Some(at) if at == 0 || name[..at].ends_with('.') => name.replace(&format!("{theirs}."), &format!("{ours}.")),
        _ => name,
    })
}

/// A value of GGUF metadata.
enum Meta {
    Text(&'static str),
    Integer(u32),
    Float(f32),
}

/// A GGUF file in the making.
struct Gguf {
    architecture: &'static str,
    metadata: Vec<(&'static str, Meta)>,
    tensors: Tensors,
}

impl Gguf {
    /// What all families say, and every tensor by its name in GGUF.
    fn new(architecture: &'static str, config: &Value, tensors: Tensors) -> Self {
        let integer = |key: &str| Meta::Integer(config[key].as_u64().unwrap() as u32);
        let mut metadata = vec![
            ("context_length", integer("max_position_embeddings")),
            ("embedding_length", integer("hidden_size")),
            ("block_count", integer("num_hidden_layers")),
            ("feed_forward_length", integer("intermediate_size")),
            ("attention.head_count", integer("num_attention_heads")),
            ("attention.head_count_kv", integer("num_key_value_heads")),
            ("attention.layer_norm_rms_epsilon", Meta::Float(config["rms_norm_eps"].as_f64().unwrap() as f32)),
        ];
        if config["head_dim"].is_u64() {
            metadata.push(("attention.key_length", integer("head_dim")));
            metadata.push(("attention.value_length", integer("head_dim")));
        }
        let theta = [&config["rope_theta"], &config["rope_parameters"]["rope_theta"]];
        let theta = theta.iter().find_map(|theta| theta.as_f64()).unwrap();
        metadata.push(("rope.freq_base", Meta::Float(theta as f32)));
        let tensors = tensors.into_iter().map(|(name, tensor)| (renamed(&name), tensor)).collect();
        Self { architecture, metadata, tensors }
    }

    fn edit(&mut self, part: &str, f: impl Fn(Tensor) -> Tensor) {
        for (name, tensor) in &mut self.tensors {
            if name.ends_with(part) {
                *tensor = f(tensor.clone());
            }
        }
    }

    fn rename(&mut self, part: &str, to: &str) {
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().map(|(name, tensor)| (name.replace(part, to), tensor)).collect();
    }

    /// As `llama` files have them.
    fn interleave(&mut self, config: &Value) {
        for (part, heads) in [("attn_q.weight", "num_attention_heads"), ("attn_k.weight", "num_key_value_heads")] {
            self.edit(part, |tensor| tensor.interleaved(config[heads].as_u64().unwrap() as usize));
        }
    }

    /// All values as F32.
    fn bytes(&self) -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64 + 1).to_le_bytes());
        let keys = self.metadata.iter().map(|(key, value)| (format!("{}.{key}", self.architecture), value));
        for (key, value) in
            [("general.architecture".to_owned(), &Meta::Text(self.architecture))].into_iter().chain(keys)
        {
            out.extend(text(&key));
            match value {
                Meta::Text(value) => out.extend([&8u32.to_le_bytes(), text(value).as_slice()].concat()),
                Meta::Integer(value) => out.extend([4u32.to_le_bytes(), value.to_le_bytes()].concat()),
                Meta::Float(value) => out.extend([6u32.to_le_bytes(), value.to_le_bytes()].concat()),
            }
        }
        let mut data = Vec::new();
        for (name, tensor) in &self.tensors {
            out.extend(text(name));
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&size| out.extend((size as u64).to_le_bytes()));
            out.extend(0u32.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(tensor.values.iter().flat_map(|value| value.to_le_bytes()));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }
}

/// The file gives what the folder gives, on both backends.
fn assert_same(name: &str, what: &str, gguf: &Gguf) {
    let scratch = Scratch::new(&format!("convert-{what}"));
    let path = scratch.0.join("model.gguf");
    fs::write(&path, gguf.bytes()).unwrap();
    let mut model = oracle::fixture(name);
    (model.name, model.path) = (format!("{name} as {what}"), path);
    assert_agrees(&model, &outcomes(&model, reference, 61));
    assert_agrees(&model, &outcomes(&model, || cpu(2), 40));
}

fn float(config: &Value, key: &str) -> Meta {
    Meta::Float(config[key].as_f64().unwrap() as f32)
}

#[test]
fn gemma2_as_gguf() {
    let (config, tensors) = read(&oracle::fixture("tiny/gemma2/bf16").path);
    let mut gguf = Gguf::new("gemma2", &config, tensors);
    gguf.edit("norm.weight", |tensor| tensor.map(|weight| weight + 1.0));
    // The format has no word for the scale of queries; it is that of the heads' width.
    let scale =
        (config["head_dim"].as_f64().unwrap() / config["query_pre_attn_scalar"].as_f64().unwrap()).sqrt() as f32;
    gguf.edit("attn_q.weight", |tensor| tensor.map(|weight| weight * scale));
    gguf.metadata.extend([
        ("attn_logit_softcapping", float(&config, "attn_logit_softcapping")),
        ("final_logit_softcapping", float(&config, "final_logit_softcapping")),
        ("attention.sliding_window", Meta::Integer(20)),
    ]);
    assert_same("tiny/gemma2/bf16", "gemma2", &gguf);
}

#[test]
fn phi3_as_gguf() {
    let (config, tensors) = read(&oracle::fixture("tiny/phi3/bf16").path);
    let mut gguf = Gguf::new("phi3", &config, tensors);
    gguf.rename("post_attention_norm", "ffn_norm");
    gguf.metadata.extend([("rope.dimension_count", Meta::Integer(12)), ("attention.sliding_window", Meta::Integer(0))]);
    assert_same("tiny/phi3/bf16", "phi3", &gguf);
}

#[test]
fn phi3_longrope_as_gguf() {
    let (config, tensors) = read(&oracle::fixture("tiny/phi3-longrope/bf16").path);
    let mut gguf = Gguf::new("phi3", &config, tensors);
    gguf.rename("post_attention_norm", "ffn_norm");
    for (key, name) in [("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")] {
        let values = oracle::numbers(&config["rope_parameters"][key]);
        gguf.tensors.insert(name.into(), Tensor { shape: vec![values.len()], values });
    }
    gguf.metadata.push(("rope.scaling.original_context_length", Meta::Integer(128)));
    assert_same("tiny/phi3-longrope/bf16", "phi3-longrope", &gguf);
    let factor = (1.0 + 8f32.ln() / 128f32.ln()).sqrt();
    gguf.metadata.push(("rope.scaling.attn_factor", Meta::Float(factor)));
    assert_same("tiny/phi3-longrope/bf16", "phi3-longrope-factor", &gguf);
}

#[test]
fn granite_as_gguf() {
    let (config, tensors) = read(&oracle::fixture("tiny/granite/bf16").path);
    let mut gguf = Gguf::new("granite", &config, tensors);
    gguf.rename("post_attention_norm", "ffn_norm");
    gguf.interleave(&config);
    gguf.metadata.extend([
        ("embedding_scale", float(&config, "embedding_multiplier")),
        ("residual_scale", float(&config, "residual_multiplier")),
        ("attention.scale", float(&config, "attention_multiplier")),
        ("logit_scale", float(&config, "logits_scaling")),
    ]);
    assert_same("tiny/granite/bf16", "granite", &gguf);
}

#[test]
fn olmo2_as_gguf() {
    let (config, tensors) = read(&oracle::fixture("tiny/olmo2/bf16").path);
    let mut gguf = Gguf::new("olmo2", &config, tensors);
    assert_same("tiny/olmo2/bf16", "olmo2", &gguf);

    let said = gguf.metadata.len();
    gguf.metadata.push(("attention.sliding_window", Meta::Integer(64)));
    let error = model(&gguf).unwrap_err().to_string();
    assert!(error.contains("a sliding window of 64 in olmo2"), "{error}");

    gguf.metadata.truncate(said);
    gguf.metadata.extend([
        ("rope.scaling.type", Meta::Text("yarn")),
        ("rope.scaling.factor", Meta::Float(4.0)),
        ("rope.scaling.original_context_length", Meta::Integer(256)),
        ("rope.scaling.yarn_beta_slow", Meta::Float(2.0)),
    ]);
    let yarn = Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 2.0,
        original_positions: 256,
        attention_factor: 1.138_629_4,
        truncate: true,
    };
    assert_eq!(model(&gguf).unwrap().spec.ropes[0].scaling, RopeScaling::Yarn(yarn));
}

fn model(gguf: &Gguf) -> Result<Model, LoadError> {
    let scratch = Scratch::new("convert-model");
    let path = scratch.0.join("model.gguf");
    fs::write(&path, gguf.bytes()).unwrap();
    Model::of(&ModelFiles::open(&path).unwrap())
}

/// The tensors of `experts.N.PART`, by layer.
fn experts(tensors: &mut Tensors, prefix: &str, part: &str) -> Vec<Vec<Tensor>> {
    let take = |layer: usize| {
        (0..)
            .map_while(|expert| {
                tensors.remove(&format!("{prefix}.{layer}.{}", part.replace("{}", &expert.to_string())))
            })
            .collect()
    };
    (0..).map(take).take_while(|all: &Vec<Tensor>| !all.is_empty()).collect()
}

const GGUF_EXPERTS: [(&str, &str); 3] = [("w1", "ffn_gate"), ("w3", "ffn_up"), ("w2", "ffn_down")];

#[test]
fn mixtral_as_gguf() {
    let (config, tensors) = read(&oracle::fixture("tiny/mixtral/bf16").path);
    let mut gguf = Gguf::new("llama", &config, tensors);
    gguf.rename("post_attention_norm", "ffn_norm");
    gguf.interleave(&config);
    gguf.metadata.extend([("expert_count", Meta::Integer(4)), ("expert_used_count", Meta::Integer(2))]);
    for ways in ["each", "stacked", "fused"] {
        let tensors = gguf.tensors.clone();
        let mut all = GGUF_EXPERTS
            .map(|(theirs, ours)| (ours, experts(&mut gguf.tensors, "blk", &format!("experts.{{}}.{theirs}.weight"))));
        if ways == "fused" {
            let (_, ups) = all[1].clone();
            let join = |(gate, up): (&mut Tensor, &Tensor)| *gate = gate.clone().joined(up);
            all[0].1.iter_mut().flatten().zip(ups.iter().flatten()).for_each(join);
            all[0].0 = "ffn_gate_up";
        }
        for (name, layers) in all.into_iter().filter(|(name, _)| ways != "fused" || *name != "ffn_up") {
            for (layer, experts) in layers.iter().enumerate() {
                if ways == "each" {
                    let each = experts.iter().enumerate();
                    gguf.tensors.extend(each.map(|(i, one)| (format!("blk.{layer}.{name}.{i}.weight"), one.clone())));
                } else {
                    gguf.tensors.insert(format!("blk.{layer}.{name}_exps.weight"), Tensor::stacked(experts));
                }
            }
        }
        assert_same("tiny/mixtral/bf16", &format!("mixtral-{ways}"), &gguf);
        gguf.tensors = tensors;
    }
}

/// As transformers 5 has them in memory: one tensor for all experts.
#[test]
fn stacked_experts_give_the_same_bits() {
    for (name, router, parts) in [
        (
            "mixtral",
            "block_sparse_moe.gate",
            ["block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"],
        ),
        ("qwen3-moe", "mlp.gate", ["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"]),
    ] {
        let mut model = oracle::fixture(&format!("tiny/{name}/bf16"));
        let wanted = outcomes(&model, || cpu(2), 61);
        let bytes = weights_bytes(&model.path);
        let scratch = Scratch::copy_of(&format!("stacked-{name}"), &format!("tiny/{name}/bf16"));
        let (_, mut tensors) = read(&model.path);
        let [gates, ups, downs] = parts.map(|part| experts(&mut tensors, "model.layers", &format!("{part}.weight")));
        for (layer, ((gates, ups), downs)) in gates.into_iter().zip(ups).zip(downs).enumerate() {
            let joined: Vec<_> = gates.into_iter().zip(&ups).map(|(gate, up)| gate.joined(up)).collect();
            let prefix = format!("model.layers.{layer}.mlp");
            tensors.insert(format!("{prefix}.experts.gate_up_proj"), Tensor::stacked(&joined));
            tensors.insert(format!("{prefix}.experts.down_proj"), Tensor::stacked(&downs));
            let gate = tensors.remove(&format!("model.layers.{layer}.{router}.weight")).unwrap();
            tensors.insert(format!("{prefix}.gate.weight"), gate);
        }
        write_bf16(&scratch.0.join("model.safetensors"), &tensors);
        model.path = scratch.0.clone();
        assert_eq!(weights_bytes(&model.path), bytes);
        assert!(outcomes(&model, || cpu(2), 61) == wanted, "{name}");
    }
}

fn weights_bytes(path: &Path) -> u64 {
    let files = ModelFiles::open(path).unwrap();
    weights::check(&files, &Model::of(&files).unwrap()).unwrap().stored
}

/// The values came from this type.
fn write_bf16(path: &Path, tensors: &Tensors) {
    let bytes: BTreeMap<&String, Vec<u8>> = tensors
        .iter()
        .map(|(name, tensor)| {
            (name, tensor.values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect())
        })
        .collect();
    let views = bytes.iter().map(|(name, bytes)| {
        ((*name).clone(), TensorView::new(Dtype::BF16, tensors[*name].shape.clone(), bytes).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}
