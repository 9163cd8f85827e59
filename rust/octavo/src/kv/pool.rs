//! The blocks themselves: free, idle or owned. Every operation takes a constant time, however large the pool.

use super::ghosts::Ghost;
use super::habit::Habit;
use super::idle::Idle;
use super::past::{Mark, Past};
use crate::request::Time;

/// A block's place in the pool. Not a token position, not a byte offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// In the place of a block that was given back.
    pub const NONE: Self = Self(octavo_kernels::StepInput::NO_BLOCK);

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// What the pool knows of one block.
#[derive(Clone, Debug)]
struct Block {
    /// Sequences that hold it.
    owners: u32,
    /// Its contents can be found by prefix; without owners it is idle instead of free.
    remembered: bool,
    /// How its contents were used, what is known from before they were last forgotten included.
    past: Past,
    // Rent: time passes for a block and is split evenly among its owners. `rent` is what one owner who had held it
    // since the beginning would owe, up to the moment `since`; `carry` is the remainder of the division, which the next
    // split takes up. The last owner divides by 1, so nothing is ever lost: all rents together are exactly the time
    // that blocks were owned.
    since: Time,
    rent: u64,
    carry: u32,
}

/// A block that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Which.
    pub block: BlockId,
    /// It was idle: whatever was remembered of it is to be forgotten. How it had been used.
    pub evicted: Option<Past>,
}

/// Who owns which block. Free blocks are a stack, idle ones wait in the order in which they are to be forgotten.
#[derive(Debug)]
pub struct Pool {
    blocks: Vec<Block>,
    free: Vec<u32>,
    idle: Idle,
    /// Blocks taken and shared so far.
    clock: u64,
    habit: Habit,
    /// Block-nanoseconds owned up to `settled`.
    owned_ns: u128,
    settled: Time,
}

impl Pool {
    /// A pool of `blocks` free blocks.
    pub fn new(blocks: usize) -> Self {
        let count = u32::try_from(blocks).expect("block ids are 32 bits wide");
        let block = Block { owners: 0, remembered: false, past: Past::default(), since: Time(0), rent: 0, carry: 0 };
        Self {
            blocks: vec![block; blocks],
            free: (0..count).rev().collect(),
            idle: Idle::new(blocks),
            clock: 0,
            habit: Habit::new(blocks),
            owned_ns: 0,
            settled: Time(0),
        }
    }

    /// All blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// There is not a single block.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks with nothing in them.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks without an owner whose contents are remembered.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Blocks that somebody holds.
    pub fn owned(&self) -> usize {
        self.len() - self.free() - self.idle()
    }

    /// Blocks that [`Pool::take`] could give.
    pub fn available(&self) -> usize {
        self.free() + self.idle()
    }

