//! Time without work, for tests, benches and planning.
//!
//! A step takes what a [`CostModel`] says. Tokens are a hash of everything that a real model's would depend on (seed,
//! position, all tokens before), taken from the cache that the batch points to and not from the request. So a block that
//! is shared wrongly, stale or overwritten changes the tokens, as it would in a real model; with
//! [`Simulated::with_cache`] it is also noticed at once.

use std::collections::{HashMap, VecDeque};

use octavo_kernels::Segment;

use super::{Batch, Draw, Drawn, Entry, EntryOutput, Executor, LogitRows, StepOutput};
use crate::kv::KvLayout;
use crate::request::TokenLogprobs;

/// What a step costs, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Whatever is in it: the weights are read once.
    pub step_ns: f64,
    /// For every token row.
    pub row_ns: f64,
    /// For every cached token that a row attends to.
    pub context_ns: f64,
}

impl CostModel {
    /// Nanoseconds of a batch.
    pub fn batch_ns(&self, batch: &Batch) -> u64 {
        let attended: f64 = batch.segments.iter().map(attended).sum();
        (self.step_ns + self.row_ns * batch.rows() as f64 + self.context_ns * attended) as u64
    }
}

/// Positions that the rows of a segment see, added up.
fn attended(segment: &Segment) -> f64 {
    let (rows, context) = (segment.rows as f64, segment.context as f64);
    rows * (context - (rows - 1.0) / 2.0)
}

/// What a slot of the cache holds: a stand-in for a key and a value, which depend on all tokens up to this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    position: u32,
    token_id: u32,
    /// Hash of all tokens up to this one.
    prefix: u64,
}

const EMPTY: Slot = Slot { position: u32::MAX, token_id: 0, prefix: 0 };

/// An executor that only lets time pass.
#[derive(Debug)]
pub struct Simulated {
    cost: CostModel,
    vocab: u32,
    layout: KvLayout,
    /// Contents of the cache, or nothing.
    cache: Vec<Slot>,
    finished: VecDeque<StepOutput>,
    elapsed_ns: u64,
}

impl Simulated {
    /// Without a model of the cache: fast, and a token depends on seed, position and the last token only.
    pub fn new(cost: CostModel, vocab: u32) -> Self {
        assert!(vocab > 0);
        let layout = KvLayout::new(1);
        Self { cost, vocab, layout, cache: Vec::new(), finished: VecDeque::new(), elapsed_ns: 0 }
    }

    /// With the contents of a cache of `blocks` blocks, whose windows hold at least two positions. Panics at a batch that
    /// reads what its sequence did not write, or writes what another one reads.
    pub fn with_cache(cost: CostModel, vocab: u32, layout: KvLayout, blocks: usize) -> Self {
        assert!(layout.block_size > 0 && !layout.windows.contains(&Some(1)), "{layout:?}");
        Self { cache: vec![EMPTY; blocks * layout.block_size], layout, ..Self::new(cost, vocab) }
    }

    /// Nanoseconds that all steps took together.
    pub fn elapsed_ns(&self) -> u64 {
        self.elapsed_ns
    }

    /// The hash of all tokens up to each row of a segment, its keys and values now being in the cache.
    fn run(&mut self, batch: &Batch, segment: &Segment) -> Vec<u64> {
        let rows = segment.first_row..segment.first_row + segment.rows;
        if self.cache.is_empty() {
            return rows.map(|row| mix(0, u64::from(batch.ids[row]))).collect();
        }
        let start = segment.context - segment.rows;
        let mut prefix = self.read(batch, segment, start);
        rows.zip(start..)
            .map(|(row, position)| {
                let token_id = batch.ids[row];
                assert_eq!(batch.positions[row] as usize, position, "rows of a segment follow one another");
                prefix = mix(prefix, u64::from(token_id));
                for group in 0..self.layout.groups() {
                    let slot = self.slot(table(batch, segment, group, &self.layout), position);
                    let told = batch.slots[group * batch.rows() + row] as usize;
                    assert_eq!(told, slot, "a row is written where its block table says");
                    self.cache[slot] = Slot { position: position as u32, token_id, prefix };
                }
                prefix
            })
            .collect()
    }

    /// The hash of the first `context` tokens, read from the cache. In every group every slot that the next row sees must
    /// continue the one before, and all must come to the same.
    fn read(&self, batch: &Batch, segment: &Segment, context: usize) -> u64 {
        let mut prefixes = (0..self.layout.groups()).map(|group| {
            let table = table(batch, segment, group, &self.layout);
            let first = self.layout.windows[group].map_or(0, |window| (context + 1).saturating_sub(window));
            (first..context).fold(None, |before, position| {
                let slot = self.cache[self.slot(table, position)];
                assert_eq!(slot.position as usize, position, "a slot holds another position");
                if let Some(before) = before.or((position == 0).then_some(0)) {
                    assert_eq!(
                        slot.prefix,
                        mix(before, u64::from(slot.token_id)),
                        "position {position}: another prefix"
                    );
                }
                Some(slot.prefix)
            })
        });
        let prefix = prefixes.next().expect("there is a group");
        assert!(prefixes.all(|other| other == prefix), "groups disagree");
        prefix.unwrap_or(0)
    }

