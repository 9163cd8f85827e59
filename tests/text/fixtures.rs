//! Where expected results come from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use octavo::load::gguf::Gguf;
use octavo::stages::tokenize::Tokenizer;
use serde_json::Value;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The committed fixtures.
pub fn committed() -> PathBuf {
    repository().join("tests/fixtures/tokenizer")
}

/// The larger set beside the repository, if it is there. Says which is used.
pub fn oracle() -> Option<PathBuf> {
    let path = repository().join("../shared/oracle");
    let found = path.join("README.md").is_file();
    println!("reference fixtures: the committed ones{}", if found { " and ../shared/oracle" } else { "; ../shared/oracle is not here" });
    found.then_some(path)
}

/// Real model files, where `OCTAVO_TEST_MODELS` names a folder that has them.
pub fn model(name: &str) -> Option<PathBuf> {
    let path = Path::new(&std::env::var_os("OCTAVO_TEST_MODELS")?).join(name);
    path.is_file().then_some(path)
}

pub fn json(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub fn gguf(path: &Path) -> Arc<Tokenizer> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let gguf = Gguf::parse(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Arc::new(Tokenizer::from_gguf(&gguf.metadata).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

pub fn folder(path: &Path) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_folder(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Every tokenizer that can be had here, with a name for messages.
pub fn tokenizers() -> Vec<(String, Arc<Tokenizer>)> {
    let mut found = Vec::new();
    for (root, prefix) in [(Some(committed()), ""), (oracle().map(|root| root.join("tokenizer")), "oracle ")] {
        let Some(root) = root else { continue };
        for (kind, path) in listed(&root.join("tiny")).into_iter().map(|path| ("tiny", path)).chain(listed(&root.join("gguf/vocab")).into_iter().map(|path| ("gguf", path))) {
            let name = format!("{prefix}{}", path.file_name().unwrap().to_string_lossy());
            if kind == "tiny" && path.is_dir() {
                found.push((name, folder(&path)));
            } else if path.extension().is_some_and(|extension| extension == "gguf") {
                found.push((name, gguf(&path)));
            }
        }
    }
    assert!(!found.is_empty());
    found
}

pub fn listed(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}
