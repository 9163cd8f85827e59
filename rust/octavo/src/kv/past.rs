//! What is known of a block's past, as far as it tells when the block comes back.

/// Levels of what tells blocks apart: how often a block was used, by doublings; and of the request that used it last,
/// whether it went on from the end of an earlier one, how much in it was new, and how long its answer was.
pub const LEVELS: [usize; 4] = [4, 2, 4, 3];
/// Blocks of one class come back alike, as far as anything tells.
pub const CLASSES: usize = LEVELS[0] * KINDS;
/// Classes of blocks that were used equally often.
pub const KINDS: usize = LEVELS[1] * LEVELS[2] * LEVELS[3];

/// Tokens up to which a request is the first, the second, … of its kind: chosen by trial on traces of conversations. How much
/// a kind matters is learnt; where all are alike these cost nothing but time to learn it.
const NEW: [usize; LEVELS[2] - 1] = [1_500, 4_000, 16_000];
const ANSWER: [usize; LEVELS[3] - 1] = [8, 64];

/// The level in every trait of a class.
pub fn levels(class: usize) -> [usize; LEVELS.len()] {
    let mut rest = class;
    let mut levels = LEVELS;
    for level in levels.iter_mut().rev() {
        (rest, *level) = (rest / *level, rest % *level);
    }
    levels
}

/// What the request was like that used a block last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    kind: u8,
    /// The block lies at the end of the prompt, or in the answer: who finds it goes on from there.
    pub is_end: bool,
}

impl Mark {
    /// It went on from another's end or not, so many of its tokens were new, and its answer had so many.
    pub fn new(continues: bool, new_tokens: usize, answer_tokens: usize) -> Self {
        let level = |bounds: &[usize], tokens| bounds.partition_point(|&bound| bound <= tokens);
        let new = usize::from(continues) * LEVELS[2] + level(&NEW, new_tokens);
        Self { kind: (new * LEVELS[3] + level(&ANSWER, answer_tokens)) as u8, is_end: false }
    }

    /// Of a block at the end, or of another.
    pub fn at_end(self, is_end: bool) -> Self {
        Self { is_end, ..self }
    }
}

/// How a block was used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// How often its contents were written or found.
    pub uses: u32,
    /// When last, or when it became idle, on the pool's clock.
    pub touched: u64,
    /// By whom.
    pub mark: Mark,
}

impl Past {
    /// Which class it is of.
    pub fn class(&self) -> usize {
        (self.uses.max(1).ilog2() as usize).min(LEVELS[0] - 1) * KINDS + usize::from(self.mark.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_is_one_of_the_levels_of_every_trait() {
        let mut seen = [false; CLASSES];
        for (uses, level) in [(0, 0), (1, 0), (3, 1), (4, 2), (7, 2), (8, 3), (u32::MAX, 3)] {
            for continues in [false, true] {
                for (new, tokens) in [0, 1_500, 4_000, 16_000].into_iter().enumerate() {
                    for (answer, length) in [7, 63, 64].into_iter().enumerate() {
                        let mark = Mark::new(continues, tokens, length);
                        let class = Past { uses, touched: 0, mark }.class();
                        assert_eq!(levels(class), [level, usize::from(continues), new, answer]);
                        seen[class] = true;
                    }
                }
            }
        }
        assert_eq!(seen, [true; CLASSES]);
    }
}
