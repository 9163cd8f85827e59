//! From logits to a token. Pure: the coin is a function of (seed, position).

use crate::execute::{Draw, Drawn};

/// The tokens before a draw, as far as penalties and banned words need them.
#[derive(Clone, Debug, Default)]
pub struct TokenHistory {
    tokens: Vec<u32>,
}

impl TokenHistory {
    /// The history of a sequence that has only its prompt.
    pub fn new(prompt: &[u32]) -> Self {
        Self { tokens: prompt.to_vec() }
    }
    /// Adds a generated token.
    pub fn push(&mut self, token_id: u32) {
        self.tokens.push(token_id);
    }
}

/// Draws tokens. Owns scratch memory for one vocabulary.
#[derive(Debug, Default)]
pub struct Sampler {}

impl Sampler {
    /// Scratch for a vocabulary of `vocab` tokens.
    pub fn new(_vocab: usize) -> Self {
        Self {}
    }
    /// Chooses a token from `logits` (raw, `vocab` values). The error is this request's alone (logits that are no numbers).
    pub fn draw(&mut self, _logits: &[f32], _draw: &Draw) -> Result<Drawn, String> {
        Err("being written".into())
    }
}
