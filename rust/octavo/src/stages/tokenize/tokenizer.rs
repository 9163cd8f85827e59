//! The public face: encode, decode, look up.

use std::ops::Range;

use super::library::Library;
use super::special::{Segment, SpecialTokens};
use super::spm::Spm;
use super::vocabulary::{Kind, Vocabulary};
use super::{folder, gguf};
use crate::load::metadata::Metadata;

/// Text ↔ token ids of one model. Immutable: share it in an `Arc`.
pub struct Tokenizer {
    pub(super) vocabulary: Vocabulary,
    pub(super) specials: SpecialTokens,
    pub(super) engine: Engine,
    pub(super) decoding: Decoding,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) end_ids: Vec<u32>,
    /// What `add_special` puts before and after a text.
    pub(super) prefix: Vec<u32>,
    pub(super) suffix: Vec<u32>,
}

/// What turns plain text, without special tokens, into ids.
pub(super) enum Engine {
    Library(Box<Library>),
    Spm(Spm),
}

/// How pieces are put together again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Decoding {
    /// The tokenizer puts a space before a text; the first space of a decoded text is that one.
    pub strips_first_space: bool,
    /// Bytes of a run of byte tokens stand or fall together: a run that is not UTF-8 becomes one U+FFFD per byte. (The rule
    /// of Hugging Face's `ByteFallback`.) Otherwise bytes are joined and every maximal broken part becomes one U+FFFD.
    pub byte_runs: bool,
}

/// What to do with the spelled-out name of a control token in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// It is text like any other. For whatever a user wrote.
    AsText,
    /// It is that token. For prompts that the program itself has put together.
    Parse,
}

/// Token ids, and which bytes of the text each came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoding {
    /// The token ids.
    pub ids: Vec<u32>,
    /// For each id its bytes in the text; an empty range for tokens that were added. Of tokens that share a character each
    /// has its own bytes of it; where a normaliser has changed the character, each has all of it.
    pub offsets: Vec<Range<usize>>,
}

impl Encoding {
    /// For each id its characters in `text`, which is what was encoded. A character that several tokens share belongs to
    /// each of them.
    pub fn char_offsets(&self, text: &str) -> Vec<Range<usize>> {
        let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        let chars = |range: &Range<usize>| {
            let end = starts.partition_point(|&start| start < range.end);
            match range.is_empty() {
                true => end..end,
                false => starts.partition_point(|&start| start <= range.start) - 1..end,
            }
        };
        self.offsets.iter().map(chars).collect()
    }

    pub(super) fn push(&mut self, id: u32, offsets: Range<usize>) {
        self.ids.push(id);
        self.offsets.push(offsets);
    }
}

/// A tokenizer could not be made, or a text not encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The model file has no tokenizer, or a broken one.
    #[error("tokenizer: {0}")]
    Malformed(String),
    /// The tokenizer is sound, but octavo does not know its kind.
    #[error("tokenizer: {what} `{found}` is not supported; supported: {supported}")]
    Unsupported {
        /// What kind of thing: model, pre-tokenizer, decoder.
        what: &'static str,
        /// The name that was found.
        found: String,
        /// The names that would do.
        supported: String,
    },
    /// This text could not be encoded.
    #[error("this text could not be tokenized: {0}")]
    Encode(String),
}

