//! What is in a model's files, for people.

use std::collections::BTreeMap;
use std::path::Path;

use octavo_kernels::CacheDtype;

use super::files::{Config, ModelFiles};
use super::tensors::Tensor;
use crate::error::LoadError;
use crate::model::weights::{self, MatrixBytes};
use crate::model::{LayerGroups, Model};

/// Positions for which the KV cache's bytes are computed, so that they divide evenly.
const BLOCK: usize = 16;

/// What is in a model's files.
#[derive(Clone, Debug, PartialEq)]
pub struct Inspection {
    /// Family, as the files name it.
    pub architecture: String,
    /// What its makers call it.
    pub name: Option<String>,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads, and as many value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Experts of a sparse layer, and how many of them a token goes to; `None`: every layer is dense.
    pub experts: Option<(usize, usize)>,
    /// Logits per position.
    pub vocab: usize,
    /// Positions that it was made for.
    pub max_positions: usize,
    /// Types of tensors, by name: how many, their bytes together, and the type they are run as unless told otherwise;
    /// `None`: they cannot be run.
    pub tensor_types: Vec<(String, usize, u64, Option<String>)>,
    /// Kind of tokenizer.
    pub tokenizer: String,
    /// How it cuts text into words, where the files name it.
    pub pre_tokenizer: Option<String>,
    /// The chat template's text.
    pub chat_template: Option<String>,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// The token that ends one.
    pub eos: Option<u32>,
    /// Bytes of the files that hold tensors.
    pub file_bytes: u64,
    /// Bytes that the KV cache takes for one position, as stored by default.
    pub kv_bytes_per_token: u64,
}

/// Reads the headers of the model at `path`.
pub fn inspect(path: &Path) -> Result<Inspection, LoadError> {
    let files = ModelFiles::open(path)?;
    let model = Model::of(&files)?;
    let spec = &model.spec;
    // Of a file with missing or broken weights everything else can still be shown.
    // Which type of two bytes it is makes no difference here.
    let of_matrices = |matrices: MatrixBytes| matrices.cache_dtype(CacheDtype::F16);
    let cache_dtype = weights::check(&files, &model).map_or(CacheDtype::F32, of_matrices);
    let words = Words::of(&files)?;
    Ok(Inspection {
        architecture: files.architecture()?.to_owned(),
        name: words.name,
        layers: spec.layers.len(),
        hidden: spec.hidden_size,
        heads: spec.heads.query,
        kv_heads: spec.heads.kv,
        head_dim: spec.heads.head_dim,
        experts: spec.experts.map(|experts| (experts.count, experts.per_token)),
        vocab: spec.vocab_size,
        max_positions: spec.max_positions,
        tensor_types: tensor_types(files.tensors.iter().map(|(_, tensor)| tensor)),
        tokenizer: words.tokenizer,
        pre_tokenizer: words.pre_tokenizer,
        chat_template: files.chat_template()?,
        bos: words.bos,
        eos: words.eos,
        file_bytes: files.tensors.file_bytes(),
        kv_bytes_per_token: (LayerGroups::new(spec, 0).cache_shape(spec, 1, BLOCK, cache_dtype).block_bytes() / BLOCK)
            as u64,
    })
}

/// What the two formats say in different words.
struct Words {
    name: Option<String>,
    tokenizer: String,
    pre_tokenizer: Option<String>,
    bos: Option<u32>,
    eos: Option<u32>,
}

impl Words {
    fn of(files: &ModelFiles) -> Result<Self, LoadError> {
        match &files.config {
            Config::Gguf(metadata) => {
                let text = |key| metadata.string(key).map_err(|what| files.malformed(what));
                let id = |key| {
                    let id = metadata.integer(key).map_err(|what| files.malformed(what))?;
                    Ok::<_, LoadError>(id.and_then(|id| u32::try_from(id).ok()))
                };
                Ok(Self {
                    name: text("general.name")?.map(str::to_owned),
                    tokenizer: text("tokenizer.ggml.model")?.unwrap_or("none").to_owned(),
                    pre_tokenizer: text("tokenizer.ggml.pre")?.map(str::to_owned),
                    bos: id("tokenizer.ggml.bos_token_id")?,
                    eos: id("tokenizer.ggml.eos_token_id")?,
                })
            }
            Config::HuggingFace(config) => Ok(Self {
                name: config.string("_name_or_path")?.map(str::to_owned),
                tokenizer: "tokenizer.json".to_owned(),
                pre_tokenizer: None,
                bos: config.token_ids("bos_token_id")?.first().copied(),
                eos: config.token_ids("eos_token_id")?.first().copied(),
            }),
        }
    }
}

fn tensor_types<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Vec<(String, usize, u64, Option<String>)> {
    let mut types: BTreeMap<&str, (usize, u64, Option<String>)> = BTreeMap::new();
    for tensor in tensors {
        let run_as = || tensor.dtype().map(|dtype| dtype.native().name().to_owned());
        let (count, bytes, _) = types.entry(&tensor.type_name).or_insert_with(|| (0, 0, run_as()));
        *count += 1;
        *bytes += tensor.stored_bytes();
    }
    types.into_iter().map(|(name, (count, bytes, run_as))| (name.to_owned(), count, bytes, run_as)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> Inspection {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle").join(name);
        inspect(&path).expect("a sound model")
    }

    #[test]
    fn both_formats_say_the_same_of_one_model() {
        let (gguf, folder) = (fixture("gguf/llama-f16.gguf"), fixture("tiny/llama-tied-rope3/f32"));
        let shape = |found: &Inspection| (found.layers, found.hidden, found.heads, found.kv_heads, found.head_dim);
        assert_eq!(shape(&gguf), shape(&folder));
        assert_eq!(gguf.kv_bytes_per_token, (2 * gguf.layers * gguf.kv_heads * gguf.head_dim * 4) as u64);
        assert_eq!((gguf.tokenizer.as_str(), folder.tokenizer.as_str()), ("gpt2", "tokenizer.json"));
    }

    #[test]
    fn the_types_add_up_to_the_file() {
        for (name, experts) in [
            ("gguf/llama-q8_0.gguf", None),
            ("gguf/qwen2-q5_1.gguf", None),
            ("gguf/qwen3moe-f16.gguf", Some((8, 3))),
            ("tiny/llama-untied-sharded/bf16", None),
        ] {
            let found = fixture(name);
            assert_eq!(found.experts, experts, "{name}");
            let bytes: u64 = found.tensor_types.iter().map(|&(_, _, bytes, _)| bytes).sum();
            assert!(bytes > 0 && bytes <= found.file_bytes, "{name}: {bytes} of {}", found.file_bytes);
            assert!(
                found
                    .tensor_types
                    .iter()
                    .all(|(name, count, bytes, run_as)| { *count > 0 && *bytes > 0 && run_as.as_ref() == Some(name) }),
                "{name}"
            );
        }
    }

    #[test]
    fn what_is_no_model_is_an_error() {
        assert!(inspect(Path::new("no such file")).is_err());
        assert!(inspect(Path::new(file!()).parent().expect("a folder")).is_err());
    }
}
