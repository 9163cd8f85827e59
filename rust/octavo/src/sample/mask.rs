//! Which tokens may be drawn: a bit for each.

/// A set of tokens. A token beyond its end is not in it, so a model may have more logits than the set has bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    /// Token `id` is bit `id % 32` of word `id / 32`.
    words: Box<[u32]>,
}

impl TokenMask {
    /// No tokens, with room for the first `tokens`.
    pub fn none(tokens: usize) -> Self {
        Self { words: vec![0; tokens.div_ceil(32)].into() }
    }

    /// From words of 32 tokens each, the smaller id in the lower bit.
    pub fn from_words(words: &[u32]) -> Self {
        Self { words: words.into() }
    }

    /// Takes a token in. One that there is no room for stays out.
    pub fn allow(&mut self, id: u32) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word |= 1 << (id % 32);
        }
    }

    /// Whether a token is in it.
    pub fn allows(&self, id: u32) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Leaves only what is in `other` too.
    pub fn intersect(&mut self, other: &TokenMask) {
        for (index, word) in self.words.iter_mut().enumerate() {
            *word &= other.words.get(index).copied().unwrap_or(0);
        }
    }

    /// Takes in what is in `other`, as far as there is room.
    pub fn unite(&mut self, other: &TokenMask) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
    }

    /// Takes out what is in `other`.
    pub fn subtract(&mut self, other: &TokenMask) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= !other);
    }

    /// The words, see [`Self::from_words`].
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Whether no token is in it.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Masks the logits of all other tokens.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        let words = self.words.iter().copied().chain(std::iter::repeat(0));
        for (logits, word) in logits.chunks_mut(32).zip(words) {
            match word {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                _ => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_what_is_not_in_it() {
        // More logits than bits, fewer, as many; whole words and parts of words.
        for (tokens, vocab) in [(1, 1), (31, 33), (32, 32), (33, 31), (64, 100), (100, 64), (96, 96), (0, 5)] {
            for step in [1, 2, 3, 7, 32, 1000] {
                let mut mask = TokenMask::none(tokens);
                (0..tokens as u32).step_by(step).for_each(|id| mask.allow(id));
                let mut logits: Vec<f32> = (0..vocab).map(|id| id as f32).collect();
                mask.apply(&mut logits);
                for (id, &logit) in logits.iter().enumerate() {
                    let allowed = id < tokens && id.is_multiple_of(step);
                    assert_eq!(mask.allows(id as u32), allowed, "{tokens} {vocab} {step} {id}");
                    assert_eq!(logit, if allowed { id as f32 } else { f32::NEG_INFINITY }, "{tokens} {vocab} {step}");
                }
            }
        }
    }

    #[test]
    fn is_a_set() {
        let of = |ids: &[u32]| {
            let mut mask = TokenMask::none(70);
            ids.iter().for_each(|&id| mask.allow(id));
            mask
        };
        let (a, b) = (of(&[0, 5, 31, 32, 69]), of(&[5, 32, 64]));
        let with = |change: fn(&mut TokenMask, &TokenMask)| {
            let mut mask = a.clone();
            change(&mut mask, &b);
            mask
        };
        assert_eq!(with(TokenMask::intersect), of(&[5, 32]));
        assert_eq!(with(TokenMask::unite), of(&[0, 5, 31, 32, 64, 69]));
        assert_eq!(with(TokenMask::subtract), of(&[0, 31, 69]));
        assert!(of(&[]).is_empty() && !of(&[69]).is_empty());
        assert_eq!(of(&[10_000]), of(&[]), "there is no room for it");
    }
}
