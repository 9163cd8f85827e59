//! Tiny random models of every family, as Hugging Face folders and as GGUF files.

use octavo::execute::local::LocalExecutor;
use octavo_kernels::cpu::{CpuBackend, CpuConfig};
use octavo_kernels::reference::{Activations, ReferenceBackend};
use octavo_kernels::{Backend, Segment, StepInput};

use crate::oracle::{self, Expected, max_abs};
use crate::runner::{self, BLOCK_SIZE, LIMITS, Outcome};

/// The reference's own noise is a tenth of this.
const TOLERANCE: f32 = 1e-4;
const STEPS: usize = 48;

fn reference() -> ReferenceBackend {
    ReferenceBackend::new(LIMITS, Activations::F32)
}

fn cpu(threads: usize) -> CpuBackend {
    CpuBackend::open(CpuConfig { threads: Some(threads), isa: None }, LIMITS).unwrap()
}

fn outcomes<B: Backend>(model: &std::path::Path, backend: B, expected: &Expected, chunk: usize) -> Vec<Outcome> {
    let prompts: Vec<&[u32]> = expected.prompts.iter().map(|prompt| prompt.ids.as_slice()).collect();
    runner::run(&mut LocalExecutor::new(runner::decoder(model, backend)), &prompts, STEPS, chunk)
}

/// All prompts in one batch give what each gave alone to the reference: logits, log-probabilities and the greedy path.
fn assert_agrees(what: &str, expected: &Expected, got: &[Outcome]) {
    for (prompt, got) in expected.prompts.iter().zip(got) {
        let what = format!("{what} {}", prompt.id);
        let logits = max_abs(&got.logits, &prompt.logits);
        assert!(logits <= TOLERANCE, "{what}: last logits differ by {logits}");
        assert_eq!(got.tokens, prompt.greedy, "{what}: greedy tokens");
        let top5 = max_abs(&got.top5.concat(), &prompt.top5.concat());
        assert!(top5 <= TOLERANCE, "{what}: the best log-probabilities differ by {top5}");
        assert_eq!(got.prompt_logprobs.len(), prompt.ids.len() - 1);
        if let Some(wanted) = &prompt.prompt_logprobs {
            let difference = max_abs(&got.prompt_logprobs, wanted);
            assert!(difference <= TOLERANCE, "{what}: prompt log-probabilities differ by {difference}");
        }
    }
}

fn check_folder<B: Backend>(name: &str, dtype: &str, backend: B) {
    let expected = oracle::expected(&oracle::path(&format!("tiny/{name}/expected.json")), dtype);
    let got = outcomes(&oracle::path(&format!("tiny/{name}/{dtype}")), backend, &expected, 61);
    assert_agrees(&format!("{name}/{dtype}"), &expected, &got);
}

fn check_gguf<B: Backend>(name: &str, backend: B) {
    let expected = oracle::expected(&oracle::path(&format!("gguf/{name}.json")), "f32");
    let got = outcomes(&oracle::path(&format!("gguf/{name}.gguf")), backend, &expected, 61);
    assert_agrees(name, &expected, &got);
}

macro_rules! folders {
    ($($test:ident: $name:literal $dtype:literal,)*) => {$(
        #[test]
        fn $test() {
            check_folder($name, $dtype, reference());
        }
    )*};
}

folders! {
    llama_with_llama3_rope_and_tied_embeddings: "llama-tied-rope3" "f32",
    llama_with_llama3_rope_and_tied_embeddings_bf16: "llama-tied-rope3" "bf16",
    llama_in_shards: "llama-untied-sharded" "f32",
    llama_in_shards_bf16: "llama-untied-sharded" "bf16",
    mistral_bf16: "mistral-swa" "bf16",
    qwen2: "qwen2" "f32",
    qwen2_bf16: "qwen2" "bf16",
    qwen3: "qwen3" "f32",
    qwen3_bf16: "qwen3" "bf16",
    gemma3: "gemma3" "f32",
    gemma3_bf16: "gemma3" "bf16",
}

macro_rules! ggufs {
    ($($test:ident: $name:literal,)*) => {$(
        #[test]
        fn $test() {
            check_gguf($name, reference());
        }
    )*};
}

ggufs! {
    gguf_llama_f16: "llama-f16",
    gguf_llama_q8_0: "llama-q8_0",
    gguf_llama_q4_0: "llama-q4_0",
    gguf_qwen2_q5_1: "qwen2-q5_1",
    gguf_qwen3_q8_0: "qwen3-q8_0",
    gguf_gemma3_q8_0: "gemma3-q8_0",
}

/// Dense weights on the CPU's kernels: as exact as the reference.
#[test]
fn cpu_agrees_on_dense_weights() {
    for (name, dtype) in [
        ("llama-tied-rope3", "f32"), ("llama-untied-sharded", "bf16"), ("mistral-swa", "bf16"), ("qwen2", "bf16"),
        ("qwen3", "f32"), ("gemma3", "f32"), ("gemma3", "bf16"),
    ] {
        check_folder(name, dtype, cpu(2));
    }
    check_gguf("llama-f16", cpu(2));
}

const QUANTISED: [&str; 5] = ["llama-q8_0", "llama-q4_0", "qwen2-q5_1", "qwen3-q8_0", "gemma3-q8_0"];

