//! What a `config.json` says of how its rotary embedding is stretched.

use super::base::MAX_POSITIONS;
use super::hf::HfDecoder;
use crate::error::LoadError;
use crate::load::HfConfig;
use crate::model::rope::{RopeScaling, Yarn};

/// The object that holds the parameters, and the file around it.
pub(super) struct RopeParameters<'a> {
    pub file: &'a HfDecoder<'a>,
    pub own: &'a HfConfig,
}

impl RopeParameters<'_> {
    pub fn scaling(&self) -> Result<RopeScaling, LoadError> {
        // `type` is the older spelling.
        let rope_type = match self.own.string("rope_type")? {
            Some(name) => name,
            None => self.own.string("type")?.unwrap_or("default"),
        };
        match rope_type {
            "default" => Ok(RopeScaling::Default),
            "linear" => Ok(RopeScaling::Linear { factor: self.need("factor")? as f32 }),
            "dynamic" => {
                Ok(RopeScaling::Dynamic { factor: self.need("factor")?, original_positions: self.file.positions()? })
            }
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: self.need("factor")? as f32,
                low_freq_factor: self.need("low_freq_factor")? as f32,
                high_freq_factor: self.need("high_freq_factor")? as f32,
                original_positions: self.original_positions()? as f32,
            }),
            // The first Phi-3 files call it by these names.
            "longrope" | "su" => self.longrope(),
            "yarn" if self.own.get("short_factor").is_some() => self.longrope(),
            "yarn" => self.yarn(),
            other => {
                let supported = "default, linear, dynamic, llama3, yarn, longrope";
                Err(self.file.unsupported("rope type", other, supported))
            }
        }
    }

    fn yarn(&self) -> Result<RopeScaling, LoadError> {
        let factor = self.factor()?;
        let set = |key: &str| Ok::<_, LoadError>(self.own.number(key)?.filter(|&number| number != 0.0));
        let attention_factor = match (self.own.number("attention_factor")?, set("mscale")?, set("mscale_all_dim")?) {
            (Some(factor), ..) => factor,
            (None, Some(m), Some(all)) => Yarn::magnitude(factor, m) / Yarn::magnitude(factor, all),
            _ => Yarn::magnitude(factor, 1.0),
        };
        Ok(RopeScaling::Yarn(Yarn {
            factor,
            beta_fast: set("beta_fast")?.unwrap_or(32.0),
            beta_slow: set("beta_slow")?.unwrap_or(1.0),
            original_positions: self.original_positions()?,
            attention_factor: attention_factor as f32,
            truncate: self.own.bool("truncate")?.unwrap_or(true),
        }))
    }

    fn longrope(&self) -> Result<RopeScaling, LoadError> {
        let divisors = |key: &str| self.own.need(key, self.own.numbers(key)?);
        let (factor, original_positions) = (self.factor()?, self.original_positions()?);
        let attention_factor = match self.own.number("attention_factor")? {
            Some(factor) => factor,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / (original_positions as f64).ln()).sqrt(),
        };
        Ok(RopeScaling::LongRope {
            short: divisors("short_factor")?,
            long: divisors("long_factor")?,
            original_positions,
            attention_factor: attention_factor as f32,
        })
    }

    /// How much longer: said, or the ratio of the lengths.
    fn factor(&self) -> Result<f64, LoadError> {
        match self.own.number("factor")? {
            Some(factor) => Ok(factor),
            None => Ok(self.file.positions()? as f64 / self.original_positions()? as f64),
        }
    }

    /// The length it was first trained for. Phi-3 has it beside the parameters, and that goes first.
    fn original_positions(&self) -> Result<usize, LoadError> {
        const KEY: &str = "original_max_position_embeddings";
        if let Some(positions) = self.file.bounded(KEY, MAX_POSITIONS)? {
            return Ok(positions);
        }
        match HfDecoder(self.own).bounded(KEY, MAX_POSITIONS)? {
            Some(positions) => Ok(positions),
            None => self.file.positions(),
        }
    }

    fn need(&self, key: &str) -> Result<f64, LoadError> {
        self.own.need(key, self.own.number(key)?)
    }
}
