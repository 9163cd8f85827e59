//! The families, a row each. To add one: a file with its [`Family`], and a line in [`FAMILIES`].

mod base; // the plainest decoder
mod hf; // what a config.json says of any decoder
mod hf_rope; // and of its rotary embedding
mod gguf; // what GGUF metadata says of any decoder
mod names; // what weights are called
mod gemma2;
mod gemma3;
mod granite;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;

pub use names::{ExpertNames, WeightNames};

use gguf::GgufConfig;
use hf::HfDecoder;

use super::spec::DecoderSpec;
use crate::error::LoadError;
use crate::load::{Config, ModelFiles};

/// A family of models: the names that its files go by, and how to read them.
struct Family {
    /// In `config.json`'s `architectures`.
    hf_architecture: &'static str,
    /// In a GGUF's `general.architecture`; `None` when its files go by another family's name.
    gguf_architecture: Option<&'static str>,
    /// From `config.json`.
    from_hf: fn(&HfDecoder<'_>) -> Result<DecoderSpec, LoadError>,
    /// From GGUF metadata.
    from_gguf: fn(&GgufConfig<'_>) -> Result<DecoderSpec, LoadError>,
    /// Weights in a folder.
    hf_names: &'static WeightNames,
    /// Weights in a GGUF.
    gguf_names: &'static WeightNames,
}

const FAMILIES: [&Family; 11] = [
    &llama::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &phi3::FAMILY,
    &granite::FAMILY,
    &olmo2::FAMILY,
];

/// A model that can be run: its spec, and what its weights are called in its files.
#[derive(Clone, Debug)]
pub struct Model {
    /// The architecture, as the files name it.
    pub architecture: String,
    /// The decoder.
    pub spec: DecoderSpec,
    /// Names of its weights.
    pub names: &'static WeightNames,
}

impl Model {
    /// What `files` describe.
    pub fn of(files: &ModelFiles) -> Result<Self, LoadError> {
        let architecture = files.architecture()?;
        let (spec, names) = match &files.config {
            Config::HuggingFace(config) => {
                let family = find(files, architecture, |family| Some(family.hf_architecture))?;
                ((family.from_hf)(&HfDecoder(config))?, family.hf_names)
            }
            Config::Gguf(metadata) => {
                let family = find(files, architecture, |family| family.gguf_architecture)?;
                ((family.from_gguf)(&GgufConfig { files, metadata, architecture })?, family.gguf_names)
            }
        };
        spec.check().map_err(|what| files.malformed(what))?;
        Ok(Self { architecture: architecture.to_owned(), spec, names })
    }
}

fn find(
    files: &ModelFiles,
    architecture: &str,
    name: impl Fn(&Family) -> Option<&'static str>,
) -> Result<&'static Family, LoadError> {
    let family = FAMILIES.into_iter().find(|family| name(family) == Some(architecture));
    family.ok_or_else(|| LoadError::Unsupported {
        path: files.path().to_owned(),
        what: "architecture",
        found: architecture.to_owned(),
        supported: FAMILIES.into_iter().filter_map(name).collect::<Vec<_>>().join(", "),
    })
}
