//! Scales as they lie in a tile: half floats and the small integers under them, one of each for every output.

use std::marker::PhantomData;

use half::f16;

use super::{Format, LANES, Scales};
use crate::cpu::memory::Plain;
use crate::cpu::vector::Vector;

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

/// `value = (d · scale) · code + (minus_dmin · minimum)`, 16 half blocks of them.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct NestedHalvesWithMinimum {
    d: [f16; LANES],
    minus_dmin: [f16; LANES],
    scales: [[u8; LANES]; 16],
    minimums: [[u8; LANES]; 16],
}

/// `value = (d · scale) · code`, 16 half blocks of them, for the types that `S` knows how to read.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct NestedHalves<S: HalvesSource> {
    /// Not as halves, even where the file has them so: this way a record is whole lines.
    d: [f32; LANES],
    scales: [[i8; LANES]; 16],
    source: PhantomData<S>,
}

/// Where [`NestedHalves`] finds its numbers in a block of the file.
pub(crate) trait HalvesSource: Format + Copy + Send + Sync {
    /// `d`, and the scales of the 16 half blocks.
    fn halves(block: &[u8]) -> (f32, [i8; 16]);
}

// SAFETY: numbers of 2 bytes and of 1, in that order and an even number of each, so without padding.
unsafe impl Plain for Scale {}
// SAFETY: as above.
unsafe impl Plain for ScaleAndMinimum {}
// SAFETY: as above.
unsafe impl Plain for NestedWithMinimum {}
// SAFETY: as above.
unsafe impl Plain for NestedHalvesWithMinimum {}
// SAFETY: as above, with numbers of 4 bytes first and 16 times as many of 1.
unsafe impl<S: HalvesSource> Plain for NestedHalves<S> {}

pub(super) fn half_at(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
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
    fn block<V: Vector>(&self, _: V, head: [V::F32; 2], _: usize) -> [[V::F32; 2]; 2] {
        [[head[0]; 2]; 2]
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
    fn block<V: Vector>(&self, _: V, head: [V::F32; 2], _: usize) -> [[V::F32; 2]; 2] {
        [[head[0]; 2], [head[1]; 2]]
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
    fn block<V: Vector>(&self, v: V, head: [V::F32; 2], i: usize) -> [[V::F32; 2]; 2] {
        let scale = v.mul(head[0], v.to_f32(v.load_u8(&self.scales[i])));
        let minimum = v.mul(head[1], v.to_f32(v.load_u8(&self.minimums[i])));
        [[scale; 2], [minimum; 2]]
    }
}

impl Scales for NestedHalvesWithMinimum {
    const BLOCKS: usize = 8;
    const HALVES: bool = true;
    const MINIMUMS: bool = true;

    fn put(&mut self, lane: usize, block: &[u8]) {
        self.d[lane] = half_at(block, 80);
        self.minus_dmin[lane] = -half_at(block, 82);
        for (group, &byte) in block[..16].iter().enumerate() {
            self.scales[group][lane] = byte & 15;
            self.minimums[group][lane] = byte >> 4;
        }
    }
    fn get(&self, lane: usize, i: usize, half: usize) -> (f32, f32) {
        let scale = self.d[lane].to_f32() * f32::from(self.scales[2 * i + half][lane]);
        (scale, self.minus_dmin[lane].to_f32() * f32::from(self.minimums[2 * i + half][lane]))
    }
    #[inline(always)]
    fn head<V: Vector>(&self, v: V) -> [V::F32; 2] {
        [v.load_f16(&self.d), v.load_f16(&self.minus_dmin)]
    }
    #[inline(always)]
    fn block<V: Vector>(&self, v: V, head: [V::F32; 2], i: usize) -> [[V::F32; 2]; 2] {
        let first = v.mul(head[0], v.to_f32(v.load_u8(&self.scales[2 * i])));
        let second = v.mul(head[0], v.to_f32(v.load_u8(&self.scales[2 * i + 1])));
        let first_minimum = v.mul(head[1], v.to_f32(v.load_u8(&self.minimums[2 * i])));
        let second_minimum = v.mul(head[1], v.to_f32(v.load_u8(&self.minimums[2 * i + 1])));
        [[first, second], [first_minimum, second_minimum]]
    }
}

impl<S: HalvesSource> Scales for NestedHalves<S> {
    const BLOCKS: usize = 8;
    const HALVES: bool = true;

    fn put(&mut self, lane: usize, block: &[u8]) {
        let (d, scales) = S::halves(block);
        self.d[lane] = d;
        for (lanes, scale) in self.scales.iter_mut().zip(scales) {
            lanes[lane] = scale;
        }
    }
    fn get(&self, lane: usize, i: usize, half: usize) -> (f32, f32) {
        (self.d[lane] * f32::from(self.scales[2 * i + half][lane]), 0.0)
    }
    #[inline(always)]
    fn head<V: Vector>(&self, v: V) -> [V::F32; 2] {
        [v.load(&self.d); 2]
    }
    #[inline(always)]
    fn block<V: Vector>(&self, v: V, head: [V::F32; 2], i: usize) -> [[V::F32; 2]; 2] {
        let first = v.mul(head[0], v.to_f32(v.load_i8(&self.scales[2 * i])));
        let second = v.mul(head[0], v.to_f32(v.load_i8(&self.scales[2 * i + 1])));
        [[first, second], [first, second]]
    }
}
