//! Who is next: the highest priority first, then whoever came first.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::observe::meter::QueueClock;
use crate::request::Time;
use crate::sequence::Sequence;

/// A request's place in line; the smallest goes first. It keeps it for life: a preempted sequence goes back to where it
/// stood, which is before everybody who came later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Order {
    /// Higher goes first.
    pub priority: Reverse<i32>,
    /// Requests that came before.
    pub arrival: u64,
}

/// The sequences that wait. Nothing here walks the queue.
#[derive(Debug, Default)]
pub struct Waiting {
    /// Why the queue waits, for everybody in it.
    pub clock: QueueClock,
    sequences: BTreeMap<Order, Sequence>,
    deadlines: BTreeSet<(Time, Order)>,
}

impl Waiting {
    /// How many wait.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Nobody waits.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Joins the queue.
    pub fn push(&mut self, sequence: Sequence) {
        if let Some(deadline) = sequence.request.deadline {
            self.deadlines.insert((deadline, sequence.order));
        }
        self.sequences.insert(sequence.order, sequence);
    }

    /// Leaves the queue.
    pub fn remove(&mut self, order: Order) -> Option<Sequence> {
        let sequence = self.sequences.remove(&order)?;
        if let Some(deadline) = sequence.request.deadline {
            self.deadlines.remove(&(deadline, order));
        }
        Some(sequence)
    }

    /// Whoever is next.
    pub fn head(&self) -> Option<&Sequence> {
        self.sequences.values().next()
    }

    /// One that waits.
    pub fn get_mut(&mut self, order: Order) -> Option<&mut Sequence> {
        self.sequences.get_mut(&order)
    }

    /// All that wait, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.sequences.values()
    }

    /// Takes one out whose deadline has passed.
    pub fn pop_expired(&mut self, now: Time) -> Option<Sequence> {
        let &(deadline, order) = self.deadlines.first()?;
        if deadline > now { None } else { self.remove(order) }
    }

    /// Takes any one out.
    pub fn pop(&mut self) -> Option<Sequence> {
        let order = self.head()?.order;
        self.remove(order)
    }

    /// Asserts that the deadlines are those of the sequences.
    pub fn check(&self) {
        let deadlines: BTreeSet<_> =
            self.iter().filter_map(|sequence| Some((sequence.request.deadline?, sequence.order))).collect();
        assert_eq!(self.deadlines, deadlines);
        for sequence in self.iter() {
            assert!(sequence.table.is_empty() && sequence.computed == 0, "{}: waits with blocks", sequence.request.id);
        }
    }
}
