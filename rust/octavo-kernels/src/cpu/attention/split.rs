//! The arithmetic of attention: one split of one item, and how splits come together.

// `for m in 0..M` over several arrays of registers reads better than the zips that would replace it.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{Item, Job};
use crate::{
    KV_SPLIT,
    cpu::{
        cache::{Element, Half, TILE},
        gated::soft_cap,
        memory::prefetch,
        vector::Vector,
    },
};

/// Queries in an item, at most.
pub(super) const ITEM_QUERIES: usize = 32;

/// Queries that share one pass over keys and values, at most.
pub(super) const PASS_QUERIES: usize = 8;

/// How many positions ahead of their use keys and values are asked for. Blocks lie anywhere, so the core cannot guess.
const AHEAD: usize = 4 * TILE;

/// Bytes of a line of the processor's caches.
const LINE: usize = 64;

/// The scores, then the weights, of one pass.
pub(super) type Scores = [[f32; KV_SPLIT]; PASS_QUERIES];

/// How many of the `rest` queries go into the next pass: as many as their sums fit in registers.
#[inline(always)]
fn pass_len<V: Vector>(rest: usize) -> usize {
    if V::ROWS >= PASS_QUERIES && rest >= PASS_QUERIES { PASS_QUERIES } else { rest.min(4) }
}

/// What softmax needs to know of the positions so far, for each query of an item: the largest score, the sum of
/// `exp(score - max)`, and the values weighted with the same.
pub(super) struct State<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    acc: &'a mut [f32], // (ITEM_QUERIES, vectors · 16); see `component`
    stride: usize,
}

/// The head component at which vector `i` of an output begins. If the head is no multiple of 16, the last vector
/// overlaps the one before; both hold the same values there.
#[inline(always)]
fn component(i: usize, head_dim: usize) -> usize {
    (16 * i).min(head_dim - 16)
}

#[inline(always)]
fn sixteen<T>(values: &[T], at: usize) -> &[T; 16] {
    values[at..].first_chunk().expect("sixteen more values")
}

/// [`sixteen`] for the innermost loops, where checks would be half of the instructions.
///
/// # Safety
/// There are sixteen values from `at` on.
#[inline(always)]
unsafe fn sixteen_unchecked<T>(values: &[T], at: usize) -> &[T; 16] {
    debug_assert!(at + 16 <= values.len());
    // SAFETY: the caller's promise.
    unsafe { &*values.as_ptr().add(at).cast() }
}

#[inline(always)]
fn sixteen_mut<T>(values: &mut [T], at: usize) -> &mut [T; 16] {
    values[at..].first_chunk_mut().expect("sixteen more values")
}

impl<'a> State<'a> {
    /// Floats that a state takes.
    pub fn len(head_dim: usize) -> usize {
        ITEM_QUERIES * (2 + head_dim.next_multiple_of(16))
    }

    /// A state in `memory`.
    #[inline(always)]
    pub fn over(memory: &'a mut [f32], head_dim: usize) -> Self {
        let (max, rest) = memory.split_at_mut(ITEM_QUERIES);
        let (sum, acc) = rest.split_at_mut(ITEM_QUERIES);
        Self { max, sum, acc, stride: head_dim.next_multiple_of(16) }
    }

    /// Of no positions.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Adds the positions of `next`, which come after its own.
    #[inline(always)]
    pub fn merge<V: Vector>(&mut self, v: V, next: &State<'_>, queries: usize) {
        for q in 0..queries {
            if next.max[q] == f32::NEG_INFINITY {
                continue; // this query sees nothing there, and `next.acc` is stale
            }
            let max = self.max[q].max(next.max[q]);
            let (scale, next_scale) = ((self.max[q] - max).exp(), (next.max[q] - max).exp());
            self.max[q] = max;
            self.sum[q] = self.sum[q] * scale + next.sum[q] * next_scale;
            let (scale, next_scale) = (v.splat(scale), v.splat(next_scale));
            let row = q * self.stride..(q + 1) * self.stride;
            let (acc, _) = self.acc[row.clone()].as_chunks_mut::<16>();
            for (acc, next) in acc.iter_mut().zip(next.acc[row].as_chunks::<16>().0) {
                let scaled = v.mul(v.load(acc), scale);
                v.store(v.fma(v.load(next), next_scale, scaled), acc);
            }
        }
    }
}

