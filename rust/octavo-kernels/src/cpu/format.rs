//! How a block type lies in a tile of 16 outputs.
//!
//! A tile's lanes are its outputs. Inputs go in blocks of 32, and a block in 8 groups of 4, because a byte product sums
//! 4 neighbours of each lane: byte `4·lane + j` of group `g` is the code of input `4g + j`.
//!
//! ```text
//! 2 bits   2 × 64 bytes: bits 2g and 2g + 1 of a byte of vector h are the code of group 4h + g
//! 3 bits   + 64 bytes:     bit g of a byte is the third bit of group g
//! 4 bits   4 × 64 bytes: vector p holds group p in its low nibbles, group p + 4 in its high nibbles
//! 5 bits   + 64 bytes:     bit g of a byte is the fifth bit of group g
//! 6 bits   + 2 × 64 bytes: bits 2g and 2g + 1 of a byte of vector h are the top bits of group 4h + g
//! 8 bits   8 × 64 bytes
//! ```
//!
//! Codes are unsigned; the zero point comes off in integers. Scales stay as the file has them, half floats and the small
//! integers under them, so nothing is lost and hardly anything grows. Codes and their scales lie side by side, so a tile is
//! one stream of bytes.

mod codes; // codes of 32 inputs of 16 outputs
mod record; // both side by side
mod scales; // their scales

use super::memory::Plain;
use super::vector::Vector;
use codes::{Codes2, Codes3, Codes4, Codes5, Codes6, Codes8};
pub(crate) use record::Record;
use record::{Side, units};
use scales::{HalvesSource, NestedHalves, NestedHalvesWithMinimum, NestedWithMinimum, Scale, ScaleAndMinimum, half_at};

/// Outputs of a tile.
pub const LANES: usize = 16;
/// Inputs of a block.
pub const BLOCK: usize = 32;

/// A block type: which codes and scales, and how the file's bytes become them.
pub(crate) trait Format: 'static {
    /// Codes of a block of 32 inputs.
    type Codes: Codes;
    /// Scales of one or more such blocks.
    type Scales: Scales;
    /// Both.
    type Record: Record<Self::Codes, Self::Scales>;
    /// The code that means zero is `1 << shift`; `None`: 0.
    const ZERO_SHIFT: Option<u32>;
    /// Whether codes take all 8 bits.
    const BYTES: bool = Self::Codes::BITS == 8;

    /// The codes of the `i`-th 32 values of a block of the file, 4 to a word.
    fn quads(block: &[u8], i: usize) -> [u32; 8];

    /// The code that means zero.
    fn zero() -> i32 {
        Self::ZERO_SHIFT.map_or(0, |shift| 1 << shift)
    }
}

/// 32 inputs of 16 outputs, as unsigned codes.
pub(crate) trait Codes: Plain {
    /// Of a code.
    const BITS: u32;

    /// Writes a lane, from zeroes.
    fn put(&mut self, lane: usize, quads: [u32; 8]);
    /// Reads a lane back.
    fn get(&self, lane: usize) -> [u32; 8];
    /// Group `g` of the 8, one code to a byte.
    fn group<V: Vector>(&self, v: V, g: usize) -> V::Bytes;
}

/// The scales of [`Scales::BLOCKS`] blocks of 16 outputs.
pub(crate) trait Scales: Plain {
    /// Blocks of 32 inputs that it covers: as many as the file's block has.
    const BLOCKS: usize;
    /// Whether the two halves of a block have scales of their own.
    const HALVES: bool = false;
    /// Whether a minimum is added.
    const MINIMUMS: bool = false;

    /// Writes a lane from a block of the file.
    fn put(&mut self, lane: usize, block: &[u8]);
    /// A lane's scale in half `half` of block `i`, and its minimum.
    fn get(&self, lane: usize, i: usize, half: usize) -> (f32, f32);
    /// What all blocks of the record share.
    fn head<V: Vector>(&self, v: V) -> [V::F32; 2];
    /// The scales of both halves of block `i`, and their minimums. The second of each is read only with
    /// [`Scales::HALVES`], minimums only with [`Scales::MINIMUMS`].
    fn block<V: Vector>(&self, v: V, head: [V::F32; 2], i: usize) -> [[V::F32; 2]; 2];
}

// The block types of the file.

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Codes 0 to 15 are low nibbles, 16 to 31 high nibbles.
fn nibbles(bytes: &[u8]) -> [u32; 8] {
    std::array::from_fn(|g| word_at(bytes, g % 4 * 4) >> (g / 4 * 4) & 0x0f0f_0f0f)
}

/// Bit `i` of the word is the fifth bit of code `i`.
fn with_fifth_bits(quads: [u32; 8], bits: u32) -> [u32; 8] {
    // The product puts bit j of a nibble at bit 7j + j of the word, the lowest of byte j.
    std::array::from_fn(|g| quads[g] | (((bits >> (4 * g) & 15) * 0x0020_4081) & 0x0101_0101) << 4)
}

/// Runs of 32 bytes hold 64 codes: low nibbles the first 32, high nibbles the others.
fn nibbles_of_64(bytes: &[u8], i: usize) -> [u32; 8] {
    std::array::from_fn(|g| word_at(bytes, i / 2 * 32 + 4 * g) >> (i % 2 * 4) & 0x0f0f_0f0f)
}

/// Runs of 32 bytes hold 128 codes of 2 bits: the lowest bits are the first 32.
fn pairs_of_128(bytes: &[u8], i: usize) -> [u32; 8] {
    std::array::from_fn(|g| word_at(bytes, i / 4 * 32 + 4 * g) >> (i % 4 * 2) & 0x0303_0303)
}

