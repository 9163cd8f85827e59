//! Paged attention of all rows of a step, prefill and decode alike.
//!
//! In words. The queries that share a key head are numbered row by row; up to 32 in a row are an *item*. An item walks its
//! sequence in splits of [`KV_SPLIT`] positions, counted from the sequence's start. In a split, every query's scores
//! come first (sixteen positions at a time, a tile of keys being read once for several queries), then their maximum,
//! their exponentials and the exponentials' sum, and last the weighted sum of the values. Splits are merged in order, by
//! the usual rescaling.
//!
//! When there are many items, each is one task. An item so long that it would keep one thread busy while the others wait
//! is a task per split instead; whoever finishes the last of them merges them all, in order. So an operation is one parallel
//! region, but where there are more such splits than memory for their states: then it is a few.
//!
//! What a query's output is made of never depends on its neighbours: positions have fixed lanes, a score is one chain of
//! fused multiply-adds over the head's components, an output component one chain over a split's visible positions, and
//! masked positions add exact zeros or nothing.
//!
//! Over a bfloat16 cache queries and weights are bfloat16 too, and a link of a chain is a pair of products, which some
//! processors do in one instruction. Sums, scores and exponentials stay f32. Weights are summed as they are rounded, so
//! what they weigh is still an average.
//!
//! Over a cache of integers queries are bytes and weights have 16 bits, and a score, and a split's output, is an exact sum
//! of integers times scales.

mod split; // one split of one item
mod state; // how splits come together

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{
    array::Array,
    cache::{Cache, Element, LayerView, Unit, Values},
    isa::Isa,
    memory::recast_mut,
    pool::{Pool, SharedSlice},
    vector::{Kernel, Vector},
};
use crate::{CacheLayer, Heads, KV_SPLIT, Mask, Result, Segment, reference::attention::visible, step::Step};
use split::{PASS_QUERIES, Place, Scores, Staged, Tiles, compute_split, stage_queries, staged_len};
use state::{ITEM_QUERIES, State, write_out};

/// How many splits of long items one region holds, at least: for each there is a state.
const WAVE: usize = 64;
/// An item is long if it has more than one part in this many of a thread's fair share.
const SHARE_PARTS: usize = 4;

/// Queries of one key head of one segment, and the splits that they see.
#[derive(Clone, Debug)]
pub(super) struct Item {
    segment: Segment,
    kv_head: usize,
    /// Queries are numbered `row · group + head in group`, from the segment's first row.
    first_query: usize,
    queries: usize,
    splits: Range<usize>,
}

/// What one thread does at a time: all splits of an item, or one split of a long item.
#[derive(Clone, Copy, Debug)]
struct Task {
    item: usize,
    /// The first split.
    split: usize,
    /// The item's number among the long ones.
    long: Option<usize>,
}

/// A long item in one wave of tasks.
#[derive(Debug, Default)]
struct LongItem {
    /// The first of its tasks in the wave.
    first: usize,
    tasks: usize,
    unfinished: AtomicUsize,
}

/// Memory that attention keeps between steps.
pub(super) struct Scratch {
    items: Vec<Item>,
    /// Those of long items come first.
    tasks: Vec<Task>,
    long_items: Vec<LongItem>,
    /// The long items' running states.
    running: Array<f32>,
    /// The states of one wave's tasks.
    states: Array<f32>,
    wave: usize,
}

impl Scratch {
    /// Memory for heads of up to `head_dim`.
    pub fn new(head_dim: usize, threads: usize) -> Result<Self> {
        let (wave, long_items, state) = (WAVE.max(4 * threads), threads * SHARE_PARTS, State::len(head_dim));
        Ok(Self {
            items: Vec::new(),
            tasks: Vec::new(),
            long_items: Vec::new(),
            running: Array::new("attention's scratch", &[long_items, state])?,
            states: Array::new("attention's scratch", &[wave, state])?,
            wave,
        })
    }