/// Copies an item's queries to where passes read them: pass by pass, `[head_dim][queries of the pass]`.
#[inline(always)]
pub(super) fn stage_queries<V: Vector, E>(_: V, job: &Job<'_, E>, item: &Item, staged: &mut [f32]) {
    let (head_dim, width) = (job.heads.head_dim, job.heads.qkv_width());
    let mut first = 0;
    while first < item.queries {
        let len = pass_len::<V>(item.queries - first);
        let staged = &mut staged[first * head_dim..][..len * head_dim];
        for q in 0..len {
            let (row, head) = job.row_and_head(item, first + q);
            let query = &job.qkv[row * width + head * head_dim..][..head_dim];
            for (staged, &x) in staged[q..].iter_mut().step_by(len).zip(query) {
                *staged = x;
            }
        }
        first += len;
    }
}

/// Attends an item's queries to the positions of one split. `next` is a hint at what is read after it.
#[inline(always)]
pub(super) fn compute_split<V: Vector, E: Element>(
    v: V,
    job: &Job<'_, E>,
    place: Place<'_>,
    next: Place<'_>,
    staged: &[f32],
    scores: &mut Scores,
    state: &mut State<'_>,
) {
    let mut first = 0;
    while first < place.item.queries {
        let len = pass_len::<V>(place.item.queries - first);
        let staged = &staged[first * job.heads.head_dim..][..len * job.heads.head_dim];
        let is_last = first + len == place.item.queries;
        let positions = Positions { job, place, next: if is_last { next } else { place } };
        match len {
            PASS_QUERIES => pass::<V, E, PASS_QUERIES>(v, &positions, first, staged, scores, state),
            4 => pass::<V, E, 4>(v, &positions, first, staged, scores, state),
            3 => pass::<V, E, 3>(v, &positions, first, staged, scores, state),
            2 => pass::<V, E, 2>(v, &positions, first, staged, scores, state),
            _ => pass::<V, E, 1>(v, &positions, first, staged, scores, state),
        }
        first += len;
    }
}

/// One split of an item: where its keys and values lie.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    item: &'a Item,
    table: &'a [u32],
    /// The split's first position.
    first: usize,
}

impl<'a> Place<'a> {
    #[inline(always)]
    pub fn new<E>(job: &Job<'a, E>, item: &'a Item, split: usize) -> Self {
        let table = job.step.block_table(&item.segment, job.group, job.cache.shape.block_size);
        Self { item, table, first: split * KV_SPLIT }
    }

    /// What any query sees of this split.
    #[inline(always)]
    fn seen<E>(&self, job: &Job<'_, E>) -> Range<usize> {
        let (group, item) = (job.sharers(), self.item);
        let (first, last) = (item.seen(0, group, &job.mask), item.seen(item.queries - 1, group, &job.mask));
        first.start.saturating_sub(self.first)..last.end.saturating_sub(self.first).min(KV_SPLIT)
    }

    /// Sixteen keys or values, `offset` positions into the split.
    #[inline(always)]
    fn tile<E: Element>(&self, job: &Job<'a, E>, offset: usize, half: Half) -> &'a [E] {
        job.cache.tile(self.table, self.first + offset, half, self.item.kv_head)
    }
}

/// The positions of one split of one item. Below, a position is counted from the split's first.
#[derive(Clone, Copy)]
struct Positions<'j, 'a, E> {
    job: &'j Job<'a, E>,
    place: Place<'a>,
    next: Place<'a>,
}

impl<'a, E: Element> Positions<'_, 'a, E> {
    /// What a query sees of this split; `start == end` if nothing.
    #[inline(always)]
    fn seen(&self, query: usize) -> Range<usize> {
        let seen = self.place.item.seen(query, self.job.sharers(), &self.job.mask);
        let clip = |position: usize| position.saturating_sub(self.place.first).min(KV_SPLIT);
        clip(seen.start)..clip(seen.end)
    }

