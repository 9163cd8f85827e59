//! What changes the logits of single tokens: masks, bias and penalties.

use super::{TokenHistory, TokenMask};
use crate::execute::Draw;
use crate::request::SamplingParams;

/// Whether `draw`, where no mask is, takes the token with the largest raw logit.
pub fn takes_largest(draw: &Draw) -> bool {
    draw.params.temperature == 0.0 && !changes_logits(draw)
}

fn changes_logits(draw: &Draw) -> bool {
    let params = &*draw.params;
    params.needs_history()
        || params.allowed_token_ids.is_some()
        || !params.logit_bias.is_empty()
        || !draw.banned.is_empty()
}

/// The logits with masks, bias and penalties applied, in `scratch`; `None` when there is nothing to change.
/// Costs one copy of the vocabulary; the rest is per token that changes.
///
/// A token that the model has no logit for is passed over: it could not be drawn anyway.
pub fn adjust<'a>(
    logits: &[f32],
    draw: &Draw,
    mask: Option<&TokenMask>,
    scratch: &'a mut Vec<f32>,
) -> Option<&'a [f32]> {
    let params = &*draw.params;
    if mask.is_none() && !changes_logits(draw) {
        return None;
    }
    copy_allowed(logits, params.allowed_token_ids.as_deref(), scratch);
    if let Some(mask) = mask {
        mask.apply(scratch);
    }
    for &token in draw.banned.iter() {
        forbid(scratch, token);
    }
    for &(token, bias) in &params.logit_bias {
        change(scratch, token, |logit| logit + f64::from(bias));
    }
    if params.needs_history() {
        let history = draw.history.as_deref().expect("a draw whose parameters need its history comes with it");
        mask_bad_words(scratch, params, history);
        penalise(scratch, params, history);
    }
    Some(scratch)
}

fn copy_allowed(logits: &[f32], allowed: Option<&[u32]>, out: &mut Vec<f32>) {
    out.clear();
    let Some(allowed) = allowed else {
        out.extend_from_slice(logits);
        return;
    };
    out.resize(logits.len(), f32::NEG_INFINITY);
    for &token in allowed {
        if let Some(&logit) = logits.get(token as usize) {
            out[token as usize] = logit;
        }
    }
}

fn mask_bad_words(logits: &mut [f32], params: &SamplingParams, history: &TokenHistory) {
    for word in &params.bad_words {
        if let Some((&last, before)) = word.split_last()
            && history.ends_with(before)
        {
            forbid(logits, last);
        }
    }
}

/// Repetition (arXiv:1909.05858): prompt and output. Frequency and presence (OpenAI's): output only.
fn penalise(logits: &mut [f32], params: &SamplingParams, history: &TokenHistory) {
    let repetition = f64::from(params.repetition_penalty);
    let frequency = f64::from(params.frequency_penalty);
    let presence = f64::from(params.presence_penalty);
    if repetition == 1.0 && frequency == 0.0 && presence == 0.0 {
        return;
    }
    for (token, generated) in history.counts() {
        change(logits, token, |logit| {
            let repeated = if logit > 0.0 { logit / repetition } else { logit * repetition };
            repeated - frequency * f64::from(generated) - if generated > 0 { presence } else { 0.0 }
        });
    }
}

fn forbid(logits: &mut [f32], token: u32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

/// In f64, so that a chain of changes is rounded once each at most; kept finite, so that only masks mask.
fn change(logits: &mut [f32], token: u32, to: impl Fn(f64) -> f64) {
    if let Some(logit) = logits.get_mut(token as usize)
        && *logit > f32::NEG_INFINITY
    {
        *logit = to(f64::from(*logit)).clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
    }
}
