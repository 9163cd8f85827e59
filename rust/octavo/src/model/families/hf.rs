//! What a `config.json` says of any decoder.

use std::ops::Deref;

use octavo_kernels::{Activation, Heads, RopeSpec, RopeStyle};

use super::base::{MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Sizes, plain, unsupported};
use crate::error::LoadError;
use crate::load::HfConfig;
use crate::model::rope::RopeScaling;
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
            rope: self.rope(&self.rope_parameters("full_attention")?, head_dim)?,
            max_positions: self.bounded("max_position_embeddings", MAX_POSITIONS)?.unwrap_or(2048),
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
            return Err(self.wrong(format!("`layer_types` has {} entries for {} layers", types.len(), spec.layers.len())));
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
    pub fn local_rope(&self, default_theta: f64, head_dim: usize) -> Result<RopeSpec, LoadError> {
        let by_layer_type = self.object("rope_parameters")?.and_then(|all| all.object("sliding_attention").transpose());
        let parameters = match by_layer_type.transpose()? {
            Some(parameters) => self.parameters(&parameters)?,
            None => {
                let theta = self.number("rope_local_base_freq")?.unwrap_or(default_theta);
                RopeParameters { theta, scaling: RopeScaling::Default, partial: None }
            }
        };
        self.rope(&parameters, head_dim)
    }

    /// transformers 5 has `rope_parameters`, once or by layer type; 4 has `rope_theta` and `rope_scaling`.
    fn rope_parameters(&self, layer_type: &str) -> Result<RopeParameters, LoadError> {
        if let Some(parameters) = self.object("rope_parameters")? {
            return match parameters.object(layer_type)? {
                Some(of_type) => self.parameters(&of_type),
                None => self.parameters(&parameters),
            };
        }
        match self.object("rope_scaling")? {
            Some(scaling) => self.parameters(&scaling),
            None => Ok(RopeParameters { theta: self.theta()?, scaling: RopeScaling::Default, partial: None }),
        }
    }

    fn theta(&self) -> Result<f64, LoadError> {
        Ok(self.number("rope_theta")?.unwrap_or(10_000.0))
    }

    fn parameters(&self, from: &HfConfig) -> Result<RopeParameters, LoadError> {
        let need = |key: &str| Ok::<_, LoadError>(from.need(key, from.number(key)?)? as f32);
        // `type` is the older spelling.
        let rope_type = match from.string("rope_type")? {
            Some(name) => name,
            None => from.string("type")?.unwrap_or("default"),
        };
        let scaling = match rope_type {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: need("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_positions: need("original_max_position_embeddings")?,
            },
            other => return Err(self.unsupported("rope type", other, "default, linear, llama3")),
        };
        let theta = match from.number("rope_theta")? {
            Some(theta) => theta,
            None => self.theta()?,
        };
        Ok(RopeParameters { theta, scaling, partial: from.number("partial_rotary_factor")? })
    }

    fn rope(&self, parameters: &RopeParameters, head_dim: usize) -> Result<RopeSpec, LoadError> {
        let partial = match parameters.partial {
            Some(partial) => partial,
            None => self.number("partial_rotary_factor")?.unwrap_or(1.0),
        };
        let rotary_dim = (head_dim as f64 * partial.clamp(0.0, 1.0)) as usize;
        let inv_freq = parameters.scaling.inv_freq(parameters.theta as f32, rotary_dim);
        Ok(RopeSpec { style: RopeStyle::Halves, inv_freq, scale: 1.0 })
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

    fn size(&self, key: &str) -> Result<usize, LoadError> {
        self.need(key, self.bounded(key, MAX_SIZE)?)
    }

    fn size_or(&self, key: &str, otherwise: usize) -> Result<usize, LoadError> {
        Ok(self.bounded(key, MAX_SIZE)?.unwrap_or(otherwise))
    }

    fn bounded(&self, key: &str, most: u64) -> Result<Option<usize>, LoadError> {
        match self.integer(key)? {
            Some(value) if value == 0 || value > most => {
                Err(self.wrong(format!("`{key}` is {value}, it should be from 1 to {most}")))
            }
            value => Ok(value.map(|value| value as usize)),
        }
    }

    fn unsupported(&self, what: &'static str, found: &str, supported: &str) -> LoadError {
        unsupported(self.path(), what, found, supported)
    }
}

struct RopeParameters {
    theta: f64,
    scaling: RopeScaling,
    /// Share of a head that is rotated, where it is said here.
    partial: Option<f64>,
}
