//! The arithmetic of attention: one split of one item.

// `for m in 0..M` over several arrays of registers reads better than the zips that would replace it.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{
    Item, Job,
    state::{ITEM_QUERIES, State, component},
};
use crate::{
    KV_SPLIT,
    cpu::{
        cache::{Element, Half, TILE, Unit, scales, sixteen, sixteen_mut},
        gated::soft_cap,
        memory::prefetch_bytes,
        vector::Vector,
    },
};

/// Queries that share one pass over keys and values, at most.
pub(super) const PASS_QUERIES: usize = 8;

/// How many tiles ahead of their use keys and values are asked for. Blocks lie anywhere, so the core cannot guess.
const AHEAD: usize = 4;

/// Tiles in a split.
const SPLIT_TILES: usize = KV_SPLIT / TILE;

/// The scores of one pass.
pub(super) type Scores = [[f32; KV_SPLIT]; PASS_QUERIES];

/// Their weights, as a cache's elements are multiplied with them; where those are pairs, they fill half of it.
type Weights<E, const M: usize> = [[<E as Element>::Weight; KV_SPLIT]; M];

/// How many of the `rest` queries go into the next pass: as many as their sums fit in registers.
#[inline(always)]
fn pass_len<V: Vector>(rest: usize) -> usize {
    rest.min(if V::ROWS >= PASS_QUERIES { PASS_QUERIES } else { 4 })
}

/// Floats that an item's staged queries take.
pub(super) fn staged_len(head_dim: usize) -> usize {
    ITEM_QUERIES * head_dim + 16
}

/// Queries where passes read them.
#[derive(Clone, Copy)]
pub(super) struct Staged<'a, E: Element> {
    pub lanes: &'a [E::Query], // (queries, head_dim / KEY_LANE)
    pub units: &'a [Unit],
}

/// Copies an item's queries to where passes read them. They are scaled, so that their products with keys are
/// scores.
#[inline(always)]
pub(super) fn stage_queries<V: Vector, E: Element>(
    v: V,
    job: &Job<'_, E>,
    item: &Item,
    lanes: &mut [E::Query],
    units: &mut [Unit; ITEM_QUERIES],
) {
    let (head_dim, width) = (job.heads.head_dim, job.heads.qkv_width());
    let scale = if job.mask.soft_cap.is_some() { job.mask.scale } else { job.mask.scale * E::SCORE_UNIT };
    for ((q, (row, head)), unit) in job.rows_and_heads(item).enumerate().zip(units) {
        let query = &job.qkv[row * width + head * head_dim..][..head_dim];
        // What is beyond a query's end is written again, by the next one.
        *unit = E::stage(v, query, scale, &mut lanes[q * head_dim / E::KEY_LANE..]);
    }
}

/// Attends an item's queries to the positions of one split.
#[inline(always)]
pub(super) fn compute_split<V: Vector, E: Element>(
    v: V,
    job: &Job<'_, E>,
    tiles: &Tiles<'_, E>,
    staged: Staged<'_, E>,
    scores: &mut Scores,
    weights: &mut Weights<E, PASS_QUERIES>,
    state: &mut State<'_>,
) {
    let lanes = job.heads.head_dim / E::KEY_LANE;
    let mut first = 0;
    let queries = tiles.place.item.queries;
    while first < queries {
        let len = pass_len::<V>(queries - first);
        let Staged { lanes: all, units } = staged;
        let staged = Staged { lanes: &all[first * lanes..][..len * lanes], units: &units[first..][..len] };
        let pass = Pass { job, tiles, first, staged };
        match len {
            1 => pass.run::<V, 1>(v, scores, weights, state),
            2 => pass.run::<V, 2>(v, scores, weights, state),
            3 => pass.run::<V, 3>(v, scores, weights, state),
            4 => pass.run::<V, 4>(v, scores, weights, state),
            _ if V::ROWS < PASS_QUERIES => unreachable!("a pass of {len} queries"),
            5 => pass.run::<V, 5>(v, scores, weights, state),
            6 => pass.run::<V, 6>(v, scores, weights, state),
            7 => pass.run::<V, 7>(v, scores, weights, state),
            _ => pass.run::<V, PASS_QUERIES>(v, scores, weights, state),
        }
        first += len;
    }
}

