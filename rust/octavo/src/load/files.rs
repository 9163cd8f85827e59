//! A model's files: a `.gguf` file, or a folder as Hugging Face lays it out.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::dtype::WeightDtype;
use super::hf_config::{HfConfig, read_text};
use super::metadata::Metadata;
use super::tensors::Tensors;
use crate::error::LoadError;
use crate::stages::tokenize::Tokenizer;

/// What describes the model, in the words of its format.
#[derive(Clone, Debug)]
pub enum Config {
    /// The metadata of a GGUF file.
    Gguf(Metadata),
    /// The `config.json` of a folder.
    HuggingFace(HfConfig),
}

/// A model's files, opened and mapped. Every size has been checked against the files' lengths.
#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    /// What describes the model.
    pub config: Config,
    /// Its tensors, by name.
    pub tensors: Tensors,
}

impl ModelFiles {
    /// Opens the model at `path`. Nothing but headers is read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref();
        let info = std::fs::metadata(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
        if info.is_dir() {
            let config = HfConfig::read(&path.join("config.json"))?;
            let tensors = Tensors::open_safetensors(&safetensors_of(path)?)?;
            return Ok(Self { path: path.to_owned(), config: Config::HuggingFace(config), tensors });
        }
        let (tensors, gguf) = Tensors::open_gguf(path)?;
        Ok(Self { path: path.to_owned(), config: Config::Gguf(gguf.metadata), tensors })
    }

    /// The same, with its matrices run as this.
    pub fn run_as(mut self, dtype: WeightDtype) -> Self {
        self.tensors.run_as = dtype;
        self
    }

    /// The file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The GGUF metadata, if it is a GGUF file.
    pub fn metadata(&self) -> Option<&Metadata> {
        match &self.config {
            Config::Gguf(metadata) => Some(metadata),
            Config::HuggingFace(_) => None,
        }
    }

    /// The architecture, as the files name it: `llama`, `LlamaForCausalLM`.
    pub fn architecture(&self) -> Result<&str, LoadError> {
        match &self.config {
            Config::Gguf(metadata) => {
                let key = "general.architecture";
                self.of_metadata(metadata.string(key))?
                    .ok_or_else(|| self.malformed(format!("metadata `{key}` is missing")))
            }
            Config::HuggingFace(config) => {
                let names = config.strings("architectures")?;
                config.need("architectures", names.and_then(|names| names.first().copied()))
            }
        }
    }

