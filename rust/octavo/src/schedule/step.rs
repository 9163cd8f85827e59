//! What the stages share while a step is being planned.

use std::collections::VecDeque;

use octavo_kernels::BlockCopy;

use crate::kv::{KvCache, Sessions};
use crate::observe::events::Notes;
use crate::request::Time;
use crate::schedule::pace::{Pace, PromptRows};
use crate::schedule::{Event, Running};
use crate::sequence::{Phase, Sequence};
use crate::stages::queue::waiting::Waiting;

/// A step being planned: sequences get rows ([`Sequence::planned`]) until the rows or the blocks are given out.
#[derive(Debug)]
pub struct Step<'a> {
    /// The time of this step.
    pub now: Time,
    /// Token rows that are still to be given.
    pub rows_left: usize,
    /// How much longer prompts may make the step, in nanoseconds.
    pub prompt_ns_left: f64,
    /// Rows of prompts that were given.
    pub prompt_rows: PromptRows,
    /// What rows of prompts cost.
    pub pace: &'a Pace,
    /// Most sequences that may run.
    pub max_num_seqs: usize,
    /// Who waits.
    pub queue: &'a mut Waiting,
    /// Who runs, in order.
    pub running: &'a mut Running,
    /// Who owns which block.
    pub kv: &'a mut KvCache,
    /// What is kept for conversations; it goes where somebody needs the blocks.
    pub sessions: &'a mut Sessions,
    /// Running sequences that will have more of their prompt to read after this step.
    pub half_read: usize,
    /// Blocks that half-read prompts will still take.
    pub promised: usize,
    /// Sequences that were sent back.
    pub preemptions: u64,
    /// Tokens of those that were admitted.
    pub tokens_admitted: usize,
    /// Tokens that were found in the cache.
    pub tokens_cached: u64,
    /// Blocks to copy before the step.
    pub copies: Vec<BlockCopy>,
    /// What becomes of requests, for whoever wants to know.
    pub notes: &'a mut Notes,
    /// What there is to say to callers.
    pub events: &'a mut VecDeque<Event>,
}

impl Step<'_> {
    /// Gives a running sequence `rows` more rows and the blocks they need. Says no, and changes nothing, if there are not
    /// enough blocks.
    #[must_use]
    pub fn plan(&mut self, index: usize, rows: usize) -> bool {
        let reading = self.running[index].phase() == Phase::Prefill;
        let promised = if reading { self.promise(index) } else { 0 };
        let sequence = &self.running[index];
        let work = sequence.work(rows);
        let begin = sequence.computed + sequence.planned;
        let end = begin + rows;
        let grows = !self.kv.holds(&sequence.table, end);
        if grows && (self.room(index, end) < end || !self.kv.grow(&mut self.running[index].table, end, self.now)) {
            return false;
        }
        let sequence = &mut self.running[index];
        sequence.planned += rows;
        self.rows_left -= rows;
        self.queue.users.charge(sequence.user, work);
        if reading {
            self.prompt_rows.add(begin, rows);
            self.prompt_ns_left -= rows as f64 * self.pace.row_ns(begin);
            self.half_read -= usize::from(sequence.planned == sequence.unread());
            self.promised = self.promised + self.promise(index) - promised;
        }
        true
    }

    /// Rows that a prompt may have in what is left of the step, after `context` tokens. The first prompt gets at least one, so
    /// that prompts get on, if any may have some.
    pub fn fitting(&self, context: usize) -> usize {
        let within_target = (self.prompt_ns_left / self.pace.row_ns(context)) as usize;
        let least = usize::from(self.prompt_rows.total() == 0 && self.prompt_ns_left > 0.0);
        self.rows_left.min(within_target.max(least))
    }

    /// Tokens that a running sequence has room for. Pins are given up until there is room for as many as `wanted`.
    pub fn room(&mut self, index: usize, wanted: usize) -> usize {
        let table = &self.running[index].table;
        while self.kv.room(table) < wanted && self.sessions.evict_oldest(None, self.kv, self.now) {}
        self.kv.room(table)
    }

    /// Counts a running sequence whose prompt is not read yet.
    pub fn note_reader(&mut self, index: usize) {
        self.half_read += 1;
        self.promised += self.promise(index);
    }

    /// One of them is not going on.
    pub fn forget_reader(&mut self, index: usize) {
        self.half_read -= 1;
        self.promised -= self.promise(index);
    }

    /// Blocks that a sequence will take until its prompt is read and the next token is there.
    fn promise(&self, index: usize) -> usize {
        let sequence: &Sequence = &self.running[index];
        self.kv.layout().blocks_for(sequence.room_wanted()).saturating_sub(sequence.table.held())
    }

    /// There is somebody waiting and a place to run.
    pub fn somebody_may_join(&self) -> bool {
        !self.queue.is_empty() && self.running.len() < self.max_num_seqs
    }
}