/// One split of an item: where its keys and values lie. Below, a position is counted from the split's first.
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

    /// What a query sees of this split; `start == end` if nothing.
    #[inline(always)]
    fn seen<E>(&self, job: &Job<'_, E>, query: usize) -> Range<usize> {
        self.seen_from(job, self.item.row(query, job.sharers()))
    }

    /// What the queries of a row see.
    #[inline(always)]
    fn seen_from<E>(&self, job: &Job<'_, E>, row: usize) -> Range<usize> {
        let seen = self.item.seen(row, &job.mask);
        let clip = |position: usize| position.saturating_sub(self.first).min(KV_SPLIT);
        clip(seen.start)..clip(seen.end)
    }

    /// What each of some queries sees, from `query` on.
    #[inline(always)]
    fn seen_by<E, const M: usize>(&self, job: &Job<'_, E>, query: usize) -> [Range<usize>; M] {
        let mut seen = [const { 0..0 }; M];
        for (seen, (row, _)) in seen.iter_mut().zip(self.item.rows_and_places(query, job.sharers())) {
            *seen = self.seen_from(job, row);
        }
        seen
    }

    /// The tiles that any query sees something of.
    #[inline(always)]
    fn tiles<E>(&self, job: &Job<'_, E>) -> Range<usize> {
        let (start, end) = (self.seen(job, 0).start, self.seen(job, self.item.queries - 1).end);
        start / TILE..end.div_ceil(TILE)
    }

    /// The split's keys and values from `tile` on, tile by tile.
    #[inline(always)]
    fn read<E: Element>(&self, job: &Job<'a, E>, tile: usize) -> impl Iterator<Item = [&'a [E]; 2]> {
        job.cache.tiles(self.table, self.first / TILE + tile, self.item.kv_head)
    }
}

/// What is read for a split, tile by tile, in this order: keys, values, and the first keys of what is read after it.
pub(super) struct Tiles<'a, E> {
    place: Place<'a>,
    /// Those that any query sees something of.
    seen: Range<usize>,
    order: [&'a [E]; 2 * SPLIT_TILES + AHEAD],
}

impl<'a, E: Element> Tiles<'a, E> {
    /// The tiles of `place`. `next` is a hint.
    #[inline(always)]
    pub fn new(job: &Job<'a, E>, place: Place<'a>, next: Place<'a>) -> Self {
        let (seen, next_seen) = (place.tiles(job), next.tiles(job));
        let mut order = [&[] as &[E]; 2 * SPLIT_TILES + AHEAD];
        let (keys, rest) = order.split_at_mut(seen.len());
        let (values, rest) = rest.split_at_mut(seen.len());
        for ((key, value), tile) in keys.iter_mut().zip(values).zip(place.read(job, seen.start)) {
            [*key, *value] = tile;
        }
        let after = &mut rest[..AHEAD];
        after.fill(keys[0]); // any tile will do where there are not so many
        for (after, [keys, _]) in after[..next_seen.len().min(AHEAD)].iter_mut().zip(next.read(job, next_seen.start)) {
            *after = keys;
        }
        Self { place, seen, order }
    }

    /// A tile, and one that is wanted soon after it.
    #[inline(always)]
    fn get(&self, tile: usize, half: Half) -> (&'a [E], &'a [E]) {
        let i = tile - self.seen.start + half as usize * self.seen.len();
        (self.order[i], self.order[i + AHEAD])
    }
}

/// Some queries of an item over one split.
struct Pass<'p, 'a, E: Element> {
    job: &'p Job<'a, E>,
    tiles: &'p Tiles<'a, E>,
    /// The first of the queries.
    first: usize,
    /// These alone.
    staged: Staged<'p, E>,
}