/// The largest difference of the last logits of any prompt.
fn worst<'a>(pairs: impl Iterator<Item = (&'a [f32], &'a [f32])>) -> f32 {
    pairs.map(|(got, wanted)| max_abs(got, wanted)).fold(0.0, f32::max)
}

/// Activations in int8 move the logits by about as much as they do in llama.cpp, which quantises them in the same way.
#[test]
fn int8_activations_cost_what_they_cost_elsewhere() {
    for name in QUANTISED {
        let expected = oracle::expected(&oracle::path(&format!("gguf/{name}.json")), "f32");
        let int8 = ReferenceBackend::new(LIMITS, Activations::Int8);
        let got = outcomes(&oracle::path(&format!("gguf/{name}.gguf")), int8, &expected, 61);
        let pairs = got.iter().zip(&expected.prompts);
        let ours = worst(pairs.map(|(got, prompt)| (got.logits.as_slice(), prompt.logits.as_slice())));
        let theirs = expected.llama_cpp.unwrap();
        println!("{name}: {ours} here, {theirs} in llama.cpp");
        assert!(ours > TOLERANCE && ours <= 1.5 * theirs, "{name}: {ours} here, {theirs} in llama.cpp");
    }
}

/// On the CPU's kernels quantised weights give what the reference defines for int8 activations.
#[test]
fn cpu_agrees_on_quantised_weights() {
    for name in QUANTISED {
        let expected = oracle::expected(&oracle::path(&format!("gguf/{name}.json")), "f32");
        let model = oracle::path(&format!("gguf/{name}.gguf"));
        let wanted = outcomes(&model, ReferenceBackend::new(LIMITS, Activations::Int8), &expected, 61);
        let got = outcomes(&model, cpu(2), &expected, 61);
        let logits = worst(got.iter().zip(&wanted).map(|(got, wanted)| (got.logits.as_slice(), wanted.logits.as_slice())));
        let pairs = got.iter().zip(&wanted);
        let prompt = worst(pairs.map(|(got, wanted)| (got.prompt_logprobs.as_slice(), wanted.prompt_logprobs.as_slice())));
        println!("{name}: logits {logits}, prompt log-probabilities {prompt}");
        assert!(logits <= TOLERANCE, "{name}: last logits differ by {logits}");
        assert!(prompt <= TOLERANCE, "{name}: prompt log-probabilities differ by {prompt}");
    }
}

/// Neither the batch, nor the chunks, nor the threads change a single bit.
#[test]
fn the_answer_does_not_depend_on_the_batch() {
    independent("tiny/gemma3/expected.json", "tiny/gemma3/f32", "f32", reference(), reference());
}

#[test]
fn the_answer_does_not_depend_on_the_batch_on_the_cpu() {
    independent("tiny/gemma3/expected.json", "tiny/gemma3/bf16", "bf16", cpu(1), cpu(3));
    independent("gguf/llama-q4_0.json", "gguf/llama-q4_0.gguf", "f32", cpu(2), cpu(1));
    independent("gguf/gemma3-q8_0.json", "gguf/gemma3-q8_0.gguf", "f32", cpu(3), cpu(2));
}

fn independent<B: Backend>(json: &str, model: &str, dtype: &str, one: B, other: B) {
    let expected = oracle::expected(&oracle::path(json), dtype);
    let model = oracle::path(model);
    let together = outcomes(&model, one, &expected, 7);
    let mut executor = LocalExecutor::new(runner::decoder(&model, other));
    for (prompt, together) in expected.prompts.iter().zip(&together) {
        let alone = runner::run(&mut executor, &[&prompt.ids], STEPS, 512);
        assert!(alone[0] == *together, "{}: {} differs alone", model.display(), prompt.id);
    }
}

/// The residual stream after every layer: where a difference begins, should there ever be one.
#[test]
fn hidden_states_agree_layer_by_layer() {
    for name in ["llama-tied-rope3", "llama-untied-sharded", "qwen2", "qwen3", "gemma3"] {
        let expected = oracle::expected(&oracle::path(&format!("tiny/{name}/expected.json")), "f32");
        let prompt = expected.prompts.iter().find(|prompt| prompt.hidden_states.is_some()).unwrap();
        let wanted = prompt.hidden_states.as_ref().unwrap();
        let mut decoder = runner::decoder(&oracle::path(&format!("tiny/{name}/f32")), reference());
        let rows = prompt.ids.len();
        assert!(rows <= BLOCK_SIZE);
        let positions: Vec<u32> = (0..rows as u32).collect();
        let slots: Vec<u32> = positions.iter().map(|position| 5 * BLOCK_SIZE as u32 + position).collect();
        let segments = [Segment { first_row: 0, rows, context: rows, first_table_entry: 0 }];
        let input =
            StepInput { ids: &prompt.ids, positions: &positions, slots: &slots, segments: &segments, block_tables: &[5] };
        let mut seen = Vec::new();
        decoder.forward_observed(&input, &mut |layer, states| seen.push((layer, states.to_vec())));
        assert_eq!(seen.iter().map(|(_, states)| states.len()).sum::<usize>(), wanted.len(), "{name}");
        for ((layer, states), wanted) in seen.iter().zip(wanted.chunks(wanted.len() / seen.len())) {
            let difference = max_abs(states, wanted);
            assert!(difference <= TOLERANCE, "{name}: after layer {layer} hidden states differ by {difference}");
        }
    }
}