macro_rules! formats {
    ($($name:ident: $codes:ty, $scales:ty, $zero:expr, |$block:ident, $i:ident| $quads:expr;)*) => {$(
        /// The block type of that name.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Format for $name {
            type Codes = $codes;
            type Scales = $scales;
            type Record = Side<$codes, $scales, { <$scales>::BLOCKS }, { units::<$scales>() }>;
            const ZERO_SHIFT: Option<u32> = $zero;
            fn quads($block: &[u8], $i: usize) -> [u32; 8] {
                $quads
            }
        }
    )*};
}

formats! {
    Q4_0: Codes4, Scale, Some(3), |block, _i| nibbles(&block[2..]);
    Q4_1: Codes4, ScaleAndMinimum, None, |block, _i| nibbles(&block[4..]);
    Q5_0: Codes5, Scale, Some(4), |block, _i| with_fifth_bits(nibbles(&block[6..]), word_at(block, 2));
    Q5_1: Codes5, ScaleAndMinimum, None, |block, _i| with_fifth_bits(nibbles(&block[8..]), word_at(block, 4));
    Q8_0: Codes8, Scale, Some(7), |block, _i| std::array::from_fn(|g| word_at(block, 2 + 4 * g) ^ 0x8080_8080);
    Q4_K: Codes4, NestedWithMinimum, None, |block, i| nibbles_of_64(&block[16..], i);
    Q5_K: Codes5, NestedWithMinimum, None, |block, i| {
        let low = nibbles_of_64(&block[48..], i);
        // Bit i of byte j is the fifth bit of code j of run i.
        std::array::from_fn(|g| low[g] | (word_at(block, 16 + 4 * g) >> i & 0x0101_0101) << 4)
    };
    Q2_K: Codes2, NestedHalvesWithMinimum, None, |block, i| pairs_of_128(&block[16..], i);
    Q3_K: Codes3, NestedHalves<Q3_K>, Some(2), |block, i| {
        let low = pairs_of_128(&block[32..], i);
        // Bit i of byte j is the third bit of code j of run i.
        std::array::from_fn(|g| low[g] | (word_at(block, 4 * g) >> i & 0x0101_0101) << 2)
    };
    Q8_16: Codes8, NestedHalves<Q8_16>, Some(7), |block, i| {
        std::array::from_fn(|g| word_at(block, 20 + 32 * i + 4 * g) ^ 0x8080_8080)
    };
    Q6_K: Codes6, NestedHalves<Q6_K>, Some(5), |block, i| {
        // Two halves of 128 codes, each 4 runs of 32: nibbles of runs 0 and 1 are low, of 2 and 3 high.
        let (half, run) = (i / 4, i % 4);
        std::array::from_fn(|g| {
            let low = word_at(block, 64 * half + 32 * (run % 2) + 4 * g) >> (run / 2 * 4) & 0x0f0f_0f0f;
            low | (word_at(block, 128 + 32 * half + 4 * g) >> (2 * run) & 0x0303_0303) << 4
        })
    };
}

impl HalvesSource for Q6_K {
    fn halves(block: &[u8]) -> (f32, [i8; 16]) {
        (half_at(block, 208).to_f32(), std::array::from_fn(|group| block[192 + group] as i8))
    }
}

impl HalvesSource for Q3_K {
    fn halves(block: &[u8]) -> (f32, [i8; 16]) {
        let packed = &block[96..108];
        // Six bits each: nibbles, the low ones first, and the high pairs four to a byte. 32 means zero.
        let scale = |group: usize| {
            let (low, high) = (packed[group % 8] >> (group / 8 * 4) & 15, packed[8 + group % 4] >> (group / 4 * 2) & 3);
            (low | high << 4) as i8 - 32
        };
        (half_at(block, 108).to_f32(), std::array::from_fn(scale))
    }
}

impl HalvesSource for Q8_16 {
    fn halves(block: &[u8]) -> (f32, [i8; 16]) {
        (f32::from_bits(word_at(block, 0)), std::array::from_fn(|group| block[4 + group] as i8))
    }
}

/// Runs `$body` with `$F` as the [`Format`] of `$dtype`, which must be a block type.
macro_rules! with_format {
    ($dtype:expr, $F:ident => $body:expr) => {
        match $dtype {
            $crate::DType::Q4_0 => {
                type $F = $crate::cpu::format::Q4_0;
                $body
            }
            $crate::DType::Q4_1 => {
                type $F = $crate::cpu::format::Q4_1;
                $body
            }
            $crate::DType::Q5_0 => {
                type $F = $crate::cpu::format::Q5_0;
                $body
            }
            $crate::DType::Q5_1 => {
                type $F = $crate::cpu::format::Q5_1;
                $body
            }
            $crate::DType::Q8_0 => {
                type $F = $crate::cpu::format::Q8_0;
                $body
            }
            $crate::DType::Q2_K => {
                type $F = $crate::cpu::format::Q2_K;
                $body
            }
            $crate::DType::Q3_K => {
                type $F = $crate::cpu::format::Q3_K;
                $body
            }
            $crate::DType::Q4_K => {
                type $F = $crate::cpu::format::Q4_K;
                $body
            }
            $crate::DType::Q5_K => {
                type $F = $crate::cpu::format::Q5_K;
                $body
            }
            $crate::DType::Q6_K => {
                type $F = $crate::cpu::format::Q6_K;
                $body
            }
            $crate::DType::Q8_16 => {
                type $F = $crate::cpu::format::Q8_16;
                $body
            }
            other => unreachable!("{} has no format", other.name()),
        }
    };
}
pub(crate) use with_format;
