//! Paged attention of all rows of a step, prefill and decode alike.
//!
//! In words. The queries that share a key head are numbered row by row; 32 in a row are an *item*. An item walks its
//! sequence in splits of [`KV_SPLIT`] positions, counted from the sequence's start. In a split, every query's scores
//! come first (sixteen positions at a time, a tile of keys being read once for several queries), then their maximum,
//! their exponentials and the exponentials' sum, and last the weighted sum of the values. Splits are merged in order, by
//! the usual rescaling.
//!
//! When there are many items, each is one task. An item so long that it would keep one thread busy while the others wait
//! has its splits computed by all threads, in waves, and each wave's results are merged in order.
//!
//! What a query's output is made of never depends on its neighbours: positions have fixed lanes, a score is one chain of
//! fused multiply-adds over the head's components, an output component one chain over a split's visible positions, and
//! masked positions add exact zeros or nothing.

mod split; // one split of one item

use std::{cell::RefCell, ops::Range};

use super::{
    array::Array,
    cache::{Cache, Element, LayerView, Values},
    isa::Isa,
    pool::{Pool, SharedSlice},
    vector::{Kernel, Vector},
};
use crate::{CacheLayer, Heads, KV_SPLIT, Mask, Result, Segment, reference::attention::visible, step::Step};
use split::{ITEM_QUERIES, PASS_QUERIES, Scores, State, compute_split, stage_queries, write_out};

/// Splits per thread in one wave over long items.
const WAVE_PER_THREAD: usize = 8;
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
    /// Whether its splits are shared among threads.
    is_long: bool,
}

/// One split of a long item.
#[derive(Clone, Copy, Debug)]
struct LongPart {
    item: usize,
    split: usize,
    /// The item's number among the long ones.
    long: usize,
}

/// Memory that attention keeps between steps.
pub(super) struct Scratch {
    items: Vec<Item>,
    long_parts: Vec<LongPart>,
    /// The long items' running states, then the states of one wave's parts.
    states: Array<f32>,
}

impl Scratch {
    /// Memory for heads of up to `head_dim`.
    pub fn new(head_dim: usize, threads: usize) -> Result<Self> {
        let states = [threads * (SHARE_PARTS + WAVE_PER_THREAD), State::len(head_dim)];
        Ok(Self { items: Vec::new(), long_parts: Vec::new(), states: Array::new("attention's scratch", &states)? })
    }

    /// Lists the step's items, and the parts of those that are too long for one thread.
    fn plan(&mut self, step: &Step, heads: Heads, mask: &Mask, threads: usize) {
        self.items.clear();
        let group = heads.query / heads.kv;
        for segment in &step.segments {
            let queries = segment.rows * group;
            for kv_head in 0..heads.kv {
                for first_query in (0..queries).step_by(ITEM_QUERIES) {
                    let queries = ITEM_QUERIES.min(queries - first_query);
                    let mut item =
                        Item { segment: *segment, kv_head, first_query, queries, splits: 0..0, is_long: false };
                    let seen = item.seen(0, group, mask).start..item.seen(queries - 1, group, mask).end;
                    item.splits = seen.start / KV_SPLIT..seen.end.div_ceil(KV_SPLIT);
                    self.items.push(item);
                }
            }
        }

        self.long_parts.clear();
        let mut long = 0;
        let total: usize = self.items.iter().map(|item| item.splits.len()).sum();
        for (i, item) in self.items.iter_mut().enumerate() {
            let splits = item.splits.len();
            item.is_long = threads > 1 && splits > 1 && splits * threads * SHARE_PARTS > total;
            if item.is_long {
                self.long_parts.extend(item.splits.clone().map(|split| LongPart { item: i, split, long }));
                long += 1;
            }
        }
    }
}

impl Item {
    /// The row of a query, counted from the segment's first.
    #[inline(always)]
    fn row(&self, query: usize, group: usize) -> usize {
        (self.first_query + query) / group
    }

