//! Rotary embeddings and how they are stretched, computed in f32 and in the order that transformers computes them: at long
//! contexts an angle is large, and a frequency that differs in its last bit turns visibly.

use std::f32::consts::PI;

use octavo_kernels::{RopeSpec, RopeStyle};

/// A rotary embedding, as a model's files describe it.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Pairing.
    pub style: RopeStyle,
    /// Base of the frequencies.
    pub theta: f64,
    /// Components of a head that are rotated, two for each frequency.
    pub rotary_dim: usize,
    /// How it is stretched.
    pub scaling: RopeScaling,
}

/// How a model's frequencies were stretched beyond the length that it was first trained for.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Every frequency divided by the factor.
    Linear {
        /// How much longer.
        factor: f32,
    },
    /// A larger base, the longer sequences may get; up to the original length as it was.
    Dynamic {
        /// How much longer at most.
        factor: f64,
        /// The length it was first trained for.
        original_positions: usize,
    },
    /// Llama 3: low frequencies divided by the factor, high ones kept, those between blended.
    Llama3 {
        /// How much longer.
        factor: f32,
        /// Wavelengths above `original_positions / low_freq_factor` are low frequencies.
        low_freq_factor: f32,
        /// Wavelengths below `original_positions / high_freq_factor` are high frequencies.
        high_freq_factor: f32,
        /// The length it was first trained for.
        original_positions: f32,
    },
    /// YaRN: as [`RopeScaling::Llama3`], blended between two numbers of turns over the original length.
    Yarn(Yarn),
    /// A divisor per pair, one set for sequences up to the original length and one for longer ones.
    LongRope {
        /// Divisors up to `original_positions`.
        short: Vec<f32>,
        /// Divisors beyond.
        long: Vec<f32>,
        /// The length it was first trained for.
        original_positions: usize,
        /// Multiplies cosine and sine.
        attention_factor: f32,
    },
    /// A divisor per pair, as GGUF files carry them.
    PerPair(Vec<f32>),
}

/// YaRN's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// How much longer.
    pub factor: f64,
    /// Pairs that turn more often over the original length are kept.
    pub beta_fast: f64,
    /// Pairs that turn less often over the original length are divided by the factor.
    pub beta_slow: f64,
    /// The length it was first trained for.
    pub original_positions: usize,
    /// Multiplies cosine and sine.
    pub attention_factor: f32,
    /// Whether the two ends of the blend are rounded outwards to whole pairs.
    pub truncate: bool,
}

impl Rope {
    /// As a backend takes it, for sequences of up to `positions`. What depends on the length is chosen here, once: an
    /// answer must not depend on how long other sequences are, nor on how its own came to be as long as it is.
    pub fn spec(&self, positions: usize) -> RopeSpec {
        let scale = match &self.scaling {
            RopeScaling::Yarn(Yarn { attention_factor, .. }) | RopeScaling::LongRope { attention_factor, .. } => {
                *attention_factor
            }
            _ => 1.0,
        };
        RopeSpec { style: self.style, inv_freq: self.inv_freq(positions), scale }
    }