    fn slot(&self, table: &[u32], position: usize) -> usize {
        table[position / self.layout.block_size] as usize * self.layout.block_size + position % self.layout.block_size
    }

    /// No block that a sequence writes is in another one's table, or in another group's.
    fn check_writes(&self, batch: &Batch) {
        let mut writers = HashMap::new();
        for (index, segment) in batch.segments.iter().enumerate() {
            for group in 0..self.layout.groups() {
                for &slot in &batch.slots[group * batch.rows() + segment.first_row..][..segment.rows] {
                    let block = slot as usize / self.layout.block_size;
                    let writer = *writers.entry(block).or_insert((index, group));
                    assert_eq!(writer, (index, group), "block {block} is written twice");
                }
            }
        }
        for (index, segment) in batch.segments.iter().enumerate() {
            for group in 0..self.layout.groups() {
                for &block in table(batch, segment, group, &self.layout) {
                    let writer = writers.get(&(block as usize)).copied().unwrap_or((index, group));
                    assert_eq!(writer, (index, group), "block {block} is written by another sequence");
                }
            }
        }
    }

    fn output(&self, entry: &Entry, prefixes: &[u64]) -> EntryOutput {
        let last = prefixes[prefixes.len() - 1];
        let wanted = match entry.logits {
            LogitRows::None => &[][..],
            LogitRows::Last => &prefixes[prefixes.len() - 1..],
            LogitRows::All => prefixes,
        };
        EntryOutput {
            drawn: entry.draw.as_ref().map(|draw| Ok(self.draw(draw, last))),
            complete: false,
            prompt_logprobs: match entry.prompt_logprobs {
                None => Vec::new(),
                Some(top) => {
                    entry.prompt_next.iter().zip(prefixes).map(|(&id, &prefix)| logprobs(id, prefix, top)).collect()
                }
            },
            logits: wanted.iter().flat_map(|&prefix| (0..self.vocab).map(move |id| logit(id, prefix))).collect(),
        }
    }

    fn draw(&self, draw: &Draw, prefix: u64) -> Drawn {
        let coin = mix(mix(prefix, draw.seed), draw.position as u64);
        let allowed = (0..self.vocab).map(|step| (coin as u32 % self.vocab).wrapping_add(step) % self.vocab);
        let token_id = allowed.into_iter().find(|id| !draw.banned.contains(id)).unwrap_or(0);
        Drawn { token_id, logprobs: draw.params.logprobs.map(|top| logprobs(token_id, prefix, top)) }
    }
}

impl Executor for Simulated {
    fn launch(&mut self, batch: &Batch) -> Result<(), String> {
        if !self.cache.is_empty() {
            self.check_writes(batch);
            for copy in &batch.copies {
                let [from, to] = [copy.from, copy.to].map(|block| block as usize * self.layout.block_size);
                self.cache.copy_within(from..from + self.layout.block_size, to);
            }
        }
        let entries = batch.entries.iter().zip(&batch.segments);
        let entries = entries
            .map(|(entry, segment)| {
                let prefixes = self.run(batch, segment);
                self.output(entry, &prefixes)
            })
            .collect();
        self.elapsed_ns += self.cost.batch_ns(batch);
        self.finished.push_back(StepOutput { entries });
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, String> {
        self.finished.pop_front().ok_or_else(|| "no batch was launched".into())
    }
}

/// The block table of a segment in a group.
fn table<'a>(batch: &'a Batch, segment: &Segment, group: usize, layout: &KvLayout) -> &'a [u32] {
    let in_a_group = batch.block_tables.len() / layout.groups();
    &batch.block_tables[group * in_a_group + segment.first_table_entry..][..layout.entries(segment.context)]
}

fn logit(token_id: u32, prefix: u64) -> f32 {
    (mix(prefix, u64::from(token_id)) >> 40) as f32 / (1u64 << 24) as f32
}

fn logprobs(token_id: u32, prefix: u64, top: usize) -> TokenLogprobs {
    let top = (0..top as u32).map(|id| (id, -logit(id, prefix))).collect();
    TokenLogprobs { token_id, logprob: -logit(token_id, prefix), rank: 1, top }
}

/// A hash of a chain: the finaliser of splitmix64 over the sum.
fn mix(chain: u64, value: u64) -> u64 {
    let mut z = (chain ^ value.wrapping_mul(0xd134_2543_de82_ef95)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
