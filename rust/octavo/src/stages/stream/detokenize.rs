//! Ids → text, one at a time. A piece of text is *settled* when no later token can change it.

use std::sync::Arc;

use crate::stages::tokenize::Tokenizer;

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

    /// Takes a token; gives the text that it settles.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(id) {
            return String::new();
        }
        let tokenizer = Arc::clone(&self.tokenizer);
        let Some(piece) = tokenizer.piece(id) else { return String::new() };
        if !tokenizer.decodes_byte_runs() {
            self.pending.extend_from_slice(piece);
            let text = self.settle_characters();
            return self.stripped(text);
        }
        if tokenizer.is_byte(id) {
            self.pending.extend_from_slice(piece);
            return String::new();
        }
        let text = self.settle_byte_run() + &String::from_utf8_lossy(piece);
        self.stripped(text)
    }

    /// The rest, with U+FFFD for what is incomplete.
    pub fn finish(&mut self) -> String {
        let text = if self.tokenizer.decodes_byte_runs() {
            self.settle_byte_run()
        } else {
            String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
        };
        self.stripped(text)
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

    /// Whole characters, and a U+FFFD for every maximal part that can no longer become one.
    fn settle_characters(&mut self) -> String {
        // Nearly always all of it is.
        match String::from_utf8(std::mem::take(&mut self.pending)) {
            Ok(text) => return text,
            Err(broken) => self.pending = broken.into_bytes(),
        }
        let mut text = String::new();
        let mut rest = &self.pending[..];
        for chunk in self.pending.utf8_chunks() {
            let invalid = chunk.invalid();
            text.push_str(chunk.valid());
            rest = &rest[chunk.valid().len()..];
            // Only the last chunk can be a character that has merely not ended yet.
            if invalid.is_empty() || (invalid.len() == rest.len() && is_incomplete(invalid)) {
                break;
            }
            text.push('\u{FFFD}');
            rest = &rest[invalid.len()..];
        }
        self.pending = rest.to_vec();
        text
    }

    fn settle_byte_run(&mut self) -> String {
        crate::stages::tokenize::settle_byte_run(&mut self.pending)
    }

    fn stripped(&mut self, mut text: String) -> String {
        if self.strip && !text.is_empty() {
            self.strip = false;
            if text.starts_with(' ') {
                text.remove(0);
            }
        }
        text
    }
}

/// Whether these bytes, which are not UTF-8, are the beginning of a character.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
