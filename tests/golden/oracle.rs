//! Expected values: JSON beside safetensors arrays.

use std::path::{Path, PathBuf};

use octavo::load::ModelFiles;
use safetensors::SafeTensors;
use serde_json::Value;

/// The folder or file `name` of the fixtures, or of the whole collection beside the workspace if that is there.
pub fn path(name: &str) -> PathBuf {
    find(name).unwrap_or_else(|| panic!("no fixture {name}"))
}

pub fn find(name: &str) -> Option<PathBuf> {
    root_of(name).map(|root| root.join(name))
}

fn root_of(name: &str) -> Option<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let roots = ["tests/fixtures/oracle", "../shared/oracle"].map(|folder| workspace.join(folder));
    roots.into_iter().find(|root| root.join(name).exists())
}

/// A tiny model and what it should give.
pub struct Model {
    pub name: String,
    pub path: PathBuf,
    pub expected: Expected,
}

/// The folder `tiny/NAME/DTYPE`, or the file of `gguf/NAME`. The fixtures have some of them and the collection has all: says
/// which was used, or that it is skipped.
pub fn model(name: &str) -> Option<Model> {
    let parts: Vec<&str> = name.split('/').collect();
    let (path, json, dtype) = match parts[..] {
        ["tiny", model, dtype] => (name.to_owned(), format!("tiny/{model}/expected.json"), dtype),
        ["gguf", model] => (format!("gguf/{model}.gguf"), format!("gguf/{model}.json"), "f32"),
        _ => panic!("no model {name}"),
    };
    let Some(root) = root_of(&path) else {
        println!("skipped: {name} is in ../shared/oracle, which is not here");
        return None;
    };
    println!("{name}: from {}", root.display());
    Some(Model { name: name.to_owned(), path: root.join(path), expected: expected(&root.join(json), dtype) })
}

impl Model {
    pub fn files(&self) -> ModelFiles {
        ModelFiles::open(&self.path).unwrap()
    }
}

/// A model that the fixtures have.
pub fn fixture(name: &str) -> Model {
    model(name).unwrap_or_else(|| panic!("no fixture {name}"))
}

/// What one model should give.
pub struct Expected {
    pub prompts: Vec<Prompt>,
    /// By how much logits may differ where activations are floats: a tenth of this is the reference's own noise.
    pub tolerance: f32,
    /// By how much llama.cpp, which quantises activations to 8 bits, misses the logits of any prompt; GGUF files only.
    pub llama_cpp: Option<f32>,
}

pub struct Prompt {
    pub id: String,
    pub ids: Vec<u32>,
    /// Of the last position.
    pub logits: Vec<f32>,
    pub greedy: Vec<u32>,
    /// Log-probabilities of the five best at each greedy step.
    pub top5: Vec<Vec<f32>>,
    pub prompt_logprobs: Option<Vec<f32>>,
    /// `[layer][row][hidden]`, flat.
    pub hidden_states: Option<Vec<f32>>,
}

/// The part `dtype` (`f32` or `bf16`) of an `expected.json` or `NAME.json`.
pub fn expected(json: &Path, dtype: &str) -> Expected {
    let text = std::fs::read_to_string(json).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let arrays = std::fs::read(json.with_file_name(all["arrays"].as_str().unwrap())).unwrap();
    let arrays = SafeTensors::deserialize(&arrays).unwrap();
    let array = |name: &Value| -> Option<Vec<f32>> {
        let data = arrays.tensor(name.as_str()?).unwrap().data().to_vec();
        Some(data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    let prompt = |prompt: &Value| Prompt {
        id: prompt["id"].as_str().unwrap().to_owned(),
        ids: ids(&prompt["ids"]),
        logits: array(&prompt["logits"]).unwrap(),
        greedy: ids(&prompt["greedy"]["tokens"]),
        top5: list(&prompt["greedy"]["top5"])
            .iter()
            .map(|step| list(step).iter().map(|pair| number(&pair[1])).collect())
            .collect(),
        prompt_logprobs: array(&prompt["prompt_logprobs"]),
        hidden_states: array(&prompt["hidden_states"]),
    };
    let worst = |all: &serde_json::Map<String, Value>| all.values().map(number).fold(0.0, f32::max);
    Expected {
        prompts: list(&all[dtype]["prompts"]).iter().map(prompt).collect(),
        tolerance: all[dtype]["suggested_atol"].as_f64().unwrap_or(1e-4).max(1e-4) as f32,
        llama_cpp: all["llama_cpp"]["last_logits_max_abs"].as_object().map(worst),
    }
}

pub fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

pub fn ids(value: &Value) -> Vec<u32> {
    list(value).iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn numbers(value: &Value) -> Vec<f32> {
    list(value).iter().map(number).collect()
}

pub fn number(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

/// The largest difference, NaN counted as infinite.
pub fn max_abs(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let difference = |(got, want): (&f32, &f32)| (got - want).abs();
    got.iter().zip(want).map(difference).fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}