    /// Lists the step's items and what is to be done for them.
    fn plan(&mut self, step: &Step, heads: Heads, mask: &Mask, threads: usize) {
        self.items.clear();
        let group = heads.query / heads.kv;
        for segment in &step.segments {
            let queries = segment.rows * group;
            for kv_head in 0..heads.kv {
                for first_query in (0..queries).step_by(item_queries(queries)) {
                    let queries = item_queries(queries).min(queries - first_query);
                    let mut item = Item { segment: *segment, kv_head, first_query, queries, splits: 0..0 };
                    let (first, last) = (item.row(0, group), item.row(queries - 1, group));
                    let seen = item.seen(first, mask).start..item.seen(last, mask).end;
                    item.splits = seen.start / KV_SPLIT..seen.end.div_ceil(KV_SPLIT);
                    self.items.push(item);
                }
            }
        }

        let total: usize = self.items.iter().map(|item| item.splits.len()).sum();
        let is_long = |item: &Item| {
            let splits = item.splits.len();
            threads > 1 && splits > 1 && splits * threads * SHARE_PARTS > total
        };
        self.tasks.clear();
        self.long_items.clear();
        for (number, item) in self.items.iter().enumerate().filter(|(_, item)| is_long(item)) {
            let long = Some(self.long_items.len());
            self.tasks.extend(item.splits.clone().map(|split| Task { item: number, split, long }));
            self.long_items.push(LongItem::default());
        }
        for (number, item) in self.items.iter().enumerate().filter(|(_, item)| !is_long(item)) {
            self.tasks.push(Task { item: number, split: item.splits.start, long: None });
        }
    }

    /// The length of the wave that begins with this task: all that are left, unless too many of them need states.
    fn begin_wave(&mut self, begin: usize) -> usize {
        let tasks = &self.tasks[begin..];
        let with_state = tasks.partition_point(|task| task.long.is_some());
        let len = if with_state > self.wave { self.wave } else { tasks.len() };
        for long in &mut self.long_items {
            long.tasks = 0;
        }
        for (i, task) in tasks[..len].iter().enumerate() {
            let Some(long) = task.long else { break };
            let long = &mut self.long_items[long];
            long.first = if long.tasks == 0 { i } else { long.first };
            long.tasks += 1;
            *long.unfinished.get_mut() = long.tasks;
        }
        len
    }
}

impl Item {
    /// The row of a query, counted from the segment's first.
    #[inline(always)]
    fn row(&self, query: usize, group: usize) -> usize {
        (self.first_query + query) / group
    }

    /// The rows of the queries from `query` on, and each one's place among its row's. Endless: take what there are.
    #[inline(always)]
    fn rows_and_places(&self, query: usize, group: usize) -> impl Iterator<Item = (usize, usize)> {
        let (mut row, mut place) = (self.row(query, group), (self.first_query + query) % group);
        std::iter::from_fn(move || {
            let at = (row, place);
            place += 1;
            if place == group {
                (row, place) = (row + 1, 0);
            }
            Some(at)
        })
    }

    /// The positions that the queries of a row see.
    #[inline(always)]
    fn seen(&self, row: usize, mask: &Mask) -> Range<usize> {
        visible(self.segment.context - self.segment.rows + row, mask.window)
    }
}

/// What all items share.
#[derive(Clone, Copy)]
pub(super) struct Job<'a, E> {
    step: &'a Step,
    cache: LayerView<'a, E>,
    /// Whose block tables say where the cache's positions lie.
    group: usize,
    heads: Heads,
    mask: Mask,
    qkv: &'a [f32],
    out: SharedSlice<'a, f32>,
}

impl<E> Job<'_, E> {
    /// Query heads that share a key head.
    fn sharers(&self) -> usize {
        self.heads.query / self.heads.kv
    }

    /// The row of the step and the query head of each of an item's queries.
    #[inline(always)]
    fn rows_and_heads(&self, item: &Item) -> impl Iterator<Item = (usize, usize)> {
        let (group, first_row) = (self.sharers(), item.segment.first_row);
        let first_head = item.kv_head * group;
        item.rows_and_places(0, group).map(move |(row, place)| (first_row + row, first_head + place)).take(item.queries)
    }
}

/// Queries in each of the items of a segment's key head: items as even as whole passes allow.
fn item_queries(queries: usize) -> usize {
    queries.div_ceil(queries.div_ceil(ITEM_QUERIES)).next_multiple_of(PASS_QUERIES)
}

