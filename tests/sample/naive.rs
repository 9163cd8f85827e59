//! Sampling the obvious way: sort everything, in f64.

use octavo::execute::Draw;
use octavo::request::SamplingParams;

/// The probabilities by the definitions in `octavo::sample`. `history` is prompt and output.
pub fn probabilities(logits: &[f32], draw: &Draw, history: (&[u32], &[u32])) -> Vec<f64> {
    let params = &*draw.params;
    let logits = adjusted(logits, draw, history);
    let mut order: Vec<usize> = (0..logits.len()).filter(|&i| logits[i] > f64::NEG_INFINITY).collect();
    // A stable sort: equals stay in order of id.
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let mut out = vec![0.0; logits.len()];
    if params.temperature == 0.0 {
        out[order[0]] = 1.0;
        return out;
    }
    let weight = |i: usize| ((logits[i] - logits[order[0]]) / f64::from(params.temperature)).exp();
    let mut kept: Vec<usize> = order.iter().copied().filter(|&i| weight(i) >= f64::from(params.min_p)).collect();
    if params.top_k > 0 && (params.top_k as usize) < kept.len() {
        let border = logits[kept[params.top_k as usize - 1]];
        kept.retain(|&i| logits[i] >= border);
    }
    if params.top_p < 1.0 {
        let total: f64 = kept.iter().map(|&i| weight(i)).sum();
        let mut sum = 0.0;
        let enough = kept.iter().position(|&i| {
            sum += weight(i);
            (sum / total) as f32 >= params.top_p
        });
        kept.truncate(enough.map_or(kept.len(), |i| i + 1));
    }
    let total: f64 = kept.iter().map(|&i| weight(i)).sum();
    kept.iter().for_each(|&i| out[i] = weight(i) / total);
    out
}

fn adjusted(logits: &[f32], draw: &Draw, (prompt, output): (&[u32], &[u32])) -> Vec<f64> {
    let SamplingParams { allowed_token_ids, bad_words, logit_bias, .. } = &*draw.params;
    let mut logits: Vec<f64> = logits.iter().map(|&l| f64::from(l)).collect();
    let all = [prompt, output].concat();
    for (id, logit) in logits.iter_mut().enumerate() {
        let id = id as u32;
        let is_bad = |word: &Vec<u32>| word.last() == Some(&id) && all.ends_with(&word[..word.len() - 1]);
        if allowed_token_ids.as_ref().is_some_and(|allowed| !allowed.contains(&id))
            || draw.banned.contains(&id)
            || bad_words.iter().any(is_bad)
        {
            *logit = f64::NEG_INFINITY;
        }
        *logit += logit_bias.iter().filter(|(token, _)| *token == id).map(|(_, bias)| f64::from(*bias)).sum::<f64>();
        let repetition = f64::from(draw.params.repetition_penalty);
        if all.contains(&id) {
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        }
        let count = output.iter().filter(|token| **token == id).count();
        *logit -= f64::from(draw.params.frequency_penalty) * count as f64;
        *logit -= f64::from(draw.params.presence_penalty) * f64::from(u8::from(count > 0));
    }
    logits
}
