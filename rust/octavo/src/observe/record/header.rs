//! What was recorded, and on what: enough to make the same scheduler, and to load the same model the same way.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use octavo_kernels::CacheDtype;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::engine::config::{Device, EngineConfig};
use crate::kv::KvLayout;
use crate::load::WeightDtype;
use crate::schedule::SchedulerConfig;

/// Most groups of layers, and longest end of a generation: more than any model has.
const MAX_LIST: usize = 1 << 12;

/// The head of a log.
#[derive(Clone, Debug)]
pub struct Header {
    /// Version of octavo.
    pub octavo: String,
    /// Which model.
    pub model: ModelIdentity,
    /// Device, instruction set, threads.
    pub device: String,
    /// How the model was loaded. What the scheduler is made of is in `limits`.
    pub config: EngineConfig,
    /// Bytes of the KV cache.
    pub kv_cache_bytes: u64,
    /// What the scheduler was made of.
    pub limits: SchedulerConfig,
    /// Tokens in the model's output.
    pub vocab: usize,
}

/// Tells one model from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelIdentity {
    /// Where it was.
    pub path: PathBuf,
    /// Family, as the file names it.
    pub architecture: String,
    /// Bytes of all its weight files.
    pub bytes: u64,
    /// SHA-256 of its configuration, and of the length, the first and the last megabyte of every weight file.
    pub sha256: String,
}

impl ModelIdentity {
    /// Of the file or folder at `path`.
    pub fn of(path: &Path, architecture: &str) -> std::io::Result<Self> {
        let mut hash = Sha256::new();
        let mut files = vec![path.to_owned()];
        if path.is_dir() {
            hash.update(std::fs::read(path.join("config.json"))?);
            let entries = std::fs::read_dir(path)?.collect::<Result<Vec<_>, _>>()?;
            let weights = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
            files = entries.into_iter().map(|entry| entry.path()).filter(weights).collect();
            files.sort();
        }
        let mut bytes = 0;
        for path in files {
            bytes += add_file(&mut hash, &path)?;
        }
        let sha256 = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        // Where another working directory finds it too.
        let path = std::path::absolute(path)?;
        Ok(Self { path, architecture: architecture.to_owned(), bytes, sha256 })
    }
}

fn add_file(hash: &mut Sha256, path: &Path) -> std::io::Result<u64> {
    const PIECE: u64 = 1 << 20;
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    hash.update(len.to_le_bytes());
    let mut piece = Vec::new();
    (&file).take(PIECE).read_to_end(&mut piece)?;
    file.seek(SeekFrom::Start(len.saturating_sub(PIECE).max(PIECE.min(len))))?;
    file.take(PIECE).read_to_end(&mut piece)?;
    hash.update(&piece);
    Ok(len)
}

impl Header {
    pub(super) fn write(&self) -> Vec<u8> {
        self.json().to_string().into_bytes()
    }

    pub(super) fn read(bytes: &[u8]) -> Result<Self, String> {
        let json: Value = serde_json::from_slice(bytes).map_err(|error| format!("the header is no JSON: {error}"))?;
        Self::of_json(&json).map_err(|what| format!("the header: {what}"))
    }

    fn json(&self) -> Value {
        let Self { octavo, model, device, config, kv_cache_bytes, limits, vocab } = self;
        let SchedulerConfig {
            max_num_seqs,
            max_num_batched_tokens,
            max_queue,
            max_model_len,
            layout: KvLayout { block_size, windows },
            blocks,
            itl_target_ns,
        } = limits;
        json!({
            "octavo": octavo,
            "model": {
                "path": model.path.to_string_lossy(),
                "architecture": model.architecture,
                "bytes": model.bytes,
                "sha256": model.sha256,
            },
            "device": device,
            "load": {
                "device": config.device.name(),
                "dtype": config.dtype.name(),
                "kv_cache_dtype": config.kv_cache_dtype.map(CacheDtype::name),
                "kv_cache_bytes": kv_cache_bytes,
                "threads": config.threads,
                "seed": config.seed,
                "enable_prefix_caching": config.enable_prefix_caching,
            },
            "scheduler": {
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "max_queue": max_queue,
                "max_model_len": max_model_len,
                "block_size": block_size,
                "windows": windows,
                "blocks": blocks,
                "itl_target_ns": itl_target_ns,
            },
            "vocab": vocab,
        })
    }