impl<E: Element> Pass<'_, '_, E> {
    #[inline(always)]
    fn run<V: Vector, const M: usize>(
        &self,
        v: V,
        scores: &mut Scores,
        weights: &mut Weights<E, PASS_QUERIES>,
        state: &mut State<'_>,
    ) {
        let scores: &mut [[f32; KV_SPLIT]; M] = scores.first_chunk_mut().expect("room for a pass");
        let weights: &mut Weights<E, M> = weights.first_chunk_mut().expect("room for a pass");
        let seen: [_; M] = self.tiles.place.seen_by(self.job, self.first);
        // Later queries see from later positions to later ones; what nobody sees begins and ends with the split.
        let tiles = seen[0].start / TILE..seen[M - 1].end.div_ceil(TILE);

        self.score_tiles(v, tiles.clone(), scores);
        let mut value_scales = [0.0; KV_SPLIT];
        if E::SCALE > 0 {
            for tile in tiles.clone() {
                let values = self.tiles.get(tile, Half::Values).0;
                v.store(scales(v, values), sixteen_mut(&mut value_scales, tile * TILE));
            }
        }
        let softmax = softmax::<V, E, M>(v, scores, &value_scales, weights, tiles.clone(), &seen);
        let mut units = [Unit::default(); M];
        for m in 0..M {
            (state.max[self.first + m], state.sum[self.first + m], units[m]) = softmax[m];
        }
        let acc = &mut state.acc[self.first * state.stride..][..M * state.stride];
        acc.fill(0.0);
        if E::ZERO_IS_NOTHING {
            self.weigh_range(v, tiles.start * TILE..tiles.end * TILE, weights, &units, acc);
        } else {
            self.weigh_all(v, &seen, weights, &units, acc);
        }
    }

    /// The scores of all queries with all positions of `tiles`, masked or not. Several tiles go together where registers
    /// allow: few queries have few sums in flight, and a sum waits for the one before.
    #[inline(always)]
    fn score_tiles<V: Vector, const M: usize>(&self, v: V, tiles: Range<usize>, scores: &mut [[f32; KV_SPLIT]; M]) {
        let mut tile = tiles.start;
        if V::ROWS >= 8 {
            while M <= 4 && tile + 4 <= tiles.end {
                self.score::<V, M, 4>(v, tile, scores);
                tile += 4;
            }
            while tile + 2 <= tiles.end {
                self.score::<V, M, 2>(v, tile, scores);
                tile += 2;
            }
        }
        while tile < tiles.end {
            self.score::<V, M, 1>(v, tile, scores);
            tile += 1;
        }
    }

    /// The scores of all queries with `N` tiles of keys.
    #[inline(always)]
    fn score<V: Vector, const M: usize, const N: usize>(&self, v: V, tile: usize, scores: &mut [[f32; KV_SPLIT]; M]) {
        let tiles: [_; N] = std::array::from_fn(|n| self.tiles.get(tile + n, Half::Keys));
        let (line, lanes) = (TILE * E::KEY_LANE, self.job.heads.head_dim / E::KEY_LANE);
        let queries: [_; M] = std::array::from_fn(|m| &self.staged.lanes[m * lanes..][..lanes]);
        for (n, (keys, ahead)) in tiles.into_iter().enumerate() {
            assert!(keys.len() >= lanes * line);
            if E::SCALE > 0 {
                prefetch_element(ahead, lanes * line);
                prefetch_element(self.tiles.get(tile + n, Half::Values).0, lanes * line);
            }
        }
        let units: &[Unit; M] = self.staged.units.try_into().expect("a unit for each query");
        let mut sums = [[E::begin_score(v, units[0]); N]; M];
        for m in 1..M {
            sums[m] = [E::begin_score(v, units[m]); N];
        }
        for i in 0..lanes {
            let query: [_; M] = std::array::from_fn(|m| queries[m][i]);
            for n in 0..N {
                let (keys, ahead) = tiles[n];
                prefetch_element(ahead, i * line);
                // SAFETY: `i` is below the number of a query's lanes, and there are as many lines.
                let keys = unsafe { E::load_keys(v, keys, i * line) };
                for m in 0..M {
                    sums[m][n] = E::add_to_score(v, sums[m][n], query[m], keys);
                }
            }
        }
        assert!(tile + N <= SPLIT_TILES);
        for n in 0..N {
            let scales = scales(v, tiles[n].0);
            for m in 0..M {
                let score = E::end_score(v, sums[m][n], units[m], scales);
                v.store(score, sixteen_mut(&mut scores[m], (tile + n) * TILE));
            }
        }
        if let Some(cap) = self.job.mask.soft_cap {
            for scores in scores {
                for n in 0..N {
                    let score = sixteen_mut(scores, (tile + n) * TILE);
                    v.store(v.mul(soft_cap(v, v.load(score), Some(cap)), v.splat(E::SCORE_UNIT)), score);
                }
            }
        }
    }