    /// One frequency per rotated pair.
    fn inv_freq(&self, positions: usize) -> Vec<f32> {
        let plain = frequencies(self.theta, self.rotary_dim);
        let divided = |divisors: &[f32]| plain.iter().zip(divisors).map(|(plain, by)| plain / by).collect();
        match &self.scaling {
            RopeScaling::Default => plain,
            RopeScaling::Linear { factor } => plain.iter().map(|frequency| frequency / factor).collect(),
            RopeScaling::Dynamic { factor, original_positions } => {
                let longer = positions.max(*original_positions) as f64 / *original_positions as f64;
                let exponent = self.rotary_dim as f64 / (self.rotary_dim as f64 - 2.0);
                frequencies(self.theta * (factor * longer - (factor - 1.0)).powf(exponent), self.rotary_dim)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                let stretched = |frequency: &f32| {
                    let wavelength = 2.0 * PI / frequency;
                    if wavelength > original_positions / low_freq_factor {
                        return frequency / factor;
                    }
                    if wavelength < original_positions / high_freq_factor {
                        return *frequency;
                    }
                    let smooth =
                        (original_positions / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                };
                plain.iter().map(stretched).collect()
            }
            RopeScaling::Yarn(yarn) => yarn.blend(&plain, self.theta),
            RopeScaling::LongRope { short, long, original_positions, .. } => {
                divided(if positions > *original_positions { long } else { short })
            }
            RopeScaling::PerPair(divisors) => divided(divisors),
        }
    }

    /// Checks what the numbers owe each other and the heads.
    pub fn check(&self, head_dim: usize) -> Result<(), String> {
        let pairs = self.rotary_dim / 2;
        if !self.rotary_dim.is_multiple_of(2) || pairs == 0 || self.rotary_dim > head_dim {
            return Err(format!("{} rotated components in heads of {head_dim}", self.rotary_dim));
        }
        let divisors: &[&Vec<f32>] = match &self.scaling {
            RopeScaling::LongRope { short, long, .. } => &[short, long],
            RopeScaling::PerPair(divisors) => &[divisors],
            _ => &[],
        };
        if let Some(wrong) = divisors.iter().find(|divisors| divisors.len() != pairs) {
            return Err(format!("{} rope factors for {pairs} rotated pairs", wrong.len()));
        }
        let original = match &self.scaling {
            RopeScaling::Dynamic { original_positions, .. }
            | RopeScaling::LongRope { original_positions, .. }
            | RopeScaling::Yarn(Yarn { original_positions, .. }) => *original_positions,
            _ => 1,
        };
        if original == 0 {
            return Err("a rope that was first trained for 0 positions".into());
        }
        for positions in [1, usize::MAX] {
            let RopeSpec { inv_freq, scale, .. } = self.spec(positions);
            if !inv_freq.iter().all(|frequency| frequency.is_finite()) || !scale.is_finite() {
                return Err("a rotary frequency is no number".into());
            }
        }
        Ok(())
    }
}

impl Yarn {
    /// `0.1 · m · ln(factor) + 1`, what YaRN multiplies cosine and sine with; 1 where nothing is stretched.
    pub fn magnitude(factor: f64, m: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
    }

