//! The sampler against vectors from elsewhere (`fixtures`), against the obvious way of doing it (`naive`), and the promises
//! that neither shows: ties, errors, and draws that follow the probabilities.

mod device;
mod fixtures;
mod naive;

use std::sync::Arc;

use octavo::execute::Draw;
use octavo::request::SamplingParams;
use octavo::sample::random::coin;
use octavo::sample::{Sampler, TokenHistory, TokenMask};
use octavo_kernels::cpu::Isa;

/// A draw for these parameters, after these tokens.
fn draw(params: SamplingParams, prompt: &[u32], output: &[u32]) -> Draw {
    let mut history = TokenHistory::new(prompt);
    output.iter().for_each(|&token| history.push(token));
    let history = params.needs_history().then(|| Arc::new(history));
    let position = prompt.len() + output.len();
    Draw { params: Arc::new(params), seed: 11, position, history, banned: Arc::new([]) }
}

/// Draws at `count` positions; how improbable the counts are under `probabilities`: χ² as a standard normal variable
/// (Wilson–Hilferty), rare tokens taken together.
fn improbability(sampler: &mut Sampler, logits: &[f32], mut draw: Draw, probabilities: &[f64], count: usize) -> f64 {
    let mut drawn = vec![0usize; logits.len()];
    for position in 0..count {
        draw.position = position;
        drawn[sampler.draw(logits, &draw, None).expect("a token").token_id as usize] += 1;
    }
    let (mut rare, mut terms) = ((0.0, 0.0), Vec::new());
    for (&got, &p) in drawn.iter().zip(probabilities) {
        assert!(p > 0.0 || got == 0, "a token of probability 0 was drawn");
        let expected = p * count as f64;
        if expected < 5.0 {
            rare = (rare.0 + got as f64, rare.1 + expected);
        } else {
            terms.push((got as f64 - expected).powi(2) / expected);
        }
    }
    if rare.1 >= 5.0 {
        terms.push((rare.0 - rare.1).powi(2) / rare.1);
    }
    let freedom = terms.len().saturating_sub(1) as f64;
    if freedom == 0.0 {
        return 0.0;
    }
    let spread = 2.0 / (9.0 * freedom);
    ((terms.iter().sum::<f64>() / freedom).cbrt() - (1.0 - spread)) / spread.sqrt()
}

/// A number from 0 to `below`, decided by the case and which of its choices this is.
fn dice(case: u64, choice: usize, below: usize) -> usize {
    (coin(case, choice) * below as f64) as usize
}

/// Random parameters, each filter off about as often as on.
fn any_params(case: u64, vocab: usize) -> SamplingParams {
    let pick = |choice: usize, values: &[f32]| values[dice(case, choice, values.len())];
    let token = |choice: usize| dice(case, choice, vocab) as u32;
    SamplingParams {
        temperature: pick(0, &[0.0, 0.05, 0.7, 1.0, 1.0, 1.3, 8.0]),
        top_p: pick(1, &[1.0, 1.0, 1e-6, 0.3, 0.77, 0.99]),
        top_k: pick(2, &[0.0, 0.0, 1.0, 2.0, 20.0, vocab as f32, 1e9]) as u32,
        min_p: pick(3, &[0.0, 0.0, 0.013, 0.3, 1.0]),
        presence_penalty: pick(4, &[0.0, 0.0, 0.7, -0.4]),
        frequency_penalty: pick(5, &[0.0, 0.0, 0.3, -0.2]),
        repetition_penalty: pick(6, &[1.0, 1.0, 1.3, 0.8]),
        logit_bias: (0..dice(case, 7, 4)).map(|i| (token(20 + i), pick(30 + i, &[-50.0, -1.25, 2.5]))).collect(),
        bad_words: (0..dice(case, 8, 3))
            .map(|i| vec![2; dice(case, 40 + i, 2)].into_iter().chain([token(50 + i)]).collect())
            .collect(),
        allowed_token_ids: (dice(case, 9, 4) == 0).then(|| (0..vocab as u32).filter(|id| id % 3 != 1).collect()),
        ..SamplingParams::default()
    }
}

