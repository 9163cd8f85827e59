//! What is read besides weights, and errors that say what is wrong.

use std::fs;
use std::path::{Path, PathBuf};

use octavo::error::LoadError;
use octavo::load::ModelFiles;
use octavo::model::{Model, weights};
use serde_json::{Value, json};

use crate::oracle;

/// A folder of its own that goes away.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("octavo-golden-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// With a copy of a fixture's files.
    pub fn copy_of(name: &str, folder: &str) -> Self {
        let scratch = Self::new(name);
        for entry in fs::read_dir(oracle::path(folder)).unwrap() {
            let entry = entry.unwrap();
            fs::write(scratch.0.join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
        }
        scratch
    }

    fn edit(&self, file: &str, edit: impl Fn(&mut Value)) {
        let path = self.0.join(file);
        let mut value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        edit(&mut value);
        fs::write(path, value.to_string()).unwrap();
    }

    /// Why the model in this folder cannot be loaded.
    fn error(&self) -> String {
        check(&self.0).unwrap_err().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Everything short of reading the weights.
pub fn check(path: &Path) -> Result<Model, LoadError> {
    let files = ModelFiles::open(path)?;
    let model = Model::of(&files)?;
    weights::check(&files, &model)?;
    files.chat_template()?;
    files.end_token_ids(&files.tokenizer()?)?;
    Ok(model)
}

const FOLDERS: [&str; 5] = ["llama-tied-rope3", "llama-untied-sharded", "qwen2", "qwen3", "gemma3"];

#[test]
fn both_styles_of_config_say_the_same() {
    for name in FOLDERS {
        let [old, new] =
            ["f32", "bf16"].map(|dtype| ModelFiles::open(oracle::path(&format!("tiny/{name}/{dtype}"))).unwrap());
        assert_eq!(Model::of(&old).unwrap().spec, Model::of(&new).unwrap().spec, "{name}");
        assert_eq!(ends(&old), ends(&new), "{name}");
        let template = old.chat_template().unwrap();
        assert!(template.is_some() && template == new.chat_template().unwrap(), "{name}");
        assert_eq!(old.tensors.file_bytes(), file_bytes(old.path()), "{name}");
    }
}

fn ends(files: &ModelFiles) -> Vec<u32> {
    files.end_token_ids(&files.tokenizer().unwrap()).unwrap()
}

fn file_bytes(folder: &Path) -> u64 {
    let is_weights =
        |entry: &fs::DirEntry| entry.path().extension().is_some_and(|extension| extension == "safetensors");
    fs::read_dir(folder)
        .unwrap()
        .map(Result::unwrap)
        .filter(is_weights)
        .map(|entry| entry.metadata().unwrap().len())
        .sum()
}

#[test]
fn end_tokens_and_templates() {
    let open = |name: &str| ModelFiles::open(oracle::path(name)).unwrap();
    assert_eq!(ends(&open("tiny/gemma3/f32")), [1]);
    let gguf = open("gguf/llama-q8_0.gguf");
    assert!(ends(&gguf).contains(&572));
    assert!(gguf.chat_template().unwrap().unwrap().contains("<|start_header_id|>"));
    assert!(gguf.metadata().is_some());

    let folder = Scratch::copy_of("templates", "tiny/qwen2/f32");
    folder.edit("generation_config.json", |config| config["eos_token_id"] = json!([7, 3, 7]));
    folder.edit("tokenizer_config.json", |config| {
        config["chat_template"] =
            json!([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]);
    });
    let files = ModelFiles::open(&folder.0).unwrap();
    assert_eq!(ends(&files), [3, 7]);
    assert_eq!(files.chat_template().unwrap().as_deref(), Some("yes"));
    fs::remove_file(folder.0.join("generation_config.json")).unwrap();
    fs::write(folder.0.join("chat_template.jinja"), "own file").unwrap();
    assert_eq!(ends(&files), [570], "what config.json says");
    assert_eq!(files.chat_template().unwrap().as_deref(), Some("own file"));
}

#[test]
fn a_single_file_of_any_name_will_do_and_two_will_not() {
    let folder = Scratch::copy_of("names", "tiny/qwen3/bf16");
    let model = folder.0.join("model.safetensors");
    fs::rename(&model, folder.0.join("weights.safetensors")).unwrap();
    check(&folder.0).unwrap();
    fs::copy(folder.0.join("weights.safetensors"), folder.0.join("more.safetensors")).unwrap();
    assert!(folder.error().contains("more.safetensors, weights.safetensors and no model.safetensors.index.json"));
    fs::remove_file(folder.0.join("weights.safetensors")).unwrap();
    fs::remove_file(folder.0.join("more.safetensors")).unwrap();
    assert!(folder.error().contains("model.safetensors is missing"), "{}", folder.error());
}

#[test]
fn missing_files_are_named() {
    let folder = Scratch::copy_of("missing", "tiny/llama-untied-sharded/bf16");
    let shard = fs::read_dir(&folder.0)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_string_lossy().contains("-00003-"))
        .unwrap();
    fs::remove_file(&shard).unwrap();
    assert!(folder.error().contains("model-00003-of-"), "{}", folder.error());
    folder.edit("model.safetensors.index.json", |index| {
        index["weight_map"]["lm_head.weight"] = json!("../lm_head.safetensors")
    });
    assert!(folder.error().contains("the name of a file beside it"), "{}", folder.error());
    fs::remove_file(folder.0.join("config.json")).unwrap();
    assert!(folder.error().contains("config.json"), "{}", folder.error());
    assert!(check(&folder.0.join("none.gguf")).unwrap_err().to_string().contains("none.gguf"));
}

#[test]
fn configs_that_do_not_fit_say_where() {
    let cases: [(&str, Value, &str); 9] = [
        (
            "architectures",
            json!(["WhisperForConditionalGeneration"]),
            "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2",
        ),
        ("architectures", json!(null), "`architectures` is missing"),
        ("hidden_size", json!(80), "has shape [576, 64], the configuration asks for [576, 80]"),
        ("num_hidden_layers", json!(4), "tensor `model.layers.3.input_layernorm.weight` is missing"),
        (
            "num_attention_heads",
            json!("four"),
            "`num_attention_heads` should be a non-negative integer, it is \"four\"",
        ),
        ("num_key_value_heads", json!(3), "4 query heads cannot share 3 key heads"),
        ("hidden_act", json!("relu"), "activation `relu` is not supported; supported: silu"),
        (
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 4.0}),
            "rope type `yarn` is not supported; supported: default",
        ),
        ("rope_scaling", json!({"type": "linear"}), "`rope_scaling.factor` is missing"),
    ];
    for (key, value, wanted) in cases {
        let folder = Scratch::copy_of("config", "tiny/llama-tied-rope3/f32");
        folder.edit("config.json", |config| config[key] = value.clone());
        let error = folder.error();
        assert!(error.contains(wanted), "{key} = {value}: {error}");
        assert!(error.contains(&*folder.0.to_string_lossy()), "the path is named: {error}");
    }
}

#[test]
fn a_type_that_cannot_run_is_named_with_its_tensor() {
    let folder = Scratch::new("type");
    let mut bytes = fs::read(oracle::path("gguf/llama-q4_0.gguf")).unwrap();
    let name = b"blk.1.ffn_up.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    // After the name: axes (u32), two sizes (u64), type (u32).
    bytes[at + 4 + 16] = 9;
    let path = folder.0.join("model.gguf");
    fs::write(&path, &bytes).unwrap();
    let error = check(&path).unwrap_err().to_string();
    assert!(
        error.contains("tensor type `Q8_1` of `blk.1.ffn_up.weight` is not supported; supported: F32, F16"),
        "{error}"
    );

    let architecture = b"general.architecture";
    let at = bytes.windows(architecture.len()).position(|window| window == architecture).unwrap();
    // After the key: type (u32), length (u64), "llama".
    bytes[at + architecture.len() + 12] = b'k';
    fs::write(&path, &bytes).unwrap();
    let error = check(&path).unwrap_err().to_string();
    assert!(error.contains("architecture `klama` is not supported; supported: llama, qwen2, qwen3, gemma3"), "{error}");
}
