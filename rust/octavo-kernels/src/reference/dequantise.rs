//! What the bytes of every block type mean.

use half::f16;

use super::codebooks::{IQ4_VALUES, MXFP4_VALUES, Nested};
use crate::{DType, types::decode_dense};

/// Decodes `bytes` of any type into `out`.
///
/// # Panics
/// When the lengths differ or `out` is not a whole number of blocks.
pub fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    if dtype.is_dense() {
        return decode_dense(dtype, bytes, out);
    }
    assert_eq!(dtype.row_bytes(out.len()), Some(bytes.len()), "{} values of {}", out.len(), dtype.name());
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    for (bytes, out) in blocks.zip(out.chunks_exact_mut(dtype.block_len())) {
        let block = Block::decode(dtype, bytes);
        for (i, out) in out.iter_mut().enumerate() {
            let group = i / group_len(dtype);
            let value = block.scales[group] * f32::from(block.codes[i]);
            // Multiply and add round one after the other, never fused: these are the published values, bit for bit.
            *out = block.minimums.map_or(value, |minimums| value + minimums[group]);
        }
    }
}

/// How many consecutive values of a block share a scale.
pub const fn group_len(dtype: DType) -> usize {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => 1,
        DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q8_0 => 32,
        DType::Q4_K | DType::Q5_K | DType::IQ4_NL | DType::MXFP4 => 32,
        _ => 16,
    }
}

/// A block taken apart: value `i` is `scales[g] · codes[i] (+ minimums[g])`, where `g = i / group_len`.
#[derive(Clone, Debug)]
pub struct Block {
    /// Signed integers with the type's zero point already taken off; the first `block_len` are meant.
    pub codes: [i8; 256],
    /// One per group.
    pub scales: [f32; 16],
    /// One per group, with the sign it is added with; `None` for types that are symmetric.
    pub minimums: Option<[f32; 16]>,
}

impl Block {
    /// Takes one block of a quantised type apart.
    ///
    /// # Panics
    /// When `dtype` is dense or `bytes` is not exactly one block.
    pub fn decode(dtype: DType, bytes: &[u8]) -> Self {
        assert_eq!(bytes.len(), dtype.block_bytes(), "one block of {}", dtype.name());
        match dtype {
            DType::Q4_0 => symmetric(bytes, |codes| nibbles(&bytes[2..18], codes, 8)),
            DType::Q4_1 => with_minimum(bytes, |codes| nibbles(&bytes[4..20], codes, 0)),
            DType::Q5_0 => symmetric(bytes, |codes| {
                nibbles(&bytes[6..22], codes, 16);
                fifth_bits(&bytes[2..6], codes);
            }),
            DType::Q5_1 => with_minimum(bytes, |codes| {
                nibbles(&bytes[8..24], codes, 0);
                fifth_bits(&bytes[4..8], codes);
            }),
            DType::Q8_0 => symmetric(bytes, |codes| {
                for (code, &byte) in codes.iter_mut().zip(&bytes[2..34]) {
                    *code = byte as i8;
                }
            }),
            DType::Q4_K => super_block(bytes, |codes| nibbles_of_64(&bytes[16..144], codes)),
            DType::Q5_K => super_block(bytes, |codes| {
                nibbles_of_64(&bytes[48..176], codes);
                for (i, code) in codes.iter_mut().enumerate() {
                    // Bit g of byte i belongs to value i of group g.
                    *code |= ((bytes[16 + i % 32] >> (i / 32)) as i8 & 1) << 4;
                }
            }),
            DType::Q6_K => q6_k(bytes),
            DType::Q2_K => q2_k(bytes),
            DType::Q3_K => q3_k(bytes),
            DType::IQ4_NL => symmetric(bytes, |codes| looked_up(&bytes[2..], &IQ4_VALUES, codes)),
            DType::MXFP4 => mxfp4(bytes),
            DType::F32 | DType::F16 | DType::BF16 => panic!("{} has no blocks", dtype.name()),
            _ => Nested::decode(dtype, bytes).into(),
        }
    }
}

