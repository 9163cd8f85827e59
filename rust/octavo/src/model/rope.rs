//! Rotary frequencies, computed in f32 and in the order that transformers computes them: at long contexts an angle is
//! large, and a frequency that differs in its last bit turns visibly.

use std::f32::consts::PI;

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
    /// A divisor per pair, as GGUF files carry them.
    PerPair(Vec<f32>),
}

impl RopeScaling {
    /// One frequency per rotated pair of `rotary_dim` components.
    pub fn inv_freq(&self, theta: f32, rotary_dim: usize) -> Vec<f32> {
        let plain = (0..rotary_dim / 2).map(|pair| 1.0 / theta.powf((2 * pair) as f32 / rotary_dim as f32));
        match self {
            Self::Default => plain.collect(),
            Self::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => plain
                .map(|frequency| {
                    let wavelength = 2.0 * PI / frequency;
                    if wavelength > original_positions / low_freq_factor {
                        return frequency / factor;
                    }
                    if wavelength < original_positions / high_freq_factor {
                        return frequency;
                    }
                    let smooth = (original_positions / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                })
                .collect(),
            Self::PerPair(divisors) => plain.zip(divisors).map(|(frequency, divisor)| frequency / divisor).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_fall_from_one() {
        assert_eq!(RopeScaling::Default.inv_freq(10000.0, 8), [1.0, 0.1, 0.01, 0.001]);
        assert_eq!(RopeScaling::Linear { factor: 4.0 }.inv_freq(10000.0, 4), [0.25, 0.0025]);
        assert_eq!(RopeScaling::PerPair(vec![1.0, 8.0]).inv_freq(10000.0, 4), [1.0, 0.00125]);
    }

    #[test]
    fn llama3_keeps_high_frequencies_and_stretches_low_ones() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 8192.0 };
        let (plain, scaled) = (RopeScaling::Default.inv_freq(5e5, 64), scaling.inv_freq(5e5, 64));
        for (plain, scaled) in plain.iter().zip(&scaled) {
            let wavelength = 2.0 * PI / plain;
            match plain / scaled {
                ratio if wavelength < 2048.0 => assert_eq!(ratio, 1.0),
                ratio if wavelength > 8192.0 => assert_eq!(ratio, 8.0),
                ratio => assert!((1.0..=8.0).contains(&ratio)),
            }
        }
    }
}