    /// `acc[m] += Σ weights[m][p] · value[p]` over the positions that query `m` sees, in order.
    #[inline(always)]
    fn weigh_all<V: Vector, const M: usize>(
        &self,
        v: V,
        seen: &[Range<usize>; M],
        weights: &Weights<E, M>,
        units: &[Unit; M],
        acc: &mut [f32],
    ) {
        // Positions that only some of the queries see come one query at a time: before those that all see, and after.
        // Lanes of which they see a part are among them.
        let (start, end) =
            (seen[M - 1].start.next_multiple_of(E::VALUE_LANE), seen[0].end / E::VALUE_LANE * E::VALUE_LANE);
        let (start, end) = if start < end { (start, end) } else { (KV_SPLIT, KV_SPLIT) };
        let stride = acc.len() / M;
        for m in 0..M {
            let before = seen[m].start..seen[m].end.min(start);
            self.weigh_some(v, before, &weights[m], units[m], &mut acc[m * stride..][..stride]);
        }
        self.weigh_range(v, start..end, weights, units, acc);
        for m in 0..M {
            let after = seen[m].start.max(end)..seen[m].end;
            self.weigh_some(v, after, &weights[m], units[m], &mut acc[m * stride..][..stride]);
        }
    }

    /// All outputs over positions that all queries see, or that weigh nothing: whole lanes.
    #[inline(always)]
    fn weigh_range<V: Vector, const M: usize>(
        &self,
        v: V,
        positions: Range<usize>,
        weights: &Weights<E, M>,
        units: &[Unit; M],
        acc: &mut [f32],
    ) {
        let (mut i, vectors) = (0, acc.len() / M / 16);
        if V::ROWS >= 8 {
            while M <= 4 && i + 4 <= vectors {
                self.weigh::<V, M, 4>(v, positions.clone(), weights, units, acc, i);
                i += 4;
            }
            while i + 2 <= vectors {
                self.weigh::<V, M, 2>(v, positions.clone(), weights, units, acc, i);
                i += 2;
            }
        }
        while i < vectors {
            self.weigh::<V, M, 1>(v, positions.clone(), weights, units, acc, i);
            i += 1;
        }
    }

    /// Vectors `i..i + N` of all outputs.
    #[inline(always)]
    fn weigh<V: Vector, const M: usize, const N: usize>(
        &self,
        v: V,
        positions: Range<usize>,
        weights: &Weights<E, M>,
        units: &[Unit; M],
        acc: &mut [f32],
        i: usize,
    ) {
        let (stride, head_dim) = (acc.len() / M, self.job.heads.head_dim);
        let at: [usize; N] = std::array::from_fn(|n| component(i + n, head_dim) * E::VALUE_LANE);
        let mut sums = [[E::begin_output(v, v.splat(0.0)); N]; M];
        for m in 0..M {
            for n in 0..N {
                sums[m][n] = E::begin_output(v, v.load(sixteen(acc, m * stride + 16 * (i + n))));
            }
        }
        for tile in positions.start / TILE..positions.end.div_ceil(TILE) {
            let first = tile * TILE;
            let (start, end) = (positions.start.max(first) - first, positions.end.min(first + TILE) - first);
            let (start, end) = (start / E::VALUE_LANE, end / E::VALUE_LANE);
            let (values, ahead) = self.tiles.get(tile, Half::Values);
            let weights: [&[_; 16]; M] = std::array::from_fn(|m| sixteen(&weights[m], first / E::VALUE_LANE));
            assert!(
                end <= TILE / E::VALUE_LANE
                    && values.len() >= TILE * head_dim
                    && at[N - 1] <= (head_dim - 16) * E::VALUE_LANE
            );
            for lane in start..end {
                for n in 0..N {
                    let at = lane * E::VALUE_LANE * head_dim + at[n];
                    prefetch_element(ahead, at);
                    // SAFETY: such a lane is inside of the tile, and `at[n]` begins sixteen components of it.
                    let values = unsafe { E::load_values(v, values, at) };
                    for m in 0..M {
                        sums[m][n] = E::add_to_output(v, sums[m][n], weights[m][lane], values);
                    }
                }
            }
        }
        for m in 0..M {
            for n in 0..N {
                let output = E::end_output(v, sums[m][n], units[m]);
                v.store(output, sixteen_mut(acc, m * stride + 16 * (i + n)));
            }
        }
    }

