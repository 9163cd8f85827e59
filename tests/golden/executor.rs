//! What a batch's entries may ask for, and that one's failure is not the others'.

use std::fs;
use std::sync::Arc;

use octavo::error::LoadError;
use octavo::execute::local::LocalExecutor;
use octavo::execute::{Batch, Draw, Entry, EntryOutput, Executor, LogitRows};
use octavo::load::ModelFiles;
use octavo::model::{Model, Weights};
use octavo::request::{RequestId, SamplingParams};
use octavo_kernels::Segment;
use octavo_kernels::reference::{Activations, ReferenceBackend};

use crate::files::Scratch;
use crate::oracle::{self, max_abs};
use crate::runner::{self, BLOCK_SIZE, LIMITS};

fn reference() -> ReferenceBackend {
    ReferenceBackend::new(LIMITS, Activations::F32)
}

/// Whole prompts in one batch, each in its own blocks.
fn batch(prompts: &[(&[u32], Entry)]) -> Batch {
    let mut batch = Batch::default();
    let mut block = 3;
    for (ids, entry) in prompts {
        let blocks = ids.len().div_ceil(BLOCK_SIZE);
        let (first_row, first_table_entry) = (batch.rows(), batch.block_tables.len());
        batch.segments.push(Segment { first_row, rows: ids.len(), context: ids.len(), first_table_entry });
        batch.ids.extend(*ids);
        batch.positions.extend(0..ids.len() as u32);
        batch.slots.extend((0..ids.len()).map(|position| (block * BLOCK_SIZE + position) as u32));
        batch.block_tables.extend((block..block + blocks).map(|block| block as u32));
        batch.entries.push(entry.clone());
        block += blocks;
    }
    batch
}

fn entry(draw: bool, prompt_logprobs: Option<usize>, prompt_next: &[u32], logits: LogitRows) -> Entry {
    let params = Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
    let draw = draw.then(|| Draw { params, seed: 0, position: 0, history: None, banned: [].into() });
    let prompt_next = prompt_next.to_vec();
    Entry { id: RequestId(1), draw, goes_on: true, guide: None, prompt_logprobs, prompt_next, logits }
}

/// A batch that draws greedily after one prompt.
pub fn greedy(ids: &[u32]) -> Batch {
    batch(&[(ids, entry(true, None, &[], LogitRows::None))])
}

fn outputs(executor: &mut impl Executor, batch: &Batch) -> Vec<EntryOutput> {
    executor.launch(batch).unwrap();
    executor.collect().unwrap().entries
}

#[test]
fn every_entry_gets_what_it_asked_for_and_nothing_else() {
    let model = oracle::fixture("tiny/qwen3/f32");
    let prompt = model.expected.prompts.iter().find(|prompt| prompt.prompt_logprobs.is_some()).unwrap();
    let (ids, n) = (prompt.ids.as_slice(), prompt.ids.len());
    assert!(n > octavo::model::decoder::LOGIT_ROWS, "more rows than are computed at once");
    let mut executor = LocalExecutor::new(runner::decoder(&model.path, reference()));
    let vocab = executor.decoder().spec().vocab_size;
    let nothing = entry(false, None, &[], LogitRows::None);
    let all = entry(false, Some(3), &ids[1..], LogitRows::All);
    let last = entry(true, None, &[], LogitRows::Last);
    let drawn = entry(true, None, &[], LogitRows::None);
    let got = outputs(&mut executor, &batch(&[(ids, nothing), (ids, all), (&ids[..5], drawn), (ids, last)]));

    assert!(got[0].drawn.is_none() && got[0].logits.is_empty() && got[0].prompt_logprobs.is_empty());
    assert_eq!((got[1].logits.len(), got[1].prompt_logprobs.len()), (n * vocab, n - 1));
    assert!(got[1].drawn.is_none());
    for (i, logprobs) in got[1].prompt_logprobs.iter().enumerate() {
        assert_eq!((logprobs.token_id, logprobs.top.len()), (ids[i + 1], 3));
        let row = &got[1].logits[i * vocab..][..vocab];
        let ln_total = row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
        let wanted = f64::from(row[ids[i + 1] as usize]) - ln_total;
        assert!((f64::from(logprobs.logprob) - wanted).abs() < 1e-5, "row {i}");
    }
    assert!(got[2].drawn.as_ref().is_some_and(Result::is_ok) && got[2].logits.is_empty());
    assert_eq!(got[3].logits, got[1].logits[(n - 1) * vocab..], "the last row, bit for bit");
    assert!(max_abs(&got[3].logits, &prompt.logits) <= 1e-4);
    assert_eq!(got[3].drawn.as_ref().unwrap().as_ref().unwrap().token_id, prompt.greedy[0]);
    assert!(executor.collect().is_err(), "nothing was launched");
}

#[test]
fn numbers_that_are_none_fail_one_entry() {
    let scratch = Scratch::copy_of("nan", "tiny/qwen3/f32");
    let path = scratch.0.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let poisoned = 9u32;
    let row = {
        let files = ModelFiles::open(&scratch.0).unwrap();
        let table = files.tensors.matrix(&path, "model.embed_tokens.weight", [576, 64]).unwrap();
        let file = fs::read(&path).unwrap();
        // Rows are random, so the table's first row is where its bytes are found.
        let row_bytes = table.bytes.len() / table.rows;
        let start = file.windows(row_bytes).position(|window| window == &table.bytes[..row_bytes]).unwrap();
        start + poisoned as usize * row_bytes..start + (poisoned as usize + 1) * row_bytes
    };
    bytes[row].fill(0xff);
    fs::write(&path, bytes).unwrap();

    let mut executor = LocalExecutor::new(runner::decoder(&scratch.0, reference()));
    let (sound, bad) = ([1, 2, 3, 4], [1, 2, poisoned, 4]);
    let wanted = outputs(&mut executor, &batch(&[(&sound, entry(true, None, &[], LogitRows::Last))]));
    let each = [
        (bad.as_slice(), entry(true, None, &[], LogitRows::None)),
        (sound.as_slice(), entry(true, None, &[], LogitRows::Last)),
        (bad.as_slice(), entry(false, Some(0), &bad[1..], LogitRows::None)),
    ];
    let got = outputs(&mut executor, &batch(&each));
    for failed in [&got[0], &got[2]] {
        let error = failed.drawn.as_ref().unwrap().as_ref().unwrap_err();
        assert!(error.contains("logit of token 0 is NaN"), "{error}");
    }
    assert_eq!((&got[1].logits, &got[1].drawn), (&wanted[0].logits, &wanted[0].drawn));
}

#[test]
fn a_load_tells_how_far_it_is_and_can_be_stopped() {
    let files = ModelFiles::open(oracle::path("gguf/gemma3-q8_0.gguf")).unwrap();
    let model = Model::of(&files).unwrap();
    let mut told = Vec::new();
    let mut progress = |done, total| {
        told.push((done, total));
        true
    };
    let weights = Weights::load(&files, &model, &mut reference(), &mut progress).unwrap();
    let total = told[0].1;
    assert!(told.is_sorted() && told.iter().all(|&(done, of)| done <= of && of == total));
    assert_eq!(told.last().unwrap().0, total);
    assert!(weights.head.is_none(), "tied embeddings are packed once");

    let mut calls = 0;
    let stopped = Weights::load(&files, &model, &mut reference(), &mut |_, _| {
        calls += 1;
        calls < 3
    });
    assert!(matches!(stopped, Err(LoadError::Interrupted)) && calls == 3);
}
