//! The names of all tokens and the bytes they stand for.

use octavo_kernels::prefetch::prefetch;

/// What a token is. GGUF has numbers for these; a Hugging Face folder says it in other words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A piece of ordinary text.
    Normal,
    /// One byte, for text that has no piece.
    Byte,
    /// Stands for characters the vocabulary lacks.
    Unknown,
    /// Steers the model; leaves no text with `skip_special`, and is recognised only where the caller allows it.
    Control,
    /// Added by the model's makers and recognised in any text, before it is cut into words.
    UserDefined,
    /// The id is not used.
    Unused,
}

/// Names, bytes and kinds by id, and ids by name. Everything lies in a few flat arrays.
pub(super) struct Vocabulary {
    names: Arena,
    /// What the tokens stand for, end to end.
    bytes: Vec<u8>,
    tokens: Vec<Token>,
    /// Open addressing with linear probing: ids, or [`EMPTY`]. A power of two, at most half full.
    slots: Vec<u32>,
}

/// What streaming asks of a token, side by side: after a step of the model nothing of it is in the caches.
#[derive(Clone, Copy)]
struct Token {
    /// Where its bytes begin.
    start: usize,
    len: u32,
    kind: Kind,
}

const EMPTY: u32 = u32::MAX;

impl Vocabulary {
    /// Room for about `tokens` tokens.
    pub fn with_capacity(tokens: usize) -> Self {
        Self {
            names: Arena::with_capacity(tokens),
            bytes: Vec::with_capacity(8 * tokens),
            tokens: Vec::with_capacity(tokens),
            slots: vec![EMPTY; (2 * tokens).next_power_of_two().max(16)],
        }
    }

    /// Adds the next token. A name that was there before now leads to the new id; an empty one leads nowhere.
    pub fn push(&mut self, name: &str, piece: &[u8], kind: Kind) {
        let id = self.len() as u32;
        self.names.push(name.as_bytes());
        self.tokens.push(Token { start: self.bytes.len(), len: piece.len() as u32, kind });
        self.bytes.extend_from_slice(piece);
        if 2 * self.len() > self.slots.len() {
            self.rehash();
        } else if !name.is_empty() {
            let slot = self.slot(name.as_bytes());
            self.slots[slot] = id;
        }
    }

    fn rehash(&mut self) {
        self.slots = vec![EMPTY; 2 * self.slots.len()];
        for id in 0..self.len() as u32 {
            if !self.names.get(id).is_empty() {
                let slot = self.slot(self.names.get(id));
                self.slots[slot] = id;
            }
        }
    }

    /// Where `name` is, or would be.
    fn slot(&self, name: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = hash(name) as usize & mask;
        while self.slots[slot] != EMPTY && self.names.get(self.slots[slot]) != name {
            slot = (slot + 1) & mask;
        }
        slot
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The id of the token that the model file calls `name`.
    pub fn id_of(&self, name: &[u8]) -> Option<u32> {
        Some(self.slots[self.slot(name)]).filter(|&id| id != EMPTY)
    }

    /// What the model file calls it.
    pub fn name(&self, id: u32) -> Option<&str> {
        // Names come from `str`s.
        ((id as usize) < self.len()).then(|| std::str::from_utf8(self.names.get(id)).unwrap_or_default())
    }

    /// Asks the memory for what a token is and where its `bytes` are, or for these.
    pub fn prefetch(&self, id: u32, bytes: bool) {
        let Some(token) = self.tokens.get(id as usize) else { return };
        if bytes { prefetch(self.bytes_of(token)) } else { prefetch(token) }
    }

    /// The bytes it stands for.
    pub fn piece(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(id as usize).map(|token| self.bytes_of(token))
    }

    /// What it is; ids outside the vocabulary are unused.
    pub fn kind(&self, id: u32) -> Kind {
        self.tokens.get(id as usize).map_or(Kind::Unused, |token| token.kind)
    }

    fn bytes_of(&self, token: &Token) -> &[u8] {
        &self.bytes[token.start..][..token.len as usize]
    }
}

/// Rotate, mix, multiply, eight bytes at a time. The keys are fixed by the model file, so there is nobody to defend against.
fn hash(bytes: &[u8]) -> u64 {
    const PRIME: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut state = bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = (state.rotate_left(5) ^ u64::from_le_bytes(word)).wrapping_mul(PRIME);
    }
    state ^ (state >> 32)
}

/// Many short byte strings, end to end.
struct Arena {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Arena {
    fn with_capacity(strings: usize) -> Self {
        Self { bytes: Vec::with_capacity(8 * strings), ends: Vec::with_capacity(strings) }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
    }

    fn get(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..self.ends[index]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_every_token_and_no_other() {
        let mut vocabulary = Vocabulary::with_capacity(3); // small on purpose: it must grow
        let names: Vec<String> = (0..1000).map(|i| format!("token {i}")).collect();
        for name in &names {
            vocabulary.push(name, name.to_uppercase().as_bytes(), Kind::Normal);
        }
        for (id, name) in (0..).zip(&names) {
            assert_eq!(vocabulary.id_of(name.as_bytes()), Some(id));
            assert_eq!(vocabulary.name(id), Some(name.as_str()));
            assert_eq!(vocabulary.piece(id), Some(name.to_uppercase().as_bytes()));
        }
        assert_eq!(vocabulary.id_of(b"token 1000"), None);
        assert_eq!(vocabulary.id_of(b""), None);
        assert_eq!(vocabulary.piece(1000), None);
        assert_eq!(vocabulary.kind(1000), Kind::Unused);
    }

    #[test]
    fn the_last_of_two_equal_names_counts() {
        let mut vocabulary = Vocabulary::with_capacity(4);
        vocabulary.push("a", b"a", Kind::Normal);
        vocabulary.push("a", b"a", Kind::UserDefined);
        assert_eq!(vocabulary.id_of(b"a"), Some(1));
    }
}
