//! A draw as a device takes it, and what it said as everybody else takes it. The steps and their numbers are those of the
//! [`Sampler`](super::Sampler), so a device draws what it would.

use std::sync::Arc;

use octavo_kernels::{DrawnRow, RowDraw};

use super::{NOTHING_LEFT, TokenMask, filter, logprobs, no_logit, penalties, random};
use crate::execute::{Draw, Drawn};

/// What a [`RowDraw`] points to, besides its [`Draw`].
#[derive(Debug)]
pub struct RowChanges {
    mask: Option<Arc<TokenMask>>,
    biases: Vec<(u32, f32)>,
}

impl RowChanges {
    /// Of a draw, where there is a `mask` of one of its tokens.
    pub fn new(draw: &Draw, mask: Option<Arc<TokenMask>>) -> Self {
        let mut biases: Vec<_> = penalties::biases(draw).collect();
        biases.sort_by_key(|&(token, _)| token); // stable: those of one token stay in order
        Self { mask: both(mask, draw.params.allowed_token_ids.as_deref()), biases }
    }

    /// The draw.
    pub fn row<'a>(&'a self, draw: &'a Draw) -> RowDraw<'a> {
        let params = &*draw.params;
        RowDraw {
            temperature: params.temperature,
            min_p_offset: filter::min_p_offset(params),
            top_k: params.top_k,
            top_p: params.top_p,
            coin: random::coin(draw.seed, draw.position),
            logprobs: params.logprobs,
            mask: self.mask.as_ref().map(|mask| mask.words()),
            biases: &self.biases,
            counts: penalties::counts(draw),
            repetition_penalty: params.repetition_penalty,
            frequency_penalty: params.frequency_penalty,
            presence_penalty: params.presence_penalty,
        }
    }
}

fn both(mask: Option<Arc<TokenMask>>, allowed: Option<&[u32]>) -> Option<Arc<TokenMask>> {
    let Some(allowed) = allowed else { return mask };
    let mut all = TokenMask::none(allowed.iter().max().map_or(0, |&most| most as usize + 1));
    allowed.iter().for_each(|&token| all.allow(token));
    if let Some(mask) = mask {
        all.intersect(&mask);
    }
    Some(Arc::new(all))
}

/// What a device drew; the error is this request's alone.
pub fn drawn(row: DrawnRow) -> Result<Drawn, String> {
    match row {
        DrawnRow::Token(token_id, statistics) => {
            Ok(Drawn { token_id, logprobs: statistics.map(|row| logprobs::from_statistics(token_id, row)) })
        }
        DrawnRow::NoLogit(token, logit) => Err(no_logit(token as usize, logit)),
        DrawnRow::NothingLeft => Err(NOTHING_LEFT.into()),
    }
}
