//! How a block type lies in a tile of 16 outputs.
//!
//! A tile's lanes are its outputs. Inputs go in blocks of 32, and a block in 8 groups of 4, because a byte product sums
//! 4 neighbours of each lane: byte `4·lane + j` of group `g` is the code of input `4g + j`.
//!
//! ```text
//! 4 bits   4 × 64 bytes: vector p holds group p in its low nibbles, group p + 4 in its high nibbles
//! 5 bits   + 64 bytes:     bit g of a byte is the fifth bit of group g
//! 6 bits   + 2 × 64 bytes: bits 2g and 2g + 1 of a byte of vector h are the top bits of group 4h + g
//! 8 bits   8 × 64 bytes
//! ```
//!
//! Codes are unsigned; the zero point comes off in integers. Scales stay as the file has them, half floats and the small
//! integers under them, so nothing is lost and nothing grows.

use half::f16;

use super::memory::Plain;
use super::vector::Vector;

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
    /// The code that means zero is `1 << shift`; `None`: 0.
    const ZERO_SHIFT: Option<u32>;
    /// Whether codes take all 8 bits.
    const BYTES: bool = false;

    /// The codes of the `i`-th 32 values of a block of the file, 4 to a word.
    fn quads(block: &[u8], i: usize) -> [u32; 8];

    /// The code that means zero.
    fn zero() -> i32 {
        Self::ZERO_SHIFT.map_or(0, |shift| 1 << shift)
    }
}

/// 32 inputs of 16 outputs, as unsigned codes.
pub(crate) trait Codes: Plain {
    /// Writes a lane, from zeroes.
    fn put(&mut self, lane: usize, quads: [u32; 8]);
    /// Reads a lane back.
    fn get(&self, lane: usize) -> [u32; 8];
    /// All 8 groups, one code to a byte.
    fn load<V: Vector>(&self, v: V) -> [V::Bytes; 8];
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
    /// The scales of both halves of block `i`, and its minimum.
    fn block<V: Vector>(&self, v: V, head: [V::F32; 2], i: usize) -> [V::F32; 3];
}

// Codes.

/// 4 bits.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Codes4 {
    nibbles: [[u8; 64]; 4],
}

/// 5 bits.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Codes5 {
    low: Codes4,
    high: [u8; 64],
}

/// 6 bits.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Codes6 {
    low: Codes4,
    high: [[u8; 64]; 2],
}

/// 8 bits.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Codes8 {
    groups: [[u8; 64]; 8],
}

// SAFETY: bytes, a multiple of 64 of them.
unsafe impl Plain for Codes4 {}
// SAFETY: bytes, a multiple of 64 of them.
unsafe impl Plain for Codes5 {}
// SAFETY: bytes, a multiple of 64 of them.
unsafe impl Plain for Codes6 {}
// SAFETY: bytes, a multiple of 64 of them.
unsafe impl Plain for Codes8 {}

/// A lane's 4 bytes as a word.
fn word(vector: &mut [u8; 64], lane: usize) -> &mut [u8; 4] {
    &mut vector.as_chunks_mut().0[lane]
}

fn read(vector: &[u8; 64], lane: usize) -> u32 {
    u32::from_le_bytes(vector.as_chunks().0[lane])
}

impl Codes for Codes4 {
    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        for (p, vector) in self.nibbles.iter_mut().enumerate() {
            *word(vector, lane) = (quads[p] & 0x0f0f_0f0f | (quads[p + 4] & 0x0f0f_0f0f) << 4).to_le_bytes();
        }
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        std::array::from_fn(|g| read(&self.nibbles[g % 4], lane) >> (g / 4 * 4) & 0x0f0f_0f0f)
    }

    #[inline(always)]
    fn load<V: Vector>(&self, v: V) -> [V::Bytes; 8] {
        let low = v.splat_byte(0x0f);
        let mut groups = [low; 8];
        for p in 0..4 {
            let both = v.load_bytes(&self.nibbles[p]);
            groups[p] = v.and(both, low);
            groups[p + 4] = v.and(v.shr_pairs(both, 4), low);
        }
        groups
    }
}

/// Moves the bits that begin at `from` to bit 4 and keeps those of `mask`.
#[inline(always)]
fn to_bit_4<V: Vector>(v: V, high: V::Bytes, from: u32, mask: u8) -> V::Bytes {
    let moved = match from {
        0..4 => v.shl_pairs(high, 4 - from),
        4 => high,
        _ => v.shr_pairs(high, from - 4),
    };
    v.and(moved, v.splat_byte(mask))
}

