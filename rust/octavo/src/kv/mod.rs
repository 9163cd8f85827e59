//! Who owns which block of the KV cache.
//!
//! Always true: a block is free, idle with a remembered prefix, or owned by a counted number of sequences; the three sum
//! to the pool. A remembered block is full and all its keys and values are committed, so nobody writes into it again.
//!
//! Not here: the keys and values themselves (the executor has them), and who deserves a block (see
//! [`stages`](crate::stages)).

use crate::request::Time;

mod pool;
mod prefix;
mod table;

pub use pool::{BlockId, Pool, Taken};
pub use prefix::{PrefixChain, PrefixIndex, PrefixKey};
pub use table::BlockTable;

/// The pool and what is remembered of it.
#[derive(Debug)]
pub struct KvCache {
    pool: Pool,
    prefixes: PrefixIndex,
    block_size: usize,
    remember: bool,
}

impl KvCache {
    /// `blocks` blocks of `block_size` positions; `remember`: blocks outlive their sequences and can be found by prefix.
    pub fn new(blocks: usize, block_size: usize, remember: bool) -> Self {
        Self {
            pool: Pool::new(blocks),
            prefixes: PrefixIndex::new(if remember { blocks } else { 0 }),
            block_size,
            remember,
        }
    }

    /// Positions in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Whether blocks are remembered.
    pub fn remembers(&self) -> bool {
        self.remember
    }

    /// Counts of the pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Blocks that `tokens` take.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// The longest run of remembered blocks, at most `limit` of them; `key` names block `i` of the sequence.
    pub fn find_prefix(&self, limit: usize, mut key: impl FnMut(usize) -> PrefixKey) -> Vec<BlockId> {
        let limit = if self.remember { limit } else { 0 };
        (0..limit).map_while(|index| self.prefixes.find(key(index))).collect()
    }

    /// How many of these blocks nobody holds: sharing them takes them from the available ones.
    pub fn idle_among(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|&&block| self.pool.owners(block) == 0).count()
    }

    /// Puts found blocks into an empty table.
    pub fn share(&mut self, table: &mut BlockTable, blocks: &[BlockId], now: Time) {
        assert!(table.is_empty(), "a prefix comes first");
        for &block in blocks {
            self.pool.share(block, now);
            table.push(block, self.pool.rent(block, now));
        }
    }

    /// Tokens that the table could hold if it got every available block.
    pub fn room(&self, table: &BlockTable) -> usize {
        (table.len() + self.pool.available()) * self.block_size
    }

    /// Makes the table long enough for `tokens`. Says no, and takes nothing, when there are not enough blocks.
    #[must_use]
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize, now: Time) -> bool {
        if tokens > self.room(table) {
            return false;
        }
        while table.len() < self.blocks_for(tokens) {
            let Taken { block, evicted } = self.pool.take(now).expect("the room was counted");
            if evicted {
                self.prefixes.forget(block);
            }
            table.push(block, self.pool.rent(block, now));
        }
        true
    }

    /// Remembers block `index` of the table, which is full and committed. If its name is taken, the first block keeps it.
    pub fn publish(&mut self, table: &BlockTable, index: usize, key: PrefixKey) {
        let block = table.blocks()[index];
        if self.remember && !self.pool.is_remembered(block) && self.prefixes.publish(key, block) {
            self.pool.remember(block);
        }
    }

    /// Gives all blocks of the table back and returns the rent in block-nanoseconds. The last block goes first, so that a
    /// prefix loses its end before its beginning.
    pub fn release(&mut self, table: &mut BlockTable, now: Time) -> u128 {
        let mut rent = 0;
        while let Some((block, rent_before)) = table.pop() {
            rent += u128::from(self.pool.rent(block, now) - rent_before);
            self.pool.release(block, now);
        }
        rent
    }

    /// Block-nanoseconds owned by anyone up to `now`: the sum of all rents.
    pub fn owned_ns(&mut self, now: Time) -> u128 {
        self.pool.owned_ns(now)
    }

    /// Asserts everything that is always true; `tables` are all that exist. Walks the whole pool.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        self.pool.check();
        let mut owners = vec![0; self.pool.len()];
        for table in tables {
            for block in table.blocks() {
                owners[block.index()] += 1;
            }
        }
        for (id, &owners) in owners.iter().enumerate() {
            assert_eq!(self.pool.owners(BlockId(id as u32)), owners, "block {id}: owners");
        }
        if self.remember {
            self.prefixes.check(|block| self.pool.is_remembered(block));
        }
    }
}
