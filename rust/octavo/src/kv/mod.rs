//! Who owns which block of the KV cache.
//!
//! Always true: a block is free, idle with a remembered prefix, or owned by a counted number of holders; the three sum
//! to the pool. A remembered block is full and all its keys and values are committed, so nobody writes into it again.
//!
//! Not here: the keys and values themselves (the executor has them), and who deserves a block (see
//! [`stages`](crate::stages)).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::observe::events::{EngineEvent, Notes};
use crate::request::Time;

mod contents;
mod explain;
mod ghosts;
mod habit;
mod idle;
mod layout;
mod past;
mod pool;
mod prefix;
mod sessions;
mod table;

use contents::Contents;
pub use explain::{CacheExplanation, MissReason};
pub use ghosts::Ghost;
use ghosts::Ghosts;
pub use habit::Habit;
pub use layout::KvLayout;
pub use past::{Mark, Past};
pub use pool::{BlockId, Pool, Taken};
pub use prefix::{PrefixChain, PrefixIndex, PrefixKey};
pub use sessions::{Pin, PinFate, SessionEvent, SessionReport, Sessions};
pub use table::BlockTable;

/// The pool and what is remembered of it.
#[derive(Debug)]
pub struct KvCache {
    pool: Pool,
    /// Full blocks.
    prefixes: PrefixIndex,
    /// Blocks by the end of a prompt that lies in them. Their owners may still write behind it; whoever goes on from the
    /// prompt's end copies the block.
    tails: PrefixIndex,
    /// The tokens of remembered blocks of the first group.
    contents: Contents,
    /// What was forgotten lately.
    ghosts: Ghosts,
    /// Names that are going to be published, and by how many sequences.
    announced: HashMap<PrefixKey, u32>,
    layout: KvLayout,
    /// What becomes of blocks, for whoever wants to know.
    pub notes: Notes,
}

/// A remembered prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Its length in blocks.
    pub len: usize,
    /// For each group its blocks; [`BlockId::NONE`] for those that nobody who goes on from here sees.
    pub groups: Vec<Vec<BlockId>>,
}

impl Found {
    /// Blocks, over all groups.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.groups.iter().flatten().copied().filter(|&block| block != BlockId::NONE)
    }
}

impl KvCache {
    /// `blocks` blocks in this layout.
    pub fn new(blocks: usize, layout: KvLayout) -> Self {
        Self {
            pool: Pool::new(blocks),
            prefixes: PrefixIndex::new(blocks),
            tails: PrefixIndex::new(blocks),
            contents: Contents::new(blocks),
            ghosts: Ghosts::new(blocks),
            announced: HashMap::new(),
            layout,
            notes: Notes::default(),
        }
    }

    /// How positions lie in blocks.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Counts of the pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// An empty table.
    pub fn table(&self) -> BlockTable {
        BlockTable::new(self.layout.groups())
    }

    /// The longest remembered prefix of at most `limit` blocks; `key` names block `i` of the sequence. In a group without a
    /// window all blocks are needed, in one with a window those that the next row sees.
    pub fn find_prefix(&self, limit: usize, mut key: impl FnMut(usize) -> PrefixKey) -> Found {
        let groups = self.layout.groups();
        let (mut found, mut blocks, mut run) = (0, vec![Vec::new(); groups], vec![0; groups]);
        for index in 0..limit {
            let (len, key) = (index + 1, key(index));
            let mut enough = true;
            for (group, &window) in self.layout.windows.iter().enumerate() {
                let block = self.prefixes.find(key, group);
                run[group] = if block.is_some() { run[group] + 1 } else { 0 };
                blocks[group].push(block.unwrap_or(BlockId::NONE));
                enough &= run[group] >= len - self.layout.outside(window, len * self.layout.block_size);
            }
            if enough {
                found = len;
            }
            if self.layout.windows.iter().zip(&run).any(|(window, &run)| window.is_none() && run < len) {
                break;
            }
        }
        for (blocks, &window) in blocks.iter_mut().zip(&self.layout.windows) {
            blocks.truncate(found);
            blocks[..self.layout.outside(window, found * self.layout.block_size)].fill(BlockId::NONE);
        }
        Found { len: found, groups: blocks }
    }

    /// A block with this name is going to be published: whoever wants to share it may wait for that.
    pub fn announce(&mut self, key: PrefixKey) {
        *self.announced.entry(key).or_default() += 1;
    }

    /// One that was announced has been published, or never will be.
    pub fn withdraw(&mut self, key: PrefixKey) {
        let Entry::Occupied(mut announced) = self.announced.entry(key) else { unreachable!("it was announced") };
        *announced.get_mut() -= 1;
        if *announced.get() == 0 {
            announced.remove();
        }
    }

