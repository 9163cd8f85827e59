//! How blocks come back, and so which remembered block is forgotten first.
//!
//! Least recently used is right where blocks stay longer than the pauses between their uses. Where they do not, everything
//! that comes back has just been forgotten, and nothing is ever found but what everybody uses. So a block's turn comes
//! later the oftener it was used: every doubling of its uses is worth one typical pause more, as far as blocks come back
//! too late at all. Both are learnt from what happens, what was forgotten included, and measured on the pool's own clock,
//! which counts blocks taken and shared: no time enters, and the same history forgets the same blocks.

use std::collections::{HashMap, VecDeque};

use super::PrefixKey;
use crate::request::Time;

/// How many of the latest uses count.
const MEMORY: u64 = 4096;

/// Running means over the latest uses of what had been used before.
#[derive(Clone, Debug, Default)]
pub struct Habit {
    seen: u64,
    /// Ticks between one use and the next.
    pause: f64,
    /// Share of uses that came when the block had been forgotten.
    late: f64,
}

impl Habit {
    /// A block is used again after `pause` ticks, `late` if it had been forgotten by then.
    pub fn observe(&mut self, pause: u64, late: bool) {
        self.seen = (self.seen + 1).min(MEMORY);
        let weight = 1.0 / self.seen as f64;
        self.pause += weight * (pause as f64 - self.pause);
        self.late += weight * (f64::from(u8::from(late)) - self.late);
    }

    /// How many ticks longer a block is kept for every doubling of its uses. The root was chosen by trial: a share of 1 in
    /// 100 that come too late asks for a tenth of a pause.
    pub fn worth_of_doubling(&self) -> u64 {
        (self.pause * self.late.sqrt()) as u64
    }
}

/// A block's name: a prefix, and a group of layers.
pub type Name = (PrefixKey, u32);

/// What is known of a block that was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ghost {
    /// How often it had been used.
    pub uses: u32,
    /// When it was last used, on the pool's clock.
    pub touched: u64,
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
    pub fn insert(&mut self, name: Name, uses: u32, touched: u64, evicted: Time) {
        let serial = self.first + self.order.len() as u64;
        self.ghosts.insert(name, Ghost { uses, touched, evicted, serial });
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
    fn a_doubling_is_worth_a_pause_where_blocks_come_back_too_late() {
        let mut habit = Habit::default();
        assert_eq!(habit.worth_of_doubling(), 0, "least recently used until something is known");
        (0..10_000).for_each(|_| habit.observe(500, true));
        assert!((499..=500).contains(&habit.worth_of_doubling()));
        (0..100_000).for_each(|_| habit.observe(500, false));
        assert_eq!(habit.worth_of_doubling(), 0, "and where none does");
    }

    #[test]
    fn only_the_latest_evictions_are_known() {
        let name = |i: u32| (PrefixKey::root("").then([i]), 0);
        let mut ghosts = Ghosts::new(0);
        let most = ghosts.most as u32;
        for i in 0..most {
            ghosts.insert(name(i), 1, u64::from(i), Time(0));
        }
        // The first comes back and is forgotten again: its first eviction does not take the second along.
        assert!(ghosts.remove(name(0)).is_some() && ghosts.get(name(0)).is_none());
        ghosts.insert(name(0), 2, 7, Time(9));
        assert_eq!(ghosts.get(name(0)).map(|ghost| (ghost.uses, ghost.evicted)), Some((2, Time(9))));
        ghosts.insert(name(most), 1, 0, Time(0));
        assert_eq!([0, 1, 2, most].map(|i| ghosts.get(name(i)).is_some()), [true, false, true, true]);
        ghosts.check();
    }
}
