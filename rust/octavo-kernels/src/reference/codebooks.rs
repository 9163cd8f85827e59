//! Block types whose codes number the entries of a published table, and ternary ones.
//!
//! All of them are `d · scale · code` with small integers: a scale for every 16 values, and codes that fit a signed byte.
//! The products are exact in f32 (at most 24 bits), so no order of multiplication can change a bit.

use super::dequantise::{Block, half_at, nibbles, pairs};
use crate::DType;

/// What the nibbles of IQ4_NL and IQ4_XS mean.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// What the nibbles of MXFP4 mean, doubled.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A block of 256: value `i` is `d · scales[i / 16] · codes[i]`.
#[derive(Clone, Debug)]
pub struct Nested {
    /// What all values share.
    pub d: f32,
    /// One for every 16 values.
    pub scales: [i8; 16],
    /// Within ±127.
    pub codes: [i8; 256],
}

impl Nested {
    /// Takes one block of such a type apart.
    ///
    /// # Panics
    /// When `dtype` is of another kind or `bytes` is not exactly one block.
    pub fn decode(dtype: DType, bytes: &[u8]) -> Self {
        assert_eq!(bytes.len(), dtype.block_bytes(), "one block of {}", dtype.name());
        match dtype {
            DType::Q8_16 => q8_16(bytes),
            DType::IQ4_XS => iq4_xs(bytes),
            DType::IQ2_XXS => iq2_xxs(bytes),
            DType::IQ2_XS => iq2_xs(bytes),
            DType::IQ2_S => iq2_s(bytes),
            DType::IQ3_XXS => iq3_xxs(bytes),
            DType::IQ3_S => iq3_s(bytes),
            DType::IQ1_S => iq1_s(bytes),
            DType::IQ1_M => iq1_m(bytes),
            DType::TQ1_0 => tq1_0(bytes),
            DType::TQ2_0 => tq2_0(bytes),
            other => panic!("{} has no nested scales", other.name()),
        }
    }

    /// Writes it as a block of [`DType::Q8_16`].
    pub fn encode(&self, block: &mut [u8]) {
        block[..4].copy_from_slice(&self.d.to_le_bytes());
        for (byte, &number) in block[4..].iter_mut().zip(self.scales.iter().chain(&self.codes)) {
            *byte = number as u8;
        }
    }
}

impl From<Nested> for Block {
    fn from(nested: Nested) -> Self {
        Self { codes: nested.codes, scales: nested.scales.map(|scale| nested.d * f32::from(scale)), minimums: None }
    }
}

/// A published table: `entries` numbers of 16 bits, each the `width` values of an entry in `bits` bits, lowest first.
struct Codebook {
    first: usize,
    bits: usize,
    values: &'static [i8],
}

/// All tables, one after another: 256, 512, 1024, 256, 512 and 2048 entries. They are part of the format, as ggml (MIT
/// licence) publishes it; `tests/fixtures/dequant` holds what they give.
static TABLES: &[u8; 2 * 4608] = include_bytes!("codebooks.bin");

const TWO_BITS: &[i8] = &[8, 25, 43];
const IQ2_XXS: Codebook = Codebook { first: 0, bits: 2, values: TWO_BITS };
const IQ2_XS: Codebook = Codebook { first: 256, bits: 2, values: TWO_BITS };
const IQ2_S: Codebook = Codebook { first: 768, bits: 2, values: TWO_BITS };
const IQ3_XXS: Codebook = Codebook { first: 1792, bits: 3, values: &[4, 12, 20, 28, 36, 44, 52, 62] };
const IQ3_S: Codebook = Codebook { first: 2048, bits: 3, values: &[1, 3, 5, 7, 9, 11, 13, 15] };
/// In eighths, because a shift of an eighth is added.
const IQ1: Codebook = Codebook { first: 2560, bits: 2, values: &[-8, 0, 8] };