impl Codes for Codes5 {
    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        self.low.put(lane, quads);
        let high = (0..8).fold(0, |bits, g| bits | (quads[g] >> 4 & 0x0101_0101) << g);
        *word(&mut self.high, lane) = high.to_le_bytes();
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        let (low, high) = (self.low.get(lane), read(&self.high, lane));
        std::array::from_fn(|g| low[g] | (high >> g & 0x0101_0101) << 4)
    }

    #[inline(always)]
    fn load<V: Vector>(&self, v: V) -> [V::Bytes; 8] {
        let mut groups = self.low.load(v);
        let high = v.load_bytes(&self.high);
        for (g, codes) in groups.iter_mut().enumerate() {
            *codes = v.or(*codes, to_bit_4(v, high, g as u32, 0x10));
        }
        groups
    }
}

impl Codes for Codes6 {
    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        self.low.put(lane, quads);
        for (h, vector) in self.high.iter_mut().enumerate() {
            let high = (0..4).fold(0, |bits, g| bits | (quads[4 * h + g] >> 4 & 0x0303_0303) << (2 * g));
            *word(vector, lane) = high.to_le_bytes();
        }
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        let low = self.low.get(lane);
        std::array::from_fn(|g| low[g] | (read(&self.high[g / 4], lane) >> (g % 4 * 2) & 0x0303_0303) << 4)
    }

    #[inline(always)]
    fn load<V: Vector>(&self, v: V) -> [V::Bytes; 8] {
        let mut groups = self.low.load(v);
        let high = [v.load_bytes(&self.high[0]), v.load_bytes(&self.high[1])];
        for (g, codes) in groups.iter_mut().enumerate() {
            *codes = v.or(*codes, to_bit_4(v, high[g / 4], g as u32 % 4 * 2, 0x30));
        }
        groups
    }
}

impl Codes for Codes8 {
    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        for (vector, quad) in self.groups.iter_mut().zip(quads) {
            *word(vector, lane) = quad.to_le_bytes();
        }
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        std::array::from_fn(|g| read(&self.groups[g], lane))
    }

    #[inline(always)]
    fn load<V: Vector>(&self, v: V) -> [V::Bytes; 8] {
        let mut groups = [v.splat_byte(0); 8];
        for (codes, group) in groups.iter_mut().zip(&self.groups) {
            *codes = v.load_bytes(group);
        }
        groups
    }
}

// Scales.

/// `value = scale · code`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Scale {
    scale: [f16; LANES],
}

/// `value = scale · code + minimum`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ScaleAndMinimum {
    scale: [f16; LANES],
    minimum: [f16; LANES],
}

/// `value = (d · scale) · code + (minus_dmin · minimum)`, 8 blocks of them.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct NestedWithMinimum {
    d: [f16; LANES],
    minus_dmin: [f16; LANES],
    scales: [[u8; LANES]; 8],
    minimums: [[u8; LANES]; 8],
}

/// `value = (d · scale) · code`, 16 half blocks of them.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct NestedHalves {
    d: [f16; LANES],
    scales: [[i8; LANES]; 16],
}

// SAFETY: numbers of 2 bytes and of 1, in that order and an even number of each, so without padding.
unsafe impl Plain for Scale {}
// SAFETY: as above.
unsafe impl Plain for ScaleAndMinimum {}
// SAFETY: as above.
unsafe impl Plain for NestedWithMinimum {}
// SAFETY: as above.
unsafe impl Plain for NestedHalves {}

