//! Runs a batch. The scheduler plans in counts; an [`Executor`] turns a plan into tokens.
//!
//! It has several homes: [`local`] drives a model over a backend, [`simulated`] only lets time pass. The scheduler cannot
//! tell which one it drives.

use std::sync::Arc;

use octavo_kernels::{BlockCopy, Segment, StepInput};

use crate::grammar::Guide;
use crate::request::{RequestId, SamplingParams, TokenLogprobs, Wanted};
use crate::sample::TokenHistory;

pub mod local; // a model over a backend
mod ahead; // the next step, before it is asked for
pub mod memory; // how bytes are divided at load
pub mod rehearsal; // how many of a device's a model takes
pub mod machine; // how many there are
pub mod simulated; // time without work, for tests, benches and planning

/// One step's work, as flat arrays that a backend can take as they are. Row `i` is one token to run.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Number of this step, from 0.
    pub step: u64,
    /// Token id of every row.
    pub ids: Vec<u32>,
    /// Position of every row in its sequence.
    pub positions: Vec<u32>,
    /// `block · block_size + offset` of every row's key and value, `(groups, rows)`: see [`StepInput`].
    pub slots: Vec<u32>,
    /// One per sequence in the batch, in row order.
    pub segments: Vec<Segment>,
    /// Block tables of the segments, one after another: `(groups, entries)`.
    pub block_tables: Vec<u32>,
    /// One per segment: whose it is and what is wanted of it.
    pub entries: Vec<Entry>,
    /// Blocks to copy before any row is run.
    pub copies: Vec<BlockCopy>,
}

impl Batch {
    /// The part that a backend needs.
    pub fn input(&self) -> StepInput<'_> {
        StepInput {
            ids: &self.ids,
            positions: &self.positions,
            slots: &self.slots,
            segments: &self.segments,
            block_tables: &self.block_tables,
        }
    }
    /// Token rows in the batch.
    pub fn rows(&self) -> usize {
        self.ids.len()
    }
    /// The part of it that some of its entries are: those for which `chosen` says so, by number. Without copies.
    pub fn part(&self, chosen: impl Fn(usize) -> bool) -> Batch {
        let mut part = Batch { step: self.step, ..Batch::default() };
        for group in 0..self.groups() {
            for (number, segment) in self.segments.iter().enumerate().filter(|&(number, _)| chosen(number)) {
                let rows = segment.first_row..segment.first_row + segment.rows;
                if group == 0 {
                    let (first_row, first_table_entry) = (part.ids.len(), part.block_tables.len());
                    part.segments.push(Segment { first_row, first_table_entry, ..*segment });
                    part.ids.extend(&self.ids[rows.clone()]);
                    part.positions.extend(&self.positions[rows.clone()]);
                    part.entries.push(self.entries[number].clone());
                }
                part.slots.extend(&self.slots[group * self.rows()..][rows]);
                part.block_tables.extend(self.table(number, group));
            }
        }
        part
    }
    /// Groups of layers.
    pub fn groups(&self) -> usize {
        self.slots.len() / self.rows().max(1)
    }
    /// The block table of entry number `number` in a group.
    pub fn table(&self, number: usize, group: usize) -> &[u32] {
        let entries = self.block_tables.len() / self.groups().max(1);
        let next = self.segments.get(number + 1).map_or(entries, |next| next.first_table_entry);
        &self.block_tables[group * entries..][self.segments[number].first_table_entry..next]
    }
    /// Forgets the contents, keeps the memory.
    pub fn clear(&mut self) {
        self.ids.clear();
        self.positions.clear();
        self.slots.clear();
        self.segments.clear();
        self.block_tables.clear();
        self.entries.clear();
        self.copies.clear();
    }
}

/// What is wanted of one sequence in a batch.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Whose rows these are.
    pub id: RequestId,
    /// Draw a token after the last row (every known token has been run). `None` for a chunk that does not end the prompt.
    pub draw: Option<Draw>,
    /// A token may follow the one that is drawn.
    pub goes_on: bool,
    /// Knows which tokens a draw may give. Asked when the logits are there, told what was drawn.
    pub guide: Option<Arc<Guide>>,
    /// Log-probabilities of the prompt tokens that follow this segment's rows, with so many alternatives. The tokens are
    /// `prompt_next`, one per row but for the last row of the prompt, which has none.
    pub prompt_logprobs: Option<usize>,
    /// See `prompt_logprobs`; empty otherwise.
    pub prompt_next: Vec<u32>,
    /// Raw logits to give back.
    pub logits: LogitRows,
}

/// Which rows' raw logits are to be given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogitRows {
    /// None.
    #[default]
    None,
    /// The last row's.
    Last,
    /// All rows'.
    All,
}

impl LogitRows {
    /// For a chunk of a request that wants `wanted`, `last` if it ends the prompt.
    pub fn of(wanted: Wanted, last: bool) -> Self {
        match (wanted, last) {
            (Wanted::AllLogits, _) => Self::All,
            (Wanted::LastLogits, true) => Self::Last,
            _ => Self::None,
        }
    }
}

/// Everything a draw depends on, besides the logits. Nothing here knows the batch.
#[derive(Clone, Debug)]
pub struct Draw {
    /// How to choose.
    pub params: Arc<SamplingParams>,
    /// Seed of the coins.
    pub seed: u64,
    /// Position of the token to be drawn: how many tokens are known. With the seed it decides the coin.
    pub position: usize,
    /// The tokens before, when `params.needs_history()`.
    pub history: Option<Arc<TokenHistory>>,
    /// Tokens that may not be drawn yet (ends before `min_tokens`).
    pub banned: Arc<[u32]>,
}

/// What a step gave, one per entry of the batch and in its order.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// The outcome of every entry.
    pub entries: Vec<EntryOutput>,
}

/// What a step gave for one entry.
#[derive(Clone, Debug, Default)]
pub struct EntryOutput {
    /// The drawn token, if one was to be drawn; or why there is none: that request's error, nobody else's.
    pub drawn: Option<Result<Drawn, String>>,
    /// A token was to be drawn and there is none: the grammar is complete, and nothing can follow.
    pub complete: bool,
    /// As asked by `prompt_logprobs`.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// As asked by `logits`: rows of `vocab` values.
    pub logits: Vec<f32>,
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token_id: u32,
    /// When `params.logprobs` asks.
    pub logprobs: Option<TokenLogprobs>,
}

/// Runs batches.
///
/// `launch` may return before the device is done; `collect` waits for the oldest launched batch. An `Err` from either is
/// the engine's end: every request in flight gets it.
pub trait Executor: Send {
    /// Starts a batch.
    fn launch(&mut self, batch: &Batch) -> Result<(), String>;
    /// The result of the oldest batch that was launched.
    fn collect(&mut self) -> Result<StepOutput, String>;
}
