//! What a draw of a token from a row of logits is told, and what it says: the seam between a sampler's policy, which is not
//! this crate's business, and a device that draws where the logits are.

/// The most of a row's best tokens that a draw lists.
pub const MOST_TOPS: usize = 64;

/// How a token is drawn from a row of logits. A token that there is no logit for changes nothing.
///
/// In this order: logits that the mask does not have become −∞; `biases` are added, in f64 and rounded once each, and kept
/// finite; tokens of `counts` are penalised; what is left is filtered and picked from as `octavo::sample` defines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowDraw<'a> {
    /// Divides; 0 takes the largest and skips the rest.
    pub temperature: f32,
    /// What is below the largest logit and this is not drawn; −∞: nothing is.
    pub min_p_offset: f64,
    /// Only what is at least the k-th largest; 0: all.
    pub top_k: u32,
    /// Only the fewest that reach this; 1: all.
    pub top_p: f32,
    /// Picks among what is left, in order of tokens.
    pub coin: f64,
    /// Wanted: the log-probability of what is drawn, and so many of the best, at most [`MOST_TOPS`].
    pub logprobs: Option<usize>,
    /// A bit for every token that may be drawn, the smaller one in the lower bit; none for those beyond its end.
    pub mask: Option<&'a [u32]>,
    /// Sorted by token; those of one token are added in this order. −∞: must not be drawn.
    pub biases: &'a [(u32, f32)],
    /// Tokens that came before, each once, and how often it was generated.
    pub counts: &'a [(u32, u32)],
    /// What happens to those: divides or multiplies …
    pub repetition_penalty: f32,
    /// … is subtracted for every time …
    pub frequency_penalty: f32,
    /// … and once for those that were generated.
    pub presence_penalty: f32,
}

impl RowDraw<'_> {
    /// Takes the largest logit, and says nothing about it.
    pub const LARGEST: Self = RowDraw {
        temperature: 0.0,
        min_p_offset: f64::NEG_INFINITY,
        top_k: 0,
        top_p: 1.0,
        coin: 0.0,
        logprobs: None,
        mask: None,
        biases: &[],
        counts: &[],
        repetition_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
    };

    /// Whether what is drawn from is not the logits themselves.
    pub fn changes_logits(&self) -> bool {
        self.mask.is_some() || !self.biases.is_empty() || !self.counts.is_empty()
    }
}

/// What became of a draw.
#[derive(Clone, Debug, PartialEq)]
pub enum DrawnRow {
    /// A token, and what its log-probability is made of where that is wanted.
    Token(u32, Option<RowStatistics>),
    /// A value that is no logit: the first one's index.
    NoLogit(u32, f32),
    /// Every logit is −∞ or masked.
    NothingLeft,
}

/// What the log-probabilities of a row are made of, of the logits as they were.
#[derive(Clone, Debug, PartialEq)]
pub struct RowStatistics {
    /// The drawn token's logit.
    pub logit: f32,
    /// How many logits are larger, plus 1.
    pub rank: u32,
    /// The largest logit.
    pub largest: f32,
    /// The sum of the weights of all logits, relative to the largest.
    pub total: f64,
    /// The largest logits and their tokens, in no order.
    pub top: Vec<(u32, f32)>,
}
