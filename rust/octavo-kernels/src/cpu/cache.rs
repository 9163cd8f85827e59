//! The paged KV cache: `[block][layer][k|v][kv_head][block_size · head_dim]`. Blocks come first, because memory is the
//! system's until it is written: a short sequence makes a few blocks resident, and not a page of every layer.
//!
//! Within a block and head, values lie as `[position][head_dim]`, and keys in tiles of 16 positions, transposed:
//! `[tile][head_dim][16]`. So the scores of 16 positions are 16 lanes that walk the head's components together, with no
//! sum across lanes; and the weighted sum of values has the head's components as lanes.
//!
//! bfloat16 is multiplied in pairs, so a lane holds two elements: `[tile][head_dim / 2][16][2]` of keys, and of values
//! `[position / 2][head_dim][2]`, the components of two positions. Of integers, a lane holds four
//! components of a key, and two positions of values; behind a tile are its sixteen scales.

mod element; // what all kinds of elements do
mod float; // f32, f16, pairs of bf16
mod int8; // integers with scales

use half::{bf16, f16};

use super::{
    array::Array,
    memory::{Pages, cast},
    pool::SharedSlice,
    vector::Vector,
};
use crate::{BackendError, BlockCopy, CacheDtype, CacheShape, Result, reference::int8::Centres};

pub(super) use element::{Element, Unit};
use int8::Int8;

/// Positions in a tile of keys.
pub(super) const TILE: usize = 16;

/// The cache of all layers. Its memory becomes resident block by block, as it is written.
pub struct Cache {
    pub(super) shape: CacheShape,
    pub(super) values: Values,
    pub(super) centres: Centres,
}

/// The cache's elements.
pub(super) enum Values {
    F32(Array<f32>),
    F16(Array<f16>),
    Bf16(Array<bf16>),
    Int8(Array<Int8>),
}

impl Cache {
    /// Takes the memory.
    pub fn new(shape: CacheShape) -> Result<Self> {
        let CacheShape { block_size, head_dim, dtype, .. } = shape;
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
        if dtype == CacheDtype::Bf16 && !head_dim.is_multiple_of(2) {
            return Err(BackendError::Unsupported(format!(
                "a bf16 cache of attention heads of {head_dim} components: their number must be even"
            )));
        }
        if dtype == CacheDtype::Int8 && !head_dim.is_multiple_of(16) {
            return Err(BackendError::Unsupported(format!(
                "an int8 cache of attention heads of {head_dim} components: a multiple of 16 is needed"
            )));
        }
        let values = match dtype {
            CacheDtype::F32 => Values::F32(take(&shape)?),
            CacheDtype::F16 => Values::F16(take(&shape)?),
            CacheDtype::Bf16 => Values::Bf16(take(&shape)?),
            CacheDtype::Int8 => Values::Int8(take(&shape)?),
            CacheDtype::Fp8E4m3 => {
                return Err(BackendError::Unsupported(
                    "a KV cache of fp8_e4m3 is for GPUs: on the CPU there are f32, f16, bf16 and int8".to_owned(),
                ));
            }
        };
        Ok(Self { shape, values, centres: Centres::default() })
    }

    /// Copies blocks: each is one stretch of memory.
    pub fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        fn copy<E: Element>(values: &mut [E], shape: &CacheShape, copies: &[BlockCopy]) {
            let len = block_len::<E>(shape);
            for copy in copies {
                let from = copy.from as usize * len;
                values.copy_within(from..from + len, copy.to as usize * len);
            }
        }
        match &mut self.values {
            Values::F32(values) => copy(values, &self.shape, copies),
            Values::F16(values) => copy(values, &self.shape, copies),
            Values::Bf16(values) => copy(values, &self.shape, copies),
            Values::Int8(values) => copy(values, &self.shape, copies),
        }
    }
}

/// Takes the memory of a cache.
fn take<E: Element>(shape: &CacheShape) -> Result<Array<E>> {
    let CacheShape { layers, blocks, block_size, kv_heads, head_dim, .. } = *shape;
    let lens = [blocks, layers, 2, kv_heads, block_size, head_dim + E::SCALE];
    Array::in_pages("the KV cache", &lens, Pages::Small)
}

/// `N` values for the innermost loops, where checks would be half of the instructions.
///
/// # Safety
/// There are `N` values from `at` on.
#[inline(always)]
unsafe fn chunk_unchecked<T, const N: usize>(values: &[T], at: usize) -> &[T; N] {
    debug_assert!(at + N <= values.len());
    // SAFETY: the caller's promise.
    unsafe { &*values.as_ptr().add(at).cast() }
}

