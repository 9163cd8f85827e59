//! What can be set when a model is loaded. `None` means: chosen at load, and said in [`super::handle::Facts`].

use octavo_kernels::CacheDtype;

use crate::load::WeightDtype;

/// Where the model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Device {
    /// The CPU's fast kernels.
    #[default]
    Cpu,
    /// The plain loops that define every operation, with float activations. Slow; the yardstick.
    Reference,
    /// An NVIDIA GPU, by its number.
    Cuda(usize),
    /// The GPU's kernels on the CPU, in builds for tests. Very slow.
    CudaShim,
}

impl Device {
    /// As it is asked for.
    pub fn name(self) -> String {
        match self {
            Self::Cpu => "cpu".into(),
            Self::Reference => "reference".into(),
            Self::Cuda(ordinal) => format!("cuda:{ordinal}"),
            Self::CudaShim => "cuda-shim".into(),
        }
    }
}

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Where the model runs.
    pub device: Device,
    /// What weights are run as.
    pub dtype: WeightDtype,
    /// How keys and values are stored; `None`: see [`MatrixBytes::cache_dtype`](crate::model::weights::MatrixBytes).
    pub kv_cache_dtype: Option<CacheDtype>,
    /// Bytes for the KV cache.
    pub kv_cache_bytes: Option<u64>,
    /// Positions in a block; a multiple of 16.
    pub block_size: usize,
    /// Longest prompt and answer together; at most what the model was made for.
    pub max_model_len: Option<usize>,
    /// Most sequences in one step.
    pub max_num_seqs: usize,
    /// Most token rows in one step.
    pub max_num_batched_tokens: Option<usize>,
    /// Most requests that may wait.
    pub max_queue: usize,
    /// How long running sequences may be held up by others' prompts between two tokens, in milliseconds; `None`: as long as
    /// it takes.
    pub itl_target_ms: Option<f64>,
    /// Whether blocks of equal prefixes are shared.
    pub enable_prefix_caching: bool,
    /// Worker threads; `None`: the cores this process may use.
    pub threads: Option<usize>,
    /// Seed of requests that bring none.
    pub seed: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            dtype: WeightDtype::Auto,
            kv_cache_dtype: None,
            kv_cache_bytes: None,
            block_size: 16,
            max_model_len: None,
            max_num_seqs: 64,
            max_num_batched_tokens: None,
            max_queue: 1024,
            itl_target_ms: Some(30.0),
            enable_prefix_caching: true,
            threads: None,
            seed: 0,
        }
    }
}

/// Rows of one step when nothing is set: enough to reach the arithmetic limit of a CPU's matrix kernels, few enough that
/// running sequences are not held up for long.
const DEFAULT_BATCHED_TOKENS: usize = 512;

impl EngineConfig {
    /// Rows of one step.
    pub fn batched_tokens(&self) -> usize {
        self.max_num_batched_tokens.unwrap_or(DEFAULT_BATCHED_TOKENS.max(self.max_num_seqs))
    }

    /// Checks what needs no model. The error names the setting, what was wanted and what was found.
    pub fn validate(&self) -> Result<(), String> {
        let at_least_one = |name: &str, value: usize| match value {
            0 => Err(format!("{name} must be at least 1, not 0")),
            _ => Ok(()),
        };
        at_least_one("max_num_seqs", self.max_num_seqs)?;
        at_least_one("max_model_len", self.max_model_len.unwrap_or(1))?;
        at_least_one("threads", self.threads.unwrap_or(1))?;
        if self.block_size == 0 || !self.block_size.is_multiple_of(16) || self.block_size > 1024 {
            return Err(format!("block_size must be a multiple of 16 up to 1024, not {}", self.block_size));
        }
        if let Some(ms) = self.itl_target_ms.filter(|ms| !(ms.is_finite() && *ms > 0.0)) {
            return Err(format!("itl_target_ms must be a number of milliseconds above 0, not {ms}"));
        }
        if self.batched_tokens() < self.max_num_seqs {
            return Err(format!(
                "max_num_batched_tokens ({}) is below max_num_seqs ({}): every running sequence needs one row a step",
                self.batched_tokens(),
                self.max_num_seqs
            ));
        }
        match (self.kv_cache_dtype, self.device) {
            (Some(CacheDtype::Fp8E4m3), Device::Cpu) => {
                let there_are = r#"on the CPU there are "f32", "f16", "bf16" and "int8""#;
                return Err(format!(r#"kv_cache_dtype="fp8_e4m3" is for GPUs: {there_are}"#));
            }
            (Some(CacheDtype::Int8), Device::Cuda(_) | Device::CudaShim) => {
                let there_are = r#"on a GPU there are "f32", "f16", "bf16" and "fp8_e4m3""#;
                return Err(format!(r#"kv_cache_dtype="int8" is for CPUs: {there_are}"#));
            }
            _ => {}
        }
        let most = [
            ("max_num_seqs", self.max_num_seqs, 1 << 13),
            ("max_num_batched_tokens", self.batched_tokens(), 1 << 16),
            ("max_queue", self.max_queue, 1 << 24),
            ("threads", self.threads.unwrap_or(1), 1 << 10),
        ];
        for (name, value, most) in most {
            if value > most {
                return Err(format!("{name} may be at most {most}, not {value}"));
            }
        }
        Ok(())
    }
}
