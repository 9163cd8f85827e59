//! Mixture of experts: which experts a row goes to, and how their outputs become one.

use crate::routing::Choice;

/// A row's best experts by their logits, as many as there are `choices`, best first and the smaller index first among
/// equals. A weight is the softmax over all experts, divided by the sum over the chosen ones where `renormalise`.
pub fn route(choices: &mut [Choice], logits: &[f32], renormalise: bool) {
    assert!(choices.len() <= logits.len());
    for i in 0..choices.len() {
        let free = |expert: &usize| choices[..i].iter().all(|choice| choice.expert as usize != *expert);
        let better = |best: usize, expert: usize| if logits[expert] > logits[best] { expert } else { best };
        let best = (0..logits.len()).filter(free).reduce(better).unwrap_or_default();
        choices[i].expert = best as u32;
    }
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = logits.iter().map(|logit| (logit - max).exp()).sum();
    for choice in choices.iter_mut() {
        choice.weight = (logits[choice.expert as usize] - max).exp() / total;
    }
    if renormalise {
        let chosen: f32 = choices.iter().map(|choice| choice.weight).sum();
        choices.iter_mut().for_each(|choice| choice.weight /= chosen);
    }
}

/// `out = Σ weight · expert output`, one row, in the order of its choices.
pub fn combine<'a>(out: &mut [f32], outputs: impl Iterator<Item = (f32, &'a [f32])>) {
    out.fill(0.0);
    for (weight, output) in outputs {
        assert_eq!(out.len(), output.len());
        for (out, x) in out.iter_mut().zip(output) {
            *out += weight * x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routed(logits: &[f32], count: usize, renormalise: bool) -> Vec<(u32, f32)> {
        let mut choices = vec![Choice::default(); count];
        route(&mut choices, logits, renormalise);
        choices.iter().map(|choice| (choice.expert, choice.weight)).collect()
    }

    #[test]
    fn the_best_come_first_and_equals_by_index() {
        let logits = [0.0, 2f32.ln(), 2f32.ln(), 3f32.ln()];
        let got = routed(&logits, 3, false);
        assert_eq!(got.iter().map(|choice| choice.0).collect::<Vec<_>>(), [3, 1, 2]);
        for ((_, weight), wanted) in got.iter().zip([3.0 / 8.0, 0.25, 0.25]) {
            assert!((weight - wanted).abs() < 1e-6, "{weight}, wanted {wanted}");
        }
        let shared: f32 = routed(&logits, 3, true).iter().map(|choice| choice.1).sum();
        assert!((shared - 1.0).abs() < 1e-6, "{shared}");
    }

    #[test]
    fn whatever_the_logits_a_row_goes_to_different_experts() {
        for logits in [[f32::NAN; 4], [f32::INFINITY; 4], [f32::NEG_INFINITY; 4], [1.0, f32::NAN, 2.0, f32::NAN]] {
            let mut experts: Vec<u32> = routed(&logits, 4, true).iter().map(|choice| choice.0).collect();
            experts.sort_unstable();
            assert_eq!(experts, [0, 1, 2, 3], "{logits:?}");
        }
    }
}
