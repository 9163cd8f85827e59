//! What changes the logits of single tokens: masks, bias and penalties.

use super::{TokenHistory, TokenMask};
use crate::execute::Draw;
use crate::request::SamplingParams;

fn changes_logits(draw: &Draw) -> bool {
    let params = &*draw.params;
    params.needs_history()
        || params.allowed_token_ids.is_some()
        || !params.logit_bias.is_empty()
        || !draw.banned.is_empty()
}

/// The logits with masks, bias and penalties applied: in `scratch`, or the raw ones when there is nothing to change.
/// Costs one copy of the vocabulary; the rest is per token that changes.
///
/// A token that the model has no logit for is passed over: it could not be drawn anyway.
pub fn adjust<'a>(logits: &'a [f32], draw: &Draw, mask: Option<&TokenMask>, scratch: &'a mut Vec<f32>) -> &'a [f32] {
    let params = &*draw.params;
    if mask.is_none() && !changes_logits(draw) {
        return logits;
    }
    copy_allowed(logits, params.allowed_token_ids.as_deref(), scratch);
    if let Some(mask) = mask {
        mask.apply(scratch);
    }
    for (token, bias) in biases(draw) {
        if bias == f32::NEG_INFINITY {
            forbid(scratch, token);
        } else {
            change(scratch, token, |logit| logit + f64::from(bias));
        }
    }
    penalise(scratch, params, counts(draw));
    scratch
}

/// What is added to single logits, in order; −∞ for tokens that must not be drawn.
pub fn biases(draw: &Draw) -> impl Iterator<Item = (u32, f32)> + '_ {
    let SamplingParams { logit_bias, bad_words, .. } = &*draw.params;
    let bad = bad_words.iter().filter_map(|word| {
        let (&last, before) = word.split_last()?;
        history(draw).ends_with(before).then_some(last)
    });
    let forbidden = |token| (token, f32::NEG_INFINITY);
    draw.banned.iter().copied().map(forbidden).chain(logit_bias.iter().copied()).chain(bad.map(forbidden))
}

/// The tokens that are penalised, and how often each was generated.
pub fn counts(draw: &Draw) -> &[(u32, u32)] {
    let SamplingParams { repetition_penalty, frequency_penalty, presence_penalty, .. } = *draw.params;
    match repetition_penalty == 1.0 && frequency_penalty == 0.0 && presence_penalty == 0.0 {
        true => &[],
        false => history(draw).counts(),
    }
}

fn history(draw: &Draw) -> &TokenHistory {
    draw.history.as_deref().expect("a draw whose parameters need its history comes with it")
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

/// Repetition (arXiv:1909.05858): prompt and output. Frequency and presence (OpenAI's): output only.
fn penalise(logits: &mut [f32], params: &SamplingParams, counts: &[(u32, u32)]) {
    let repetition = f64::from(params.repetition_penalty);
    let frequency = f64::from(params.frequency_penalty);
    let presence = f64::from(params.presence_penalty);
    for &(token, generated) in counts {
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
