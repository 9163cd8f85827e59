//! Codes as they lie in a tile. Every kind is a multiple of 64 bytes.

use super::Codes;
use crate::cpu::memory::Plain;
use crate::cpu::vector::Vector;

/// 2 bits.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Codes2 {
    pairs: [[u8; 64]; 2],
}

/// 3 bits.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Codes3 {
    low: Codes2,
    high: [u8; 64],
}

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
unsafe impl Plain for Codes2 {}
// SAFETY: bytes, a multiple of 64 of them.
unsafe impl Plain for Codes3 {}
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

/// Puts pairs of bits of 4 groups side by side.
fn put_pairs(vectors: &mut [[u8; 64]; 2], lane: usize, quads: [u32; 8]) {
    for (h, vector) in vectors.iter_mut().enumerate() {
        let pairs = (0..4).fold(0, |bits, g| bits | (quads[4 * h + g] & 0x0303_0303) << (2 * g));
        *word(vector, lane) = pairs.to_le_bytes();
    }
}

fn get_pairs(vectors: &[[u8; 64]; 2], lane: usize) -> [u32; 8] {
    std::array::from_fn(|g| read(&vectors[g / 4], lane) >> (g % 4 * 2) & 0x0303_0303)
}

/// Puts one bit of each group into a byte, group by group.
fn put_bits(vector: &mut [u8; 64], lane: usize, quads: [u32; 8]) {
    let bits = (0..8).fold(0, |bits, g| bits | (quads[g] & 0x0101_0101) << g);
    *word(vector, lane) = bits.to_le_bytes();
}

fn get_bits(vector: &[u8; 64], lane: usize) -> [u32; 8] {
    std::array::from_fn(|g| read(vector, lane) >> g & 0x0101_0101)
}

/// Moves the bits that begin at `from` to `to` and keeps those of `mask`.
#[inline(always)]
fn moved<V: Vector>(v: V, x: V::Bytes, from: u32, to: u32, mask: u8) -> V::Bytes {
    let moved = match from {
        _ if from < to => v.shl_pairs(x, to - from),
        _ if from > to => v.shr_pairs(x, from - to),
        _ => x,
    };
    v.and(moved, v.splat_byte(mask))
}

impl Codes for Codes2 {
    const BITS: u32 = 2;

    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        put_pairs(&mut self.pairs, lane, quads);
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        get_pairs(&self.pairs, lane)
    }

    #[inline(always)]
    fn group<V: Vector>(&self, v: V, g: usize) -> V::Bytes {
        moved(v, v.load_bytes(&self.pairs[g / 4]), g as u32 % 4 * 2, 0, 0x03)
    }
}

impl Codes for Codes3 {
    const BITS: u32 = 3;

    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        self.low.put(lane, quads);
        put_bits(&mut self.high, lane, quads.map(|quad| quad >> 2));
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        let (low, high) = (self.low.get(lane), get_bits(&self.high, lane));
        std::array::from_fn(|g| low[g] | high[g] << 2)
    }

    #[inline(always)]
    fn group<V: Vector>(&self, v: V, g: usize) -> V::Bytes {
        v.or(self.low.group(v, g), moved(v, v.load_bytes(&self.high), g as u32, 2, 0x04))
    }
}

impl Codes for Codes4 {
    const BITS: u32 = 4;

    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        for (p, vector) in self.nibbles.iter_mut().enumerate() {
            *word(vector, lane) = (quads[p] & 0x0f0f_0f0f | (quads[p + 4] & 0x0f0f_0f0f) << 4).to_le_bytes();
        }
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        std::array::from_fn(|g| read(&self.nibbles[g % 4], lane) >> (g / 4 * 4) & 0x0f0f_0f0f)
    }

    #[inline(always)]
    fn group<V: Vector>(&self, v: V, g: usize) -> V::Bytes {
        moved(v, v.load_bytes(&self.nibbles[g % 4]), g as u32 / 4 * 4, 0, 0x0f)
    }
}

impl Codes for Codes5 {
    const BITS: u32 = 5;

    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        self.low.put(lane, quads);
        put_bits(&mut self.high, lane, quads.map(|quad| quad >> 4));
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        let (low, high) = (self.low.get(lane), get_bits(&self.high, lane));
        std::array::from_fn(|g| low[g] | high[g] << 4)
    }

    #[inline(always)]
    fn group<V: Vector>(&self, v: V, g: usize) -> V::Bytes {
        v.or(self.low.group(v, g), moved(v, v.load_bytes(&self.high), g as u32, 4, 0x10))
    }
}

impl Codes for Codes6 {
    const BITS: u32 = 6;

    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        self.low.put(lane, quads);
        put_pairs(&mut self.high, lane, quads.map(|quad| quad >> 4));
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        let (low, high) = (self.low.get(lane), get_pairs(&self.high, lane));
        std::array::from_fn(|g| low[g] | high[g] << 4)
    }

    #[inline(always)]
    fn group<V: Vector>(&self, v: V, g: usize) -> V::Bytes {
        v.or(self.low.group(v, g), moved(v, v.load_bytes(&self.high[g / 4]), g as u32 % 4 * 2, 4, 0x30))
    }
}

impl Codes for Codes8 {
    const BITS: u32 = 8;

    fn put(&mut self, lane: usize, quads: [u32; 8]) {
        for (vector, quad) in self.groups.iter_mut().zip(quads) {
            *word(vector, lane) = quad.to_le_bytes();
        }
    }

    fn get(&self, lane: usize) -> [u32; 8] {
        std::array::from_fn(|g| read(&self.groups[g], lane))
    }

    #[inline(always)]
    fn group<V: Vector>(&self, v: V, g: usize) -> V::Bytes {
        v.load_bytes(&self.groups[g])
    }
}
