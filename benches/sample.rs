//! A draw from one row of logits, on one thread. Floor: every logit is read once. The obvious way, which sorts, stands below.

#[path = "../tests/sample/naive.rs"]
mod naive;
mod support;

use std::sync::Arc;

use octavo::execute::Draw;
use octavo::request::SamplingParams;
use octavo::sample::random::coin;
use octavo::sample::{Sampler, TokenHistory};
use support::{Bench, Work};

/// Logits like a model's: a few likely tokens, then a long slope.
fn logits(vocab: usize) -> Vec<f32> {
    (0..vocab).map(|i| (-2.0 * coin(1, i).ln() + 4.0 * coin(2, i)) as f32).collect()
}

fn cases(vocab: usize) -> Vec<(&'static str, SamplingParams)> {
    let default = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    vec![
        ("greedy", SamplingParams { temperature: 0.0, ..default.clone() }),
        ("temperature", default.clone()),
        ("min-p 0.05", SamplingParams { min_p: 0.05, ..default.clone() }),
        ("top-k 50", SamplingParams { top_k: 50, ..default.clone() }),
        ("top-p 0.95", SamplingParams { top_p: 0.95, ..default.clone() }),
        ("top-k 50, top-p 0.95", SamplingParams { top_k: 50, top_p: 0.95, ..default.clone() }),
        (
            "penalties, greedy",
            SamplingParams { temperature: 0.0, repetition_penalty: 1.1, frequency_penalty: 0.1, ..default.clone() },
        ),
        ("logprobs 20, greedy", SamplingParams { temperature: 0.0, logprobs: Some(20), ..default.clone() }),
        (
            "allowed: half",
            SamplingParams { allowed_token_ids: Some((0..vocab as u32).step_by(2).collect()), ..default },
        ),
    ]
}

fn main() {
    let bench = Bench::start("sample", Some(1));
    for vocab in [bench.size(49_152, 100), bench.size(262_144, 1000)] {
        let logits = logits(vocab);
        let mut sampler = Sampler::new(vocab);
        let prompt: Vec<u32> = (0..bench.size(1000, 10)).map(|i| (coin(3, i) * vocab as f64) as u32).collect();
        let (shape, work) = (format!("vocab {vocab}"), Work::cache(4 * vocab));
        for (name, params) in cases(vocab) {
            let history = Some(Arc::new(TokenHistory::new(&prompt)));
            let mut draw = Draw { params: Arc::new(params), seed: 7, position: 0, history, banned: Arc::new([]) };
            check(&mut sampler, &logits, &draw, &prompt);
            bench.line(name, &shape, work, || {
                draw.position += 1;
                sampler.draw(&logits, &draw, None)
            });
            if name == "top-p 0.95" {
                bench.line("  the same by sorting", &shape, work, || {
                    naive::probabilities(&logits, &draw, (&prompt, &[]))
                });
            }
        }
    }
}

fn check(sampler: &mut Sampler, logits: &[f32], draw: &Draw, prompt: &[u32]) {
    // The obvious way looks through every list for every token, so it gets a short history, and half a vocabulary of
    // allowed tokens is left to the tests.
    if draw.params.allowed_token_ids.is_some() {
        return;
    }
    let prompt = &prompt[..10];
    let draw = Draw { history: Some(Arc::new(TokenHistory::new(prompt))), ..draw.clone() };
    let got = sampler.probabilities(logits, &draw, None).expect("tokens");
    let want = naive::probabilities(logits, &draw, (prompt, &[]));
    for (got, want) in got.iter().zip(want) {
        assert!((f64::from(*got) - want).abs() < 1e-6, "{got}, not {want}");
    }
}
