//! Which tokens stand in remembered blocks: for explaining why a prompt was not found.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{BlockId, PrefixKey};

/// Tokens of a block, after the prefix that they go on from.
type Entry = (PrefixKey, Arc<[u32]>);

/// The tokens of remembered blocks, in order after every prefix.
#[derive(Debug)]
pub struct Contents {
    entries: BTreeSet<Entry>,
    /// By block.
    of: Vec<Option<Entry>>,
}

impl Contents {
    /// For a pool of `blocks`.
    pub fn new(blocks: usize) -> Self {
        Self { entries: BTreeSet::new(), of: vec![None; blocks] }
    }

    /// A block holds these tokens, after this prefix.
    pub fn insert(&mut self, block: BlockId, parent: PrefixKey, tokens: Arc<[u32]>) {
        let entry = (parent, tokens);
        self.of[block.index()] = Some(entry.clone());
        self.entries.insert(entry);
    }

    /// A block holds nothing any more.
    pub fn remove(&mut self, block: BlockId) {
        if let Some(entry) = self.of[block.index()].take() {
            self.entries.remove(&entry);
        }
    }

    /// What goes on from a prefix most like `tokens` do, and for how many tokens it does.
    pub fn nearest(&self, parent: PrefixKey, tokens: &[u32]) -> Option<(usize, &Arc<[u32]>)> {
        let wanted: Entry = (parent, tokens.into());
        // What has most in common with it is beside it.
        let neighbours = [self.entries.range(..&wanted).next_back(), self.entries.range(&wanted..).next()];
        let common = |stored: &[u32]| stored.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let siblings = neighbours.into_iter().flatten().filter(|entry| entry.0 == parent);
        siblings.map(|(_, stored)| (common(stored), stored)).max_by_key(|(common, _)| *common)
    }

    /// Asserts that every entry is of a remembered block.
    pub fn check(&self, remembered: impl Fn(BlockId) -> bool) {
        let of = self.of.iter().enumerate().filter_map(|(id, entry)| Some((BlockId(id as u32), entry.as_ref()?)));
        let entries: BTreeSet<_> = of.inspect(|(id, _)| assert!(remembered(*id), "{id:?} is forgotten")).collect();
        assert_eq!(entries.len(), self.entries.len(), "one entry for a block");
        assert!(entries.iter().all(|(_, entry)| self.entries.contains(entry)));
    }
}
