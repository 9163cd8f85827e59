//! Plain text → ids as SentencePiece's BPE does it: of all neighbours whose union is a token, join the pair with the best
//! score first, the leftmost of equals; what ends up as no token is spelled in byte tokens.

use std::collections::BinaryHeap;
use std::ops::Range;

use super::tokenizer::Encoding;
use super::vocabulary::{Kind, Vocabulary};

/// SentencePiece's visible space.
pub(super) const SPACE: &str = "\u{2581}";

/// The scores of a vocabulary.
pub(super) struct Spm {
    /// By token id.
    pub scores: Vec<f32>,
    /// The ids of the 256 byte tokens, where the vocabulary has them.
    pub bytes: Box<[Option<u32>; 256]>,
    pub unknown: Option<u32>,
    /// A space is put before text that follows a special token or begins the prompt.
    pub adds_space_prefix: bool,
}

/// A stretch of the text that is one token, or one character so far. A doubly linked list by index.
struct Symbol {
    /// In the escaped text.
    range: Range<usize>,
    /// In the caller's text.
    source: Range<usize>,
    before: usize,
    after: usize,
}

const NONE: usize = usize::MAX;

/// Two neighbours that may be joined.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Length of both when the pair was found: if it has changed, one of them has joined another.
    len: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

impl Spm {
    /// Encodes `text[range]`, which holds no special token.
    pub fn encode(
        &self,
        text: &str,
        range: Range<usize>,
        after_special: bool,
        vocabulary: &Vocabulary,
        into: &mut Encoding,
    ) {
        let (escaped, mut symbols) = self.symbols(text, range, after_special);
        let mut pairs = BinaryHeap::new();
        for left in 0..symbols.len() {
            pairs.extend(self.pair(vocabulary, &escaped, &symbols, left, symbols[left].after));
        }
        while let Some(pair) = pairs.pop() {
            let (left, right) = (&symbols[pair.left].range, &symbols[pair.right].range);
            if left.is_empty() || right.is_empty() || left.len() + right.len() != pair.len {
                continue;
            }
            join(&mut symbols, pair.left, pair.right);
            let Symbol { before, after, .. } = symbols[pair.left];
            pairs.extend(self.pair(vocabulary, &escaped, &symbols, before, pair.left));
            pairs.extend(self.pair(vocabulary, &escaped, &symbols, pair.left, after));
        }
        for symbol in symbols.iter().filter(|symbol| !symbol.range.is_empty()) {
            self.emit(&escaped[symbol.range.clone()], &symbol.source, vocabulary, into);
        }
    }

    /// The text with visible spaces, cut into characters.
    fn symbols(&self, text: &str, range: Range<usize>, after_special: bool) -> (String, Vec<Symbol>) {
        let mut escaped = String::with_capacity(range.len() + range.len() / 2 + SPACE.len());
        let mut symbols = Vec::with_capacity(range.len() + 1);
        let mut push = |letter: char, source: Range<usize>| {
            let start = escaped.len();
            match letter {
                ' ' => escaped.push_str(SPACE),
                other => escaped.push(other),
            }
            let index = symbols.len();
            let before = index.checked_sub(1).unwrap_or(NONE);
            symbols.push(Symbol { range: start..escaped.len(), source, before, after: index + 1 });
        };
        if self.adds_space_prefix && after_special {
            push(' ', range.start..range.start);
        }
        for (start, letter) in text[range.clone()].char_indices() {
            let start = range.start + start;
            push(letter, start..start + letter.len_utf8());
        }
        if let Some(last) = symbols.last_mut() {
            last.after = NONE;
        }
        (escaped, symbols)
    }

    fn pair(&self, vocabulary: &Vocabulary, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Pair> {
        if left == NONE || right == NONE {
            return None;
        }
        let range = symbols[left].range.start..symbols[right].range.end;
        let id = mergeable(vocabulary, &text[range.clone()])?;
        Some(Pair { score: self.scores[id as usize], left, right, len: range.len() })
    }

    fn emit(&self, piece: &str, source: &Range<usize>, vocabulary: &Vocabulary, into: &mut Encoding) {
        if let Some(id) = mergeable(vocabulary, piece) {
            return into.push(id, source.clone());
        }
        let spelled: Option<Vec<u32>> = piece.bytes().map(|byte| self.bytes[byte as usize]).collect();
        match spelled {
            // Bytes of the text, or of the sign that stands for a space in it.
            Some(ids) if piece.len() == source.len() => {
                (source.start..).zip(ids).for_each(|(at, id)| into.push(id, at..at + 1));
            }
            Some(ids) => ids.into_iter().for_each(|id| into.push(id, source.clone())),
            None => self.unknown.into_iter().for_each(|id| into.push(id, source.clone())),
        }
    }
}

/// The token that `piece` is, if plain text may become it: not a control token, nor a byte written as `<0x0A>`.
fn mergeable(vocabulary: &Vocabulary, piece: &str) -> Option<u32> {
    let id = vocabulary.id_of(piece.as_bytes())?;
    (!matches!(vocabulary.kind(id), Kind::Control | Kind::Unknown | Kind::Byte)).then_some(id)
}

/// Makes the left symbol both; the right one stays behind, empty.
fn join(symbols: &mut [Symbol], left: usize, right: usize) {
    let (end, source_end, after) = (symbols[right].range.end, symbols[right].source.end, symbols[right].after);
    symbols[right].range.start = end;
    symbols[left].range.end = end;
    symbols[left].source.end = source_end;
    symbols[left].after = after;
    if after != NONE {
        symbols[after].before = left;
    }
}
