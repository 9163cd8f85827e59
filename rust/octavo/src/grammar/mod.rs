//! Grammars that an answer is held to: a JSON schema, a regex, a Lark grammar, a list of choices.
//!
//! ```text
//!  the door (caller's thread)              a mask thread                         the engine thread
//!  Grammars::compile  → Grammar (cached)
//!  Grammars::guide    → Guide ─────────────────────────────────────────────────→ forward, then Guide::next → draw
//!                                          matcher: takes the token, walks  ←──  Guide::advance(token)
//!                                          the tokens' trie for the next mask    (next step: schedule, forward, …)
//! ```
//!
//! Always true: a grammar is compiled within limits of size, time and memory, or it is refused; the first mask is part of
//! compiling, so the first token waits for nobody. A sequence has a matcher of its own, which starts as an exact copy of
//! what was compiled: neither its masks nor its limits depend on who else uses the grammar. What a grammar allows is text;
//! special tokens are never in a mask, and the model's end tokens are in it exactly where the grammar may end.

mod cache; // compiled grammars, bounded in bytes
mod compile; // from a constraint to a grammar, within limits
mod guide; // the masks of one sequence, and the threads that compute them
mod refuse; // what the library would take and not hold
mod vocabulary; // the tokens as bytes, in a trie

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::request::Constraint;
use crate::stages::tokenize::Tokenizer;
use cache::Cache;
use compile::Slots;
use vocabulary::Vocabulary;

pub use compile::Grammar;
pub use guide::{Guide, Next};

/// Bytes of compiled grammars that are kept for the next request.
const CACHE_BYTES: usize = 64 << 20;

/// All grammars of one engine. Costs nothing until the first is asked for.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    /// Logits of the model.
    vocab: usize,
    end_token_ids: Arc<[u32]>,
    vocabulary: OnceLock<Result<Arc<Vocabulary>, String>>,
    cache: Mutex<Cache>,
    slots: Arc<Slots>,
    threads: OnceLock<Result<guide::Threads, String>>,
}

impl Grammars {
    /// For a tokenizer, the number of logits of its model, and the tokens that end an answer.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: usize, end_token_ids: Arc<[u32]>) -> Self {
        Self {
            tokenizer,
            vocab,
            end_token_ids,
            vocabulary: OnceLock::new(),
            cache: Mutex::new(Cache::new(CACHE_BYTES)),
            slots: Arc::default(),
            threads: OnceLock::new(),
        }
    }

    /// A grammar for this constraint: out of the cache, or compiled now. The error says what is wrong with it.
    pub fn compile(&self, constraint: &Constraint) -> Result<Arc<Grammar>, String> {
        let named = |why: String| format!("{}: {why}", constraint.name());
        let vocabulary = self.vocabulary().map_err(named)?;
        if let Some(grammar) = self.cache().get(constraint) {
            return Ok(grammar);
        }
        // Two callers may compile the same at the same time; then one of the two grammars is forgotten.
        let grammar = compile::within_limits(&vocabulary, constraint, &self.slots).map_err(named)?;
        self.cache().insert(constraint.clone(), grammar.clone());
        Ok(grammar)
    }

    /// What leads one sequence through a grammar. `ends` can be drawn where the grammar may end, and end the sequence.
    pub fn guide(&self, grammar: &Arc<Grammar>, ends: Arc<[u32]>) -> Result<Arc<Guide>, String> {
        let threads = self.threads.get_or_init(guide::Threads::start).as_ref().map_err(String::clone)?;
        Ok(Guide::new(grammar.clone(), ends, threads))
    }

    fn vocabulary(&self) -> Result<Arc<Vocabulary>, String> {
        let build = || Vocabulary::new(&self.tokenizer, self.vocab, &self.end_token_ids).map(Arc::new);
        self.vocabulary.get_or_init(build).clone()
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
