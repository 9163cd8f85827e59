//! Plain text → ids by the `tokenizers` crate.

use std::ops::Range;

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::tokenizer::{Model, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Token};

use super::spm::SPACE;
use super::tokenizer::{Encoding, TokenizerError};
use super::vocabulary::{Kind, Vocabulary};

/// A normaliser, a pre-tokenizer and a model. Special tokens are ours to find, so the crate never sees any.
pub(super) struct Library {
    tokenizer: tokenizers::Tokenizer,
    /// The pre-tokenizer for text that is not the beginning, where that makes a difference.
    pre_tokenizer_inside: Option<PreTokenizerWrapper>,
}

impl Library {
    pub fn new(tokenizer: tokenizers::Tokenizer) -> Self {
        let pre_tokenizer_inside = tokenizer.get_pre_tokenizer().and_then(inside);
        Self { tokenizer, pre_tokenizer_inside }
    }

    /// Encodes `text[range]`, which holds no special token.
    pub fn encode(
        &self,
        text: &str,
        range: Range<usize>,
        vocabulary: &Vocabulary,
        into: &mut Encoding,
    ) -> Result<(), TokenizerError> {
        let encoding = self
            .run(&text[range.clone()], range.start == 0, vocabulary)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        let ids = encoding.get_ids();
        into.ids.extend_from_slice(ids);
        let told = encoding.get_offsets().iter().map(|&(start, end)| range.start + start..range.start + end);
        let pieces = ids.iter().map(|&id| vocabulary.piece(id).unwrap_or_default());
        let first = into.offsets.len();
        into.offsets.extend(exact(text.as_bytes(), range.start, pieces.zip(told)));
        // What a normaliser has taken into the character before it (an accent, say) belongs to that one's last token.
        let mut next = range.end;
        for range in into.offsets[first..].iter_mut().rev() {
            range.end = if range.start < range.end { range.end.max(next) } else { range.end };
            next = range.start;
        }
        Ok(())
    }

    fn run(&self, text: &str, first: bool, vocabulary: &Vocabulary) -> tokenizers::Result<tokenizers::Encoding> {
        let mut string = PreTokenizedString::from(text);
        if let Some(normalizer) = self.tokenizer.get_normalizer() {
            string.normalize(|part| normalizer.normalize(part))?;
        }
        let inside = self.pre_tokenizer_inside.as_ref().filter(|_| !first);
        if let Some(pre_tokenizer) = inside.or(self.tokenizer.get_pre_tokenizer()) {
            pre_tokenizer.pre_tokenize(&mut string)?;
        }
        string.tokenize(|word| {
            let tokens = self.tokenizer.get_model().tokenize(word.get())?;
            self.without_control_tokens(word.get(), tokens, vocabulary)
        })?;
        string.into_encoding(None, 0, OffsetType::Byte)
    }

    /// A model may reach a control token by ordinary merges or whole-word look-up. Such a word is encoded character by
    /// character instead: plain text stays plain text.
    fn without_control_tokens(
        &self,
        word: &str,
        tokens: Vec<Token>,
        vocabulary: &Vocabulary,
    ) -> tokenizers::Result<Vec<Token>> {
        if tokens.iter().all(|token| vocabulary.kind(token.id) != Kind::Control) {
            return Ok(tokens);
        }
        let mut spelled = Vec::new();
        for (start, letter) in word.char_indices() {
            for mut token in self.tokenizer.get_model().tokenize(letter.encode_utf8(&mut [0; 4]))? {
                token.offsets = (token.offsets.0 + start, token.offsets.1 + start);
                spelled.push(token);
            }
        }
        Ok(spelled)
    }
}

/// The bytes that each token has of the text from `at` on. The crate gives every token that holds a part of a character
/// the whole of it; where tokens spell the text, each has its own bytes instead. A space that was put before the text has
/// none.
fn exact<'a>(
    text: &[u8],
    mut at: usize,
    tokens: impl Iterator<Item = (&'a [u8], Range<usize>)>,
) -> impl Iterator<Item = Range<usize>> {
    let begin = at;
    let is_space =
        |told: &Range<usize>| text[told.clone()].starts_with(SPACE.as_bytes()) || text[told.clone()].starts_with(b" ");
    tokens.map(move |(piece, told)| {
        let own = at..at + piece.len();
        let spells = text.get(own.clone()) == Some(piece) && told.start <= own.start && own.end <= told.end;
        let range = match spells && !piece.is_empty() {
            true => own,
            false if piece == b" " && at == begin && !is_space(&told) => at..at,
            false => told,
        };
        at = at.max(range.end);
        range
    })
}

/// The same pre-tokenizer for text after a special token: one that puts a space before the first word only puts none.
fn inside(pre_tokenizer: &PreTokenizerWrapper) -> Option<PreTokenizerWrapper> {
    match pre_tokenizer {
        PreTokenizerWrapper::Metaspace(metaspace) if metaspace.prepend_scheme == PrependScheme::First => {
            let mut metaspace = metaspace.clone();
            metaspace.set_prepend_scheme(PrependScheme::Never);
            Some(metaspace.into())
        }
        PreTokenizerWrapper::Sequence(sequence) => {
            let steps: &[PreTokenizerWrapper] = sequence.as_ref();
            let changed: Vec<_> = steps.iter().map(inside).collect();
            changed.iter().any(Option::is_some).then(|| {
                let steps = steps.iter().zip(changed).map(|(step, changed)| changed.unwrap_or_else(|| step.clone()));
                tokenizers::pre_tokenizers::sequence::Sequence::new(steps.collect()).into()
            })
        }
        _ => None,
    }
}
