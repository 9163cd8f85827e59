//! Floats of eight bits, as keys and values may be kept: four bits of exponent, three of mantissa.

/// The largest.
pub const MOST: f32 = 448.0;
/// The exponent of the smallest with all of its mantissa; below that the steps are as wide.
const LEAST_EXPONENT: i32 = -6;

/// The nearest such float, the even one of two; the largest where `x` is beyond it.
pub fn round(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let size = x.abs().min(MOST);
    let exponent = (size.to_bits() >> 23) as i32 - 127;
    let step = 2f32.powi(exponent.max(LEAST_EXPONENT) - 3);
    ((size / step).round_ties_even() * step).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a code means, by its definition.
    fn value(code: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(code >> 3), f32::from(code & 7) / 8.0);
        if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) }
    }

    #[test]
    fn every_float_becomes_the_nearest_code() {
        let codes: Vec<f32> = (0..0x7f).map(value).collect();
        assert_eq!(codes.last(), Some(&MOST));
        for (code, pair) in codes.windows(2).enumerate() {
            let (low, high) = (pair[0], pair[1]);
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { low } else { high };
            let (below, above) = (f32::from_bits(middle.to_bits() - 1), f32::from_bits(middle.to_bits() + 1));
            for (x, nearest) in [(low, low), (high, high), (middle, even), (below, low), (above, high)] {
                assert_eq!(round(x), nearest, "{x}");
                assert_eq!(round(-x).to_bits(), (-nearest).to_bits(), "{x}");
            }
        }
        assert_eq!([round(449.0), round(1e30), round(f32::INFINITY), round(f32::MIN)], [MOST, MOST, MOST, -MOST]);
        assert!(round(f32::NAN).is_nan());
    }
}
