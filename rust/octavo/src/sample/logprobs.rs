//! Log-probabilities and ranks, of the raw logits: what the model believes, whatever the sampling steps make of it.

use std::cmp::Reverse;

use octavo_kernels::RowStatistics;

use super::{select, softmax};
use crate::request::TokenLogprobs;

/// The natural log-probability of `token`, its rank (1 + how many logits are larger; equals share a rank) and the `k`
/// best tokens, best first, equal ones by the smaller id (fewer than `k` if fewer have a probability at all).
pub fn of(logits: &[f32], token: u32, k: usize) -> TokenLogprobs {
    let largest = select::max(logits);
    let logit = logits[token as usize];
    let likelier: u32 = logits.iter().map(|&other| u32::from(other > logit)).sum();
    let mut keys = Vec::new();
    select::top(logits, k, &mut keys);
    let top = keys.iter().map(|&key| (select::index_of(key), select::value_of(key))).collect();
    let total = softmax::sum_of_weights(logits, largest);
    from_statistics(token, RowStatistics { logit, rank: likelier + 1, largest, total, top })
}

/// The same, from what it is made of.
pub fn from_statistics(token_id: u32, row: RowStatistics) -> TokenLogprobs {
    let RowStatistics { logit, rank, largest, total, mut top } = row;
    let ln_total = softmax::ln(total);
    let logprob = |logit: f32| ((f64::from(logit) - f64::from(largest)) - ln_total) as f32;
    top.sort_unstable_by_key(|&(id, logit)| Reverse(select::key(logit, id)));
    top.iter_mut().for_each(|(_, value)| *value = logprob(*value));
    TokenLogprobs { token_id, logprob: logprob(logit), rank, top }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::random::coin;

    #[test]
    fn matches_a_plain_log_softmax() {
        for (seed, len) in [1, 2, 7, 8, 9, 257, 5000].into_iter().enumerate() {
            // Quarters: many ties.
            let logits: Vec<f32> =
                (0..len).map(|i| (coin(seed as u64, i) * 80.0).floor() as f32 / 4.0 - 10.0).collect();
            let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
            let plain = |id: usize| f64::from(logits[id]) - total.ln();
            let mut order: Vec<usize> = (0..len).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            for (token, k) in [(0, 0), (len / 2, 1), (len - 1, 5), (0, 64)] {
                let got = of(&logits, token as u32, k);
                assert!((f64::from(got.logprob) - plain(token)).abs() < 2e-6, "seed {seed}: {got:?}, {}", plain(token));
                assert_eq!(got.rank as usize, 1 + logits.iter().filter(|&&l| l > logits[token]).count());
                let ids: Vec<usize> = got.top.iter().map(|&(id, _)| id as usize).collect();
                assert_eq!(ids, order[..k.min(len)], "seed {seed}: the best {k} of {len}");
                for (id, logprob) in got.top {
                    assert!((f64::from(logprob) - plain(id as usize)).abs() < 2e-6, "seed {seed}: token {id}");
                }
            }
        }
    }

    #[test]
    fn impossible_tokens() {
        let got = of(&[f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY], 0, 3);
        assert_eq!((got.logprob, got.rank), (f32::NEG_INFINITY, 2));
        assert_eq!(got.top, [(1, 0.0)]);
    }
}
