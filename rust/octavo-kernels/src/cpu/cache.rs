//! The paged KV cache: `[block][layer][k|v][kv_head][block_size · head_dim]`. Blocks come first, because memory is the
//! system's until it is written: a short sequence makes a few blocks resident, and not a page of every layer.
//!
//! Within a block and head, values lie as `[position][head_dim]`, and keys in tiles of 16 positions, transposed:
//! `[tile][head_dim][16]`. So the scores of 16 positions are 16 lanes that walk the head's components together, with no
//! sum across lanes; and the weighted sum of values has the head's components as lanes.
//!
//! bfloat16 is multiplied in pairs, so a lane holds two elements: `[tile][head_dim / 2][16][2]` of keys, and of values
//! `[position / 2][head_dim][2]`, the components of two positions.

use std::ops::Range;

use half::{bf16, f16};

use super::{
    array::Array,
    memory::{Pages, Plain},
    pool::SharedSlice,
    vector::Vector,
};
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
        if dtype == CacheDtype::Bf16 && !head_dim.is_multiple_of(2) {
            return Err(BackendError::Unsupported(format!(
                "a bf16 cache of attention heads of {head_dim} components: their number must be even"
            )));
        }
        let (what, lens) = ("the KV cache", [blocks, layers, 2, kv_heads, block_size, head_dim]);
        let values = match dtype {
            CacheDtype::F32 => Values::F32(Array::in_pages(what, &lens, Pages::Small)?),
            CacheDtype::F16 => Values::F16(Array::in_pages(what, &lens, Pages::Small)?),
            CacheDtype::Bf16 => Values::Bf16(Array::in_pages(what, &lens, Pages::Small)?),
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
        let len = block_len(&self.shape);
        match &mut self.values {
            Values::F32(values) => copy(values, len, copies),
            Values::F16(values) => copy(values, len, copies),
            Values::Bf16(values) => copy(values, len, copies),
        }
    }
}

/// What a cache is made of, and how it is multiplied: sixteen lanes at a time, each of [`Element::LANE`] elements that
/// are multiplied with as many numbers and added up.
pub(super) trait Element: Plain {
    /// 0.
    const ZERO: Self;
    /// Elements in a lane: 1, or a pair.
    const LANE: usize;
    /// What a lane is multiplied with: `LANE` components of a query, or the weights of `LANE` positions. 32 bits.
    type Factor: Plain;
    /// Sixteen lanes in registers.
    type Lanes<V: Vector>: Copy;

    /// Stores sixteen elements.
    fn store<V: Vector>(v: V, x: V::F32, to: &mut [Self; 16]);

    /// Stores sixteen numbers as the first `16 / LANE` of `to`.
    fn store_factors<V: Vector>(v: V, x: V::F32, to: &mut [Self::Factor; 16]);

    /// Adds the numbers of each factor to its lane of `sum`.
    fn add<V: Vector>(v: V, sum: V::F32, factors: &[Self::Factor; 16]) -> V::F32;

    /// Loads the sixteen lanes that begin with element `at`.
    ///
    /// # Safety
    /// There are `16 · LANE` elements from there on.
    unsafe fn load<V: Vector>(v: V, from: &[Self], at: usize) -> Self::Lanes<V>;

    /// `lanes` with 0 for those elements of each that are not in `kept`, whatever they held.
    fn keep<V: Vector>(v: V, lanes: Self::Lanes<V>, kept: Range<usize>) -> Self::Lanes<V>;

    /// `sum + factor · lanes`.
    fn multiply<V: Vector>(v: V, factor: Self::Factor, lanes: Self::Lanes<V>, sum: V::F32) -> V::F32;

    /// What scores are multiplied with beforehand, so that [`Element::powers`] is quick.
    const SCORE_UNIT: f32;

    /// `exp(x / SCORE_UNIT)` of what is no larger than 0, as near as a factor needs it.
    fn powers<V: Vector>(v: V, x: V::F32) -> V::F32;
}

