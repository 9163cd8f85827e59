//! What the stages share while a step is being planned.

use octavo_kernels::BlockCopy;

use crate::kv::{KvCache, Sessions};
use crate::observe::events::Notes;
use crate::request::Time;
use crate::sequence::Sequence;
use crate::stages::queue::waiting::Waiting;

/// A step being planned: sequences get rows ([`Sequence::planned`]) until the rows or the blocks are given out.
#[derive(Debug)]
pub struct Step<'a> {
    /// The time of this step.
    pub now: Time,
    /// Token rows that are still to be given.
    pub rows_left: usize,
    /// Most sequences that may run.
    pub max_num_seqs: usize,
    /// Who waits.
    pub queue: &'a mut Waiting,
    /// Who runs, in order.
    pub running: &'a mut Vec<Sequence>,
    /// Who owns which block.
    pub kv: &'a mut KvCache,
    /// What is kept for conversations; it goes where somebody needs the blocks.
    pub sessions: &'a mut Sessions,
    /// Sequences that were sent back.
    pub preemptions: u64,
    /// Tokens that were found in the cache.
    pub tokens_cached: u64,
    /// Blocks to copy before the step.
    pub copies: Vec<BlockCopy>,
    /// What becomes of requests, for whoever wants to know.
    pub notes: &'a mut Notes,
}

impl Step<'_> {
    /// Gives a running sequence `rows` more rows and the blocks they need. Says no, and changes nothing, if there are not
    /// enough blocks.
    #[must_use]
    pub fn plan(&mut self, index: usize, rows: usize) -> bool {
        let sequence = &self.running[index];
        let end = sequence.computed + sequence.planned + rows;
        if self.room(index, end) < end {
            return false;
        }
        let sequence = &mut self.running[index];
        if !self.kv.grow(&mut sequence.table, end, self.now) {
            return false;
        }
        sequence.planned += rows;
        self.rows_left -= rows;
        true
    }

    /// Tokens that a running sequence has room for. Pins are given up until there is room for as many as `wanted`.
    pub fn room(&mut self, index: usize, wanted: usize) -> usize {
        let table = &self.running[index].table;
        while self.kv.room(table) < wanted && self.sessions.evict_oldest(None, self.kv, self.now) {}
        self.kv.room(table)
    }

    /// There is somebody waiting and a place to run.
    pub fn somebody_may_join(&self) -> bool {
        !self.queue.is_empty() && self.running.len() < self.max_num_seqs
    }
}
