//! What the metadata of a GGUF file says of any decoder.

use octavo_kernels::{Activation, Heads, RopeSpec, RopeStyle};

use super::base::{MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Sizes, plain, unsupported};
use crate::error::LoadError;
use crate::load::ModelFiles;
use crate::load::metadata::Metadata;
use crate::model::rope::RopeScaling;
use crate::model::spec::DecoderSpec;

/// The metadata of a GGUF file, and its tensors: some facts are only said by their shapes. Keys are without the
/// architecture that precedes them.
pub(super) struct GgufConfig<'a> {
    pub files: &'a ModelFiles,
    pub metadata: &'a Metadata,
    pub architecture: &'a str,
}

impl GgufConfig<'_> {
    /// Llama's reading of the file, but for the order of rotated pairs.
    pub fn decoder(&self) -> Result<DecoderSpec, LoadError> {
        let hidden_size = self.size("embedding_length")?;
        let query = self.size("attention.head_count")?;
        let kv = self.size_or("attention.head_count_kv", query)?;
        let head_dim = self.size_or("attention.key_length", hidden_size / query)?;
        let value_dim = self.size_or("attention.value_length", head_dim)?;
        if value_dim != head_dim {
            let what = format!("values of {value_dim} in heads of {head_dim}");
            return Err(unsupported(self.files.path(), "attention", &what, "values as wide as keys"));
        }
        let vocab_size = match self.files.tensors.get("token_embd.weight").map(|tensor| tensor.shape.as_slice()) {
            Some(&[rows, _]) => rows,
            _ => return Err(self.files.malformed("tensor `token_embd.weight` is missing or no matrix")),
        };
        Ok(plain(Sizes {
            vocab_size,
            hidden_size,
            intermediate_size: self.size("feed_forward_length")?,
            heads: Heads { query, kv, head_dim },
            layers: self.need("block_count", self.bounded("block_count", MAX_LAYERS)?)?,
            rope: self.rope(head_dim)?,
            max_positions: self.bounded("context_length", MAX_POSITIONS)?.unwrap_or(2048),
            norm_eps: self.number("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6) as f32,
            tied_embeddings: self.files.tensors.get("output.weight").is_none(),
            activation: Activation::Silu,
        }))
    }

    fn rope(&self, head_dim: usize) -> Result<RopeSpec, LoadError> {
        let rotary_dim = self.size_or("rope.dimension_count", head_dim)?;
        let theta = self.number("rope.freq_base")?.unwrap_or(10_000.0) as f32;
        if rotary_dim > head_dim {
            return Err(self.wrong("rope.dimension_count", format!("{rotary_dim} in heads of {head_dim}")));
        }
        let inv_freq = self.rope_scaling(rotary_dim)?.inv_freq(theta, rotary_dim);
        Ok(RopeSpec { style: RopeStyle::Halves, inv_freq, scale: 1.0 })
    }

    fn rope_scaling(&self, rotary_dim: usize) -> Result<RopeScaling, LoadError> {
        const DIVISORS: &str = "rope_freqs.weight";
        if self.files.tensors.get(DIVISORS).is_some() {
            let divisors = self.files.tensors.vector(self.files.path(), DIVISORS, rotary_dim / 2)?;
            return Ok(RopeScaling::PerPair(divisors));
        }
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?,
        };
        match self.string("rope.scaling.type")?.unwrap_or("linear") {
            "none" => Ok(RopeScaling::Default),
            // A factor of 0 means "not set".
            "linear" => match factor.filter(|&factor| factor != 0.0) {
                Some(factor) => Ok(RopeScaling::Linear { factor: factor as f32 }),
                None => Ok(RopeScaling::Default),
            },
            other => Err(unsupported(self.files.path(), "rope scaling", other, "none, linear")),
        }
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn string(&self, key: &str) -> Result<Option<&str>, LoadError> {
        self.metadata.string(&self.key(key)).map_err(|what| self.files.malformed(what))
    }

    /// A number, if the key is there.
    pub fn number(&self, key: &str) -> Result<Option<f64>, LoadError> {
        self.metadata.number(&self.key(key)).map_err(|what| self.files.malformed(what))
    }

    /// A non-negative integer, if the key is there.
    pub fn integer(&self, key: &str) -> Result<Option<u64>, LoadError> {
        self.metadata.integer(&self.key(key)).map_err(|what| self.files.malformed(what))
    }

    /// A size that must be there.
    pub fn size(&self, key: &str) -> Result<usize, LoadError> {
        self.need(key, self.bounded(key, MAX_SIZE)?)
    }

    fn need<T>(&self, key: &str, found: Option<T>) -> Result<T, LoadError> {
        found.ok_or_else(|| self.files.malformed(format!("metadata `{}` is missing", self.key(key))))
    }

    fn size_or(&self, key: &str, otherwise: usize) -> Result<usize, LoadError> {
        Ok(self.bounded(key, MAX_SIZE)?.unwrap_or(otherwise))
    }

    fn bounded(&self, key: &str, most: u64) -> Result<Option<usize>, LoadError> {
        match self.integer(key)? {
            Some(value) if value == 0 || value > most => {
                Err(self.wrong(key, format!("{value}, it should be from 1 to {most}")))
            }
            value => Ok(value.map(|value| value as usize)),
        }
    }

    fn wrong(&self, key: &str, what: String) -> LoadError {
        self.files.malformed(format!("metadata `{}` is {what}", self.key(key)))
    }
}