#[inline(always)]
pub(super) fn sixteen<T>(values: &[T], at: usize) -> &[T; 16] {
    values[at..].first_chunk().expect("sixteen more values")
}

#[inline(always)]
pub(super) fn sixteen_mut<T>(values: &mut [T], at: usize) -> &mut [T; 16] {
    values[at..].first_chunk_mut().expect("sixteen more values")
}

/// Which half of a block.
#[derive(Clone, Copy, Debug)]
pub(super) enum Half {
    Keys = 0,
    Values = 1,
}

/// Elements of a block.
fn block_len<E: Element>(shape: &CacheShape) -> usize {
    shape.layers * 2 * shape.kv_heads * half_len::<E>(shape)
}

/// Elements of a half block of one layer and head.
fn half_len<E: Element>(shape: &CacheShape) -> usize {
    shape.block_size / TILE * tile_len::<E>(shape)
}

/// Elements of a tile, and of its scales.
fn tile_len<E: Element>(shape: &CacheShape) -> usize {
    TILE * (shape.head_dim + E::SCALE)
}

/// Where the half block of one layer and head begins.
fn half_block<E: Element>(shape: &CacheShape, layer: usize, block: usize, half: Half, head: usize) -> usize {
    let CacheShape { layers, blocks, kv_heads, .. } = *shape;
    assert!(
        layer < layers && block < blocks && head < kv_heads,
        "layer {layer}, block {block}, head {head} of {shape:?}"
    );
    (((block * layers + layer) * 2 + half as usize) * kv_heads + head) * half_len::<E>(shape)
}

/// The scales of a tile, which lie behind its elements; zeros where there are none.
#[inline(always)]
pub(super) fn scales<V: Vector, E: Element>(v: V, tile: &[E]) -> V::F32 {
    if E::SCALE == 0 {
        return v.splat(0.0);
    }
    // SAFETY: any elements are bytes, and as many bytes as they have.
    let bytes = unsafe { std::slice::from_raw_parts(tile.as_ptr().cast::<u8>(), size_of_val(tile)) };
    v.load(sixteen(cast(&bytes[bytes.len() - 64..]), 0))
}

/// One layer, to read.
#[derive(Clone, Copy)]
pub(super) struct LayerView<'a, E> {
    pub shape: &'a CacheShape,
    pub values: &'a [E],
    pub layer: usize,
}