pub(super) fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// `d | …`
fn symmetric(bytes: &[u8], fill: impl FnOnce(&mut [i8])) -> Block {
    let mut codes = [0; 256];
    fill(&mut codes[..32]);
    Block { codes, scales: [half_at(bytes, 0); 16], minimums: None }
}

/// `d | m | …`
fn with_minimum(bytes: &[u8], fill: impl FnOnce(&mut [i8])) -> Block {
    let block = symmetric(bytes, fill);
    Block { minimums: Some([half_at(bytes, 2); 16]), ..block }
}

/// Low nibbles are the first half of the values, high nibbles the second.
pub(super) fn nibbles(bytes: &[u8], codes: &mut [i8], zero_point: i8) {
    for (i, &byte) in bytes.iter().enumerate() {
        codes[i] = (byte & 15) as i8 - zero_point;
        codes[i + bytes.len()] = (byte >> 4) as i8 - zero_point;
    }
}

fn fifth_bits(bytes: &[u8], codes: &mut [i8]) {
    for (i, code) in codes.iter_mut().enumerate() {
        // Added, not or-ed: the zero point is already off.
        *code += ((bytes[i / 8] >> (i % 8)) as i8 & 1) << 4;
    }
}

/// K-quants keep nibbles in runs of 32 bytes: low nibbles are one group of 32, high nibbles the next.
fn nibbles_of_64(bytes: &[u8], codes: &mut [i8; 256]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        nibbles(bytes, codes, 0);
    }
}

/// `d | dmin | 8 six-bit scales and 8 six-bit minimums in 12 bytes | …`
fn super_block(bytes: &[u8], fill: impl FnOnce(&mut [i8; 256])) -> Block {
    let (d, dmin, packed) = (half_at(bytes, 0), half_at(bytes, 2), &bytes[4..16]);
    let (mut scales, mut minimums) = ([0.0; 16], [0.0; 16]);
    for group in 0..8 {
        let (scale, minimum) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            // The low four bits lie in the last bytes, the high two on top of the first eight.
            let (low, high) = (packed[group + 4], (packed[group - 4] >> 6, packed[group] >> 6));
            ((low & 15) | (high.0 << 4), (low >> 4) | (high.1 << 4))
        };
        scales[group] = d * f32::from(scale);
        minimums[group] = -(dmin * f32::from(minimum));
    }
    let mut codes = [0; 256];
    fill(&mut codes);
    Block { codes, scales, minimums: Some(minimums) }
}

/// `128 bytes of low nibbles | 64 bytes of high pairs of bits | 16 signed scales | d`
fn q6_k(bytes: &[u8]) -> Block {
    let (low, high, d) = (&bytes[..128], &bytes[128..192], half_at(bytes, 208));
    let mut codes = [0; 256];
    for (i, code) in codes.iter_mut().enumerate() {
        // Value i is number `j` of a run of 32, and `quarter` of a half block of 128.
        let (half, quarter, j) = (i / 128, i % 128 / 32, i % 32);
        let nibble = low[half * 64 + quarter % 2 * 32 + j] >> (quarter / 2 * 4) & 15;
        let pair = high[half * 32 + j] >> (quarter * 2) & 3;
        *code = (nibble | (pair << 4)) as i8 - 32;
    }
    let mut scales = [0.0; 16];
    for (scale, &byte) in scales.iter_mut().zip(&bytes[192..208]) {
        *scale = d * f32::from(byte as i8);
    }
    Block { codes, scales, minimums: None }
}

/// Code `i` of 2 bits: runs of 32 bytes hold 4 groups of 32 codes, the first in the lowest bits.
pub(super) fn pairs(bytes: &[u8], i: usize) -> i8 {
    (bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) as i8
}

