//! Who runs, in order: the first is the last to lose its blocks.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};

use octavo_kernels::prefetch::prefetch;

use crate::request::RequestId;
use crate::sequence::Sequence;

/// A place among those who run; the smallest is first. A sequence gets it when it is admitted and keeps it for life: one
/// that lost its blocks comes back to where it stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Order {
    /// Higher goes first.
    priority: Reverse<i32>,
    /// Sequences that were admitted before.
    admitted: u64,
}

/// The sequences that run. Each in a place of its own, so that nothing but pointers moves when one comes or goes.
#[derive(Debug, Default)]
pub struct Running {
    #[expect(clippy::vec_box, reason = "they move whenever one before them comes or goes")]
    sequences: Vec<Box<Sequence>>,
    orders: HashMap<RequestId, Order>,
    admissions: u64,
}

impl Running {
    /// One more; says where it stands.
    pub fn insert(&mut self, mut sequence: Box<Sequence>) -> usize {
        let admitted = *sequence.admitted.get_or_insert(self.admissions);
        self.admissions += 1;
        let order = Order { priority: Reverse(sequence.request.priority), admitted };
        self.orders.insert(sequence.request.id, order);
        let index = self.sequences.partition_point(|running| place(running) < order);
        self.sequences.insert(index, sequence);
        index
    }

    /// Asks the memory for everything that a step touches. The model has pushed it out of the caches, and so much of it
    /// comes at once.
    pub fn prefetch(&self) {
        self.iter().for_each(|sequence| prefetch(&**sequence));
        for depth in 0..2 {
            self.iter().for_each(|sequence| sequence.prefetch(depth));
        }
    }

    /// Takes one out.
    pub fn remove(&mut self, index: usize) -> Box<Sequence> {
        let sequence = self.sequences.remove(index);
        self.orders.remove(&sequence.request.id);
        sequence
    }

    /// Takes out all whose end is decided.
    pub fn take_ending(&mut self) -> Vec<Box<Sequence>> {
        let ending: Vec<_> = self.sequences.extract_if(.., |sequence| sequence.ending.is_some()).collect();
        for sequence in &ending {
            self.orders.remove(&sequence.request.id);
        }
        ending
    }

    /// Takes out all.
    pub fn take_all(&mut self) -> Vec<Box<Sequence>> {
        self.orders.clear();
        std::mem::take(&mut self.sequences)
    }

    /// Where a request runs, if it does.
    pub fn position(&self, id: RequestId) -> Option<usize> {
        let order = self.orders.get(&id)?;
        self.sequences.binary_search_by_key(order, |sequence| place(sequence)).ok()
    }

    /// Asserts that they stand in order, and can be found.
    pub fn check(&self) {
        assert!(self.is_sorted_by_key(|sequence| place(sequence)), "running sequences are in order");
        assert_eq!(self.orders.len(), self.len());
        for (index, sequence) in self.iter().enumerate() {
            assert_eq!(self.position(sequence.request.id), Some(index), "{}", sequence.request.id);
        }
    }
}

fn place(sequence: &Sequence) -> Order {
    // Whoever runs was admitted.
    Order { priority: Reverse(sequence.request.priority), admitted: sequence.admitted.unwrap_or(u64::MAX) }
}

impl Deref for Running {
    type Target = [Box<Sequence>];
    fn deref(&self) -> &Self::Target {
        &self.sequences
    }
}

impl DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.sequences
    }
}