    /// One query's output over a few positions, which need not be whole lanes.
    #[inline(always)]
    fn weigh_some<V: Vector>(
        &self,
        v: V,
        positions: Range<usize>,
        weights: &[E::Weight; KV_SPLIT],
        unit: Unit,
        acc: &mut [f32],
    ) {
        if positions.is_empty() {
            return;
        }
        let head_dim = self.job.heads.head_dim;
        for lane in positions.start / E::VALUE_LANE..positions.end.div_ceil(E::VALUE_LANE) {
            let first = lane * E::VALUE_LANE;
            let kept = positions.start.max(first) - first..positions.end.min(first + E::VALUE_LANE) - first;
            let (values, _) = self.tiles.get(first / TILE, Half::Values);
            assert!(values.len() >= TILE * head_dim);
            for (i, acc) in acc.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let at = first % TILE * head_dim + component(i, head_dim) * E::VALUE_LANE;
                // SAFETY: the lane is inside of the tile, and a component begins sixteen of it.
                let values = E::keep(v, unsafe { E::load_values(v, values, at) }, kept.clone());
                let output = E::begin_output(v, v.load(acc));
                let output = E::add_to_output(v, output, weights[lane], values);
                v.store(E::end_output(v, output, unit), acc);
            }
        }
    }
}

/// Asks for the line of element `at`.
#[inline(always)]
fn prefetch_element<E>(elements: &[E], at: usize) {
    prefetch_bytes(elements.as_ptr().wrapping_add(at).addr(), 1);
}

/// Turns each query's scores of what it has `seen` into weights relative to the largest, and all others of `tiles` into 0.
/// Returns the maxima, the weights' sums and their units. Queries go side by side: one alone would wait for itself.
#[inline(always)]
fn softmax<V: Vector, E: Element, const M: usize>(
    v: V,
    scores: &mut [[f32; KV_SPLIT]; M],
    scales: &[f32; KV_SPLIT],
    weights: &mut Weights<E, M>,
    tiles: Range<usize>,
    seen: &[Range<usize>; M],
) -> [(f32, f32, Unit); M] {
    let all = tiles.start * TILE / E::POSITIONS * E::POSITIONS..(tiles.end * TILE).next_multiple_of(E::POSITIONS);
    // By position and not by arithmetic: what an unwritten part of a block holds is anything, even no number.
    for (scores, seen) in scores.iter_mut().zip(seen) {
        let seen = if seen.is_empty() { all.start..all.start } else { seen.clone() };
        scores[all.start..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..all.end].fill(f32::NEG_INFINITY);
    }
    let mut maxima = [v.splat(f32::NEG_INFINITY); M];
    for at in all.clone().step_by(TILE) {
        for m in 0..M {
            maxima[m] = v.max(maxima[m], v.load(sixteen(&scores[m], at)));
        }
    }
    let mut found = [(f32::NEG_INFINITY, 0.0, Unit::default()); M];
    let mut shifts = [0.0; M];
    for m in 0..M {
        found[m].0 = v.max_lane(maxima[m]);
        // Where a query sees nothing, infinities have no difference.
        shifts[m] = if found[m].0 == f32::NEG_INFINITY { 0.0 } else { found[m].0 };
    }
    let sums = E::weights(v, scores, &shifts, scales, all, weights);
    for m in 0..M {
        (found[m].1, found[m].2) = sums[m];
    }
    found
}
