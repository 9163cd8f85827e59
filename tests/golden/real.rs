//! Real models, where their files are at hand: `OCTAVO_TEST_MODELS=folder cargo test --test golden real -- --nocapture`;
//! one that is not there is skipped with a line that says so (the Python tests always have SmolLM2; `tests/fetch_models.py`
//! gets all four). The bounds are the fixtures' own (see their README): quantised activations move log-probabilities by some
//! hundredths, and may flip a step whose two best tokens are close.

use std::path::{Path, PathBuf};

use octavo::execute::local::LocalExecutor;
use octavo_kernels::Backend;
use octavo_kernels::cpu::{CpuBackend, CpuConfig};
use octavo_kernels::reference::{Activations, ReferenceBackend};
use serde_json::Value;

use crate::oracle::{self, ids, list, number, numbers};
use crate::runner::{self, LIMITS};

/// Mean over a prompt, of log-probabilities.
const LOGPROB_TOLERANCE: f32 = 0.25;
/// How far the mean NLL over all recorded prompts may be from the float reference, as a part of it.
const NLL_TOLERANCE: f32 = 0.01;
/// A step whose best token leads by less may go the other way.
const MARGIN: f32 = 0.5;
const STEPS: usize = 64;

macro_rules! models {
    ($($test:ident: $json:literal,)*) => {$(
        #[test]
        fn $test() {
            let backend = CpuBackend::open(CpuConfig::default(), LIMITS).unwrap();
            compare(concat!("real/", $json), backend, LOGPROB_TOLERANCE, MARGIN);
        }
    )*};
}

models! {
    cpu_agrees_on_smollm2: "smollm2-135m.json",
    cpu_agrees_on_gemma3: "gemma3-270m.json",
    cpu_agrees_on_qwen2_of_half_a_billion: "qwen-0.5b.json",
    cpu_agrees_on_qwen2_of_one_and_a_half: "qwen-1.5b.json",
}

#[test]
#[ignore = "takes an hour: plain loops over a real model"]
fn reference_agrees_on_smollm2() {
    compare("real/smollm2-135m.json", ReferenceBackend::new(LIMITS, Activations::F32), 0.002, 0.01);
}

fn model_file(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("OCTAVO_TEST_MODELS").map(|folder| Path::new(&folder).join(name));
    let found = path.filter(|path| path.exists());
    if found.is_none() {
        println!("skipped: {name} is not in OCTAVO_TEST_MODELS");
    }
    found
}

fn compare<B: Backend>(json: &str, backend: B, logprob_tolerance: f32, margin: f32) {
    let Some(fixture) = oracle::find(json) else {
        println!("skipped: {json} is in ../shared/oracle, which is not here");
        return;
    };
    let all: Value = serde_json::from_str(&std::fs::read_to_string(fixture).unwrap()).unwrap();
    let Some(path) = model_file(all["model"].as_str().unwrap()) else { return };
    let decoder = runner::decoder(&path, backend);
    println!("{}", decoder.backend().describe());
    let mut executor = LocalExecutor::new(decoder);
    let mut nlls = Nlls::default();
    for prompt in list(&all["prompts"]) {
        compare_prompt(&mut executor, prompt, logprob_tolerance, margin, &mut nlls);
    }
    let [ours, theirs] = [nlls.deviation(0), nlls.deviation(1)];
    println!(
        "mean NLL of all prompts {:+.2} % from the float reference; llama.cpp {:+.2} %",
        100.0 * ours,
        100.0 * theirs
    );
    assert!(ours.abs() <= NLL_TOLERANCE, "{json}: the mean NLL is off by {ours}");
}

/// Mean negative log-likelihoods of all prompts together: ours, llama.cpp's and the float reference's.
#[derive(Default)]
struct Nlls([f32; 3]);

impl Nlls {
    fn deviation(&self, whose: usize) -> f32 {
        self.0[whose] / self.0[2] - 1.0
    }
}

fn compare_prompt<B: Backend>(
    executor: &mut LocalExecutor<B>,
    prompt: &Value,
    logprob_tolerance: f32,
    margin: f32,
    nlls: &mut Nlls,
) {
    let name = prompt["id"].as_str().unwrap();
    let prompt_ids = ids(&prompt["ids"]);
    let greedy = ids(&prompt["greedy"]["tokens"]);
    let margins = numbers(&prompt["greedy"]["margin"]);

    // The reference's tokens fed back, as part of a longer prompt.
    let mut forced_ids = prompt_ids.clone();
    forced_ids.extend(&greedy);
    let forced = runner::run(executor, &[&forced_ids], 1, 512).remove(0).prompt_logprobs;
    let (prompt_logprobs, greedy_logprobs) = forced.split_at(prompt_ids.len() - 1);
    let wanted = numbers(&prompt["prompt_logprobs"]);
    let wanted_greedy: Vec<f32> = list(&prompt["greedy"]["top10"]).iter().map(|top| number(&top[0][1])).collect();
    let in_prompt = mean_abs(prompt_logprobs, &wanted);
    let in_greedy = mean_abs(greedy_logprobs, &wanted_greedy);
    let nll = (mean(prompt_logprobs) - mean(&wanted)).abs();

    // Every prompt counts the same: of all tokens together, most would be those of the longest.
    let theirs = number(&prompt["llama_cpp"]["teacher_forced"]["prompt_mean_nll"]);
    for (sum, nll) in nlls.0.iter_mut().zip([-mean(prompt_logprobs), theirs, -mean(&wanted)]) {
        *sum += nll;
    }

    let own = runner::run(executor, &[&prompt_ids], STEPS, 512).remove(0).tokens;
    let diverges = own.iter().zip(&greedy).position(|(own, theirs)| own != theirs);
    let there = diverges.map(|step| margins[step]);
    println!(
        "{name:>12}: {} tokens; mean |Δ logprob| prompt {in_prompt:.4} greedy {in_greedy:.4}; |Δ mean NLL| {nll:.4}; \
         greedy diverges at {diverges:?} where the margin is {there:?}",
        prompt_ids.len()
    );
    assert!(
        in_prompt <= logprob_tolerance && in_greedy <= logprob_tolerance && nll <= 0.8 * logprob_tolerance,
        "{name}"
    );
    assert!(there.is_none_or(|there| there < margin), "{name}: another token where the reference leads by {there:?}");
}

fn mean(values: &[f32]) -> f32 {
    values.iter().sum::<f32>() / values.len() as f32
}

fn mean_abs(got: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(got.len(), wanted.len());
    got.iter().zip(wanted).map(|(got, wanted)| (got - wanted).abs()).sum::<f32>() / got.len() as f32
}
