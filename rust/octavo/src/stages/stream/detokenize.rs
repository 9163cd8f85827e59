//! Ids → text, one at a time. A piece of text is *settled* when no later token can change it.

use std::sync::Arc;

use crate::stages::tokenize::{Tokenizer, settle_byte_run};

/// An incremental decoder.
pub(super) struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// The next text is the beginning, and the tokenizer put a space there.
    strip: bool,
    /// Bytes that are not settled: the start of a character, or a run of byte tokens that stand or fall together.
    pending: Vec<u8>,
}

impl Detokenizer {
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool, continues_text: bool) -> Self {
        let strip = tokenizer.strips_first_space() && !continues_text;
        Self { tokenizer, skip_special, strip, pending: Vec::new() }
    }

    /// Asks the memory for where a token's `bytes` are, or for these.
    pub fn prefetch(&self, id: u32, bytes: bool) {
        self.tokenizer.prefetch(id, bytes);
    }

    /// Takes a token; adds what it settles to `text`.
    pub fn push(&mut self, id: u32, text: &mut String) {
        let Self { tokenizer, pending, .. } = self;
        if self.skip_special && tokenizer.is_special(id) {
            return;
        }
        let Some(piece) = tokenizer.piece(id) else { return };
        let begin = text.len();
        if !tokenizer.decodes_byte_runs() {
            match std::str::from_utf8(piece) {
                // Nearly always.
                Ok(whole) if pending.is_empty() => text.push_str(whole),
                _ => {
                    pending.extend_from_slice(piece);
                    settle_characters(pending, text);
                }
            }
        } else if tokenizer.is_byte(id) {
            pending.extend_from_slice(piece);
        } else {
            settle_byte_run(pending, text);
            text.push_str(&String::from_utf8_lossy(piece));
        }
        self.strip_space(text, begin);
    }

    /// No more tokens come: adds the rest to `text`, with U+FFFD for what is incomplete.
    pub fn finish(&mut self, text: &mut String) {
        let begin = text.len();
        if self.tokenizer.decodes_byte_runs() {
            settle_byte_run(&mut self.pending, text);
        } else {
            text.push_str(&String::from_utf8_lossy(&self.pending));
            self.pending.clear();
        }
        self.strip_space(text, begin);
    }

    /// What an unsettled run of byte tokens would be, should it end after the last whole character. `None`: it is broken.
    pub fn unsettled(&self) -> Option<&str> {
        match std::str::from_utf8(&self.pending) {
            Ok(text) => Some(text),
            Err(error) if error.error_len().is_none() => std::str::from_utf8(&self.pending[..error.valid_up_to()]).ok(),
            Err(_) => None,
        }
        .map(|text| if self.strip { text.strip_prefix(' ').unwrap_or(text) } else { text })
    }

    /// The first text may begin at `begin` with a space that the tokenizer put there.
    fn strip_space(&mut self, text: &mut String, begin: usize) {
        if self.strip && text.len() > begin {
            self.strip = false;
            if text[begin..].starts_with(' ') {
                text.remove(begin);
            }
        }
    }
}

/// Adds the whole characters of `pending`, and a U+FFFD for every maximal part that can no longer become one.
fn settle_characters(pending: &mut Vec<u8>, text: &mut String) {
    let mut settled = 0;
    for chunk in pending.utf8_chunks() {
        let invalid = chunk.invalid();
        text.push_str(chunk.valid());
        settled += chunk.valid().len();
        // Only the last chunk can be a character that has merely not ended yet.
        if invalid.is_empty() || (settled + invalid.len() == pending.len() && is_incomplete(invalid)) {
            break;
        }
        text.push('\u{FFFD}');
        settled += invalid.len();
    }
    pending.drain(..settled);
}

/// Whether these bytes, which are not UTF-8, are the beginning of a character.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