impl Codebook {
    /// Writes the values of an entry: as many as `codes` has room for.
    fn look_up(&self, entry: usize, codes: &mut [i8]) {
        let packed = u16_at(TABLES, 2 * (self.first + entry));
        for (i, code) in codes.iter_mut().enumerate() {
            *code = self.values[usize::from(packed >> (self.bits * i)) & ((1 << self.bits) - 1)];
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// Nibble `i`, low ones first.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (i % 2 * 4) & 15
}

/// `2n + 1`, which is how scales are stored that are never zero.
fn odd(n: u8) -> i8 {
    (2 * n + 1) as i8
}

/// Negates the codes whose bit is set.
fn negate(codes: &mut [i8], signs: u8) {
    for (i, code) in codes.iter_mut().enumerate() {
        if signs >> i & 1 == 1 {
            *code = -*code;
        }
    }
}

/// Seven signs are stored, and the eighth makes the number of minuses even.
fn with_eighth(signs: u32) -> u8 {
    let seven = (signs & 127) as u8;
    seven | ((seven.count_ones() as u8 & 1) << 7)
}

/// `d | scales | codes`, all as they are.
fn q8_16(bytes: &[u8]) -> Nested {
    let signed = |at: usize| bytes[at] as i8;
    Nested {
        d: f32::from_bits(u32_at(bytes, 0)),
        scales: std::array::from_fn(|group| signed(4 + group)),
        codes: std::array::from_fn(|i| signed(20 + i)),
    }
}

/// `d | high pairs of bits of 8 scales | their low nibbles | nibbles`
fn iq4_xs(bytes: &[u8]) -> Nested {
    let high = u16_at(bytes, 2);
    let scales = std::array::from_fn(|group| {
        let group = group / 2;
        (nibble(&bytes[4..8], group) | ((high >> (2 * group) & 3) as u8) << 4) as i8 - 32
    });
    let mut codes = [0; 256];
    for (bytes, codes) in bytes[8..].chunks_exact(16).zip(codes.chunks_exact_mut(32)) {
        nibbles(bytes, codes, 0);
        codes.iter_mut().for_each(|code| *code = IQ4_VALUES[*code as usize]);
    }
    Nested { d: half_at(bytes, 0), scales, codes }
}

/// `d`, then for each 32 values: 4 entries of 8 bits, and a word of 4 × 7 signs and a scale.
fn iq2_xxs(bytes: &[u8]) -> Nested {
    let word = |group: usize| u32_at(bytes, 2 + 8 * group + 4);
    let mut codes = [0; 256];
    for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
        IQ2_XXS.look_up(bytes[2 + 8 * (j / 4) + j % 4].into(), codes);
        negate(codes, with_eighth(word(j / 4) >> (7 * (j % 4))));
    }
    let scales = std::array::from_fn(|group| odd((word(group / 2) >> 28) as u8));
    Nested { d: half_at(bytes, 0) / 8.0, scales, codes }
}

/// `d | 32 × (an entry of 9 bits, 7 signs) | 16 nibbles of scales`
fn iq2_xs(bytes: &[u8]) -> Nested {
    let mut codes = [0; 256];
    for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
        let packed = u16_at(bytes, 2 + 2 * j);
        IQ2_XS.look_up(usize::from(packed & 511), codes);
        negate(codes, with_eighth(u32::from(packed >> 9)));
    }
    let scales = std::array::from_fn(|group| odd(nibble(&bytes[66..74], group)));
    Nested { d: half_at(bytes, 0) / 8.0, scales, codes }
}

/// `d | 32 low bytes of entries | 32 bytes of signs | their high pairs of bits | 16 nibbles of scales`
fn iq2_s(bytes: &[u8]) -> Nested {
    let mut codes = [0; 256];
    for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
        let high = usize::from(bytes[66 + j / 4] >> (j % 4 * 2) & 3);
        IQ2_S.look_up(usize::from(bytes[2 + j]) | high << 8, codes);
        negate(codes, bytes[34 + j]);
    }
    let scales = std::array::from_fn(|group| odd(nibble(&bytes[74..82], group)));
    Nested { d: half_at(bytes, 0) / 8.0, scales, codes }
}

