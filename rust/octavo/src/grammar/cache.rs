//! Compiled grammars, the least recently used of which make room for others.

use std::collections::HashMap;
use std::sync::Arc;

use super::compile::Grammar;
use crate::request::Constraint;

/// Bounded in bytes.
pub(super) struct Cache {
    entries: HashMap<Constraint, Entry>,
    bytes: usize,
    most_bytes: usize,
    /// Counts uses.
    clock: u64,
}

struct Entry {
    grammar: Arc<Grammar>,
    used: u64,
}

impl Cache {
    pub fn new(most_bytes: usize) -> Self {
        Self { entries: HashMap::new(), bytes: 0, most_bytes, clock: 0 }
    }

    pub fn get(&mut self, constraint: &Constraint) -> Option<Arc<Grammar>> {
        self.clock += 1;
        let entry = self.entries.get_mut(constraint)?;
        entry.used = self.clock;
        Some(entry.grammar.clone())
    }

    /// Keeps a grammar, unless it alone is too large.
    pub fn insert(&mut self, constraint: Constraint, grammar: Arc<Grammar>) {
        if grammar.bytes() > self.most_bytes {
            return;
        }
        self.clock += 1;
        self.bytes += grammar.bytes();
        if let Some(old) = self.entries.insert(constraint, Entry { grammar, used: self.clock }) {
            self.bytes -= old.grammar.bytes();
        }
        while self.bytes > self.most_bytes {
            self.forget_oldest();
        }
    }

    /// Walks all entries: there are at most a few thousand, and compiling takes longer.
    fn forget_oldest(&mut self) {
        let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(constraint, _)| constraint.clone());
        if let Some(entry) = oldest.and_then(|constraint| self.entries.remove(&constraint)) {
            self.bytes -= entry.grammar.bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::grammar::compile::{self, Slots};
    use crate::grammar::vocabulary::Vocabulary;

    #[test]
    fn the_least_recently_used_make_room() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizer/tiny/spm");
        let tokenizer = crate::load::folder_tokenizer(&folder).expect("a tokenizer");
        let vocabulary = Arc::new(Vocabulary::new(&tokenizer, tokenizer.len(), &[]).expect("a vocabulary"));
        let regex = |i: usize| Constraint::Regex(format!("ab{i}"));
        let compile = |constraint: &Constraint| {
            compile::within_limits(&vocabulary, constraint, &Arc::new(Slots::default())).expect("a grammar")
        };
        let one = compile(&regex(0)).bytes();
        let mut cache = Cache::new(4 * one + one / 2);
        for i in 0..20 {
            cache.insert(regex(i), compile(&regex(i)));
            // The first is used all the time.
            assert!(cache.get(&regex(0)).is_some(), "{i}");
            assert!(cache.bytes <= cache.most_bytes);
            assert_eq!(cache.bytes, cache.entries.values().map(|entry| entry.grammar.bytes()).sum::<usize>());
        }
        assert!((3..=4).contains(&cache.entries.len()), "{}", cache.entries.len());
        assert!(cache.get(&regex(19)).is_some() && cache.get(&regex(1)).is_none());
        // Again under the same name: it counts once.
        cache.insert(regex(0), compile(&regex(0)));
        assert_eq!(cache.bytes, cache.entries.values().map(|entry| entry.grammar.bytes()).sum::<usize>());
        // One that is too large alone drives nobody out.
        let (before, large) = (cache.entries.len(), Constraint::Regex("x".repeat(100_000)));
        cache.insert(large.clone(), compile(&large));
        assert!(cache.get(&large).is_none());
        assert_eq!(cache.entries.len(), before);
    }
}
