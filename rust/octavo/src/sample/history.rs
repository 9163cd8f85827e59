//! The tokens before a draw, as far as penalties and banned words need them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};

/// The tokens of one sequence: all of them in order, and how often each was generated. Adding one costs the same however
/// many there are.
#[derive(Clone, Debug, Default)]
pub struct TokenHistory {
    tokens: Vec<u32>,
    /// Every token that occurs once, in the order in which they first did, and how often it was generated: 0 for one that
    /// only the prompt has.
    counts: Vec<(u32, u32)>,
    /// Where each is in there. A hasher without random keys: nothing here depends on global randomness.
    places: HashMap<u32, usize, BuildHasherDefault<DefaultHasher>>,
}

impl TokenHistory {
    /// The history of a sequence that has only its prompt.
    pub fn new(prompt: &[u32]) -> Self {
        let mut history = Self { tokens: prompt.to_vec(), ..Self::default() };
        prompt.iter().for_each(|&token| _ = history.count(token));
        history
    }

    /// Adds a generated token.
    pub fn push(&mut self, token_id: u32) {
        self.tokens.push(token_id);
        *self.count(token_id) += 1;
    }

    /// How often a token was generated that occurs.
    fn count(&mut self, token_id: u32) -> &mut u32 {
        let place = *self.places.entry(token_id).or_insert_with(|| {
            self.counts.push((token_id, 0));
            self.counts.len() - 1
        });
        &mut self.counts[place].1
    }

    /// Every token of prompt and output once, with how often it was generated, in the order in which they first occurred.
    pub fn counts(&self) -> &[(u32, u32)] {
        &self.counts
    }

    /// Whether the last tokens, prompt included, are these. True for none.
    pub fn ends_with(&self, tokens: &[u32]) -> bool {
        self.tokens.ends_with(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_outputs_and_remembers_the_prompt() {
        let mut history = TokenHistory::new(&[3, 1, 3]);
        for token in [1, 4, 1] {
            history.push(token);
        }
        assert_eq!(history.counts(), [(3, 0), (1, 2), (4, 1)]);
    }

    #[test]
    fn the_tail_reaches_into_the_prompt() {
        let mut history = TokenHistory::new(&[1, 2]);
        history.push(3);
        for (tail, is_there) in
            [(&[][..], true), (&[3], true), (&[2, 3], true), (&[1, 2, 3], true), (&[0, 1, 2, 3], false), (&[2], false)]
        {
            assert_eq!(history.ends_with(tail), is_there, "{tail:?}");
        }
    }
}