    /// How many sequences hold a block.
    pub fn owners(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].owners
    }

    /// Whether a block's contents can be found by prefix.
    pub fn is_remembered(&self, block: BlockId) -> bool {
        self.blocks[block.index()].remembered
    }

    /// Block-nanoseconds owned by anyone up to `now`.
    pub fn owned_ns(&mut self, now: Time) -> u128 {
        self.owned_ns += self.owned() as u128 * u128::from(now.since(self.settled));
        self.settled = now;
        self.owned_ns
    }

    /// How a block's contents were used.
    pub fn past(&self, block: BlockId) -> Past {
        self.blocks[block.index()].past
    }

    /// What the request is like that uses an owned block last.
    pub fn mark(&mut self, block: BlockId, mark: Mark) {
        let block = &mut self.blocks[block.index()];
        assert!(block.owners > 0, "a block that waits stays in its class");
        block.past.mark = mark;
    }

    /// A block for one owner to write: a free one, else the idle one whose turn it is.
    pub fn take(&mut self, now: Time) -> Option<Taken> {
        self.owned_ns(now);
        let taken = match self.free.pop() {
            Some(id) => Taken { block: BlockId(id), evicted: None },
            None => self.evict()?,
        };
        self.tick();
        let block = &mut self.blocks[taken.block.index()];
        block.owners = 1;
        block.since = now;
        block.past = Past { touched: self.clock, ..Past::default() };
        Some(taken)
    }

    fn evict(&mut self) -> Option<Taken> {
        let id = self.idle.first(&mut self.habit)?;
        self.idle.remove(id);
        let block = &mut self.blocks[id as usize];
        block.remembered = false;
        Some(Taken { block: BlockId(id), evicted: Some(block.past) })
    }

    fn tick(&mut self) {
        self.clock += 1;
        if let Some(turn) = self.habit.tick(self.clock) {
            self.idle.turn(turn);
        }
    }

    /// One more owner for a block that is owned or idle.
    pub fn share(&mut self, id: BlockId, now: Time) {
        self.owned_ns(now);
        assert!(self.is_remembered(id), "only a remembered block can be shared");
        self.tick();
        if self.owners(id) == 0 {
            self.idle.remove(id.0);
            self.habit.wake(self.past(id), self.clock);
            self.blocks[id.index()].since = now;
        }
        self.rent(id, now);
        let block = &mut self.blocks[id.index()];
        block.owners += 1;
        block.past.uses = block.past.uses.saturating_add(1);
        block.past.touched = self.clock;
    }

    /// One owner less. Without owners, a remembered block becomes idle, any other is free.
    pub fn release(&mut self, id: BlockId, now: Time) {
        self.owned_ns(now);
        self.rent(id, now);
        let block = &mut self.blocks[id.index()];
        assert!(block.owners > 0, "a block was given back twice");
        block.owners -= 1;
        if block.owners > 0 {
            return;
        }
        if block.remembered {
            block.past.touched = self.clock;
            let class = block.past.class();
            self.habit.rest(class);
            self.idle.insert(id.0, self.habit.newest(), class);
        } else {
            self.free.push(id.0);
        }
    }

    /// An owned block's contents can be found by prefix from now on; `before` is what is known of contents of this name
    /// that were forgotten.
    pub fn remember(&mut self, id: BlockId, before: Option<Ghost>) {
        let block = &mut self.blocks[id.index()];
        assert!(block.owners > 0, "only an owner can publish a block");
        block.remembered = true;
        let Some(Ghost { past, .. }) = before else {
            block.past.uses = block.past.uses.max(1);
            return;
        };
        block.past.uses = block.past.uses.max(past.uses.saturating_add(1));
        block.past.mark = past.mark;
        self.habit.wake(past, self.clock);
    }

    /// What an owner since the beginning would owe for this block by `now`: an owner's rent is the difference between
    /// giving it back and taking it.
    pub fn rent(&mut self, id: BlockId, now: Time) -> u64 {
        let block = &mut self.blocks[id.index()];
        if block.owners > 0 {
            let due = now.since(block.since) + u64::from(block.carry);
            block.rent += due / u64::from(block.owners);
            block.carry = (due % u64::from(block.owners)) as u32;
            block.since = now;
        }
        block.rent
    }

    /// Asserts that every block is free, idle or owned, and that the rings say the same. Walks the whole pool.
    pub fn check(&self) {
        let mut free = vec![false; self.len()];
        for &id in &self.free {
            assert!(!std::mem::replace(&mut free[id as usize], true), "block {id} is free twice");
        }
        let mut idle = vec![false; self.len()];
        for ring in self.idle.rings() {
            let mut before: Option<Past> = None;
            for id in ring {
                let past = self.blocks[id as usize].past;
                assert!(!std::mem::replace(&mut idle[id as usize], true), "block {id} is idle twice");
                assert!(before.is_none_or(|before| before.class() == past.class()), "block {id}: another class");
                assert!(
                    before.is_none_or(|before| before.touched <= past.touched),
                    "block {id}: not in the order of use"
                );
                before = Some(past);
            }
        }
        assert_eq!(self.idle.len(), idle.iter().filter(|&&idle| idle).count());
        for (id, block) in self.blocks.iter().enumerate() {
            assert_eq!(free[id], block.owners == 0 && !block.remembered, "block {id} is not where it belongs");
            assert_eq!(idle[id], block.owners == 0 && block.remembered, "block {id} is not where it belongs");
            assert!(block.owners > 0 || block.carry == 0, "block {id}: time that nobody pays for");
        }
    }
}
