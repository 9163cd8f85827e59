//! What is always true, whatever happened.

use std::collections::{BTreeMap, BTreeSet};

use super::Scheduler;
use crate::sequence::Sequence;
use crate::stages::queue::limits;

impl Scheduler {
    /// Asserts everything that is always true. Walks the pool and the queue: for tests.
    pub fn check(&self) {
        self.queue.check();
        let borrowed = self.running.iter().flat_map(|sequence| sequence.borrowed.iter().map(|&(block, _)| block));
        let tables = self.running.iter().map(|sequence| &sequence.table).chain(self.sessions.tables());
        self.kv.check(tables, borrowed);
        self.sessions.check(&self.kv);
        self.queue.users.check(self.living(), &self.sessions.held());
        self.running.check();
        assert!(self.running.len() <= self.config.max_num_seqs, "more run than may");
        let running = self.running.iter().map(|sequence| &**sequence);
        let deadline = |sequence: &Sequence| Some((sequence.request.deadline?, sequence.request.id));
        let deadlines: BTreeSet<_> = running.chain(self.queue.iter()).filter_map(deadline).collect();
        assert_eq!(self.deadlines, deadlines, "the deadlines are those of the living");
        let mut calls = BTreeMap::new();
        let living = self.running.iter().map(|sequence| &**sequence).chain(self.queue.iter());
        living.for_each(|sequence| *calls.entry(sequence.request.call).or_insert(0) += 1);
        assert_eq!(self.calls, calls, "the calls are those of the living");
        let announced = self.running.iter().map(|sequence| sequence.announcements());
        assert_eq!(self.kv.announcements(), announced.sum::<usize>(), "announced by somebody who runs");
        for sequence in self.running.iter() {
            self.check_running(sequence);
        }
    }

    fn check_running(&self, sequence: &Sequence) {
        let id = sequence.request.id;
        assert!(self.in_flight.is_some() || sequence.planned == 0, "{id}: planned rows without a step");
        assert!(self.in_flight.is_some() || sequence.ending.is_none(), "{id}: should have ended");
        let end = sequence.computed + sequence.planned;
        assert!(end <= sequence.known(), "{id}: runs tokens that nobody knows");
        let layout = &self.config.layout;
        assert_eq!(sequence.table.len(), layout.entries(end), "{id}: as many blocks as it needs");
        assert!(sequence.known() <= limits::longest(&self.config), "{id}: longer than may be");
        let full = sequence.computed / layout.block_size;
        assert!(
            self.in_flight.is_some() || !sequence.shares() || sequence.published == full,
            "{id}: blocks nobody can find"
        );
        for (group, &window) in layout.windows.iter().enumerate() {
            let outside = layout.outside(window, sequence.computed);
            assert_eq!(sequence.table.outside(group), outside, "{id}: holds what its window shows, and no more");
            for (index, &block) in sequence.table.blocks(group).iter().enumerate().skip(full) {
                // Where its stem ends it writes behind what others know, and perhaps copy just now.
                if index != sequence.stem() / layout.block_size && sequence.inherited != Some(index) {
                    assert_eq!(self.kv.pool().owners(block), 1, "{id}: would write a shared block");
                    assert!(!self.kv.pool().is_remembered(block), "{id}: would write a remembered block");
                }
            }
        }
        let most = layout.blocks_for(sequence.known());
        assert!(self.in_flight.is_some() || sequence.table.held() <= most, "{id}: holds more than it ever needs");
    }
}