/// Attends every row of `step`. `qkv` is `(rows, heads.qkv_width())`, `out` is `(rows, heads.query_width())`.
#[allow(clippy::too_many_arguments)]
pub(super) fn attention(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    step: &Step,
    out: &mut [f32],
    qkv: &[f32],
    cache: &Cache,
    place: CacheLayer,
    heads: Heads,
    mask: Mask,
) {
    let shape = &cache.shape;
    assert!(heads.kv == shape.kv_heads && heads.head_dim == shape.head_dim, "{heads:?} over {shape:?}");
    assert!(heads.query.is_multiple_of(heads.kv), "{heads:?}");
    assert!(qkv.len() == step.rows() * heads.qkv_width() && out.len() == step.rows() * heads.query_width());
    scratch.plan(step, heads, &mask, pool.threads());
    let (out, CacheLayer { group, layer }) = (SharedSlice::new(out), place);
    macro_rules! run {
        ($values:ident) => {{
            let cache = LayerView { shape, values: $values, layer };
            run(isa, pool, scratch, Job { step, cache, group, heads, mask, qkv, out });
        }};
    }
    match &cache.values {
        Values::F32(values) => run!(values),
        Values::F16(values) => run!(values),
        Values::Bf16(values) => run!(values),
        Values::Int8(values) => run!(values),
    }
}

thread_local! {
    /// A thread's own working memory. Grows to its size in the first steps and stays.
    static LOCAL: RefCell<Local> = RefCell::new(Local {
        queries: Vec::new(),
        units: [Unit::default(); ITEM_QUERIES],
        scores: Box::new([[0.0; KV_SPLIT]; PASS_QUERIES]),
        weights: Box::new([[0.0; KV_SPLIT]; PASS_QUERIES]),
        states: Vec::new(),
    });
}

struct Local {
    /// Queries and weights are what the cache's elements are multiplied with: 32 bits.
    queries: Vec<f32>,
    units: [Unit; ITEM_QUERIES],
    scores: Box<Scores>,
    weights: Box<Scores>,
    states: Vec<f32>,
}

fn run<E: Element>(isa: Isa, pool: &mut Pool, scratch: &mut Scratch, job: Job<'_, E>) {
    let mut begin = 0;
    while begin < scratch.tasks.len() {
        let len = scratch.begin_wave(begin);
        let Scratch { items, tasks, long_items, running, states, .. } = &mut *scratch;
        let wave = Wave {
            isa,
            job: &job,
            items,
            tasks: &tasks[begin..begin + len],
            long_items,
            running: SharedSlice::new(running),
            states: SharedSlice::new(states),
        };
        pool.run(len, &|i| LOCAL.with_borrow_mut(|local| wave.run_task(i, local)));
        begin += len;
    }
}

/// The tasks of one parallel region.
struct Wave<'a, E> {
    isa: Isa,
    job: &'a Job<'a, E>,
    items: &'a [Item],
    tasks: &'a [Task],
    long_items: &'a [LongItem],
    running: SharedSlice<'a, f32>,
    states: SharedSlice<'a, f32>,
}