impl Tokenizer {
    /// From the `tokenizer.ggml.*` keys of a GGUF file.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        gguf::read(metadata)
    }

    /// From the text of a `tokenizer.json` and, where there are any, the objects in `tokenizer_config.json` and
    /// `special_tokens_map.json` beside it (`null` otherwise).
    pub fn from_json(tokenizer: &[u8], beside: [serde_json::Value; 2]) -> Result<Self, TokenizerError> {
        folder::read(tokenizer, beside)
    }

    /// Text → ids. With `add_special` also the tokens that this tokenizer puts around every text (BOS, seldom EOS).
    pub fn encode(&self, text: &str, special: Special, add_special: bool) -> Result<Encoding, TokenizerError> {
        let mut encoding = Encoding::default();
        if add_special {
            self.prefix.iter().for_each(|&id| encoding.push(id, 0..0));
        }
        self.encode_with_literals(text, special, &[], &mut encoding)?;
        if add_special {
            self.suffix.iter().for_each(|&id| encoding.push(id, text.len()..text.len()));
        }
        Ok(encoding)
    }

    /// As [`Self::encode`], but control tokens that touch one of `literals` stay text.
    pub(super) fn encode_with_literals(
        &self,
        text: &str,
        special: Special,
        literals: &[Range<usize>],
        into: &mut Encoding,
    ) -> Result<(), TokenizerError> {
        let mut after_special = true; // a text begins as after BOS
        for segment in self.specials.split(text, special == Special::Parse, literals) {
            match segment {
                Segment::Special(id, range) => {
                    into.push(id, range);
                    after_special = true;
                }
                Segment::Text(range) => {
                    match &self.engine {
                        Engine::Library(library) => library.encode(text, range, &self.vocabulary, into)?,
                        Engine::Spm(spm) => spm.encode(text, range, after_special, &self.vocabulary, into),
                    }
                    after_special = false;
                }
            }
        }
        Ok(())
    }

    /// Ids → text. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary leave nothing. With `skip_special`
    /// control tokens leave no text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let shown = ids.iter().copied().filter(|&id| !(skip_special && self.is_special(id)));
        let mut text = if self.decoding.byte_runs {
            self.decode_byte_runs(shown)
        } else {
            let pieces = shown.filter_map(|id| self.piece(id));
            String::from_utf8_lossy(&pieces.collect::<Vec<_>>().concat()).into_owned()
        };
        if self.decoding.strips_first_space && text.starts_with(' ') {
            text.remove(0);
        }
        text
    }

    fn decode_byte_runs(&self, ids: impl Iterator<Item = u32>) -> String {
        let (mut text, mut run) = (String::new(), Vec::new());
        for id in ids {
            let Some(piece) = self.piece(id) else { continue };
            if self.is_byte(id) {
                run.extend_from_slice(piece);
            } else {
                settle_byte_run(&mut run, &mut text);
                text.push_str(&String::from_utf8_lossy(piece));
            }
        }
        settle_byte_run(&mut run, &mut text);
        text
    }

    /// Ids → bytes, control tokens included.
    pub fn decode_bytes(&self, ids: &[u32]) -> Vec<u8> {
        let mut bytes = ids.iter().filter_map(|&id| self.piece(id)).collect::<Vec<_>>().concat();
        if self.decoding.strips_first_space && bytes.first() == Some(&b' ') {
            bytes.remove(0);
        }
        bytes
    }

    /// Asks the memory for what decoding a token looks up: where its `bytes` are, or these.
    pub(crate) fn prefetch(&self, id: u32, bytes: bool) {
        self.vocabulary.prefetch(id, bytes);
    }

    /// The bytes a token stands for.
    pub fn piece(&self, id: u32) -> Option<&[u8]> {
        self.vocabulary.piece(id)
    }

    /// A token's name, as the model file spells it.
    pub fn token(&self, id: u32) -> Option<&str> {
        self.vocabulary.name(id)
    }

    /// The token with this name.
    pub fn id_of(&self, name: &str) -> Option<u32> {
        self.vocabulary.id_of(name.as_bytes())
    }

    /// Whether it is a control token (or the one for unknown characters): `skip_special` hides it.
    pub fn is_special(&self, id: u32) -> bool {
        matches!(self.vocabulary.kind(id), Kind::Control | Kind::Unknown)
    }

    /// Whether it is a piece of text: neither special nor unused.
    pub(crate) fn is_text(&self, id: u32) -> bool {
        matches!(self.vocabulary.kind(id), Kind::Normal | Kind::Byte | Kind::UserDefined)
    }

    /// Whether it is a fall-back token for a single byte.
    pub(crate) fn is_byte(&self, id: u32) -> bool {
        self.vocabulary.kind(id) == Kind::Byte
    }

    /// Number of token ids.
    pub fn len(&self) -> usize {
        self.vocabulary.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The tokens after which there is nothing more to say: EOS, and in a GGUF file those that end a turn. (A Hugging Face
    /// folder lists them in `generation_config.json` instead.)
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }

    /// Whether `add_special` puts [`Self::bos`] before a text.
    pub fn adds_bos(&self) -> bool {
        self.bos.is_some() && self.prefix.first().copied() == self.bos
    }

    pub(crate) fn decodes_byte_runs(&self) -> bool {
        self.decoding.byte_runs
    }

    pub(crate) fn strips_first_space(&self) -> bool {
        self.decoding.strips_first_space
    }
}

/// Adds the text of a run of byte tokens, which is emptied, to `text`.
pub(crate) fn settle_byte_run(run: &mut Vec<u8>, text: &mut String) {
    match std::str::from_utf8(run) {
        Ok(whole) => text.push_str(whole),
        Err(_) => text.extend(run.iter().map(|_| '\u{FFFD}')),
    }
    run.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Tokenizer>();
        shared::<super::super::ChatTemplate>();
    }
}
