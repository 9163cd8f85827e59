//! What a `config.json` says of any decoder.

use std::ops::Deref;

use octavo_kernels::{Activation, Heads, RopeStyle};

use super::base::{MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Sizes, plain, unsupported};
use super::hf_rope::RopeParameters;
use crate::error::LoadError;
use crate::load::HfConfig;
use crate::model::rope::{Rope, RopeScaling};
use crate::model::spec::DecoderSpec;

/// A `config.json`.
pub(super) struct HfDecoder<'a>(pub &'a HfConfig);

impl Deref for HfDecoder<'_> {
    type Target = HfConfig;
    fn deref(&self) -> &HfConfig {
        self.0
    }
}

impl HfDecoder<'_> {
    /// Llama's reading of the file.
    pub fn decoder(&self) -> Result<DecoderSpec, LoadError> {
        let hidden_size = self.size("hidden_size")?;
        let query = self.size("num_attention_heads")?;
        let kv = self.size_or("num_key_value_heads", query)?;
        let head_dim = self.size_or("head_dim", hidden_size / query)?;
        Ok(plain(Sizes {
            vocab_size: self.size("vocab_size")?,
            hidden_size,
            intermediate_size: self.size("intermediate_size")?,
            heads: Heads { query, kv, head_dim },
            layers: self.need("num_hidden_layers", self.bounded("num_hidden_layers", MAX_LAYERS)?)?,
            rope: self.global_rope(head_dim)?,
            max_positions: self.positions()?,
            norm_eps: self.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            tied_embeddings: self.bool("tie_word_embeddings")?.unwrap_or(false),
            activation: self.activation()?,
        }))
    }

    /// Sets `sliding_window` on the layers that `layer_types` calls sliding, or where it is not said, on those that `local`
    /// picks.
    pub fn set_windows(&self, spec: &mut DecoderSpec, local: impl Fn(usize) -> bool) -> Result<(), LoadError> {
        let Some(window) = self.bounded("sliding_window", MAX_POSITIONS)? else { return Ok(()) };
        let types = self.strings("layer_types")?;
        if let Some(types) = types.as_ref().filter(|types| types.len() != spec.layers.len()) {
            return Err(self.wrong(format!(
                "`layer_types` has {} entries for {} layers",
                types.len(),
                spec.layers.len()
            )));
        }
        for (i, layer) in spec.layers.iter_mut().enumerate() {
            let is_local = match types.as_ref().map(|types| types[i]) {
                Some("sliding_attention") => true,
                Some("full_attention") => false,
                Some(other) => return Err(self.unsupported("layer type", other, "full_attention, sliding_attention")),
                None => local(i),
            };
            layer.window = is_local.then_some(window);
        }
        Ok(())
    }

    /// The rotary embedding of local layers: transformers 5 says it by layer type, 4 only by its theta.
    pub fn local_rope(&self, default_theta: f64, head_dim: usize) -> Result<Rope, LoadError> {
        let by_layer_type = self.object("rope_parameters")?.and_then(|all| all.object("sliding_attention").transpose());
        match by_layer_type.transpose()? {
            Some(parameters) => self.rope(Some(&parameters), head_dim),
            None => {
                let theta = self.number("rope_local_base_freq")?.unwrap_or(default_theta);
                Ok(Rope { style: RopeStyle::Halves, theta, rotary_dim: head_dim, scaling: RopeScaling::Default })
            }
        }
    }

    /// transformers 5 has `rope_parameters`, once or by layer type; 4 has `rope_theta` and `rope_scaling`.
    fn global_rope(&self, head_dim: usize) -> Result<Rope, LoadError> {
        if let Some(parameters) = self.object("rope_parameters")? {
            return match parameters.object("full_attention")? {
                Some(of_type) => self.rope(Some(&of_type), head_dim),
                None => self.rope(Some(&parameters), head_dim),
            };
        }
        self.rope(self.object("rope_scaling")?.as_ref(), head_dim)
    }

    /// What `parameters` say, and where they do not, this file.
    fn rope(&self, parameters: Option<&HfConfig>, head_dim: usize) -> Result<Rope, LoadError> {
        let number = |key: &str| match parameters.map_or(Ok(None), |parameters| parameters.number(key))? {
            Some(number) => Ok::<_, LoadError>(Some(number)),
            None => self.number(key),
        };
        let partial = number("partial_rotary_factor")?.unwrap_or(1.0);
        Ok(Rope {
            style: RopeStyle::Halves,
            theta: number("rope_theta")?.unwrap_or(10_000.0),
            rotary_dim: (head_dim as f64 * partial.clamp(0.0, 1.0)) as usize,
            scaling: match parameters {
                Some(parameters) => RopeParameters { file: self, own: parameters }.scaling()?,
                None => RopeScaling::Default,
            },
        })
    }

    /// Positions that the model was made for.
    pub fn positions(&self) -> Result<usize, LoadError> {
        Ok(self.bounded("max_position_embeddings", MAX_POSITIONS)?.unwrap_or(2048))
    }

    fn activation(&self) -> Result<Activation, LoadError> {
        let name = match self.string("hidden_activation")? {
            Some(name) => Some(name),
            None => self.string("hidden_act")?,
        };
        match name.unwrap_or("silu") {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
            other => Err(self.unsupported("activation", other, "silu, gelu_pytorch_tanh")),
        }
    }

    pub fn size(&self, key: &str) -> Result<usize, LoadError> {
        self.need(key, self.bounded(key, MAX_SIZE)?)
    }

    pub fn size_or(&self, key: &str, otherwise: usize) -> Result<usize, LoadError> {
        Ok(self.bounded(key, MAX_SIZE)?.unwrap_or(otherwise))
    }

    pub fn bounded(&self, key: &str, most: u64) -> Result<Option<usize>, LoadError> {
        match self.integer(key)? {
            Some(value) if value == 0 || value > most => {
                Err(self.wrong(format!("`{key}` is {value}, it should be from 1 to {most}")))
            }
            value => Ok(value.map(|value| value as usize)),
        }
    }

    pub fn unsupported(&self, what: &'static str, found: &str, supported: &str) -> LoadError {
        unsupported(self.path(), what, found, supported)
    }
}
