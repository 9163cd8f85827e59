//! Idle blocks, in the order in which they are to be forgotten.
//!
//! Those of one cohort and class are worth the same, and lie in a ring from the least to the most recently used. Once an
//! epoch the rings are ordered by their worth, and then emptied one after the other. Every other operation takes a constant
//! time.

use super::habit::{Habit, MOST_COHORTS, Turn};
use super::past::CLASSES;

/// Neighbours in a ring. A ring's head is older than the oldest and newer than the newest.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// The rings.
#[derive(Debug)]
pub struct Idle {
    /// Of all blocks, then of the heads: one for every slot of a cohort and every class.
    links: Vec<Link>,
    blocks: usize,
    len: usize,
    /// Worth, place before ordering, and head, the least first; empty until somebody asks.
    order: Vec<(f64, usize, u32)>,
    /// What comes before is empty.
    next: usize,
    /// Where the newest cohort's rings are in the order: blocks come to those only.
    newest: Vec<usize>,
}

impl Idle {
    /// For a pool of `blocks`, none of them idle.
    pub fn new(blocks: usize) -> Self {
        assert!(u32::try_from(blocks + MOST_COHORTS * CLASSES).is_ok(), "links are 32 bits wide");
        Self {
            links: (0..blocks + CLASSES).map(alone).collect(),
            blocks,
            len: 0,
            order: Vec::new(),
            next: 0,
            newest: vec![0; CLASSES],
        }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.len
    }

    fn head(&self, slot: usize, class: usize) -> u32 {
        (self.blocks + slot * CLASSES + class) as u32
    }

    /// A block becomes the newest of its ring; `slot` is the newest cohort's.
    pub fn insert(&mut self, id: u32, slot: usize, class: usize) {
        let head = self.head(slot, class);
        let newest = self.links[head as usize].older;
        self.join(newest, id);
        self.join(id, head);
        self.len += 1;
        self.next = self.next.min(self.newest[class]);
    }

    /// An idle block is none any more.
    pub fn remove(&mut self, id: u32) {
        let Link { older, newer } = self.links[id as usize];
        self.join(older, newer);
        self.len -= 1;
    }

    /// Whose turn it is to be forgotten.
    pub fn first(&mut self, habit: &mut Habit) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        if self.order.is_empty() {
            self.sort(habit);
        }
        loop {
            let head = self.order[self.next].2;
            match self.links[head as usize].newer {
                oldest if oldest == head => self.next += 1,
                oldest => return Some(oldest),
            }
        }
    }

    /// Orders the rings. Of equals the older cohort goes first, and in it what was used less, so that a prefix loses its end
    /// before its beginning.
    fn sort(&mut self, habit: &mut Habit) {
        let newest = habit.newest();
        for (slot, worths) in habit.cohorts() {
            for (class, worth) in worths.enumerate() {
                let head = self.head(slot, class);
                if slot == newest || self.links[head as usize].newer != head {
                    self.order.push((worth, self.order.len(), head));
                }
            }
        }
        self.order
            .sort_unstable_by(|(worth, place, _), (other, after, _)| worth.total_cmp(other).then(place.cmp(after)));
        let first = self.head(newest, 0);
        for (place, (_, _, head)) in self.order.iter().enumerate() {
            if let Some(class) = head.checked_sub(first).filter(|&class| (class as usize) < CLASSES) {
                self.newest[class as usize] = place;
            }
        }
        self.next = 0;
    }

    /// An epoch has ended: two cohorts may have become one, and what waits are worth has changed.
    pub fn turn(&mut self, turn: Turn) {
        self.order.clear();
        self.next = 0;
        let Some((older, newer)) = turn.merged else {
            // One more cohort, in a slot of its own.
            let count = self.links.len();
            return self.links.extend((count..count + CLASSES).map(alone));
        };
        for class in 0..CLASSES {
            let (older, newer) = (self.head(older, class), self.head(newer, class));
            let Link { older: last, newer: first } = self.links[newer as usize];
            if first != newer {
                self.join(self.links[older as usize].older, first);
                self.join(last, older);
                self.join(newer, newer);
            }
        }
    }

    fn join(&mut self, older: u32, newer: u32) {
        self.links[older as usize].newer = newer;
        self.links[newer as usize].older = older;
    }

    /// The idle blocks of each ring, the oldest first. Walks all.
    pub fn rings(&self) -> impl Iterator<Item = impl Iterator<Item = u32>> {
        (self.blocks..self.links.len()).map(move |head| {
            let next = move |&id: &u32| Some(self.links[id as usize].newer).filter(|&id| id as usize != head);
            std::iter::successors(next(&(head as u32)), next)
        })
    }
}

/// In no ring, or the head of an empty one.
fn alone(id: usize) -> Link {
    Link { older: id as u32, newer: id as u32 }
}