    #[inline(always)]
    fn tile(&self, position: usize, half: Half) -> &'a [E] {
        self.place.tile(self.job, position, half)
    }

    /// The tile that will be wanted [`AHEAD`] positions after this one: values come after the last keys, and the next
    /// split's keys after the last values.
    #[inline(always)]
    fn tile_ahead(&self, position: usize, tiles: &Range<usize>, half: Half) -> &'a [E] {
        let ahead = position + AHEAD;
        match half {
            _ if ahead < tiles.end => self.tile(ahead, half),
            Half::Keys => self.tile((ahead - tiles.end + tiles.start).min(tiles.end - TILE), Half::Values),
            Half::Values => {
                let seen = self.next.seen(self.job);
                self.next.tile(self.job, (seen.start + ahead - tiles.end).min(seen.end - 1) / TILE * TILE, Half::Keys)
            }
        }
    }
}

/// `M` queries, from `first` on, over one split.
#[inline(always)]
fn pass<V: Vector, E: Element, const M: usize>(
    v: V,
    positions: &Positions<'_, '_, E>,
    first: usize,
    staged: &[f32],
    scores: &mut Scores,
    state: &mut State<'_>,
) {
    let scores: &mut [[f32; KV_SPLIT]; M] = scores.first_chunk_mut().expect("room for a pass");
    let mut seen: [Range<usize>; M] = std::array::from_fn(|_| 0..0);
    let (mut start, mut end) = (KV_SPLIT, 0); // seen by any
    for m in 0..M {
        seen[m] = positions.seen(first + m);
        if !seen[m].is_empty() {
            (start, end) = (start.min(seen[m].start), end.max(seen[m].end));
        }
    }
    let tiles = if start < end { start / TILE * TILE..end.next_multiple_of(TILE) } else { 0..0 };

    score_tiles(v, positions, tiles.clone(), staged, scores);
    for m in 0..M {
        let (max, sum) = softmax(v, &mut scores[m], tiles.clone(), seen[m].clone());
        (state.max[first + m], state.sum[first + m]) = (max, sum);
    }
    let acc = &mut state.acc[first * state.stride..][..M * state.stride];
    acc.fill(0.0);
    weigh_tiles(v, positions, tiles, &seen, scores, acc);
}

/// The scores of `M` queries with all positions of `tiles`, masked or not.
#[inline(always)]
fn score_tiles<V: Vector, E: Element, const M: usize>(
    v: V,
    positions: &Positions<'_, '_, E>,
    tiles: Range<usize>,
    staged: &[f32],
    scores: &mut [[f32; KV_SPLIT]; M],
) {
    let mut position = tiles.start;
    // Two tiles go together where registers allow: few queries have few sums in flight, and many wait for their loads.
    if V::ROWS >= 8 {
        while position + 2 * TILE <= tiles.end {
            score::<V, E, M, 2>(v, positions, &tiles, position, staged, scores);
            position += 2 * TILE;
        }
    }
    while position < tiles.end {
        score::<V, E, M, 1>(v, positions, &tiles, position, staged, scores);
        position += TILE;
    }
}

