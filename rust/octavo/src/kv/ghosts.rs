//! The names of blocks that were forgotten, and what is known of them.

use std::collections::{HashMap, VecDeque};

use super::PrefixKey;
use super::past::Past;
use crate::request::Time;

/// A block's name: a prefix, and a group of layers.
pub type Name = (PrefixKey, u32);

/// What is known of a block that was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ghost {
    /// How it had been used.
    pub past: Past,
    /// When it was forgotten.
    pub evicted: Time,
    /// Which eviction that was.
    serial: u64,
}

/// The names of the latest evictions, but for those that have come back.
#[derive(Debug)]
pub struct Ghosts {
    ghosts: HashMap<Name, Ghost>,
    /// In the order of eviction; the first is the eviction `first`.
    order: VecDeque<Name>,
    first: u64,
    most: usize,
}

impl Ghosts {
    /// For a pool of `blocks`: long enough a memory for a small pool to learn what it cannot hold, bounded for a large one.
    pub fn new(blocks: usize) -> Self {
        let most = blocks.clamp(1 << 16, 1 << 18);
        Self { ghosts: HashMap::new(), order: VecDeque::new(), first: 0, most }
    }

    /// A block is forgotten.
    pub fn insert(&mut self, name: Name, past: Past, evicted: Time) {
        let serial = self.first + self.order.len() as u64;
        self.ghosts.insert(name, Ghost { past, evicted, serial });
        self.order.push_back(name);
        if self.order.len() > self.most
            && let Some(oldest) = self.order.pop_front()
        {
            if self.ghosts.get(&oldest).is_some_and(|ghost| ghost.serial == self.first) {
                self.ghosts.remove(&oldest);
            }
            self.first += 1;
        }
    }

    /// A block with this name is remembered again.
    pub fn remove(&mut self, name: Name) -> Option<Ghost> {
        self.ghosts.remove(&name)
    }

    /// What is known of a block that was forgotten.
    pub fn get(&self, name: Name) -> Option<Ghost> {
        self.ghosts.get(&name).copied()
    }

    /// Asserts that it is bounded and of one mind.
    pub fn check(&self) {
        assert!(self.ghosts.len() <= self.order.len() && self.order.len() <= self.most, "more ghosts than evictions");
        for (name, ghost) in &self.ghosts {
            let place = ghost.serial.checked_sub(self.first).expect("dropped with its eviction") as usize;
            assert_eq!(self.order.get(place), Some(name), "a ghost of another eviction");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_evictions_are_known() {
        let past = |uses| Past { uses, ..Past::default() };
        let name = |i: u32| (PrefixKey::root("").then([i]), 0);
        let mut ghosts = Ghosts::new(0);
        let most = ghosts.most as u32;
        for i in 0..most {
            ghosts.insert(name(i), past(1), Time(0));
        }
        // The first comes back and is forgotten again: its first eviction does not take the second along.
        assert!(ghosts.remove(name(0)).is_some() && ghosts.get(name(0)).is_none());
        ghosts.insert(name(0), past(2), Time(9));
        assert_eq!(ghosts.get(name(0)).map(|ghost| (ghost.past.uses, ghost.evicted)), Some((2, Time(9))));
        ghosts.insert(name(most), past(1), Time(0));
        assert_eq!([0, 1, 2, most].map(|i| ghosts.get(name(i)).is_some()), [true, false, true, true]);
        ghosts.check();
    }
}
