//! Why a prompt was found as far as it was, and no further. It looks only at names of the prompt's own namespace, so it
//! tells of no other: what another has, and what nobody has, look the same.

use super::{KvCache, PrefixChain, PrefixKey};
use crate::request::Time;

/// What a prompt would find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheExplanation {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// How many of them would be found. The last is always computed, for its logits choose the next.
    pub cached_tokens: usize,
    /// Why not more.
    pub reason: MissReason,
    /// Nanoseconds that the prompt's other tokens are likely to take but for the last; `None`: no prompt was read yet.
    pub lost_ns: Option<u64>,
}

/// Why the cache helps no further.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// It helps with all there is.
    Complete,
    /// Blocks are not shared.
    Disabled,
    /// What is left does not fill a block, and no prompt is remembered that ends just there.
    ShorterThanBlock,
    /// A running request is computing the next block.
    NotYetFilled,
    /// The next block was there, and was forgotten.
    Evicted {
        /// When.
        at: Time,
    },
    /// What is remembered goes on otherwise.
    Differs {
        /// The first token of the prompt that is another one.
        index: usize,
        /// What is remembered from there on, to its block's end.
        stored: Vec<u32>,
    },
    /// Nothing that is remembered goes on like this.
    NeverSeen,
    /// Nothing is remembered in this namespace.
    EmptyNamespace,
}

impl MissReason {
    /// In one word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Disabled => "disabled",
            Self::ShorterThanBlock => "shorter_than_block",
            Self::NotYetFilled => "not_yet_filled",
            Self::Evicted { .. } => "evicted",
            Self::Differs { .. } => "differs",
            Self::NeverSeen => "never_seen",
            Self::EmptyNamespace => "empty_namespace",
        }
    }
}

impl KvCache {
    /// How many tokens of a prompt of this namespace would be found, and why not more.
    pub fn explain(&self, prompt: &[u32], cache_salt: &str) -> (usize, MissReason) {
        let (size, shareable) = (self.layout.block_size, prompt.len().saturating_sub(1));
        let (limit, mut chain) = (shareable / size, PrefixChain::default());
        let block = |index: usize| prompt[index * size..(index + 1) * size].iter().copied();
        let found = self.find_prefix(limit, |index| chain.key(index, cache_salt, block)).len;
        let parent = match found {
            0 => PrefixKey::root(cache_salt),
            _ => chain.key(found - 1, cache_salt, block),
        };
        let (begin, end) = (found * size, ((found + 1) * size).min(shareable));
        let rest = &prompt[begin..end];
        if rest.is_empty() {
            return (begin, MissReason::Complete);
        }
        // The name of the next block, or of the prompt's end.
        let next = parent.then(rest.iter().copied());
        if found == limit && self.find_tail(next).is_some() {
            return (shareable, MissReason::Complete);
        }
        if self.is_announced(next) {
            return (begin, MissReason::NotYetFilled);
        }
        let evicted = (0..self.layout.groups()).filter_map(|group| self.ghosts.get((next, group as u32)));
        if let Some(at) = evicted.map(|ghost| ghost.evicted).max() {
            return (begin, MissReason::Evicted { at });
        }
        (begin, self.nearest_miss(parent, begin, rest))
    }

    fn nearest_miss(&self, parent: PrefixKey, begin: usize, rest: &[u32]) -> MissReason {
        match self.contents.nearest(parent, rest) {
            Some((common, stored)) if common < rest.len() && begin + common > 0 => {
                MissReason::Differs { index: begin + common, stored: stored[common..].to_vec() }
            }
            None if begin == 0 => MissReason::EmptyNamespace,
            _ if rest.len() < self.layout.block_size => MissReason::ShorterThanBlock,
            _ => MissReason::NeverSeen,
        }
    }
}
