//! Truncated and corrupt files: an error or a model, never a panic, whatever the byte.

use std::fs;
use std::path::Path;

use octavo::execute::memory::{MemoryPlan, MemoryRequest};
use octavo::model::Weights;
use octavo_kernels::CacheDtype;
use octavo_kernels::reference::{Activations, ReferenceBackend};

use crate::files::{Scratch, check};
use crate::oracle;
use crate::runner::LIMITS;

/// Every position in the header, then some.
fn positions(header: usize, length: usize) -> impl Iterator<Item = usize> {
    (0..header.min(2000)).chain((2000..header).step_by(13)).chain((header..length).step_by(4999))
}

fn header_of_gguf(bytes: &[u8]) -> usize {
    octavo::load::gguf::Gguf::parse(bytes).unwrap().data_start as usize
}

fn header_of_safetensors(bytes: &[u8]) -> usize {
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

/// A folder with a config and one file of weights, and that file.
fn folder(scratch: &Scratch) -> std::path::PathBuf {
    let source = oracle::path("tiny/qwen3/f32");
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::write(scratch.0.join(name), fs::read(source.join(name)).unwrap()).unwrap();
    }
    scratch.0.join("model.safetensors")
}

#[test]
fn every_truncation_is_an_error() {
    let scratch = Scratch::new("cut");
    let gguf = scratch.0.join("model.gguf");
    fs::write(&gguf, fs::read(oracle::path("gguf/llama-q4_0.gguf")).unwrap()).unwrap();
    truncate(&gguf, &gguf, header_of_gguf);
    let weights = folder(&scratch);
    truncate(&weights, &scratch.0, header_of_safetensors);
}

fn truncate(file: &Path, model: &Path, header: fn(&[u8]) -> usize) {
    check(model).unwrap();
    let bytes = fs::read(file).unwrap();
    let mut cuts: Vec<usize> = positions(header(&bytes), bytes.len()).chain([bytes.len() - 1]).collect();
    cuts.sort_unstable();
    for cut in cuts.into_iter().rev() {
        fs::OpenOptions::new().write(true).open(file).unwrap().set_len(cut as u64).unwrap();
        let error = check(model).expect_err(&format!("{} cut at {cut} of {}", file.display(), bytes.len()));
        assert!(error.to_string().contains(&*file.to_string_lossy()), "cut at {cut}: {error}");
    }
}

#[test]
fn flipped_bytes_never_panic() {
    let scratch = Scratch::new("flip");
    let gguf = scratch.0.join("model.gguf");
    fs::write(&gguf, fs::read(oracle::path("gguf/llama-q4_0.gguf")).unwrap()).unwrap();
    flip(&gguf, &gguf, header_of_gguf);
    let weights = folder(&scratch);
    flip(&weights, &scratch.0, header_of_safetensors);
    let config = scratch.0.join("config.json");
    flip(&config, &scratch.0, <[u8]>::len);
}

fn flip(file: &Path, model: &Path, header: fn(&[u8]) -> usize) {
    let original = fs::read(file).unwrap();
    let (mut errors, mut models) = (0, 0);
    for at in positions(header(&original), header(&original)) {
        for mask in [0x01, 0x80, 0xff] {
            let mut bytes = original.clone();
            bytes[at] ^= mask;
            fs::write(file, &bytes).unwrap();
            match try_to_load(model) {
                Ok(()) => models += 1,
                Err(_) => errors += 1,
            }
        }
    }
    fs::write(file, &original).unwrap();
    println!("{}: {errors} errors, {models} models", file.display());
    // Most bytes of a header matter; vocabularies do not matter here.
    assert!(errors > 100, "{errors} errors, {models} models");
}

/// As an engine does, weights and all.
fn try_to_load(path: &Path) -> Result<(), octavo::error::LoadError> {
    let files = octavo::load::ModelFiles::open(path)?;
    let model = octavo::model::Model::of(&files)?;
    let weights_bytes = octavo::model::weights::check(&files, &model)?.packed;
    let request = MemoryRequest {
        free_bytes: Some(1 << 30),
        weights_bytes,
        max_num_batched_tokens: 64,
        max_num_seqs: 4,
        max_model_len: None,
        block_size: 16,
        kv_cache_dtype: CacheDtype::F32,
        kv_cache_bytes: Some(1 << 20),
        device_bytes: None,
    };
    MemoryPlan::new(&model.spec, &request)?;
    files.chat_template()?;
    files.end_token_ids(&files.tokenizer()?)?;
    let mut backend = ReferenceBackend::new(LIMITS, Activations::F32);
    Weights::load(&files, &model, &mut backend, &mut |_, _| true)?;
    Ok(())
}
