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
    let shared = || repository().join("../shared/oracle");
    let path = std::env::var_os("OCTAVO_TEST_ORACLE").map_or_else(shared, PathBuf::from);
    let found = path.join("README.md").is_file();
    println!(
        "reference fixtures: the committed ones{}",
        if found { " and ../shared/oracle" } else { "; ../shared/oracle is not here" }
    );
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
    Arc::new(octavo::load::folder_tokenizer(path).unwrap_or_else(|error| panic!("{error}")))
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Real models by the name of their fixture: the file in `$OCTAVO_TEST_MODELS`.
pub const MODELS: [(&str, &str); 3] =
    [("smollm2-135m", "smollm2.gguf"), ("qwen2.5", "qwen.gguf"), ("gemma3-270m", "gemma.gguf")];

/// Every tokenizer that can be had here, with a name for messages.
pub fn tokenizers() -> Vec<(String, Arc<Tokenizer>)> {
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let folders = listed(&committed().join("tiny")).into_iter().filter(|path| path.is_dir());
    let files = listed(&committed().join("gguf/vocab")).into_iter();
    let models = MODELS.into_iter().filter_map(|(_, file)| model(file));
    let found: Vec<_> = folders
        .map(|path| (name(&path), folder(&path)))
        .chain(files.chain(models).map(|path| (name(&path), gguf(&path))))
        .collect();
    assert!(found.len() >= 6, "the committed fixtures are not where they should be");
    found
}

pub fn listed(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// All recorded strings, awkward on purpose.
pub fn strings() -> Vec<String> {
    let cases = json(&committed().join("tiny/bpe3.json"))["cases"].take();
    cases.as_array().unwrap().iter().map(|case| text(&case["text"]).to_owned()).collect()
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}