/// The scores of `M` queries with `N` tiles of keys.
#[inline(always)]
fn score<V: Vector, E: Element, const M: usize, const N: usize>(
    v: V,
    positions: &Positions<'_, '_, E>,
    tiles: &Range<usize>,
    position: usize,
    staged: &[f32],
    scores: &mut [[f32; KV_SPLIT]; M],
) {
    let (mut keys, mut ahead) = ([&[] as &[[E; 16]]; N], [&[] as &[[E; 16]]; N]);
    for n in 0..N {
        keys[n] = positions.tile(position + n * TILE, Half::Keys).as_chunks().0;
        ahead[n] = positions.tile_ahead(position + n * TILE, tiles, Half::Keys).as_chunks().0;
    }
    let (queries, _) = staged.as_chunks::<M>(); // (head_dim, M)
    let mut sums = [[v.splat(0.0); N]; M];
    for (d, query) in queries.iter().enumerate() {
        for n in 0..N {
            prefetch(&ahead[n][d]);
            let key = E::load(v, &keys[n][d]);
            for m in 0..M {
                sums[m][n] = v.fma(v.splat(query[m]), key, sums[m][n]);
            }
        }
    }
    let mask = &positions.job.mask;
    for m in 0..M {
        for n in 0..N {
            let score = soft_cap(v, v.mul(sums[m][n], v.splat(mask.scale)), mask.soft_cap);
            v.store(score, sixteen_mut(&mut scores[m], position + n * TILE));
        }
    }
}

/// Turns the scores of `seen` into `exp(score - max)` and all others of `tiles` into 0. Returns the maximum and the sum.
#[inline(always)]
fn softmax<V: Vector>(v: V, scores: &mut [f32; KV_SPLIT], tiles: Range<usize>, seen: Range<usize>) -> (f32, f32) {
    if seen.is_empty() {
        return (f32::NEG_INFINITY, 0.0);
    }
    // By position and not by arithmetic: what an unwritten part of a block holds is anything, even no number.
    scores[tiles.start..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..tiles.end].fill(f32::NEG_INFINITY);
    let (chunks, _) = scores[tiles].as_chunks_mut::<16>();
    let mut max = v.splat(f32::NEG_INFINITY);
    for chunk in &*chunks {
        max = v.max(max, v.load(chunk));
    }
    let max = v.max_lane(max);
    let mut sum = v.splat(0.0);
    for chunk in chunks {
        let weight = v.exp(v.sub(v.load(chunk), v.splat(max)));
        sum = v.add(sum, weight);
        v.store(weight, chunk);
    }
    (max, v.sum(sum))
}

/// `acc[m] += Σ weights[m][p] · value[p]` over the positions that query `m` sees, in order.
#[inline(always)]
fn weigh_tiles<V: Vector, E: Element, const M: usize>(
    v: V,
    positions: &Positions<'_, '_, E>,
    tiles: Range<usize>,
    seen: &[Range<usize>; M],
    weights: &[[f32; KV_SPLIT]; M],
    acc: &mut [f32],
) {
    let head_dim = positions.job.heads.head_dim;
    let stride = acc.len() / M;
    let by_all = seen.iter().fold(0..KV_SPLIT, |all, seen| all.start.max(seen.start)..all.end.min(seen.end));
    for position in tiles.clone().step_by(TILE) {
        let values = positions.tile(position, Half::Values);
        let ahead = positions.tile_ahead(position, &tiles, Half::Values);
        let tile = Tile { values, ahead, position, head_dim };
        let all = tile.clip(&by_all);
        // Positions that only some of the queries see come one query at a time: before those that all see, and after.
        let (before, after) = if all.is_empty() { (position + TILE, position + TILE) } else { (all.start, all.end) };
        for (m, seen) in seen.iter().enumerate() {
            let one = tile.clip(&(seen.start..seen.end.min(before)));
            weigh(v, &tile, one, std::array::from_ref(&weights[m]), &mut acc[m * stride..][..stride]);
        }
        weigh(v, &tile, all, weights, acc);
        for (m, seen) in seen.iter().enumerate() {
            let one = tile.clip(&(seen.start.max(after)..seen.end));
            weigh(v, &tile, one, std::array::from_ref(&weights[m]), &mut acc[m * stride..][..stride]);
        }
    }
}