impl<E: Element> Wave<'_, E> {
    fn run_task(&self, number: usize, local: &mut Local) {
        let (task, head_dim) = (&self.tasks[number], self.job.heads.head_dim);
        local.queries.resize(staged_len(head_dim), 0.0);
        // A thread's tasks lie side by side, so this one's next is likely that; its keys can be on their way.
        let next = self.tasks.get(number + 1).map(|next| (&self.items[next.item], next.split));
        match task.long {
            None => self.whole_item(&self.items[task.item], next, local),
            Some(long) => self.one_split(number, long, next, local),
        }
    }

    /// All splits of one item, one after another.
    fn whole_item(&self, item: &Item, next: Option<(&Item, usize)>, local: &mut Local) {
        let (job, head_dim) = (self.job, self.job.heads.head_dim);
        local.states.resize(2 * State::len(head_dim), 0.0);
        let Local { queries, units, scores, weights, states } = local;
        let (running, state) = states.split_at_mut(State::len(head_dim));
        let (running, state) = (&mut State::over(running, head_dim), &mut State::over(state, head_dim));
        let (queries, weights) = (recast_mut(queries), recast_mut(weights.as_mut_slice()));
        self.isa.run(Stage { job, item, queries, units });
        let queries = Staged { lanes: queries, units };
        let Range { start: first, end } = item.splits;
        for split in first..end {
            let next = if split + 1 < end { Some((item, split + 1)) } else { next };
            let into = if split == first { &mut *running } else { &mut *state };
            self.isa.run(OneSplit { job, item, split, next, queries, scores, weights, state: into });
            if split > first {
                self.isa.run(Merge { running, state, queries: item.queries, element: PhantomData::<E> });
            }
        }
        self.isa.run(WriteOut { job, item, state: running });
    }

    /// One split of a long item, and if it is the last to be finished, the merging of all.
    fn one_split(&self, number: usize, long: usize, next: Option<(&Item, usize)>, local: &mut Local) {
        let Task { item, split, .. } = self.tasks[number];
        let (job, item, head_dim) = (self.job, &self.items[item], self.job.heads.head_dim);
        let Local { queries, units, scores, weights, .. } = local;
        let (queries, weights) = (recast_mut(queries), recast_mut(weights.as_mut_slice()));
        self.isa.run(Stage { job, item, queries, units });
        let queries = Staged { lanes: queries, units };
        {
            // SAFETY: one task of this region has this number.
            let state = &mut unsafe { numbered(&self.states, number, head_dim) };
            self.isa.run(OneSplit { job, item, split, next, queries, scores, weights, state });
        }
        let LongItem { first, tasks, unfinished } = &self.long_items[long];
        // Release: the others' states are written before the last one reads them. Acquire: and that one is us.
        if unfinished.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        // SAFETY: one task of a region is the last of this item.
        let running = &mut unsafe { numbered(&self.running, long, head_dim) };
        for number in *first..first + tasks {
            // SAFETY: whose state this is has finished, and nobody else reads it.
            let state = &unsafe { numbered(&self.states, number, head_dim) };
            if self.tasks[number].split == item.splits.start {
                running.copy(state, item.queries);
            } else {
                self.isa.run(Merge { running, state, queries: item.queries, element: PhantomData::<E> });
            }
        }
        if self.tasks[first + tasks - 1].split + 1 == item.splits.end {
            self.isa.run(WriteOut { job, item, state: running });
        }
    }
}

/// State `number` of `states`.
///
/// # Safety
/// Nobody else uses that state at the same time.
unsafe fn numbered<'a>(states: &SharedSlice<'a, f32>, number: usize, head_dim: usize) -> State<'a> {
    let len = State::len(head_dim);
    // SAFETY: states do not overlap, and this one is the caller's alone.
    State::over(unsafe { states.slice(number * len, len) }, head_dim)
}

/// Brings an item's queries to where its splits read them.
struct Stage<'a, E: Element> {
    job: &'a Job<'a, E>,
    item: &'a Item,
    queries: &'a mut [E::Query],
    units: &'a mut [Unit; ITEM_QUERIES],
}

impl<E: Element> Kernel for Stage<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        stage_queries(v, self.job, self.item, self.queries, self.units);
    }
}

/// Computes one split of an item.
struct OneSplit<'a, 's, E: Element> {
    job: &'a Job<'a, E>,
    item: &'a Item,
    split: usize,
    /// What this thread will likely read next.
    next: Option<(&'a Item, usize)>,
    queries: Staged<'a, E>,
    scores: &'a mut Scores,
    weights: &'a mut [[E::Weight; KV_SPLIT]],
    state: &'a mut State<'s>,
}

impl<E: Element> Kernel for OneSplit<'_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let next = self.next.unwrap_or((self.item, self.split));
        let (place, next) = (Place::new(self.job, self.item, self.split), Place::new(self.job, next.0, next.1));
        let tiles = Tiles::new(self.job, place, next);
        let weights = self.weights.first_chunk_mut().expect("room for a pass");
        compute_split(v, self.job, &tiles, self.queries, self.scores, weights, self.state);
    }
}

/// Merges a split into the state of those before it.
struct Merge<'r, 's, E> {
    running: &'r mut State<'s>,
    state: &'r State<'s>,
    queries: usize,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Merge<'_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        self.running.merge::<V, E>(v, self.state, self.queries);
    }
}

/// Writes an item's output.
struct WriteOut<'a, 's, E> {
    job: &'a Job<'a, E>,
    item: &'a Item,
    state: &'a State<'s>,
}

impl<E: Element> Kernel for WriteOut<'_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        write_out(v, self.job, self.item, self.state);
    }
}
