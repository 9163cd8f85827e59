//! The paged KV cache: `[block][layer][k|v][kv_head][block_size · head_dim]`. Blocks come first, because memory is the
//! system's until it is written: a short sequence makes a few blocks resident, and not a page of every layer.
//!
//! Within a block and head, values lie as `[position][head_dim]`, and keys in tiles of 16 positions, transposed:
//! `[tile][head_dim][16]`. So the scores of 16 positions are 16 lanes that walk the head's components together, with no
//! sum across lanes; and the weighted sum of values has the head's components as lanes.

use half::{bf16, f16};

use super::{array::Array, memory::Plain, pool::SharedSlice, vector::Vector};
use crate::{BackendError, BlockCopy, CacheDtype, CacheShape, Result};

/// Positions in a tile of keys.
pub(super) const TILE: usize = 16;

/// The cache of all layers. Its memory becomes resident block by block, as it is written.
pub struct Cache {
    pub(super) shape: CacheShape,
    pub(super) values: Values,
}

/// The cache's elements.
pub(super) enum Values {
    F32(Array<f32>),
    F16(Array<f16>),
    Bf16(Array<bf16>),
}

impl Cache {
    /// Takes the memory.
    pub fn new(shape: CacheShape) -> Result<Self> {
        let CacheShape { layers, blocks, block_size, kv_heads, head_dim, dtype } = shape;
        if block_size == 0 || !block_size.is_multiple_of(TILE) {
            return Err(BackendError::Unsupported(format!(
                "a block of {block_size} positions: a multiple of {TILE} is needed"
            )));
        }
        if head_dim < 16 {
            return Err(BackendError::Unsupported(format!(
                "attention heads of {head_dim} components: at least 16 are needed"
            )));
        }
        let (what, lens) = ("the KV cache", [blocks, layers, 2, kv_heads, block_size, head_dim]);
        let values = match dtype {
            CacheDtype::F32 => Values::F32(Array::new(what, &lens)?),
            CacheDtype::F16 => Values::F16(Array::new(what, &lens)?),
            CacheDtype::Bf16 => Values::Bf16(Array::new(what, &lens)?),
            CacheDtype::Fp8E4m3 => {
                return Err(BackendError::Unsupported(
                    "a KV cache of fp8_e4m3 is for GPUs: on the CPU there are f32, f16 and bf16".to_owned(),
                ));
            }
        };
        Ok(Self { shape, values })
    }

    /// Copies blocks: each is one stretch of memory.
    pub fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        fn copy<T: Copy>(values: &mut [T], len: usize, copies: &[BlockCopy]) {
            for copy in copies {
                let from = copy.from as usize * len;
                values.copy_within(from..from + len, copy.to as usize * len);
            }
        }
        let CacheShape { layers, block_size, kv_heads, head_dim, .. } = self.shape;
        let len = layers * 2 * kv_heads * block_size * head_dim;
        match &mut self.values {
            Values::F32(values) => copy(values, len, copies),
            Values::F16(values) => copy(values, len, copies),
            Values::Bf16(values) => copy(values, len, copies),
        }
    }
}

/// What a cache is made of.
pub(super) trait Element: Plain {
    fn load<V: Vector>(v: V, from: &[Self; 16]) -> V::F32;
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn load<V: Vector>(v: V, from: &[f32; 16]) -> V::F32 {
        v.load(from)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<V: Vector>(v: V, from: &[f16; 16]) -> V::F32 {
        v.load_f16(from)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<V: Vector>(v: V, from: &[bf16; 16]) -> V::F32 {
        v.load_bf16(from)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
}

/// Which half of a block.
#[derive(Clone, Copy, Debug)]
pub(super) enum Half {
    Keys = 0,
    Values = 1,
}

/// Where the half block of one layer and head begins.
fn half_block(shape: &CacheShape, layer: usize, block: usize, half: Half, head: usize) -> usize {
    let CacheShape { layers, blocks, block_size, kv_heads, head_dim, .. } = *shape;
    assert!(
        layer < layers && block < blocks && head < kv_heads,
        "layer {layer}, block {block}, head {head} of {shape:?}"
    );
    (((block * layers + layer) * 2 + half as usize) * kv_heads + head) * block_size * head_dim
}

/// One layer, to read.
#[derive(Clone, Copy)]
pub(super) struct LayerView<'a, E> {
    pub shape: &'a CacheShape,
    pub values: &'a [E],
    pub layer: usize,
}

impl<'a, E: Element> LayerView<'a, E> {
    /// Sixteen positions' keys `[head_dim][16]` or values `[16][head_dim]`. `position` is a multiple of 16.
    #[inline(always)]
    pub fn tile(&self, table: &[u32], position: usize, half: Half, head: usize) -> &'a [E] {
        let (block_size, tile_len) = (self.shape.block_size, TILE * self.shape.head_dim);
        let block = table[position / block_size] as usize;
        let begin = half_block(self.shape, self.layer, block, half, head) + position % block_size / TILE * tile_len;
        &self.values[begin..begin + tile_len]
    }
}

/// One layer, to write from several threads.
pub(super) struct LayerWriter<'a, E> {
    pub shape: CacheShape,
    pub values: SharedSlice<'a, E>,
    pub layer: usize,
}

impl<E: Element> LayerWriter<'_, E> {
    /// Writes the key of one head.
    ///
    /// # Safety
    /// No other thread writes this slot.
    #[inline(always)]
    pub unsafe fn write_key(&self, slot: usize, head: usize, key: &[f32]) {
        let (offset, begin) = self.locate(slot, head, Half::Keys, key);
        let first = begin + offset / TILE * TILE * key.len() + offset % TILE;
        for (d, &x) in key.iter().enumerate() {
            // SAFETY: an element belongs to one slot, and this slot is ours by the caller's promise.
            unsafe { self.values.slice(first + d * TILE, 1)[0] = E::from_f32(x) };
        }
    }

    /// Writes the value of one head.
    ///
    /// # Safety
    /// No other thread writes this slot.
    #[inline(always)]
    pub unsafe fn write_value(&self, slot: usize, head: usize, value: &[f32]) {
        let (offset, begin) = self.locate(slot, head, Half::Values, value);
        // SAFETY: an element belongs to one slot, and this slot is ours by the caller's promise.
        let to = unsafe { self.values.slice(begin + offset * value.len(), value.len()) };
        for (to, &x) in to.iter_mut().zip(value) {
            *to = E::from_f32(x);
        }
    }

    #[inline(always)]
    fn locate(&self, slot: usize, head: usize, half: Half, row: &[f32]) -> (usize, usize) {
        assert_eq!(row.len(), self.shape.head_dim);
        let (block, offset) = (slot / self.shape.block_size, slot % self.shape.block_size);
        (offset, half_block(&self.shape, self.layer, block, half, head))
    }
}