    /// Somebody is going to publish a block with this name.
    pub fn is_announced(&self, key: PrefixKey) -> bool {
        self.announced.contains_key(&key)
    }

    /// How often names are announced.
    pub fn announcements(&self) -> usize {
        self.announced.values().map(|&count| count as usize).sum()
    }

    /// How many of these blocks nobody holds: sharing them takes them from the available ones.
    pub fn idle_among(&self, blocks: impl Iterator<Item = BlockId>) -> usize {
        blocks.filter(|&block| self.pool.owners(block) == 0).count()
    }

    /// Puts a found prefix into an empty table.
    pub fn share(&mut self, table: &mut BlockTable, found: &Found, now: Time) {
        assert!(table.is_empty(), "a prefix comes first");
        for (group, blocks) in found.groups.iter().enumerate() {
            for &block in blocks {
                let rent = if block == BlockId::NONE {
                    0
                } else {
                    self.pool.share(block, now);
                    self.pool.rent(block, now)
                };
                table.push(group, block, rent);
            }
        }
    }

    /// Tokens that the table could hold if it got every available block.
    pub fn room(&self, table: &BlockTable) -> usize {
        (table.len() + self.pool.available() / self.layout.groups()) * self.layout.block_size
    }

    /// Whether the table is long enough for so many `tokens`, as it mostly is.
    pub fn holds(&self, table: &BlockTable, tokens: usize) -> bool {
        tokens <= table.len() * self.layout.block_size
    }

