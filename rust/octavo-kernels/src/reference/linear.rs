//! Products with a weight's row: in f32, and with activations quantised to int8.

use super::dequantise::{Block, group_len};
use crate::DType;

/// Values of an activation row that share a scale.
pub const ACTIVATION_BLOCK: usize = 32;

/// `w · x`, one output: a fused multiply-add per input, in order.
pub fn dot(w: &[f32], x: &[f32]) -> f32 {
    assert_eq!(w.len(), x.len());
    w.iter().zip(x).fold(0.0, |sum, (w, x)| w.mul_add(*x, sum))
}

/// A row of activations in int8: value `i` is about `scales[i / 32] · codes[i]`.
#[derive(Clone, Debug, Default)]
pub struct Int8Row {
    /// Within ±127.
    pub codes: Vec<i8>,
    /// `max |x| / 127` over each block of 32; 0 for a block of zeros.
    pub scales: Vec<f32>,
}

impl Int8Row {
    /// Quantises `x`, whose length is a multiple of 32. A code is `x · (1 / scale)`, rounded half to even; 0 where the scale
    /// is so small that it has no inverse.
    pub fn quantise(x: &[f32]) -> Self {
        assert!(x.len().is_multiple_of(ACTIVATION_BLOCK), "{} activations", x.len());
        let mut row = Self::default();
        for x in x.chunks_exact(ACTIVATION_BLOCK) {
            let scale = x.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
            let inverse = if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale };
            row.scales.push(scale);
            row.codes.extend(x.iter().map(|x| (x * inverse).max(-127.0).round_ties_even() as i8));
        }
        row
    }
}

/// `w · x`, one output, for a row of a quantised type. This defines what a backend with int8 activations computes:
///
/// for each group of values that share a weight scale, in order,
/// `sum = fma(Σ w_code · x_code, w_scale · x_scale, sum)`, then, where the type has minimums,
/// `sum = fma(minimum, x_scale · Σ x_code, sum)`. The inner sums are integers, hence exact.
pub fn dot_int8(dtype: DType, weight: &[u8], x: &Int8Row) -> f32 {
    assert_eq!(dtype.row_bytes(x.codes.len()), Some(weight.len()));
    let mut sum = 0.0f32;
    for (b, bytes) in weight.chunks_exact(dtype.block_bytes()).enumerate() {
        let block = Block::decode(dtype, bytes);
        for group in 0..dtype.block_len() / group_len(dtype) {
            let in_block = group * group_len(dtype);
            let in_row = b * dtype.block_len() + in_block;
            let codes = &block.codes[in_block..][..group_len(dtype)];
            let x_codes = &x.codes[in_row..][..group_len(dtype)];
            let x_scale = x.scales[in_row / ACTIVATION_BLOCK];

            let product: i32 = codes.iter().zip(x_codes).map(|(&w, &x)| i32::from(w) * i32::from(x)).sum();
            sum = (product as f32).mul_add(block.scales[group] * x_scale, sum);
            if let Some(minimums) = block.minimums {
                let total: i32 = x_codes.iter().map(|&x| i32::from(x)).sum();
                sum = minimums[group].mul_add(x_scale * total as f32, sum);
            }
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_rounds_half_to_even_and_keeps_zero_blocks() {
        let mut x = [0.0f32; 64];
        (x[0], x[1], x[2], x[3]) = (127.0, 0.5, 1.5, -2.5);
        let row = Int8Row::quantise(&x);
        assert_eq!(row.scales, [1.0, 0.0]);
        assert_eq!(row.codes[..4], [127, 0, 2, -2]);
        assert!(row.codes[32..].iter().all(|&code| code == 0));
    }
}