#[test]
fn random_parameters_match_the_obvious_way() {
    let mut cuts = 0;
    for case in 0..1500u64 {
        let vocab = [8, 9, 33, 64, 600][dice(case, 100, 5)];
        let mut sampler = Sampler::new(vocab);
        // Thirds of a whole number: ties in about half of the cases.
        let levels = [5.0, 1e6][dice(case, 101, 2)];
        let logit = |i| ((coin(case + (1 << 40), i) * levels).floor() / levels * 24.0 - 12.0) as f32;
        let mut logits: Vec<f32> = (0..vocab).map(logit).collect();
        if dice(case, 102, 3) == 0 {
            logits[dice(case, 103, vocab)] = f32::NEG_INFINITY;
        }
        let output = [2, 5, 2, 0, 2];
        let mut draw = draw(any_params(case, vocab), &[1, 1, 4, 7], &output);
        draw.banned = (0..dice(case, 104, 3)).map(|i| dice(case, 110 + i, vocab) as u32).collect();

        let want = naive::probabilities(&logits, &draw, (&[1, 1, 4, 7], &output));
        let got = sampler.probabilities(&logits, &draw, None).expect("some token is left");
        for (id, (&got, &want)) in got.iter().zip(&want).enumerate() {
            let error = (f64::from(got) - want).abs();
            assert!(error < 1e-6, "case {case}: token {id} of {vocab}: {got}, not {want}\n{:?}", draw.params);
        }
        let count = got.iter().filter(|&&p| p > 0.0).count();
        assert_eq!(count, want.iter().filter(|&&p| p as f32 > 0.0).count(), "case {case}: kept");
        cuts += usize::from(count > 1 && count < vocab / 2);
    }
    assert!((300..1200).contains(&cuts), "the cases are too much alike: {cuts} cut through the middle");
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    for case in 0..400u64 {
        // Around the chunks of 64 that are looked at together, the sums' blocks of 512 and the scan's of 1024.
        let vocab = [1, 63, 64, 65, 511, 513, 1023, 1025, 3000][dice(case, 100, 9)];
        let logits: Vec<f32> = (0..vocab).map(|i| (coin(case + (1 << 41), i).ln() * -3.0) as f32).collect();
        let mut params = any_params(case, vocab);
        params.logprobs = Some(dice(case, 101, 5));
        params.allowed_token_ids = None;
        params.bad_words.clear();
        let draw = draw(params, &[0], &[0]);
        let answer = |isa| {
            let mut sampler = Sampler::with_isa(vocab, isa);
            let probabilities = sampler.probabilities(&logits, &draw, None).expect("tokens");
            let bits: Vec<u32> = probabilities.into_iter().map(f32::to_bits).collect();
            let drawn = sampler.draw(&logits, &draw, None).expect("a token");
            let logprobs = drawn.logprobs.expect("they were asked for");
            (bits, drawn.token_id, logprobs.logprob.to_bits(), logprobs.rank, logprobs.top)
        };
        let available = Isa::available();
        let plain = answer(available[0]);
        for isa in &available[1..] {
            assert_eq!(answer(*isa), plain, "case {case}, vocabulary {vocab}, {}", isa.describe());
        }
    }
}

#[test]
fn draws_follow_the_probabilities() {
    for case in [3, 5, 8, 13, 21, 34] {
        let vocab = 900; // more than a block of the running sum
        let mut params = any_params(case, vocab);
        params.temperature = params.temperature.max(0.7);
        let draw = draw(params, &[1, 2], &[3, 3]);
        let logits: Vec<f32> = (0..vocab).map(|i| (coin(case, i + 500) * 6.0) as f32).collect();
        let probabilities = naive::probabilities(&logits, &draw, (&[1, 2], &[3, 3]));
        let z = improbability(&mut Sampler::new(vocab), &logits, draw, &probabilities, 20_000);
        assert!(z < 4.75, "case {case}: {z} standard deviations");
    }
}

#[test]
fn ties_go_to_the_smaller_id() {
    let logits = [1.0, 3.0, -0.0, 3.0, 0.0, 3.0];
    let keeps = |params: SamplingParams| {
        let p = Sampler::new(6).probabilities(&logits, &draw(params, &[0], &[]), None).expect("tokens");
        (0..6).filter(|&i| p[i] > 0.0).collect::<Vec<_>>()
    };
    let default = SamplingParams::default;
    assert_eq!(keeps(SamplingParams { temperature: 0.0, ..default() }), [1]);
    assert_eq!(keeps(SamplingParams { top_p: 0.1, ..default() }), [1]);
    assert_eq!(keeps(SamplingParams { top_p: 0.5, ..default() }), [1, 3]);
    assert_eq!(keeps(SamplingParams { top_p: 0.1, logit_bias: vec![(1, -0.5)], ..default() }), [3]);
    assert_eq!(keeps(SamplingParams { top_k: 2, ..default() }), [1, 3, 5], "equal to the k-th: kept");
    assert_eq!(keeps(SamplingParams { top_k: 5, ..default() }), [0, 1, 2, 3, 4, 5], "-0 equals 0");
    assert_eq!(keeps(SamplingParams { min_p: 1.0, ..default() }), [1, 3, 5]);
}

#[test]
fn greedy_takes_no_coin_and_logprobs_are_raw() {
    let params =
        SamplingParams { temperature: 0.0, logit_bias: vec![(0, 10.0)], logprobs: Some(2), ..Default::default() };
    let mut draw = draw(params, &[1], &[]);
    let logits = [0.0f32, 2.0, 1.0];
    for position in 0..20 {
        draw.position = position;
        let drawn = Sampler::new(3).draw(&logits, &draw, None).expect("a token");
        assert_eq!(drawn.token_id, 0);
        let logprobs = drawn.logprobs.expect("they were asked for");
        let ln_total = logits.iter().map(|l| l.exp()).sum::<f32>().ln();
        assert!((logprobs.logprob + ln_total).abs() < 1e-6);
        assert_eq!((logprobs.token_id, logprobs.rank), (0, 3));
        assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
    }
}

