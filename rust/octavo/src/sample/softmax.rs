//! exp and its sums. Our own exp rather than the system's: plain IEEE operations in one order give the same bits on
//! every machine, and the compiler makes vector code of the loop.

/// Weights are `exp(x) · 2^60`: the room below keeps every probability that an f32 can hold, denormal ones too, while no
/// weight is itself denormal (and slow).
const SCALE_EXPONENT: i32 = 60;

/// Below this a weight is 0: 2^60 · exp(-128.6) is just above the smallest normal f32.
const LOWEST: f32 = -128.6;

/// `ln(sum of exp(x))` from a sum of weights.
pub fn ln(total: f64) -> f64 {
    total.ln() - f64::from(SCALE_EXPONENT) * std::f64::consts::LN_2
}

/// `exp(x) · 2^60` for x ≤ 0, within 2 units in the last place; 0 below [`LOWEST`].
pub fn weight(x: f32) -> f32 {
    // x = n · ln 2 + r with n whole and |r| ≤ ln 2 / 2. Adding 1.5 · 2^23 leaves n in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: n times the first is exact (it has 9 bits), the second carries the rest.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > LOWEST { x } else { LOWEST };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    // Taylor to r^7: the next term is below 6e-9.
    let mut exp_r = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        exp_r = exp_r * r + coefficient;
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(((127 + SCALE_EXPONENT) as u32) << 23));
    if x < LOWEST { 0.0 } else { exp_r * power }
}

/// A weight, rounded to a multiple of 2^26. Sums in f64 of up to 2^19 of them are exact, so a draw, which compares such sums,
/// does not depend on their order: a device may add as it likes. A token has to be 2^35 times less likely than the
/// likeliest to become impossible by this.
pub fn round(weight: f32) -> f32 {
    const BORDER: f32 = (1u64 << 49) as f32; // from here on numbers are such multiples
    if weight < BORDER { (weight + BORDER) - BORDER } else { weight }
}

/// The sum in f64, eight lanes wide, in one fixed order.
pub fn sum(values: &[f32]) -> f64 {
    let (chunks, rest) = values.as_chunks::<8>();
    let mut lanes = [0.0f64; 8];
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(v);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|&v| f64::from(v)).sum::<f64>()
}

/// The sum of the weights of `values - max`.
pub fn sum_of_weights(values: &[f32], max: f32) -> f64 {
    // First the weights, then their sum: in one loop, the compiler makes vector code of neither.
    let mut weights = [0.0; 256];
    let mut total = 0.0;
    for values in values.chunks(weights.len()) {
        for (weight, &v) in weights.iter_mut().zip(values) {
            *weight = self::weight(v - max);
        }
        total += sum(&weights[..values.len()]);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_is_exp() {
        let mut x = 0.0f32;
        while x > LOWEST {
            let want = f64::from(x).exp() * 2f64.powi(SCALE_EXPONENT);
            let error = (f64::from(weight(x)) / want - 1.0).abs();
            assert!(error < 2.5e-7, "exp({x}) is off by {error:e}");
            assert!(weight(x).is_normal());
            x -= 0.0137;
        }
        assert_eq!(weight(0.0), 2f32.powi(SCALE_EXPONENT));
        assert!(weight(LOWEST).is_normal());
        for nothing in [LOWEST - 0.01, -1e6, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(weight(nothing), 0.0, "exp({nothing})");
        }
    }

    #[test]
    fn sums_of_rounded_weights_are_exact() {
        let mut x = 0.0f32;
        while x > -60.0 {
            let (exact, rounded) = (f64::from(weight(x)), f64::from(round(weight(x))));
            assert!((rounded - exact).abs() <= f64::from(1 << 25) && rounded % f64::from(1 << 26) == 0.0, "exp({x})");
            x -= 0.0137;
        }
        let weights: Vec<f32> = (0..5000).map(|i| round(weight(-0.007 * i as f32))).collect();
        let backwards: f64 = weights.iter().rev().map(|&weight| f64::from(weight)).sum();
        assert_eq!(sum(&weights), backwards);
    }

    #[test]
    fn sums_of_every_length() {
        for len in [0usize, 1, 7, 8, 9, 64, 1001] {
            let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
            assert_eq!(sum(&values), (len * len.saturating_sub(1) / 2) as f64, "{len} values");
        }
        let log_of_8 = ln(sum_of_weights(&[3.0; 8], 3.0));
        assert!((log_of_8 - 8f64.ln()).abs() < 1e-12, "{log_of_8}");
    }
}
