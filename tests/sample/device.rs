//! What a device draws is what the sampler draws, to the bit: tokens, log-probabilities and errors, whatever the parameters,
//! and whatever other rows there are.

use std::sync::Arc;

use octavo::execute::{Draw, Drawn};
use octavo::request::SamplingParams;
use octavo::sample::random::coin;
use octavo::sample::{self, RowChanges, Sampler, TokenMask};
use octavo_kernels::cuda::{self, CudaBackend};
use octavo_kernels::{Backend, DType, Segment, StepInput, StepLimits, Weight};

use crate::{any_params, dice, draw};

const ROWS: usize = 24;
const AT_ONCE: usize = 16;
const LIMITS: StepLimits = StepLimits { rows: ROWS, segments: ROWS, groups: 1, table_entries: 1 };

fn backends() -> Vec<CudaBackend> {
    let gpu = cuda::Device::gpu(0);
    if let Err(why) = &gpu {
        eprintln!("skipped: draws on a GPU ({why})");
    }
    let devices = [cuda::Device::shim().ok(), gpu.ok()].into_iter().flatten();
    devices.map(|device| CudaBackend::open(device, LIMITS).unwrap()).collect()
}

/// A row of logits, how to draw from it, and the tokens that its grammar allows.
struct Row {
    logits: Vec<f32>,
    draw: Draw,
    mask: Option<Arc<TokenMask>>,
}

fn row(case: u64, vocab: usize) -> Row {
    let levels = [5.0, 300.0, 1e6][dice(case, 101, 3)];
    let spread = [3.0, 24.0, 300.0][dice(case, 105, 3)];
    let logit = |i| (((coin(case + (1 << 40), i) * levels).floor() / levels - 0.5) * spread) as f32;
    let mut logits: Vec<f32> = (0..vocab).map(logit).collect();
    for bad in 0..dice(case, 102, 3) {
        let value = [f32::NEG_INFINITY, f32::NEG_INFINITY, -0.0, f32::NAN, f32::INFINITY][dice(case, 106 + bad, 5)];
        logits[dice(case, 103 + bad, vocab)] = value;
    }
    let output: Vec<u32> = (0..dice(case, 107, 30)).map(|i| dice(case, 200 + i, vocab) as u32).collect();
    let params = SamplingParams {
        logprobs: [None, None, Some(0), Some(1), Some(5), Some(64)][dice(case, 108, 6)],
        ..any_params(case, vocab)
    };
    let mut draw = draw(params, &[1, 1, 4, 7], &output);
    draw.banned = (0..dice(case, 104, 3)).map(|i| dice(case, 110 + i, vocab + 2) as u32).collect();
    let mask = (dice(case, 109, 4) == 0).then(|| {
        let mut mask = TokenMask::none(vocab - 1 + dice(case, 120, 64));
        let share = [0.0, 0.1, 0.9][dice(case, 121, 3)];
        (0..vocab as u32).filter(|&id| coin(case + 9, id as usize) < share).for_each(|id| mask.allow(id));
        Arc::new(mask)
    });
    Row { logits, draw, mask }
}

/// Draws from all rows on a device, in goes of at most [`AT_ONCE`].
fn drawn(backend: &mut CudaBackend, rows: &[Row], vocab: usize) -> Vec<Result<Drawn, String>> {
    let values: Vec<f32> = rows.iter().flat_map(|row| row.logits.iter().copied()).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let weight = Weight { dtype: DType::F32, rows: rows.len(), cols: vocab, bytes: &bytes, run_as: DType::F32 };
    let table = backend.matrix(&[weight]).unwrap();
    let changes: Vec<_> = rows.iter().map(|row| RowChanges::new(&row.draw, row.mask.clone())).collect();
    let draws: Vec<_> = rows.iter().zip(&changes).map(|(row, changes)| changes.row(&row.draw)).collect();
    assert!(draws.iter().all(|draw| backend.draws_from(draw)));
    for first in (0..rows.len()).step_by(AT_ONCE) {
        let ids: Vec<u32> = (first..rows.len().min(first + AT_ONCE)).map(|id| id as u32).collect();
        let positions: Vec<u32> = (0..ids.len() as u32).collect();
        let segment = Segment { first_row: 0, rows: ids.len(), context: ids.len(), first_table_entry: 0 };
        let (slots, segments) = (&positions, &[segment]);
        backend.begin(&StepInput { ids: &ids, positions: &positions, slots, segments, block_tables: &[] });
        let mut logits = backend.buffer(ids.len(), vocab).unwrap();
        backend.embed(&mut logits, &table, 1.0);
        backend.set_draws(&draws);
        backend.draw(&logits, first, ids.len());
    }
    backend.send_drawn(rows.len());
    let drawn = backend.drawn().iter().cloned().map(sample::drawn).collect();
    assert_eq!(backend.failure(), None);
    drawn
}