#[test]
fn a_used_sampler_draws_like_a_new_one() {
    let vocab = 300;
    let mut used = Sampler::new(vocab);
    for case in 0..200 {
        let draw = draw(any_params(case, vocab), &[1], &[2, 2]);
        let logits: Vec<f32> = (0..vocab).map(|i| (coin(case, i + 300) * 9.0) as f32).collect();
        assert_eq!(used.draw(&logits, &draw, None), Sampler::new(vocab).draw(&logits, &draw, None), "case {case}");
    }
}

#[test]
fn what_cannot_be_drawn_is_an_error_of_that_request() {
    let mut sampler = Sampler::new(40);
    for temperature in [0.0, 1.0] {
        let draw = |allowed: Option<Vec<u32>>, banned: &[u32]| {
            let params = SamplingParams { temperature, allowed_token_ids: allowed, ..Default::default() };
            Draw { banned: banned.into(), ..draw(params, &[0], &[]) }
        };
        for (bad, name) in [(f32::NAN, "NaN"), (-f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
            let mut logits = [0.5; 40];
            logits[37] = bad;
            let error = sampler.draw(&logits, &draw(None, &[]), None).expect_err("no token");
            assert!(error.contains("token 37") && error.contains(name), "{error}");
        }
        assert!(
            sampler.draw(&[f32::NEG_INFINITY; 40], &draw(None, &[]), None).expect_err("no token").contains("masked")
        );
        assert!(sampler.draw(&[0.5; 40], &draw(Some(vec![5, 9]), &[9, 5]), None).is_err());
        let last_one = sampler.draw(&[0.5; 40], &draw(Some(vec![5, 9]), &[5]), None).expect("token 9 is left");
        assert_eq!(last_one.token_id, 9);
    }
}

#[test]
fn extreme_numbers_stay_numbers() {
    let cases = [
        (vec![f32::MAX, f32::MIN, 0.0, 1e-45], SamplingParams::default()),
        (vec![1.0, 2.0, 2.0, 1.5], SamplingParams { temperature: 1e-45, ..Default::default() }),
        (vec![1.0, 2.0, 2.0, 1.5], SamplingParams { logit_bias: vec![(0, f32::MAX); 3], ..Default::default() }),
        (vec![f32::MAX, 2.0, 2.0, 1.5], SamplingParams { repetition_penalty: 1e-3, ..Default::default() }),
        (vec![1e-45, -1e-45, 0.0, -0.0], SamplingParams { top_p: 0.6, min_p: 1e-30, ..Default::default() }),
        (
            vec![-1e30, -1e30, -2e30, f32::NEG_INFINITY],
            SamplingParams { top_p: f32::MIN_POSITIVE, ..Default::default() },
        ),
    ];
    for (logits, params) in cases {
        let p = Sampler::new(4).probabilities(&logits, &draw(params.clone(), &[0], &[]), None).expect("tokens");
        assert!((p.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{logits:?} {params:?}: {p:?}");
    }
}

#[test]
fn bad_words_ban_the_last_token_after_the_others() {
    let params = SamplingParams { bad_words: vec![vec![4], vec![1, 2, 3], vec![2, 2]], ..Default::default() };
    for (prompt, output, banned) in [
        (&[1u32][..], &[][..], &[4usize][..]),
        (&[1], &[2], &[2, 3, 4]),
        (&[1, 2], &[], &[2, 3, 4]),
        (&[0], &[1, 2, 0], &[4]),
        (&[0], &[2, 2], &[2, 4]),
    ] {
        let p = Sampler::new(6).probabilities(&[1.0; 6], &draw(params.clone(), prompt, output), None).expect("tokens");
        let zero: Vec<usize> = (0..6).filter(|&i| p[i] == 0.0).collect();
        assert_eq!(zero, banned, "after {prompt:?} {output:?}");
    }
}

#[test]
fn a_mask_is_a_list_of_allowed_tokens() {
    let vocab = 70;
    for case in 0..200 {
        let params = SamplingParams { allowed_token_ids: None, ..any_params(case, vocab) };
        let logits: Vec<f32> = (0..vocab).map(|i| (coin(case, i + 900) * 9.0) as f32).collect();
        let allowed: Vec<u32> = (0..vocab as u32).filter(|&id| coin(case, id as usize + 500) < 0.3).collect();
        // Room for fewer tokens than there are logits, or for more: what there is no room for is masked.
        let room = vocab - 6 + case as usize % 12;
        let mut mask = TokenMask::none(room);
        allowed.iter().for_each(|&id| mask.allow(id));
        let allowed: Vec<u32> = allowed.into_iter().filter(|&id| mask.allows(id)).collect();
        let listed = SamplingParams { allowed_token_ids: Some(allowed), ..params.clone() };
        let mut sampler = Sampler::new(vocab);
        let masked = draw(params, &[1], &[2, 2]);
        let listed = draw(listed, &[1], &[2, 2]);
        assert_eq!(
            sampler.probabilities(&logits, &masked, Some(&mask)),
            sampler.probabilities(&logits, &listed, None),
            "case {case}"
        );
        assert_eq!(sampler.draw(&logits, &masked, Some(&mask)), sampler.draw(&logits, &listed, None), "case {case}");
    }
}