/// What elements have in common that are one to a lane and widened.
macro_rules! one_to_a_lane {
    ($load:ident) => {
        const LANE: usize = 1;
        type Factor = f32;
        type Lanes<V: Vector> = V::F32;

        #[inline(always)]
        fn store_factors<V: Vector>(v: V, x: V::F32, to: &mut [f32; 16]) {
            v.store(x, to);
        }
        #[inline(always)]
        fn add<V: Vector>(v: V, sum: V::F32, factors: &[f32; 16]) -> V::F32 {
            v.add(sum, v.load(factors))
        }
        #[inline(always)]
        unsafe fn load<V: Vector>(v: V, from: &[Self], at: usize) -> V::F32 {
            // SAFETY: the caller's promise.
            v.$load(unsafe { chunk_unchecked(from, at) })
        }
        #[inline(always)]
        fn keep<V: Vector>(_: V, lanes: V::F32, _: Range<usize>) -> V::F32 {
            lanes
        }
        #[inline(always)]
        fn multiply<V: Vector>(v: V, factor: f32, lanes: V::F32, sum: V::F32) -> V::F32 {
            v.fma(v.splat(factor), lanes, sum)
        }
        const SCORE_UNIT: f32 = 1.0;
        #[inline(always)]
        fn powers<V: Vector>(v: V, x: V::F32) -> V::F32 {
            v.exp(x)
        }
    };
}

impl Element for f32 {
    const ZERO: f32 = 0.0;
    one_to_a_lane!(load);
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F32, to: &mut [f32; 16]) {
        v.store(x, to);
    }
}

impl Element for f16 {
    const ZERO: f16 = f16::ZERO;
    one_to_a_lane!(load_f16);
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F32, to: &mut [f16; 16]) {
        let mut lanes = [0.0; 16];
        v.store(x, &mut lanes);
        *to = lanes.map(f16::from_f32);
    }
}

