//! Which block holds the keys and values of which prefix.
//!
//! A full block is named by everything that its contents depend on: all tokens up to its end, and the namespace. The name
//! is a chain of hashes, so a block's costs one hash over the block, and two names agree only if everything before
//! agrees. It is SHA-256, cut to 128 bits: prompts come from strangers, and nobody may be able to find two that collide.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{Hash, Hasher};

use sha2::{Digest, Sha256};

use super::BlockId;
use super::ghosts::Name;

/// The name of a prefix that ends at a block's edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PrefixKey([u8; 16]);

impl Hash for PrefixKey {
    /// Half of it: it is a hash already, and the map's own, which is keyed, keeps strangers from choosing where it lands.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [half, _] = self.0.as_chunks::<8>().0 else { unreachable!("sixteen bytes are two halves") };
        state.write_u64(u64::from_le_bytes(*half));
    }
}

impl PrefixKey {
    /// The empty prefix of a namespace.
    pub fn root(cache_salt: &str) -> Self {
        Self::cut(Sha256::new().chain_update(b"octavo prefix\0").chain_update(cache_salt))
    }

    /// This prefix and one more block.
    pub fn then(self, token_ids: impl IntoIterator<Item = u32>) -> Self {
        let mut hash = Sha256::new().chain_update(self.0);
        for id in token_ids {
            hash.update(id.to_le_bytes());
        }
        Self::cut(hash)
    }

    /// The name as programs around the engine know it: shorter, and so not to be relied on against people who look for
    /// collisions.
    pub fn short(self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| self.0[i]))
    }

    fn cut(hash: Sha256) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&hash.finalize()[..16]);
        Self(key)
    }
}

/// The names of a sequence's blocks, from its first on, as far as they were needed.
#[derive(Clone, Debug, Default)]
pub struct PrefixChain {
    keys: Vec<PrefixKey>,
    tail: Option<PrefixKey>,
}

impl PrefixChain {
    /// The name of block `index`. `block` gives the tokens of any block of the sequence, `cache_salt` is its namespace.
    pub fn key<I>(&mut self, index: usize, cache_salt: &str, block: impl Fn(usize) -> I) -> PrefixKey
    where
        I: IntoIterator<Item = u32>,
    {
        while self.keys.len() <= index {
            let parent = self.keys.last().copied().unwrap_or_else(|| PrefixKey::root(cache_salt));
            self.keys.push(parent.then(block(self.keys.len())));
        }
        self.keys[index]
    }

    /// The name of block `index`, which was asked for before.
    pub fn known(&self, index: usize) -> PrefixKey {
        self.keys[index]
    }

    /// The name of the first `blocks` blocks and a `rest` of one that is not full: always the same of one sequence.
    pub fn tail<I>(
        &mut self,
        blocks: usize,
        cache_salt: &str,
        block: impl Fn(usize) -> I,
        rest: impl IntoIterator<Item = u32>,
    ) -> PrefixKey
    where
        I: IntoIterator<Item = u32>,
    {
        if let Some(tail) = self.tail {
            return tail;
        }
        let parent = match blocks.checked_sub(1) {
            Some(last) => self.key(last, cache_salt, block),
            None => PrefixKey::root(cache_salt),
        };
        *self.tail.insert(parent.then(rest))
    }
}

/// Published blocks by name and group of layers.
#[derive(Debug)]
pub struct PrefixIndex {
    blocks: HashMap<Name, BlockId>,
    /// The other way round; means something only for blocks in `blocks`.
    keys: Vec<Name>,
}

impl PrefixIndex {
    /// For a pool of `blocks`.
    pub fn new(blocks: usize) -> Self {
        Self { blocks: HashMap::new(), keys: vec![(PrefixKey([0; 16]), 0); blocks] }
    }

    /// The block with this name in a group.
    pub fn find(&self, key: PrefixKey, group: usize) -> Option<BlockId> {
        self.blocks.get(&(key, group as u32)).copied()
    }

    /// Names a block of a group. Says no if another block has the name already: the first stays.
    pub fn publish(&mut self, key: PrefixKey, group: usize, block: BlockId) -> bool {
        let name = (key, group as u32);
        let Entry::Vacant(vacant) = self.blocks.entry(name) else { return false };
        vacant.insert(block);
        self.keys[block.index()] = name;
        true
    }

    /// The name of a published block, and its group.
    pub fn name(&self, block: BlockId) -> (PrefixKey, u32) {
        self.keys[block.index()]
    }

    /// Whether this block has a name.
    pub fn names(&self, block: BlockId) -> bool {
        self.blocks.get(&self.keys[block.index()]) == Some(&block)
    }

    /// A published block's name, which is gone.
    pub fn forget(&mut self, block: BlockId) -> Name {
        let name = self.keys[block.index()];
        assert_eq!(self.blocks.remove(&name), Some(block), "a remembered block must be in the index");
        name
    }

    /// Asserts that every published block has one name and is remembered.
    pub fn check(&self, remembered: impl Fn(BlockId) -> bool) {
        for (&key, &block) in &self.blocks {
            assert_eq!(self.keys[block.index()], key, "{block:?} has two names");
            assert!(remembered(block), "{block:?} is published, but the pool has forgotten it");
        }
    }
}