    /// Makes the table long enough for `tokens`. Says no, and takes nothing, when there are not enough blocks.
    #[must_use]
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize, now: Time) -> bool {
        if tokens > self.room(table) {
            return false;
        }
        while table.len() < self.layout.entries(tokens) {
            // The first group last: its length is the table's.
            for group in (0..self.layout.groups()).rev() {
                let Taken { block, evicted } = self.pool.take(now).expect("the room was counted");
                if let Some(past) = evicted {
                    self.forget(block, past, now);
                }
                table.push(group, block, self.pool.rent(block, now));
            }
        }
        true
    }

    /// Remembers block `index` of the table, which is full and committed, in every group. If its name is taken, the first
    /// block keeps it. `contents` gives its tokens, and the name of what comes before them.
    pub fn publish(
        &mut self,
        table: &BlockTable,
        index: usize,
        key: PrefixKey,
        contents: impl Fn() -> (PrefixKey, Arc<[u32]>),
    ) {
        let Self { prefixes, pool, ghosts, notes, contents: described, .. } = self;
        name(prefixes, pool, ghosts, table, index, key, |group, block| {
            if group == 0 {
                let (parent, token_ids) = contents();
                described.insert(block, parent, token_ids);
            }
            notes.push(|| {
                let (parent, token_ids) = contents();
                let parent = (index > 0).then(|| parent.short());
                EngineEvent::BlockStored { hash: key.short(), parent, token_ids, group: group as u32 }
            });
        });
    }

    /// Remembers block `index` of the table by the end of a prompt that lies in it, likewise.
    pub fn publish_tail(&mut self, table: &BlockTable, index: usize, key: PrefixKey) {
        name(&mut self.tails, &mut self.pool, &mut self.ghosts, table, index, key, |_, _| {});
    }

    /// For every group the block in which a prompt with this name ends.
    pub fn find_tail(&self, key: PrefixKey) -> Option<Vec<BlockId>> {
        (0..self.layout.groups()).map(|group| self.tails.find(key, group)).collect()
    }

    /// Holds blocks that are to be copied, so that they stay as they are. They are given back with their rents.
    pub fn borrow(&mut self, blocks: &[BlockId], now: Time) -> Vec<(BlockId, u64)> {
        let borrow = |&block: &BlockId| {
            self.pool.share(block, now);
            (block, self.pool.rent(block, now))
        };
        blocks.iter().map(borrow).collect()
    }

    fn forget(&mut self, block: BlockId, past: Past, now: Time) {
        if self.notes.are_watched() && self.prefixes.names(block) {
            let (key, group) = self.prefixes.name(block);
            self.notes.push(|| EngineEvent::BlockRemoved { hash: key.short(), group });
        }
        self.contents.remove(block);
        for index in [&mut self.prefixes, &mut self.tails] {
            if index.names(block) {
                self.ghosts.insert(index.forget(block), past, now);
            }
        }
    }

    /// Marks a table's blocks with what the request is like whose they are, before it gives them back: how blocks come back
    /// is learnt for each kind of request. The last block that was known before tells whether it goes on from the end of an
    /// earlier one.
    pub fn mark(&mut self, table: &BlockTable, prompt_tokens: usize, answer_tokens: usize) {
        let pasts = || table.blocks(0)[table.outside(0)..].iter().map(|&block| self.pool.past(block));
        let new = pasts().filter(|past| past.uses == 1).count() * self.layout.block_size;
        let continues = pasts().rev().find(|past| past.uses > 1).is_some_and(|past| past.mark.is_end);
        let mark = Mark::new(continues, new, answer_tokens);
        for group in 0..self.layout.groups() {
            for (index, &block) in table.blocks(group).iter().enumerate().skip(table.outside(group)) {
                let is_end = index + 2 >= prompt_tokens / self.layout.block_size;
                self.pool.mark(block, mark.at_end(is_end));
            }
        }
    }

    /// Gives back the blocks that no row from position `computed` on sees, and returns their rent in block-nanoseconds.
    pub fn give_back_outside(&mut self, table: &mut BlockTable, computed: usize, now: Time) -> u128 {
        let mut rent = 0;
        for group in 0..self.layout.groups() {
            let outside = self.layout.outside(self.layout.windows[group], computed);
            while table.outside(group) < outside {
                let held = table.leave_behind(group);
                rent += self.give_back(held, now);
            }
        }
        rent
    }

    /// Gives all blocks of the table back and returns the rent in block-nanoseconds. The last blocks go first, so that a
    /// prefix loses its end before its beginning.
    pub fn release(&mut self, table: &mut BlockTable, now: Time) -> u128 {
        let mut rent = 0;
        for _ in 0..table.len() {
            for group in (0..self.layout.groups()).rev() {
                if let Some(held) = table.pop(group) {
                    rent += self.give_back(held, now);
                }
            }
        }
        assert_eq!(table.held(), 0, "every block was given back");
        rent
    }

    /// Gives back one block, and returns its rent in block-nanoseconds.
    pub fn give_back(&mut self, (block, rent_before): (BlockId, u64), now: Time) -> u128 {
        let rent = u128::from(self.pool.rent(block, now) - rent_before);
        self.pool.release(block, now);
        rent
    }

    /// The rent of a table's blocks since it was last settled, or they were taken, in block-nanoseconds.
    pub fn settle(&mut self, table: &mut BlockTable, now: Time) -> u128 {
        let mut rent = 0;
        for group in 0..self.layout.groups() {
            for (block, rent_before) in table.held_mut(group) {
                let due = self.pool.rent(block, now);
                rent += u128::from(due - std::mem::replace(rent_before, due));
            }
        }
        rent
    }

    /// Block-nanoseconds owned by anyone up to `now`: the sum of all rents.
    pub fn owned_ns(&mut self, now: Time) -> u128 {
        self.pool.owned_ns(now)
    }

    /// Asserts everything that is always true; `tables` and `borrowed` blocks are all that exist. Walks the whole pool.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>, borrowed: impl Iterator<Item = BlockId>) {
        self.pool.check();
        let mut owners = vec![0; self.pool.len()];
        for table in tables {
            for group in 0..self.layout.groups() {
                assert_eq!(table.blocks(group).len(), table.len(), "equally long in every group");
                let (outside, held) = table.blocks(group).split_at(table.outside(group));
                assert!(outside.iter().all(|&block| block == BlockId::NONE), "what is outside was given back");
                held.iter().for_each(|block| owners[block.index()] += 1);
            }
        }
        borrowed.for_each(|block| owners[block.index()] += 1);
        for (id, &owners) in owners.iter().enumerate() {
            assert_eq!(self.pool.owners(BlockId(id as u32)), owners, "block {id}: owners");
        }
        self.prefixes.check(|block| self.pool.is_remembered(block));
        self.tails.check(|block| self.pool.is_remembered(block));
        self.contents.check(|block| self.prefixes.names(block));
        self.ghosts.check();
        let named = |&id: &u32| self.prefixes.names(BlockId(id)) || self.tails.names(BlockId(id));
        let remembered = |&id: &u32| self.pool.is_remembered(BlockId(id));
        let ids = 0..self.pool.len() as u32;
        assert!(ids.clone().filter(named).eq(ids.filter(remembered)), "a remembered block has a name");
    }
}

/// Names block `index` of the table in every group that still holds it, and says in which it is new.
fn name(
    names: &mut PrefixIndex,
    pool: &mut Pool,
    ghosts: &mut Ghosts,
    table: &BlockTable,
    index: usize,
    key: PrefixKey,
    mut named: impl FnMut(usize, BlockId),
) {
    for group in 0..table.groups() {
        let block = table.blocks(group)[index];
        // What is not remembered has no name of any kind.
        let known = block == BlockId::NONE || pool.is_remembered(block) && names.names(block);
        if !known && names.publish(key, group, block) {
            pool.remember(block, ghosts.remove((key, group as u32)));
            named(group, block);
        }
    }
}