/// `d | 64 entries of 8 bits | for each 32 values a word of 4 × 7 signs and a scale`
fn iq3_xxs(bytes: &[u8]) -> Nested {
    let word = |group: usize| u32_at(bytes, 66 + 4 * group);
    let mut codes = [0; 256];
    for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
        for (half, codes) in codes.chunks_exact_mut(4).enumerate() {
            IQ3_XXS.look_up(bytes[2 + 2 * j + half].into(), codes);
        }
        negate(codes, with_eighth(word(j / 4) >> (7 * (j % 4))));
    }
    let scales = std::array::from_fn(|group| odd((word(group / 2) >> 28) as u8));
    Nested { d: half_at(bytes, 0) / 4.0, scales, codes }
}

/// `d | 64 low bytes of entries | their ninth bits | 32 bytes of signs | 8 nibbles of scales`
fn iq3_s(bytes: &[u8]) -> Nested {
    let mut codes = [0; 256];
    for (j, codes) in codes.chunks_exact_mut(4).enumerate() {
        let ninth = usize::from(bytes[66 + j / 8] >> (j % 8) & 1);
        IQ3_S.look_up(usize::from(bytes[2 + j]) | ninth << 8, codes);
    }
    for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
        negate(codes, bytes[74 + j]);
    }
    let scales = std::array::from_fn(|group| odd(nibble(&bytes[106..110], group / 2)));
    Nested { d: half_at(bytes, 0), scales, codes }
}

/// Looks up 8 values and moves them all by an eighth.
fn iq1(entry: usize, down: bool, codes: &mut [i8]) {
    IQ1.look_up(entry, codes);
    codes.iter_mut().for_each(|code| *code += if down { -1 } else { 1 });
}

/// `d | 32 low bytes of entries | for each 32 values: their 4 × 3 high bits, a scale, and which way the values are moved`
fn iq1_s(bytes: &[u8]) -> Nested {
    let word = |group: usize| u16_at(bytes, 34 + 2 * group);
    let mut codes = [0; 256];
    for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
        let high = usize::from(word(j / 4) >> (j % 4 * 3) & 7);
        iq1(usize::from(bytes[2 + j]) | high << 8, word(j / 4) >> 15 == 1, codes);
    }
    let scales = std::array::from_fn(|group| odd((word(group / 2) >> 12 & 7) as u8));
    Nested { d: half_at(bytes, 0) / 8.0, scales, codes }
}

/// `32 low bytes of entries | nibbles: 3 high bits and which way | 4 × (4 scales of 3 bits and a quarter of d)`
fn iq1_m(bytes: &[u8]) -> Nested {
    let word = |i: usize| u16_at(bytes, 48 + 2 * i);
    let mut codes = [0; 256];
    for (j, codes) in codes.chunks_exact_mut(8).enumerate() {
        let nibble = nibble(&bytes[32..48], j);
        iq1(usize::from(bytes[j]) | usize::from(nibble & 7) << 8, nibble >> 3 == 1, codes);
    }
    let scales = std::array::from_fn(|group| odd((word(group / 4) >> (group % 4 * 3) & 7) as u8));
    let d = (0..4).fold(0, |d, i| d | (word(i) >> 12) << (4 * i));
    Nested { d: half::f16::from_bits(d).to_f32() / 8.0, scales, codes }
}

/// `48 bytes of 5 digits of base 3 | 4 bytes of 4 | d`. A byte is the digits as a fraction of 256, so that multiplying by 3
/// moves the next one out at the top.
fn tq1_0(bytes: &[u8]) -> Nested {
    let digit = |byte: u8, place: usize| {
        let rest = byte.wrapping_mul([1, 3, 9, 27, 81][place]);
        ((u16::from(rest) * 3) >> 8) as i8 - 1
    };
    let codes = std::array::from_fn(|i| match i {
        0..160 => digit(bytes[i % 32], i / 32),
        160..240 => digit(bytes[32 + i % 16], (i - 160) / 16),
        _ => digit(bytes[48 + i % 4], (i - 240) / 4),
    });
    Nested { d: half_at(bytes, 52), scales: [1; 16], codes }
}

/// `64 bytes of pairs of bits | d`
fn tq2_0(bytes: &[u8]) -> Nested {
    let codes = std::array::from_fn(|i| pairs(&bytes[..64], i) - 1);
    Nested { d: half_at(bytes, 64), scales: [1; 16], codes }
}