/// `16 bytes: a four-bit scale and, above it, a minimum | 64 bytes of pairs of bits | d | dmin`
fn q2_k(bytes: &[u8]) -> Block {
    let (d, dmin) = (half_at(bytes, 80), half_at(bytes, 82));
    let codes = std::array::from_fn(|i| pairs(&bytes[16..80], i));
    let scales = std::array::from_fn(|group| d * f32::from(bytes[group] & 15));
    let minimums = std::array::from_fn(|group| -(dmin * f32::from(bytes[group] >> 4)));
    Block { codes, scales, minimums: Some(minimums) }
}

/// `32 bytes of third bits | 64 bytes of pairs of bits | 16 six-bit scales in 12 bytes | d`
fn q3_k(bytes: &[u8]) -> Block {
    let (packed, d) = (&bytes[96..108], half_at(bytes, 108));
    // Bit g of byte j is the third bit of value j of group g of 32.
    let third = |i: usize| (bytes[i % 32] >> (i / 32) & 1) as i8;
    let codes = std::array::from_fn(|i| pairs(&bytes[32..96], i) + 4 * third(i) - 4);
    let scales = std::array::from_fn(|group| {
        let (low, high) = (packed[group % 8] >> (group / 8 * 4) & 15, packed[8 + group % 4] >> (group / 4 * 2) & 3);
        d * f32::from((low | high << 4) as i8 - 32)
    });
    Block { codes, scales, minimums: None }
}

/// Nibbles that number one of 16 values.
fn looked_up(bytes: &[u8], values: &[i8; 16], codes: &mut [i8]) {
    nibbles(bytes, codes, 0);
    codes.iter_mut().for_each(|code| *code = values[*code as usize]);
}

/// `exponent | nibbles`: the scale is a power of two, and the values are doubled so that they are integers.
fn mxfp4(bytes: &[u8]) -> Block {
    let exponent = u32::from(bytes[0]);
    // 2^(exponent - 128): below the smallest normal number for 0 and 1.
    let scale = f32::from_bits(if exponent < 2 { 1 << (21 + exponent) } else { (exponent - 1) << 23 });
    let mut codes = [0; 256];
    looked_up(&bytes[1..17], &MXFP4_VALUES, &mut codes[..32]);
    Block { codes, scales: [scale; 16], minimums: None }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn every_type_decodes_to_the_published_values() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/dequant");
        for dtype in in_files() {
            let read = |what| fs::read(fixtures.join(format!("{}.{what}", dtype.name()))).unwrap();
            let mut want = vec![0.0; 768];
            decode_dense(DType::F32, &read("f32"), &mut want);
            check_bits(dtype, &read("raw"), &want);
        }
    }

    /// F32 is its own value, and Q8_16 is in no file.
    fn in_files() -> impl Iterator<Item = DType> {
        DType::ALL.into_iter().filter(|dtype| !matches!(dtype, DType::F32 | DType::Q8_16))
    }

    /// More of the same, where the larger set of reference outputs is at hand.
    #[test]
    fn every_type_decodes_to_the_oracle() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/oracle/dequant/blocks.safetensors");
        let Ok(tensors) = candle_core::safetensors::load(&path, &candle_core::Device::Cpu) else {
            return eprintln!("skipped: the larger set of blocks is not here");
        };
        for dtype in in_files() {
            let raw = tensors[&format!("{}.raw", dtype.name())].to_vec1::<u8>().unwrap();
            let want = tensors[&format!("{}.f32", dtype.name())].to_vec1::<f32>().unwrap();
            check_bits(dtype, &raw, &want);
        }
    }

    fn check_bits(dtype: DType, raw: &[u8], want: &[f32]) {
        let mut got = vec![0.0; want.len()];
        dequantise(dtype, raw, &mut got);
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "value {i} of {}: {got} for {want}", dtype.name());
        }
    }
}