fn compare(backend: &mut CudaBackend, cases: impl Iterator<Item = u64>, vocab: usize) -> [usize; 2] {
    let rows: Vec<_> = cases.map(|case| row(case, vocab)).collect();
    let mut sampler = Sampler::new(vocab);
    let mut outcomes = [0; 2];
    for (got, row) in drawn(backend, &rows, vocab).into_iter().zip(&rows) {
        let wanted = sampler.draw(&row.logits, &row.draw, row.mask.as_deref());
        let bits = |drawn: &Result<Drawn, String>| drawn.clone().map(|drawn| (drawn.token_id, logprob_bits(&drawn)));
        assert_eq!(bits(&got), bits(&wanted), "{vocab} tokens, {:?}", row.draw);
        outcomes[usize::from(wanted.is_ok())] += 1;
    }
    outcomes
}

fn logprob_bits(drawn: &Drawn) -> Vec<(u32, u32, u32)> {
    let Some(own) = &drawn.logprobs else { return Vec::new() };
    let top = own.top.iter().map(|&(id, logprob)| (id, logprob.to_bits(), 0));
    [(own.token_id, own.logprob.to_bits(), own.rank)].into_iter().chain(top).collect()
}

#[test]
fn a_device_draws_what_the_sampler_draws() {
    for mut backend in backends() {
        let mut outcomes = [0; 2];
        // Around a warp, a word of a mask, a chunk of the sum of weights and what one thread takes.
        let vocabularies = [8, 31, 32, 33, 255, 256, 257, 263, 600, 2049, 9001];
        for (number, &vocab) in vocabularies.iter().enumerate() {
            assert!(backend.draws(vocab, AT_ONCE).unwrap());
            let rounds = if vocab > 1000 { 2 } else { 12 };
            for round in 0..rounds {
                let count = [ROWS, 1, AT_ONCE, AT_ONCE + 1][round % 4];
                let first = (1000 * number + 100 * round) as u64;
                let [failed, drawn] = compare(&mut backend, first..first + count as u64, vocab);
                outcomes = [outcomes[0] + failed, outcomes[1] + drawn];
            }
        }
        assert!(outcomes[0] > 20 && outcomes[1] > 500, "errors and tokens: {outcomes:?}");
    }
}

/// Most of a vocabulary equally likely: what is cut lies among equals.
#[test]
fn ties_on_a_device_go_to_the_smaller_id() {
    for mut backend in backends() {
        let vocab = 700;
        assert!(backend.draws(vocab, AT_ONCE).unwrap());
        let params = |case: u64| SamplingParams {
            top_k: [0, 3, 699][dice(case, 1, 3)],
            top_p: [0.01, 0.3, 0.999][dice(case, 2, 3)],
            temperature: [0.0, 0.5, 1.0][dice(case, 3, 3)],
            logprobs: Some([1, 7, 64][dice(case, 4, 3)]),
            ..SamplingParams::default()
        };
        let rows: Vec<_> = (0..ROWS as u64)
            .map(|case| Row {
                logits: (0..vocab).map(|i| [2.0, 2.0, -0.0, 0.0, 2.5][dice(case, i, 4 + i / 690)]).collect(),
                draw: draw(params(case), &[1], &[case as u32]),
                mask: None,
            })
            .collect();
        let mut sampler = Sampler::new(vocab);
        for (got, row) in drawn(&mut backend, &rows, vocab).into_iter().zip(&rows) {
            assert_eq!(got, sampler.draw(&row.logits, &row.draw, None), "{:?}", row.draw.params);
        }
    }
}