    fn blend(&self, plain: &[f32], theta: f64) -> Vec<f32> {
        let dim = 2.0 * plain.len() as f64;
        // The pair, not whole in general, that turns this often.
        let pair = |turns: f64| {
            dim * (self.original_positions as f64 / (turns * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let (low, span, factor) = (low as f32, (high - low) as f32, self.factor as f32);
        let blended = |(i, frequency): (usize, &f32)| {
            let kept = 1.0 - ((i as f32 - low) / span).clamp(0.0, 1.0);
            1.0 / (factor * (1.0 / frequency)) * (1.0 - kept) + frequency * kept
        };
        plain.iter().enumerate().map(blended).collect()
    }
}

fn frequencies(theta: f64, rotary_dim: usize) -> Vec<f32> {
    let theta = theta as f32;
    (0..rotary_dim / 2).map(|pair| 1.0 / theta.powf((2 * pair) as f32 / rotary_dim as f32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(theta: f64, rotary_dim: usize, scaling: RopeScaling) -> Rope {
        Rope { style: RopeStyle::Halves, theta, rotary_dim, scaling }
    }

    fn inv_freq(theta: f64, rotary_dim: usize, scaling: RopeScaling) -> Vec<f32> {
        rope(theta, rotary_dim, scaling).spec(1 << 20).inv_freq
    }

    #[test]
    fn frequencies_fall_from_one() {
        assert_eq!(inv_freq(10000.0, 8, RopeScaling::Default), [1.0, 0.1, 0.01, 0.001]);
        assert_eq!(inv_freq(10000.0, 4, RopeScaling::Linear { factor: 4.0 }), [0.25, 0.0025]);
        assert_eq!(inv_freq(10000.0, 4, RopeScaling::PerPair(vec![1.0, 8.0])), [1.0, 0.00125]);
    }

    #[test]
    fn llama3_keeps_high_frequencies_and_stretches_low_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8192.0,
        };
        let (plain, scaled) = (inv_freq(5e5, 64, RopeScaling::Default), inv_freq(5e5, 64, scaling));
        for (plain, scaled) in plain.iter().zip(&scaled) {
            let wavelength = 2.0 * PI / plain;
            match plain / scaled {
                ratio if wavelength < 2048.0 => assert_eq!(ratio, 1.0),
                ratio if wavelength > 8192.0 => assert_eq!(ratio, 8.0),
                ratio => assert!((1.0..=8.0).contains(&ratio)),
            }
        }
    }

    #[test]
    fn what_depends_on_the_length_changes_beyond_the_original_one() {
        let long = RopeScaling::LongRope {
            short: vec![1.0, 1.0],
            long: vec![2.0, 4.0],
            original_positions: 100,
            attention_factor: 1.25,
        };
        let dynamic = RopeScaling::Dynamic { factor: 2.0, original_positions: 100 };
        for scaling in [long, dynamic] {
            let rope = rope(10000.0, 4, scaling);
            let [short, at, beyond] = [1, 100, 101].map(|positions| rope.spec(positions));
            assert_eq!(short, at);
            assert_eq!(short.inv_freq, [1.0, 0.01]);
            assert!(beyond.inv_freq[1] < at.inv_freq[1], "{beyond:?}");
            assert_eq!(beyond.scale, at.scale);
        }
    }

    fn yarn(truncate: bool) -> Yarn {
        Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_positions: 4096,
            attention_factor: 1.125,
            truncate,
        }
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_stretches_slow_ones() {
        let plain = inv_freq(10000.0, 64, RopeScaling::Default);
        for truncate in [true, false] {
            let spec = rope(10000.0, 64, RopeScaling::Yarn(yarn(truncate))).spec(1);
            assert_eq!(spec.scale, 1.125);
            let ratios: Vec<f32> = plain.iter().zip(&spec.inv_freq).map(|(plain, scaled)| plain / scaled).collect();
            assert!(ratios.is_sorted() && ratios[0] == 1.0 && (ratios[31] - 4.0).abs() < 1e-5, "{ratios:?}");
            for (plain, ratio) in plain.iter().zip(ratios) {
                let turns = 4096.0 * plain / (2.0 * PI);
                assert!(turns < 64.0 || ratio == 1.0, "{turns} turns, {ratio}");
                assert!(turns > 0.5 || (ratio - 4.0).abs() < 1e-5, "{turns} turns, {ratio}");
            }
        }
        assert_ne!(
            rope(10000.0, 64, RopeScaling::Yarn(yarn(true))).spec(1),
            rope(10000.0, 64, RopeScaling::Yarn(yarn(false))).spec(1)
        );
        assert_eq!(Yarn::magnitude(1.0, 1.0), 1.0);
        assert!((Yarn::magnitude(40.0, 0.707) - 1.2608).abs() < 1e-4);
    }

    #[test]
    fn absurd_numbers_are_refused() {
        let error = |rotary_dim, scaling| rope(10000.0, rotary_dim, scaling).check(64).unwrap_err();
        assert!(error(66, RopeScaling::Default).contains("66 rotated components in heads of 64"));
        assert!(error(7, RopeScaling::Default).contains("7 rotated"));
        assert!(error(0, RopeScaling::Default).contains("0 rotated"));
        assert!(error(8, RopeScaling::PerPair(vec![1.0; 3])).contains("3 rope factors for 4 rotated pairs"));
        assert!(error(8, RopeScaling::PerPair(vec![0.0; 4])).contains("no number"));
        assert!(error(8, RopeScaling::Linear { factor: 0.0 }).contains("no number"));
        assert!(error(8, RopeScaling::Dynamic { factor: 2.0, original_positions: 0 }).contains("0 positions"));
        assert!(error(8, RopeScaling::Yarn(Yarn { factor: f64::NAN, ..yarn(true) })).contains("no number"));
        assert!(rope(10000.0, 48, RopeScaling::Yarn(yarn(true))).check(64).is_ok());
    }
}