    /// The positions that a query sees.
    #[inline(always)]
    fn seen(&self, query: usize, group: usize, mask: &Mask) -> Range<usize> {
        visible(self.segment.context - self.segment.rows + self.row(query, group), mask.window)
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

    /// The row of the step and the query head of an item's query.
    #[inline(always)]
    fn row_and_head(&self, item: &Item, query: usize) -> (usize, usize) {
        let group = self.sharers();
        let head = item.kv_head * group + (item.first_query + query) % group;
        (item.segment.first_row + item.row(query, group), head)
    }
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
    match &cache.values {
        Values::F32(values) => run(
            isa,
            pool,
            scratch,
            Job { step, cache: LayerView { shape, values, layer }, group, heads, mask, qkv, out },
        ),
        Values::F16(values) => run(
            isa,
            pool,
            scratch,
            Job { step, cache: LayerView { shape, values, layer }, group, heads, mask, qkv, out },
        ),
        Values::Bf16(values) => run(
            isa,
            pool,
            scratch,
            Job { step, cache: LayerView { shape, values, layer }, group, heads, mask, qkv, out },
        ),
    }
}

thread_local! {
    /// A thread's own working memory. Grows to its size in the first steps and stays.
    static LOCAL: RefCell<Local> = RefCell::new(Local {
        queries: Vec::new(),
        scores: Box::new([[0.0; KV_SPLIT]; PASS_QUERIES]),
        states: Vec::new(),
    });
}

struct Local {
    queries: Vec<f32>,
    scores: Box<Scores>,
    states: Vec<f32>,
}

fn run<E: Element>(isa: Isa, pool: &mut Pool, scratch: &mut Scratch, job: Job<'_, E>) {
    let (head_dim, threads, job) = (job.heads.head_dim, pool.threads(), &job);
    let Scratch { items, long_parts, states } = scratch;
    pool.run(items.len(), &|i| {
        let item = &items[i];
        if !item.is_long {
            LOCAL.with_borrow_mut(|local| whole_item(isa, job, item, local));
        }
    });

    let (running_states, wave_states) = states.split_at_mut(threads * SHARE_PARTS * State::len(head_dim));
    let (running_states, wave_states) = (SharedSlice::new(running_states), SharedSlice::new(wave_states));
    for wave in long_parts.chunks(threads * WAVE_PER_THREAD) {
        pool.run(wave.len(), &|i| {
            let (item, split) = (&items[wave[i].item], wave[i].split);
            // SAFETY: one task of this region has this number.
            let state = &mut unsafe { numbered(&wave_states, i, head_dim) };
            LOCAL.with_borrow_mut(|Local { queries, scores, .. }| {
                queries.resize(ITEM_QUERIES * head_dim, 0.0);
                isa.run(OneSplit { job, item, split, queries, scores, state });
            });
        });
        let (first, last) = (wave[0].long, wave[wave.len() - 1].long);
        pool.run(last - first + 1, &|i| {
            // SAFETY: one task of this region has this long item, and so its running state.
            let running = &mut unsafe { numbered(&running_states, first + i, head_dim) };
            for (number, part) in wave.iter().enumerate().filter(|(_, part)| part.long == first + i) {
                // SAFETY: and its parts' states.
                let state = &unsafe { numbered(&wave_states, number, head_dim) };
                isa.run(Merge { job, item: &items[part.item], split: part.split, running, state });
            }
        });
    }
}

/// All splits of one item, one after another.
fn whole_item<E: Element>(isa: Isa, job: &Job<'_, E>, item: &Item, local: &mut Local) {
    let head_dim = job.heads.head_dim;
    local.queries.resize(ITEM_QUERIES * head_dim, 0.0);
    local.states.resize(2 * State::len(head_dim), 0.0);
    let Local { queries, scores, states } = local;
    let (running, state) = states.split_at_mut(State::len(head_dim));
    let (running, state) = (&mut State::over(running, head_dim), &mut State::over(state, head_dim));
    for split in item.splits.clone() {
        isa.run(OneSplit { job, item, split, queries, scores, state });
        isa.run(Merge { job, item, split, running, state });
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

/// Computes one split of an item.
struct OneSplit<'a, 's, E> {
    job: &'a Job<'a, E>,
    item: &'a Item,
    split: usize,
    queries: &'a mut [f32],
    scores: &'a mut Scores,
    state: &'a mut State<'s>,
}

impl<E: Element> Kernel for OneSplit<'_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        stage_queries(v, self.job, self.item, self.queries);
        compute_split(v, self.job, self.item, self.split, self.queries, self.scores, self.state);
    }
}

/// Merges one split into an item's running state. The item's first split begins it, the last writes the output.
struct Merge<'a, 'r, 's, E> {
    job: &'a Job<'a, E>,
    item: &'a Item,
    split: usize,
    running: &'a mut State<'r>,
    state: &'a State<'s>,
}

impl<E: Element> Kernel for Merge<'_, '_, '_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        if self.split == self.item.splits.start {
            self.running.clear();
        }
        self.running.merge(v, self.state, self.item.queries);
        if self.split + 1 == self.item.splits.end {
            write_out(v, self.job, self.item, self.running);
        }
    }
}