    fn of_json(json: &Value) -> Result<Self, String> {
        let whole = Object::of("the header", json)?;
        let (model, load, scheduler) = (whole.object("model")?, whole.object("load")?, whole.object("scheduler")?);
        let windows = scheduler.0.get("windows").and_then(Value::as_array).filter(|list| list.len() <= MAX_LIST);
        let window = |window: &Value| match window {
            Value::Null => Ok(None),
            some => some.as_u64().filter(|&window| window > 0).map(|window| Some(window as usize)).ok_or("windows"),
        };
        let windows = windows.ok_or("windows")?.iter().map(window).collect::<Result<Vec<_>, _>>()?;
        if windows.is_empty() {
            return Err("windows is empty: a model has a group of layers".into());
        }
        let limits = SchedulerConfig {
            max_num_seqs: scheduler.size("max_num_seqs", 1 << 13)?,
            max_num_batched_tokens: scheduler.size("max_num_batched_tokens", 1 << 16)?,
            max_queue: scheduler.size("max_queue", 1 << 24)?,
            max_model_len: scheduler.size("max_model_len", u32::MAX as usize)?,
            layout: KvLayout { block_size: scheduler.size("block_size", 1 << 10)?, windows },
            blocks: scheduler.size("blocks", u32::MAX as usize - 1)?,
            itl_target_ns: scheduler.number_or_null("itl_target_ns")?,
        };
        limits.validate()?;
        let dtype = load.text("dtype")?;
        Ok(Self {
            octavo: whole.text("octavo")?,
            model: ModelIdentity {
                path: model.text("path")?.into(),
                architecture: model.text("architecture")?,
                bytes: model.number("bytes")?,
                sha256: model.text("sha256")?,
            },
            device: whole.text("device")?,
            kv_cache_bytes: load.number("kv_cache_bytes")?,
            config: EngineConfig {
                device: device_of(&load.text("device")?)?,
                dtype: WeightDtype::from_name(&dtype).ok_or_else(|| format!("there is no dtype {dtype:?}"))?,
                kv_cache_dtype: cache_dtype_of(load.0.get("kv_cache_dtype"))?,
                kv_cache_bytes: Some(load.number("kv_cache_bytes")?),
                block_size: limits.layout.block_size,
                max_model_len: Some(limits.max_model_len),
                max_num_seqs: limits.max_num_seqs,
                max_num_batched_tokens: Some(limits.max_num_batched_tokens),
                max_queue: limits.max_queue,
                itl_target_ms: limits.itl_target_ns.map(|ns| ns as f64 / 1e6),
                enable_prefix_caching: load.0.get("enable_prefix_caching") != Some(&Value::Bool(false)),
                threads: load.number_or_null("threads")?.map(|threads| threads as usize),
                seed: load.number("seed")?,
            },
            vocab: whole.size("vocab", u32::MAX as usize)?,
            limits,
        })
    }
}

fn device_of(name: &str) -> Result<Device, String> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "reference" => Ok(Device::Reference),
        "cuda-shim" => Ok(Device::CudaShim),
        _ => {
            let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
            ordinal.map(Device::Cuda).ok_or_else(|| format!("there is no device {name:?}"))
        }
    }
}

fn cache_dtype_of(value: Option<&Value>) -> Result<Option<CacheDtype>, String> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(name) => match CacheDtype::ALL.into_iter().find(|dtype| name.as_str() == Some(dtype.name())) {
            Some(dtype) => Ok(Some(dtype)),
            None => Err(format!("there is no kv_cache_dtype {name}")),
        },
    }
}

/// A JSON object whose values are asked for by name.
struct Object<'a>(&'a Map<String, Value>);

impl<'a> Object<'a> {
    fn of(name: &str, value: &'a Value) -> Result<Self, String> {
        value.as_object().map(Self).ok_or_else(|| format!("{name} is no object"))
    }

    fn get(&self, name: &str) -> Result<&'a Value, String> {
        self.0.get(name).ok_or_else(|| format!("{name} is missing"))
    }

    fn object(&self, name: &str) -> Result<Self, String> {
        Self::of(name, self.get(name)?)
    }

    fn text(&self, name: &str) -> Result<String, String> {
        let value = self.get(name)?;
        value.as_str().map(str::to_owned).ok_or_else(|| format!("{name} should be a text, it is {value}"))
    }

    fn number(&self, name: &str) -> Result<u64, String> {
        let value = self.get(name)?;
        value.as_u64().ok_or_else(|| format!("{name} should be a whole number, it is {value}"))
    }

    fn number_or_null(&self, name: &str) -> Result<Option<u64>, String> {
        if self.get(name)?.is_null() { Ok(None) } else { self.number(name).map(Some) }
    }

    fn size(&self, name: &str, most: usize) -> Result<usize, String> {
        let value = self.number(name)?;
        match usize::try_from(value) {
            Ok(size) if size <= most => Ok(size),
            _ => Err(format!("{name} may be at most {most}, it is {value}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_is_read_back() {
        for device in [Device::Cpu, Device::Reference, Device::Cuda(0), Device::Cuda(3), Device::CudaShim] {
            assert_eq!(device_of(&device.name()), Ok(device));
        }
        assert!(device_of("cuda:").is_err() && device_of("tpu").is_err());
    }
}