fn half_at(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl Scales for Scale {
    const BLOCKS: usize = 1;

    fn put(&mut self, lane: usize, block: &[u8]) {
        self.scale[lane] = half_at(block, 0);
    }
    fn get(&self, lane: usize, _: usize, _: usize) -> (f32, f32) {
        (self.scale[lane].to_f32(), 0.0)
    }
    #[inline(always)]
    fn head<V: Vector>(&self, v: V) -> [V::F32; 2] {
        [v.load_f16(&self.scale); 2]
    }
    #[inline(always)]
    fn block<V: Vector>(&self, _: V, head: [V::F32; 2], _: usize) -> [V::F32; 3] {
        [head[0]; 3]
    }
}

impl Scales for ScaleAndMinimum {
    const BLOCKS: usize = 1;
    const MINIMUMS: bool = true;

    fn put(&mut self, lane: usize, block: &[u8]) {
        self.scale[lane] = half_at(block, 0);
        self.minimum[lane] = half_at(block, 2);
    }
    fn get(&self, lane: usize, _: usize, _: usize) -> (f32, f32) {
        (self.scale[lane].to_f32(), self.minimum[lane].to_f32())
    }
    #[inline(always)]
    fn head<V: Vector>(&self, v: V) -> [V::F32; 2] {
        [v.load_f16(&self.scale), v.load_f16(&self.minimum)]
    }
    #[inline(always)]
    fn block<V: Vector>(&self, _: V, head: [V::F32; 2], _: usize) -> [V::F32; 3] {
        [head[0], head[0], head[1]]
    }
}

impl Scales for NestedWithMinimum {
    const BLOCKS: usize = 8;
    const MINIMUMS: bool = true;

    fn put(&mut self, lane: usize, block: &[u8]) {
        self.d[lane] = half_at(block, 0);
        self.minus_dmin[lane] = -half_at(block, 2);
        let packed = &block[4..16];
        for i in 0..8 {
            // Six bits each. From the fifth on, the low four lie in the last bytes and the high two above the first eight.
            let (scale, minimum) = if i < 4 {
                (packed[i] & 63, packed[i + 4] & 63)
            } else {
                (packed[i + 4] & 15 | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4)
            };
            self.scales[i][lane] = scale;
            self.minimums[i][lane] = minimum;
        }
    }
    fn get(&self, lane: usize, i: usize, _: usize) -> (f32, f32) {
        let scale = self.d[lane].to_f32() * f32::from(self.scales[i][lane]);
        (scale, self.minus_dmin[lane].to_f32() * f32::from(self.minimums[i][lane]))
    }
    #[inline(always)]
    fn head<V: Vector>(&self, v: V) -> [V::F32; 2] {
        [v.load_f16(&self.d), v.load_f16(&self.minus_dmin)]
    }
    #[inline(always)]
    fn block<V: Vector>(&self, v: V, head: [V::F32; 2], i: usize) -> [V::F32; 3] {
        let scale = v.mul(head[0], v.to_f32(v.load_u8(&self.scales[i])));
        let minimum = v.mul(head[1], v.to_f32(v.load_u8(&self.minimums[i])));
        [scale, scale, minimum]
    }
}

impl Scales for NestedHalves {
    const BLOCKS: usize = 8;
    const HALVES: bool = true;

    fn put(&mut self, lane: usize, block: &[u8]) {
        self.d[lane] = half_at(block, 208);
        for (scale, &byte) in self.scales.iter_mut().zip(&block[192..208]) {
            scale[lane] = byte as i8;
        }
    }
    fn get(&self, lane: usize, i: usize, half: usize) -> (f32, f32) {
        (self.d[lane].to_f32() * f32::from(self.scales[2 * i + half][lane]), 0.0)
    }
    #[inline(always)]
    fn head<V: Vector>(&self, v: V) -> [V::F32; 2] {
        [v.load_f16(&self.d); 2]
    }
    #[inline(always)]
    fn block<V: Vector>(&self, v: V, head: [V::F32; 2], i: usize) -> [V::F32; 3] {
        let first = v.mul(head[0], v.to_f32(v.load_i8(&self.scales[2 * i])));
        let second = v.mul(head[0], v.to_f32(v.load_i8(&self.scales[2 * i + 1])));
        [first, second, first]
    }
}

// The block types of the file.

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

macro_rules! formats {
    ($($name:ident: $codes:ty, $scales:ty, $zero:expr, $bytes:literal, |$block:ident, $i:ident| $quads:expr;)*) => {$(
        /// The block type of that name.
        #[allow(non_camel_case_types)]
        pub(crate) struct $name;

        impl Format for $name {
            type Codes = $codes;
            type Scales = $scales;
            const ZERO_SHIFT: Option<u32> = $zero;
            const BYTES: bool = $bytes;
            fn quads($block: &[u8], $i: usize) -> [u32; 8] {
                $quads
            }
        }
    )*};
}

formats! {
    Q4_0: Codes4, Scale, Some(3), false, |block, _i| nibbles(&block[2..]);
    Q4_1: Codes4, ScaleAndMinimum, None, false, |block, _i| nibbles(&block[4..]);
    Q5_0: Codes5, Scale, Some(4), false, |block, _i| with_fifth_bits(nibbles(&block[6..]), word_at(block, 2));
    Q5_1: Codes5, ScaleAndMinimum, None, false, |block, _i| with_fifth_bits(nibbles(&block[8..]), word_at(block, 4));
    Q8_0: Codes8, Scale, Some(7), true, |block, _i| std::array::from_fn(|g| word_at(block, 2 + 4 * g) ^ 0x8080_8080);
    Q4_K: Codes4, NestedWithMinimum, None, false, |block, i| nibbles_of_64(&block[16..], i);
    Q5_K: Codes5, NestedWithMinimum, None, false, |block, i| {
        let low = nibbles_of_64(&block[48..], i);
        // Bit i of byte j is the fifth bit of code j of run i.
        std::array::from_fn(|g| low[g] | (word_at(block, 16 + 4 * g) >> i & 0x0101_0101) << 4)
    };
    Q6_K: Codes6, NestedHalves, Some(5), false, |block, i| {
        // Two halves of 128 codes, each 4 runs of 32: nibbles of runs 0 and 1 are low, of 2 and 3 high.
        let (half, run) = (i / 4, i % 4);
        std::array::from_fn(|g| {
            let low = word_at(block, 64 * half + 32 * (run % 2) + 4 * g) >> (run / 2 * 4) & 0x0f0f_0f0f;
            low | (word_at(block, 128 + 32 * half + 4 * g) >> (2 * run) & 0x0303_0303) << 4
        })
    };
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
            dense => unreachable!("{} has no blocks", dense.name()),
        }
    };
}
pub(crate) use with_format;
