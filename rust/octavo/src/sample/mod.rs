//! From logits to a token. Pure: the coin is a function of (seed, position), and nothing here knows the batch, so a request
//! draws the same tokens whoever its neighbours are.
//!
//! The steps, in this order (vLLM's):
//!
//! 1. logits that are NaN or +∞ are that request's error; −∞ is a token that the model itself rules out
//! 2. what the request's grammar does not allow here (the mask), `allowed_token_ids`, tokens that may not be drawn yet,
//!    `bad_words` → −∞
//! 3. `logit_bias` is added
//! 4. `repetition_penalty` (prompt and output), then `frequency_penalty` and `presence_penalty` (output only)
//! 5. `temperature` divides; 0 takes the largest logit here and skips the rest
//! 6. `min_p` → `top_k` → `top_p`, each on what the one before it kept
//! 7. the coin picks among the kept, in order of id
//!
//! Log-probabilities are of the raw logits, before any of these.
//!
//! **Ties.** Among equal logits the smaller id is the likelier one: greedy takes it, `top_p` and the lists of
//! alternatives fill up with it first. `top_k` keeps every token equal to the k-th, so it may keep more than k.
//!
//! **Elsewhere.** A device that draws where the logits are takes the same steps with the same numbers and gives the same
//! tokens and log-probabilities, to the bit: so a row may be drawn here or there, as it suits.

use octavo_kernels::cpu::Isa;
use octavo_kernels::cpu::vector::{Kernel, Vector};

use crate::execute::{Draw, Drawn};
use crate::request::{SamplingParams, TokenLogprobs};

mod filter; // temperature, min-p, top-k, top-p, and the pick among what they keep
mod history; // the tokens before a draw
mod mask; // which tokens may be drawn
mod logprobs; // log-probabilities and ranks of raw logits
mod penalties; // what changes single logits: masks, bias, penalties
pub mod random; // coins
mod row; // a draw as a device takes it
mod select; // the largest values, without sorting
mod softmax; // exp, and sums in one order

pub use history::TokenHistory;
pub use mask::TokenMask;
pub use row::{RowChanges, drawn};

/// Draws tokens. Owns the scratch memory for one vocabulary, so a draw allocates nothing (but the log-probabilities it
/// returns).
#[derive(Debug)]
pub struct Sampler {
    isa: Isa,
    /// Logits after masks, bias and penalties, when there are any.
    adjusted: Vec<f32>,
    kept: filter::Kept,
}

impl Sampler {
    /// Scratch for a vocabulary of `vocab` tokens. The instructions are those of the environment, or else the best that
    /// this CPU has; they change no bit.
    pub fn new(vocab: usize) -> Self {
        Self::with_isa(vocab, Isa::from_environment().unwrap_or_else(|_| Isa::best()))
    }

    /// With these instructions.
    pub fn with_isa(vocab: usize, isa: Isa) -> Self {
        Self { isa, adjusted: Vec::with_capacity(vocab), kept: filter::Kept::new(vocab) }
    }

    /// Chooses a token from `logits` (raw, one per token of the vocabulary), where there is a `mask` one of its tokens. The
    /// error is this request's alone: logits that are no numbers, or no token left to draw.
    pub fn draw(&mut self, logits: &[f32], draw: &Draw, mask: Option<&TokenMask>) -> Result<Drawn, String> {
        let token_id = match self.keep(logits, draw, mask)? {
            Choice::Greedy(token_id) => token_id,
            Choice::Among { kept, .. } => kept.pick(random::coin(draw.seed, draw.position)),
        };
        let logprobs = draw.params.logprobs.map(|k| self.logprobs(logits, token_id, k));
        Ok(Drawn { token_id, logprobs })
    }

    /// The probability of each token, by the same steps. A draw follows it as closely as it may: it rounds weights, so that
    /// what is 2^35 times less likely than the likeliest token does not come.
    pub fn probabilities(&mut self, logits: &[f32], draw: &Draw, mask: Option<&TokenMask>) -> Result<Vec<f32>, String> {
        let mut probabilities = vec![0.0; logits.len()];
        match self.keep(logits, draw, mask)? {
            Choice::Greedy(token_id) => probabilities[token_id as usize] = 1.0,
            Choice::Among { kept, logits, max } => {
                kept.probabilities(logits, max, draw.params.temperature, &mut probabilities);
            }
        }
        Ok(probabilities)
    }

    /// The log-probability of `token` in these raw logits, its rank and the `k` best tokens.
    pub fn logprobs(&self, logits: &[f32], token: u32, k: usize) -> TokenLogprobs {
        self.isa.run(Logprobs { logits, token, k })
    }

    /// Refuses what is no logit. −∞ is one: a token that the model rules out; NaN and +∞ are failures of the model.
    pub fn check(&self, logits: &[f32]) -> Result<(), String> {
        self.scan(logits).map(drop)
    }

    fn scan(&self, logits: &[f32]) -> Result<select::Scan, String> {
        let scan = self.isa.run(Scan(logits));
        if scan.all_logits {
            return Ok(scan);
        }
        let token = logits.iter().position(|&value| !select::is_logit(value)).unwrap_or(0);
        Err(no_logit(token, logits[token]))
    }

    /// Everything but the coin.
    fn keep<'a>(&'a mut self, logits: &'a [f32], draw: &Draw, mask: Option<&TokenMask>) -> Result<Choice<'a>, String> {
        let raw = self.scan(logits)?;
        let (logits, seen) = match penalties::adjust(logits, draw, mask, &mut self.adjusted) {
            None => (logits, raw),
            Some(adjusted) => (adjusted, self.isa.run(Scan(adjusted))),
        };
        if seen.max == f32::NEG_INFINITY {
            return Err(NOTHING_LEFT.into());
        }
        if draw.params.temperature == 0.0 {
            return Ok(Choice::Greedy(seen.first));
        }
        let max = seen.max;
        self.isa.run(Keep { kept: &mut self.kept, logits, max, params: &draw.params });
        Ok(Choice::Among { kept: &self.kept, logits, max })
    }
}

enum Choice<'a> {
    Greedy(u32),
    /// One of these, by their weights; `logits` after masks, bias and penalties, and the largest of them.
    Among {
        kept: &'a filter::Kept,
        logits: &'a [f32],
        max: f32,
    },
}

// Loops over a vocabulary, compiled for every instruction set. They are plain arithmetic in one order, which the compiler
// makes vectors of, so their bits are the same on all.

struct Scan<'a>(&'a [f32]);

impl Kernel for Scan<'_> {
    type Output = select::Scan;
    #[inline(always)]
    fn run<V: Vector>(self, _: V) -> select::Scan {
        select::scan(self.0)
    }
}

struct Keep<'a> {
    kept: &'a mut filter::Kept,
    logits: &'a [f32],
    max: f32,
    params: &'a SamplingParams,
}

impl Kernel for Keep<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, _: V) {
        self.kept.keep(self.logits, self.max, self.params);
    }
}

struct Logprobs<'a> {
    logits: &'a [f32],
    token: u32,
    k: usize,
}

impl Kernel for Logprobs<'_> {
    type Output = TokenLogprobs;
    #[inline(always)]
    fn run<V: Vector>(self, _: V) -> TokenLogprobs {
        logprobs::of(self.logits, self.token, self.k)
    }
}

fn no_logit(token: usize, logit: f32) -> String {
    format!("the model's logit of token {token} is {logit}: the model gave no answer")
}

const NOTHING_LEFT: &str = "no token is left to draw: every one is masked by the model, the grammar, allowed_token_ids, bad_words or min_tokens";
