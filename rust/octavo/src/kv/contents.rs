//! Which tokens stand in remembered blocks: for explaining why a prompt was not found.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::sync::Arc;

use super::{BlockId, PrefixKey};

/// What goes on from a prefix: mostly one block.
#[derive(Debug)]
enum Next {
    One(Arc<[u32]>),
    /// In order.
    Several(BTreeSet<Arc<[u32]>>),
}

/// The tokens of remembered blocks, by the prefix that they go on from.
#[derive(Debug)]
pub struct Contents {
    next: HashMap<PrefixKey, Next>,
    /// By block.
    of: Vec<Option<(PrefixKey, Arc<[u32]>)>>,
}

impl Contents {
    /// For a pool of `blocks`.
    pub fn new(blocks: usize) -> Self {
        Self { next: HashMap::new(), of: vec![None; blocks] }
    }

    /// A block holds these tokens, after this prefix.
    pub fn insert(&mut self, block: BlockId, parent: PrefixKey, tokens: Arc<[u32]>) {
        self.of[block.index()] = Some((parent, tokens.clone()));
        match self.next.entry(parent) {
            Entry::Vacant(vacant) => _ = vacant.insert(Next::One(tokens)),
            Entry::Occupied(mut occupied) => match occupied.get_mut() {
                Next::Several(several) => _ = several.insert(tokens),
                Next::One(one) => {
                    let both = BTreeSet::from([one.clone(), tokens]);
                    occupied.insert(Next::Several(both));
                }
            },
        }
    }

    /// A block holds nothing any more.
    pub fn remove(&mut self, block: BlockId) {
        let Some((parent, tokens)) = self.of[block.index()].take() else { return };
        let Entry::Occupied(mut occupied) = self.next.entry(parent) else { unreachable!("it goes on from there") };
        let is_empty = match occupied.get_mut() {
            Next::One(_) => true,
            Next::Several(several) => several.remove(&tokens) && several.is_empty(),
        };
        if is_empty {
            occupied.remove();
        }
    }

    /// What goes on from a prefix most like `tokens` do, and for how many tokens it does.
    pub fn nearest(&self, parent: PrefixKey, tokens: &[u32]) -> Option<(usize, &Arc<[u32]>)> {
        let [before, after] = match self.next.get(&parent)? {
            Next::One(one) => [Some(one), None],
            // What has most in common with it is beside it.
            Next::Several(several) => {
                let before = several.range::<[u32], _>((Unbounded, Excluded(tokens))).next_back();
                [before, several.range::<[u32], _>((Included(tokens), Unbounded)).next()]
            }
        };
        let common = |stored: &[u32]| stored.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let siblings = before.into_iter().chain(after);
        siblings.map(|stored| (common(stored), stored)).max_by_key(|(common, _)| *common)
    }

    /// Asserts that every entry is of a remembered block, and can be found.
    pub fn check(&self, remembered: impl Fn(BlockId) -> bool) {
        let mut entries = 0;
        for (id, entry) in self.of.iter().enumerate() {
            let Some((parent, tokens)) = entry else { continue };
            assert!(remembered(BlockId(id as u32)), "block {id} is forgotten");
            let found = self.nearest(*parent, tokens).map(|(_, found)| found);
            assert_eq!(found, Some(tokens), "block {id} is not found");
            entries += 1;
        }
        let listed = self.next.values().map(|next| match next {
            Next::One(_) => 1,
            Next::Several(several) => several.len(),
        });
        assert_eq!(listed.sum::<usize>(), entries, "one entry for a block");
    }
}
