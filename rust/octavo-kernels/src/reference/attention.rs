//! Attention of one query over the positions it may see.

use super::{gated::soft_cap, linear::dot};
use crate::Mask;

/// The positions that a query at `position` may see.
pub fn visible(position: usize, window: Option<usize>) -> std::ops::Range<usize> {
    let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
    first..position + 1
}

/// `out = softmax(mask(q · kᵢ)) · vᵢ` over the keys and values of the visible positions, in order; one head of one row.
pub fn attention<'a>(
    out: &mut [f32],
    query: &[f32],
    keys: impl Iterator<Item = &'a [f32]>,
    values: impl Iterator<Item = &'a [f32]>,
    mask: &Mask,
) {
    let scores: Vec<f32> = keys.map(|key| soft_cap(dot(key, query) * mask.scale, mask.soft_cap)).collect();
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f32 = weights.iter().sum();
    out.fill(0.0);
    for (weight, value) in weights.iter().zip(values) {
        for (out, value) in out.iter_mut().zip(value) {
            *out += weight / sum * value;
        }
    }
}
