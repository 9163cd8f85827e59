//! What the metadata of a GGUF file says of any decoder.

use octavo_kernels::{Activation, Heads, RopeStyle};

use super::base::{MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Sizes, plain, unsupported};
use crate::error::LoadError;
use crate::load::ModelFiles;
use crate::load::metadata::Metadata;
use crate::model::rope::{Rope, RopeScaling, Yarn};
use crate::model::spec::{Biases, DecoderSpec, Experts};

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
            max_positions: self.positions()?,
            norm_eps: self.number("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6) as f32,
            tied_embeddings: self.files.tensors.get("output.weight").is_none(),
            activation: Activation::Silu,
        }))
    }

    /// Llama's reading of a mixture of experts, on the layers that have one.
    pub fn set_experts(&self, spec: &mut DecoderSpec) -> Result<(), LoadError> {
        let count = match self.integer("expert_count")? {
            None | Some(0) => return Ok(()),
            Some(count) => count as usize,
        };
        spec.experts = Some(Experts {
            count,
            per_token: self.size("expert_used_count")?,
            intermediate_size: self.size_or("expert_feed_forward_length", spec.intermediate_size)?,
            renormalise: true,
        });
        for (i, layer) in spec.layers.iter_mut().enumerate() {
            layer.sparse = self.has(&format!("blk.{i}.ffn_gate_inp.weight"));
        }
        Ok(())
    }

    /// Biases that the file has.
    pub fn biases(&self) -> Biases {
        Biases {
            qkv: self.has("blk.0.attn_q.bias"),
            output: self.has("blk.0.attn_output.bias"),
            mlp: self.has("blk.0.ffn_down.bias"),
        }
    }

    fn has(&self, tensor: &str) -> bool {
        self.files.tensors.get(tensor).is_some()
    }

    fn rope(&self, head_dim: usize) -> Result<Rope, LoadError> {
        let rotary_dim = self.size_or("rope.dimension_count", head_dim)?;
        Ok(Rope {
            style: RopeStyle::Halves,
            theta: self.number("rope.freq_base")?.unwrap_or(10_000.0),
            rotary_dim,
            scaling: self.rope_scaling(rotary_dim)?,
        })
    }

    fn rope_scaling(&self, rotary_dim: usize) -> Result<RopeScaling, LoadError> {
        let divisors = |name: &str| match self.has(name) {
            true => self.files.tensors.vector(self.files.path(), name, rotary_dim / 2).map(Some),
            false => Ok(None),
        };
        if let Some(long) = divisors("rope_factors_long.weight")? {
            let short = divisors("rope_factors_short.weight")?.unwrap_or_else(|| vec![1.0; rotary_dim / 2]);
            return self.longrope(short, long);
        }
        if let Some(divisors) = divisors("rope_freqs.weight")? {
            return Ok(RopeScaling::PerPair(divisors));
        }
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?,
        };
        // A factor of 0 means "not set".
        let factor = factor.filter(|&factor| factor != 0.0);
        match self.string("rope.scaling.type")?.unwrap_or("linear") {
            "none" | "longrope" => Ok(RopeScaling::Default),
            "linear" => Ok(factor.map_or(RopeScaling::Default, |factor| RopeScaling::Linear { factor: factor as f32 })),
            "yarn" => self.yarn(factor.unwrap_or(1.0)),
            other => Err(unsupported(self.files.path(), "rope scaling", other, "none, linear, yarn, longrope")),
        }
    }

    /// The file says what cosine and sine are multiplied with; where it does not, it is what Phi-3 does.
    fn longrope(&self, short: Vec<f32>, long: Vec<f32>) -> Result<RopeScaling, LoadError> {
        let (original_positions, positions) = (self.original_positions()?, self.positions()?);
        let attention_factor = match self.number("rope.scaling.attn_factor")? {
            Some(factor) => factor,
            None if positions <= original_positions => 1.0,
            None => {
                (1.0 + (positions as f64 / original_positions as f64).ln() / (original_positions as f64).ln()).sqrt()
            }
        };
        Ok(RopeScaling::LongRope { short, long, original_positions, attention_factor: attention_factor as f32 })
    }

    fn yarn(&self, factor: f64) -> Result<RopeScaling, LoadError> {
        let mut attention_factor = Yarn::magnitude(factor, 1.0);
        for key in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"] {
            attention_factor *= self.number(key)?.unwrap_or(1.0);
        }
        Ok(RopeScaling::Yarn(Yarn {
            factor,
            beta_fast: self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            original_positions: self.original_positions()?,
            attention_factor: attention_factor as f32,
            truncate: true,
        }))
    }

    fn original_positions(&self) -> Result<usize, LoadError> {
        match self.bounded("rope.scaling.original_context_length", MAX_POSITIONS)? {
            Some(positions) => Ok(positions),
            None => self.positions(),
        }
    }

    fn positions(&self) -> Result<usize, LoadError> {
        Ok(self.bounded("context_length", MAX_POSITIONS)?.unwrap_or(2048))
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

    /// The sliding window; 0 means that there is none.
    pub fn window(&self) -> Result<Option<usize>, LoadError> {
        match self.integer("attention.sliding_window")? {
            None | Some(0) => Ok(None),
            Some(_) => self.bounded("attention.sliding_window", MAX_POSITIONS),
        }
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
