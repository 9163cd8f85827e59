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

    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.entries.len()
    }
}