/// Sixteen positions' values, the first of them at `position`.
struct Tile<'a, E> {
    values: &'a [E],
    ahead: &'a [E],
    position: usize,
    head_dim: usize,
}

impl<E> Tile<'_, E> {
    #[inline(always)]
    fn clip(&self, range: &Range<usize>) -> Range<usize> {
        let clip = |position: usize| position.clamp(self.position, self.position + TILE);
        clip(range.start)..clip(range.end)
    }
}

#[inline(always)]
fn weigh<V: Vector, E: Element, const M: usize>(
    v: V,
    tile: &Tile<'_, E>,
    range: Range<usize>,
    weights: &[[f32; KV_SPLIT]; M],
    acc: &mut [f32],
) {
    if range.is_empty() {
        return;
    }
    let vectors = acc.len() / M / 16;
    let mut i = 0;
    if V::ROWS >= 8 {
        while i + 2 <= vectors {
            weigh_vectors::<V, E, M, 2>(v, tile, range.clone(), weights, acc, i);
            i += 2;
        }
    }
    while i < vectors {
        weigh_vectors::<V, E, M, 1>(v, tile, range.clone(), weights, acc, i);
        i += 1;
    }
}

/// Vectors `i..i + N` of the output.
#[inline(always)]
fn weigh_vectors<V: Vector, E: Element, const M: usize, const N: usize>(
    v: V,
    tile: &Tile<'_, E>,
    range: Range<usize>,
    weights: &[[f32; KV_SPLIT]; M],
    acc: &mut [f32],
    i: usize,
) {
    let (stride, head_dim) = (acc.len() / M, tile.head_dim);
    let mut sums = [[v.splat(0.0); N]; M];
    for m in 0..M {
        for n in 0..N {
            sums[m][n] = v.load(sixteen(acc, m * stride + 16 * (i + n)));
        }
    }
    let at: [usize; N] = std::array::from_fn(|n| component(i + n, head_dim));
    let weights: [&[f32; TILE]; M] = std::array::from_fn(|m| sixteen(&weights[m], tile.position));
    let (start, end) = (range.start - tile.position, range.end - tile.position);
    assert!(end <= TILE && at[N - 1] + 16 <= head_dim);
    assert!(tile.values.len() >= TILE * head_dim && tile.ahead.len() >= TILE * head_dim);
    for position in start..end {
        for n in 0..N {
            let at = position * head_dim + at[n];
            // SAFETY: `position` is below `TILE`, so its row is inside of both, and `at` begins sixteen components of it.
            let (values, ahead) = unsafe { (sixteen_unchecked(tile.values, at), sixteen_unchecked(tile.ahead, at)) };
            if (16 * n * size_of::<E>()).is_multiple_of(LINE) {
                prefetch(ahead);
            }
            let value = E::load(v, values);
            for m in 0..M {
                sums[m][n] = v.fma(v.splat(weights[m][position]), value, sums[m][n]);
            }
        }
    }
    for m in 0..M {
        for n in 0..N {
            v.store(sums[m][n], sixteen_mut(acc, m * stride + 16 * (i + n)));
        }
    }
}

/// Divides by the sums and writes the output of an item's queries.
#[inline(always)]
pub(super) fn write_out<V: Vector, E>(v: V, job: &Job<'_, E>, item: &Item, state: &State<'_>) {
    let (head_dim, width) = (job.heads.head_dim, job.heads.query_width());
    for q in 0..item.queries {
        let (row, head) = job.row_and_head(item, q);
        // SAFETY: a query is in one item, and an item is written by one task.
        let out = unsafe { job.out.slice(row * width + head * head_dim, head_dim) };
        let sum = v.splat(state.sum[q]);
        for i in 0..state.stride / 16 {
            let acc = v.load(sixteen(state.acc, q * state.stride + 16 * i));
            v.store(v.div(acc, sum), sixteen_mut(out, component(i, head_dim)));
        }
    }
}