    /// The chat template's text, if the model has one.
    pub fn chat_template(&self) -> Result<Option<String>, LoadError> {
        match &self.config {
            Config::Gguf(metadata) => {
                Ok(self.of_metadata(metadata.string("tokenizer.chat_template"))?.map(str::to_owned))
            }
            Config::HuggingFace(_) => {
                let own_file = self.path.join("chat_template.jinja");
                if own_file.exists() {
                    return read_text(&own_file).map(Some);
                }
                match HfConfig::read_if_there(&self.path.join("tokenizer_config.json"))? {
                    Some(tokenizer) => template_in(&tokenizer),
                    None => Ok(None),
                }
            }
        }
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> Result<Tokenizer, LoadError> {
        match &self.config {
            Config::Gguf(metadata) => Tokenizer::from_gguf(metadata).map_err(|error| self.malformed(error.to_string())),
            Config::HuggingFace(_) => folder_tokenizer(&self.path),
        }
    }

    /// The tokens that end a generation, ascending. A GGUF file says so in its vocabulary, a folder in its
    /// `generation_config.json` or `config.json`.
    pub fn end_token_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, LoadError> {
        let mut ids = match &self.config {
            Config::Gguf(_) => Vec::new(),
            Config::HuggingFace(config) => {
                let vocab = config.integer("vocab_size")?.unwrap_or(0).max(tokenizer.len() as u64);
                let of_model = end_token_ids_in(config, vocab)?;
                let generation = HfConfig::read_if_there(&self.path.join("generation_config.json"))?;
                let ids = generation.map_or(Ok(Vec::new()), |generation| end_token_ids_in(&generation, vocab))?;
                if ids.is_empty() { of_model } else { ids }
            }
        };
        if ids.is_empty() {
            ids.extend(tokenizer.end_ids());
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// An error about these files.
    pub fn malformed(&self, what: impl Into<String>) -> LoadError {
        LoadError::malformed(&self.path, what)
    }

    fn of_metadata<T>(&self, found: Result<T, String>) -> Result<T, LoadError> {
        found.map_err(|what| self.malformed(what))
    }
}

/// The tokenizer of a `.gguf` file or a Hugging Face folder, either of which may lack weights.
pub fn tokenizer(path: &Path) -> Result<Tokenizer, LoadError> {
    if path.is_dir() {
        return folder_tokenizer(path);
    }
    let (_, gguf) = Tensors::open_gguf(path)?;
    Tokenizer::from_gguf(&gguf.metadata).map_err(|error| LoadError::malformed(path, error.to_string()))
}

/// The tokenizer of a Hugging Face folder.
pub fn folder_tokenizer(folder: &Path) -> Result<Tokenizer, LoadError> {
    let path = folder.join("tokenizer.json");
    let text = std::fs::read(&path).map_err(|source| LoadError::Read { path: path.clone(), source })?;
    let object = |name: &str| -> Result<Value, LoadError> {
        Ok(HfConfig::read_if_there(&folder.join(name))?.map_or(Value::Null, HfConfig::into_value))
    };
    let beside = [object("tokenizer_config.json")?, object("special_tokens_map.json")?];
    Tokenizer::from_json(&text, beside).map_err(|error| LoadError::malformed(folder, error.to_string()))
}

/// The `eos_token_id` of a file, which must be in a vocabulary of `vocab` tokens.
fn end_token_ids_in(config: &HfConfig, vocab: u64) -> Result<Vec<u32>, LoadError> {
    let ids = config.token_ids("eos_token_id")?;
    match ids.iter().find(|&&id| u64::from(id) >= vocab) {
        None => Ok(ids),
        Some(id) => Err(config.wrong(format!("`eos_token_id` is {id}, the vocabulary has {vocab} tokens"))),
    }
}

/// `chat_template` is a text, or several by name of which one is called `default`.
fn template_in(tokenizer: &HfConfig) -> Result<Option<String>, LoadError> {
    let text = |value: &Value, key| value.get(key).and_then(Value::as_str).map(str::to_owned);
    match tokenizer.get("chat_template") {
        None => Ok(None),
        Some(Value::String(template)) => Ok(Some(template.clone())),
        Some(Value::Array(named)) => {
            let default = named.iter().find(|one| text(one, "name").as_deref() == Some("default"));
            Ok(default.and_then(|one| text(one, "template")))
        }
        Some(_) => Err(tokenizer.wrong("`chat_template` should be a string or a list of named templates")),
    }
}

/// The safetensors files of a folder: the one, the shards of an index, or the only one there is.
fn safetensors_of(folder: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let single = folder.join("model.safetensors");
    if single.exists() {
        return Ok(vec![single]);
    }
    let index = folder.join("model.safetensors.index.json");
    if index.exists() {
        return shards(folder, &HfConfig::read(&index)?);
    }
    let entries = std::fs::read_dir(folder).map_err(|source| LoadError::Read { path: folder.to_owned(), source })?;
    let is_weights = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    let mut found: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_weights).collect();
    match found.len() {
        1 => Ok(found),
        0 => Err(LoadError::malformed(
            folder,
            "no weights: model.safetensors is missing, and there is no other *.safetensors",
        )),
        _ => {
            found.sort();
            let names: Vec<_> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
            let what = format!("{} and no model.safetensors.index.json that joins them", names.join(", "));
            Err(LoadError::malformed(folder, what))
        }
    }
}

fn shards(folder: &Path, index: &HfConfig) -> Result<Vec<PathBuf>, LoadError> {
    let map = index.get("weight_map").and_then(Value::as_object);
    let mut names = BTreeSet::new();
    for (tensor, name) in index.need("weight_map", map)? {
        match name.as_str() {
            // A shard lies beside its index; a path could point anywhere.
            Some(name) if Path::new(name).file_name().is_some_and(|file| file == name) => names.insert(name),
            _ => {
                return Err(
                    index.wrong(format!("`weight_map.{tensor}` should be the name of a file beside it, it is {name}"))
                );
            }
        };
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}