impl Element for bf16 {
    const ZERO: bf16 = bf16::ZERO;
    const LANE: usize = 2;
    type Factor = [bf16; 2];
    type Lanes<V: Vector> = V::Bytes;

    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F32, to: &mut [bf16; 16]) {
        v.store_bf16(x, to);
    }
    #[inline(always)]
    fn store_factors<V: Vector>(v: V, x: V::F32, to: &mut [[bf16; 2]; 16]) {
        v.store_bf16(x, to.as_flattened_mut().first_chunk_mut().expect("sixteen of thirty-two"));
    }
    #[inline(always)]
    fn add<V: Vector>(v: V, sum: V::F32, factors: &[[bf16; 2]; 16]) -> V::F32 {
        let pairs = v.load_pairs(factors.as_flattened().try_into().expect("thirty-two"));
        v.dot_pairs(sum, v.splat_pair([bf16::ONE; 2]), pairs)
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(v: V, from: &[bf16], at: usize) -> V::Bytes {
        // SAFETY: the caller's promise.
        v.load_pairs(unsafe { chunk_unchecked(from, at) })
    }
    #[inline(always)]
    fn keep<V: Vector>(v: V, lanes: V::Bytes, kept: Range<usize>) -> V::Bytes {
        let bytes = |element| if kept.contains(&element) { -1 } else { 0 };
        v.and(lanes, v.splat_quad([bytes(0), bytes(0), bytes(1), bytes(1)]))
    }
    #[inline(always)]
    fn multiply<V: Vector>(v: V, factor: [bf16; 2], lanes: V::Bytes, sum: V::F32) -> V::F32 {
        v.dot_pairs(sum, v.splat_pair(factor), lanes)
    }
    // To the base 2, which saves half of the work, and exact for the largest score, which has most of the weight.
    const SCORE_UNIT: f32 = std::f32::consts::LOG2_E;
    #[inline(always)]
    fn powers<V: Vector>(v: V, x: V::F32) -> V::F32 {
        v.exp2_of_negative(x)
    }
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

/// Which half of a block.
#[derive(Clone, Copy, Debug)]
pub(super) enum Half {
    Keys = 0,
    Values = 1,
}

/// Elements of a block.
fn block_len(shape: &CacheShape) -> usize {
    shape.layers * 2 * shape.kv_heads * shape.block_size * shape.head_dim
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
    /// The keys and values of sixteen positions at a time, from the sequence's tile `first` on. Endless: take what there is.
    #[inline(always)]
    pub fn tiles(&self, table: &'a [u32], first: usize, head: usize) -> impl Iterator<Item = [&'a [E]; 2]> {
        let Self { shape, values, layer } = *self;
        let starts = [Half::Keys, Half::Values].map(|half| half_block(shape, layer, 0, half, head));
        let (block_len, tile_len, tiles) = (block_len(shape), TILE * shape.head_dim, shape.block_size / TILE);
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
        let (offset, begin) = self.locate(slot, head, Half::Keys, key);
        let first = begin + offset / TILE * TILE * key.len() + offset % TILE * E::LANE;
        each_sixteen(v, key, |d, elements: &[E]| {
            for (i, lane) in elements.chunks_exact(E::LANE).enumerate() {
                // SAFETY: an element belongs to one slot, and this slot is ours by the caller's promise.
                let to = unsafe { self.values.slice(first + d * TILE + i * TILE * E::LANE, E::LANE) };
                to.copy_from_slice(lane);
            }
        });
    }

    /// Writes the value of one head.
    ///
    /// # Safety
    /// No other thread writes this slot.
    #[inline(always)]
    pub unsafe fn write_value<V: Vector>(&self, v: V, slot: usize, head: usize, value: &[f32]) {
        let (offset, begin) = self.locate(slot, head, Half::Values, value);
        let first = begin + offset / E::LANE * E::LANE * value.len() + offset % E::LANE;
        each_sixteen(v, value, |d, elements: &[E]| {
            for (i, &element) in elements.iter().enumerate() {
                // SAFETY: an element belongs to one slot, and this slot is ours by the caller's promise.
                unsafe { self.values.slice(first + (d + i) * E::LANE, 1)[0] = element };
            }
        });
    }

    /// Writes two values of one head side by side, where the slots from `slot` on share their lanes.
    ///
    /// # Safety
    /// No other thread writes these slots.
    #[inline(always)]
    pub unsafe fn write_values<V: Vector>(&self, v: V, slot: usize, head: usize, values: [&[f32]; 2]) {
        let (offset, begin) = self.locate(slot, head, Half::Values, values[0]);
        assert!(E::LANE == 2 && offset.is_multiple_of(2) && values[1].len() == values[0].len());
        // SAFETY: all lanes of these two slots, which are ours by the caller's promise.
        let to = unsafe { self.values.slice(begin + offset * values[0].len(), 2 * values[0].len()) };
        let chunks = values[0].chunks(16).zip(values[1].chunks(16));
        for ((first, second), to) in chunks.zip(to.chunks_mut(32)) {
            let mut elements = [[E::ZERO; 16]; 2];
            E::store(v, v.load_partial(first, 0.0), &mut elements[0]);
            E::store(v, v.load_partial(second, 0.0), &mut elements[1]);
            for (i, pair) in to.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *pair = [elements[0][i], elements[1][i]];
            }
        }
    }

    #[inline(always)]
    fn locate(&self, slot: usize, head: usize, half: Half, row: &[f32]) -> (usize, usize) {
        assert_eq!(row.len(), self.shape.head_dim);
        let (block, offset) = (slot / self.shape.block_size, slot % self.shape.block_size);
        (offset, half_block(&self.shape, self.layer, block, half, head))
    }
}

/// Calls `write` with a row's components as elements, and the number of the first, sixteen at a time.
#[inline(always)]
fn each_sixteen<V: Vector, E: Element>(v: V, row: &[f32], mut write: impl FnMut(usize, &[E])) {
    for (i, x) in row.chunks(16).enumerate() {
        let mut elements = [E::ZERO; 16];
        E::store(v, v.load_partial(x, 0.0), &mut elements);
        write(16 * i, &elements[..x.len()]);
    }
}