impl<'a, E: Element> LayerView<'a, E> {
    /// The keys and values of sixteen positions at a time, from the sequence's tile `first` on. Endless: take what there is.
    #[inline(always)]
    pub fn tiles(&self, table: &'a [u32], first: usize, head: usize) -> impl Iterator<Item = [&'a [E]; 2]> {
        let Self { shape, values, layer } = *self;
        let starts = [Half::Keys, Half::Values].map(|half| half_block::<E>(shape, layer, 0, half, head));
        let (block_len, tile_len, tiles) = (block_len::<E>(shape), tile_len::<E>(shape), shape.block_size / TILE);
        let (mut block, mut tile) = (first / tiles, first % tiles);
        std::iter::from_fn(move || {
            let at = table[block] as usize * block_len + tile * tile_len;
            tile += 1;
            if tile == tiles {
                (block, tile) = (block + 1, 0);
            }
            Some(starts.map(|start| &values[start + at..][..tile_len]))
        })
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
    pub unsafe fn write_key<V: Vector>(&self, v: V, slot: usize, head: usize, key: &[f32]) {
        let (tile, offset) = self.locate(slot, head, Half::Keys, key);
        let (scale, first) = (E::scale(v, key), tile + offset * E::KEY_LANE);
        // SAFETY: this slot is ours by the caller's promise.
        unsafe { self.write_scale(tile, offset, scale.scale) };
        for (i, x) in key.chunks(16).enumerate() {
            let mut elements = [E::ZERO; 16];
            E::store(v, v.load_partial(x, 0.0), scale, Half::Keys, &mut elements);
            for (j, lane) in elements[..x.len()].chunks_exact(E::KEY_LANE).enumerate() {
                // SAFETY: an element belongs to one slot, and this slot is ours by the caller's promise.
                let to = unsafe { self.values.slice(first + (16 * i + E::KEY_LANE * j) * TILE, E::KEY_LANE) };
                to.copy_from_slice(lane);
            }
        }
    }

    /// Writes the value of one head.
    ///
    /// # Safety
    /// No other thread writes this slot.
    #[inline(always)]
    pub unsafe fn write_value<V: Vector>(&self, v: V, slot: usize, head: usize, value: &[f32]) {
        let (tile, offset) = self.locate(slot, head, Half::Values, value);
        let (scale, first) =
            (E::scale(v, value), tile + offset / E::VALUE_LANE * E::VALUE_LANE * value.len() + offset % E::VALUE_LANE);
        // SAFETY: this slot is ours by the caller's promise.
        unsafe { self.write_scale(tile, offset, scale.scale) };
        for (i, x) in value.chunks(16).enumerate() {
            let mut elements = [E::ZERO; 16];
            E::store(v, v.load_partial(x, 0.0), scale, Half::Values, &mut elements);
            for (j, &element) in elements[..x.len()].iter().enumerate() {
                // SAFETY: an element belongs to one slot, and this slot is ours by the caller's promise.
                unsafe { self.values.slice(first + (16 * i + j) * E::VALUE_LANE, 1)[0] = element };
            }
        }
    }

    /// Writes two values of one head side by side, where the slots from `slot` on share their lanes.
    ///
    /// # Safety
    /// No other thread writes these slots.
    #[inline(always)]
    pub unsafe fn write_values<V: Vector>(&self, v: V, slot: usize, head: usize, values: [&[f32]; 2]) {
        let (tile, offset) = self.locate(slot, head, Half::Values, values[0]);
        assert!(E::VALUE_LANE == 2 && offset.is_multiple_of(2) && values[1].len() == values[0].len());
        let scales = [E::scale(v, values[0]), E::scale(v, values[1])];
        // SAFETY: these slots are ours by the caller's promise.
        unsafe { self.write_scale(tile, offset, scales[0].scale) };
        // SAFETY: as above.
        unsafe { self.write_scale(tile, offset + 1, scales[1].scale) };
        // SAFETY: all lanes of these two slots.
        let to = unsafe { self.values.slice(tile + offset * values[0].len(), 2 * values[0].len()) };
        let chunks = values[0].chunks(16).zip(values[1].chunks(16));
        for ((first, second), to) in chunks.zip(to.chunks_mut(32)) {
            let mut elements = [[E::ZERO; 16]; 2];
            E::store(v, v.load_partial(first, 0.0), scales[0], Half::Values, &mut elements[0]);
            E::store(v, v.load_partial(second, 0.0), scales[1], Half::Values, &mut elements[1]);
            for (i, pair) in to.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *pair = [elements[0][i], elements[1][i]];
            }
        }
    }

    /// Writes the scale of position `offset` of the tile that begins with element `tile`.
    ///
    /// # Safety
    /// No other thread writes this position.
    #[inline(always)]
    unsafe fn write_scale(&self, tile: usize, offset: usize, scale: f32) {
        if E::SCALE > 0 {
            let at = tile + TILE * self.shape.head_dim + offset * E::SCALE;
            // SAFETY: a position's scale belongs to it alone.
            let to = unsafe { self.values.slice(at, E::SCALE) };
            to.copy_from_slice(cast(&scale.to_ne_bytes()));
        }
    }

    /// Where a slot's tile begins, and which of its positions the slot is.
    #[inline(always)]
    fn locate(&self, slot: usize, head: usize, half: Half, row: &[f32]) -> (usize, usize) {
        assert_eq!(row.len(), self.shape.head_dim);
        let (block, offset) = (slot / self.shape.block_size, slot % self.shape.block_size);
        let begin = half_block::<E>(&self.shape, self.layer, block, half, head);
        (begin + offset / TILE * tile_len::<E>(&self.shape), offset % TILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_what_its_shape_says() {
        let shape =
            CacheShape { layers: 3, blocks: 5, block_size: 32, kv_heads: 2, head_dim: 48, dtype: CacheDtype::F32 };
        for dtype in [CacheDtype::F32, CacheDtype::F16, CacheDtype::Bf16, CacheDtype::Int8] {
            let shape = CacheShape { dtype, ..shape };
            let bytes = match &Cache::new(shape).unwrap().values {
                Values::F32(values) => size_of_val::<[_]>(values),
                Values::F16(values) => size_of_val::<[_]>(values),
                Values::Bf16(values) => size_of_val::<[_]>(values),
                Values::Int8(values) => size_of_val::<[_]>(values),
            };
            assert_eq!(bytes, shape.bytes(), "{dtype:?}");
        }
    }
}
