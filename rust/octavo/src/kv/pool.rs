//! The blocks themselves: free, idle or owned. Every operation takes a constant time, however large the pool.

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

/// End of a list.
const NONE: u32 = u32::MAX;

/// What the pool knows of one block.
#[derive(Clone, Debug)]
struct Block {
    /// Sequences that hold it.
    owners: u32,
    /// Its contents can be found by prefix; without owners it is idle instead of free.
    remembered: bool,
    /// Neighbours in the list of idle blocks.
    older: u32,
    newer: u32,
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
    /// It was idle: whatever was remembered of it is to be forgotten.
    pub evicted: bool,
}

/// Who owns which block. Free blocks are a stack, idle ones a list from the least to the most recently used.
#[derive(Debug)]
pub struct Pool {
    blocks: Vec<Block>,
    free: Vec<u32>,
    oldest: u32,
    newest: u32,
    idle: usize,
    /// Block-nanoseconds owned up to `settled`.
    owned_ns: u128,
    settled: Time,
}

impl Pool {
    /// A pool of `blocks` free blocks.
    pub fn new(blocks: usize) -> Self {
        let count = u32::try_from(blocks).expect("block ids are 32 bits wide");
        assert!(count < NONE, "block ids are 32 bits wide");
        let block = Block { owners: 0, remembered: false, older: NONE, newer: NONE, since: Time(0), rent: 0, carry: 0 };
        Self {
            blocks: vec![block; blocks],
            free: (0..count).rev().collect(),
            oldest: NONE,
            newest: NONE,
            idle: 0,
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
        self.idle
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

    /// A block for one owner to write: a free one, else the least recently used idle one.
    pub fn take(&mut self, now: Time) -> Option<Taken> {
        self.owned_ns(now);
        let taken = match self.free.pop() {
            Some(id) => Taken { block: BlockId(id), evicted: false },
            None if self.oldest != NONE => {
                let block = BlockId(self.oldest);
                self.unlink(block);
                self.blocks[block.index()].remembered = false;
                Taken { block, evicted: true }
            }
            None => return None,
        };
        let block = &mut self.blocks[taken.block.index()];
        block.owners = 1;
        block.since = now;
        Some(taken)
    }

    /// One more owner for a block that is owned or idle.
    pub fn share(&mut self, id: BlockId, now: Time) {
        self.owned_ns(now);
        let block = &self.blocks[id.index()];
        assert!(block.remembered, "only a remembered block can be shared");
        if block.owners == 0 {
            self.unlink(id);
            self.blocks[id.index()].since = now;
        }
        self.rent(id, now);
        self.blocks[id.index()].owners += 1;
    }

    /// One owner less. Without owners, a remembered block becomes the newest idle one, any other is free.
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
            self.link_newest(id);
        } else {
            self.free.push(id.0);
        }
    }

    /// An owned block's contents can be found by prefix from now on.
    pub fn remember(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        assert!(block.owners > 0, "only an owner can publish a block");
        block.remembered = true;
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

    fn unlink(&mut self, id: BlockId) {
        let Block { older, newer, .. } = self.blocks[id.index()];
        match older {
            NONE => self.oldest = newer,
            _ => self.blocks[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.blocks[newer as usize].older = older,
        }
        self.idle -= 1;
    }

    fn link_newest(&mut self, id: BlockId) {
        let newest = std::mem::replace(&mut self.newest, id.0);
        match newest {
            NONE => self.oldest = id.0,
            _ => self.blocks[newest as usize].newer = id.0,
        }
        let block = &mut self.blocks[id.index()];
        block.older = newest;
        block.newer = NONE;
        self.idle += 1;
    }

    /// Asserts that every block is free, idle or owned, and that the lists say the same. Walks the whole pool.
    pub fn check(&self) {
        let mut free = vec![false; self.len()];
        for &id in &self.free {
            assert!(!std::mem::replace(&mut free[id as usize], true), "block {id} is free twice");
        }
        let mut idle = vec![false; self.len()];
        let (mut id, mut older) = (self.oldest, NONE);
        while id != NONE {
            assert!(!std::mem::replace(&mut idle[id as usize], true), "block {id} is idle twice");
            assert_eq!(self.blocks[id as usize].older, older, "block {id}: the list of idle blocks is torn");
            (older, id) = (id, self.blocks[id as usize].newer);
        }
        assert_eq!(self.newest, older, "the list of idle blocks does not end at the newest");
        assert_eq!(self.idle, idle.iter().filter(|&&idle| idle).count());
        for (id, block) in self.blocks.iter().enumerate() {
            assert_eq!(free[id], block.owners == 0 && !block.remembered, "block {id} is not where it belongs");
            assert_eq!(idle[id], block.owners == 0 && block.remembered, "block {id} is not where it belongs");
            assert!(block.owners > 0 || block.carry == 0, "block {id}: time that nobody pays for");
        }
    }
}
