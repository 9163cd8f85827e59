//! The blocks themselves: free, idle or owned. Every operation takes a constant time, however large the pool.

use super::habit::{Ghost, Habit};
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
/// Idle blocks are told apart by the logarithm of their uses, up to this many classes.
const CLASSES: usize = 16;

/// What the pool knows of one block.
#[derive(Clone, Debug)]
struct Block {
    /// Sequences that hold it.
    owners: u32,
    /// Its contents can be found by prefix; without owners it is idle instead of free.
    remembered: bool,
    /// How often its contents were written or found, what is known from before they were last forgotten included.
    uses: u32,
    /// The last of these, or when it became idle, on the pool's clock.
    touched: u64,
    /// Neighbours in the list of idle blocks of its class.
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
    /// It was idle: whatever was remembered of it is to be forgotten. How often it had been used, and when last.
    pub evicted: Option<(u32, u64)>,
}

/// A list of idle blocks from the least to the most recently used.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
}

/// Who owns which block. Free blocks are a stack, idle ones lie in a list for each class of use.
#[derive(Debug)]
pub struct Pool {
    blocks: Vec<Block>,
    free: Vec<u32>,
    lists: [List; CLASSES],
    idle: usize,
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
        assert!(count < NONE, "block ids are 32 bits wide");
        let block = Block {
            owners: 0,
            remembered: false,
            uses: 0,
            touched: 0,
            older: NONE,
            newer: NONE,
            since: Time(0),
            rent: 0,
            carry: 0,
        };
        Self {
            blocks: vec![block; blocks],
            free: (0..count).rev().collect(),
            lists: [List { oldest: NONE, newest: NONE }; CLASSES],
            idle: 0,
            clock: 0,
            habit: Habit::default(),
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

    /// How blocks come back to this pool.
    pub fn habit(&self) -> &Habit {
        &self.habit
    }

    /// A block for one owner to write: a free one, else the idle one whose turn it is.
    pub fn take(&mut self, now: Time) -> Option<Taken> {
        self.owned_ns(now);
        let taken = match self.free.pop() {
            Some(id) => Taken { block: BlockId(id), evicted: None },
            None => self.evict()?,
        };
        self.clock += 1;
        let block = &mut self.blocks[taken.block.index()];
        block.owners = 1;
        block.since = now;
        (block.uses, block.touched) = (0, self.clock);
        Some(taken)
    }

    /// The oldest of each class is asked; of equals the one that was used less goes, so that a prefix loses its end before
    /// its beginning.
    fn evict(&mut self) -> Option<Taken> {
        let worth = self.habit.worth_of_doubling();
        let oldest = self.lists.iter().enumerate().filter(|(_, list)| list.oldest != NONE);
        let turn = |(class, list): (usize, &List)| {
            let touched = self.blocks[list.oldest as usize].touched;
            (touched.saturating_add(worth.saturating_mul(class as u64)), class, BlockId(list.oldest))
        };
        let (_, _, id) = oldest.map(turn).min()?;
        self.unlink(id);
        let block = &mut self.blocks[id.index()];
        block.remembered = false;
        Some(Taken { block: id, evicted: Some((block.uses, block.touched)) })
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
        self.clock += 1;
        let block = &mut self.blocks[id.index()];
        block.owners += 1;
        block.uses = block.uses.saturating_add(1);
        let pause = self.clock - std::mem::replace(&mut block.touched, self.clock);
        self.habit.observe(pause, false);
    }

    /// One owner less. Without owners, a remembered block becomes the newest idle one of its class, any other is free.
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
            block.touched = self.clock;
            self.link_newest(id);
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
        block.uses = block.uses.max(before.map_or(0, |ghost| ghost.uses).saturating_add(1));
        if let Some(ghost) = before {
            self.habit.observe(self.clock - ghost.touched, true);
        }
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

    /// The list that an idle block is in.
    fn list(&mut self, id: BlockId) -> &mut List {
        &mut self.lists[class(self.blocks[id.index()].uses)]
    }

    fn unlink(&mut self, id: BlockId) {
        let Block { older, newer, .. } = self.blocks[id.index()];
        match older {
            NONE => self.list(id).oldest = newer,
            _ => self.blocks[older as usize].newer = newer,
        }
        match newer {
            NONE => self.list(id).newest = older,
            _ => self.blocks[newer as usize].older = older,
        }
        self.idle -= 1;
    }

    fn link_newest(&mut self, id: BlockId) {
        let newest = std::mem::replace(&mut self.list(id).newest, id.0);
        match newest {
            NONE => self.list(id).oldest = id.0,
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
        for (class, list) in self.lists.iter().enumerate() {
            let (mut id, mut older, mut touched) = (list.oldest, NONE, 0);
            while id != NONE {
                let block = &self.blocks[id as usize];
                assert!(!std::mem::replace(&mut idle[id as usize], true), "block {id} is idle twice");
                assert_eq!(block.older, older, "block {id}: the list of idle blocks is torn");
                assert_eq!(self::class(block.uses), class, "block {id}: another class");
                assert!(block.touched >= touched, "block {id}: not in the order of use");
                (older, id, touched) = (id, block.newer, block.touched);
            }
            assert_eq!(list.newest, older, "the list of idle blocks does not end at the newest");
        }
        assert_eq!(self.idle, idle.iter().filter(|&&idle| idle).count());
        for (id, block) in self.blocks.iter().enumerate() {
            assert_eq!(free[id], block.owners == 0 && !block.remembered, "block {id} is not where it belongs");
            assert_eq!(idle[id], block.owners == 0 && block.remembered, "block {id} is not where it belongs");
            assert!(block.owners > 0 || block.carry == 0, "block {id}: time that nobody pays for");
        }
    }
}

/// Every doubling of its uses puts a block into the next class.
fn class(uses: u32) -> usize {
    (uses.max(1).ilog2() as usize).min(CLASSES - 1)
}
