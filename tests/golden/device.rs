//! What only a device does: steps are recorded and repeated, tokens drawn where the logits are, and it may fail.

use std::sync::Arc;

use octavo::execute::local::LocalExecutor;
use octavo::execute::memory::{MemoryPlan, MemoryRequest};
use octavo::execute::rehearsal::{device_bytes, step_limits};
use octavo::execute::{Draw, Entry, Executor, LogitRows};
use octavo::load::ModelFiles;
use octavo::model::decoder::LOGIT_ROWS;
use octavo::model::{Decoder, LayerGroups, Model, Weights, weights};
use octavo::request::SamplingParams;
use octavo::sample::TokenHistory;
use octavo_kernels::cuda::driver::PAGE_BYTES;
use octavo_kernels::cuda::{self, CudaBackend};
use octavo_kernels::{Backend, BackendError, CacheDtype, Segment, StepInput, StepLimits};

use crate::oracle;
use crate::runner::{self, BLOCK_SIZE, BLOCKS, LIMITS};
use crate::tiny::cuda_shim;

const SEQUENCES: usize = 5;
const BLOCKS_EACH: usize = 24;

/// A step's arrays.
#[derive(Default)]
struct Arrays {
    ids: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    segments: Vec<Segment>,
    block_tables: Vec<u32>,
}

impl Arrays {
    /// Sequence number `sequence`, of which `computed` are, goes on by `rows` rows.
    fn add(&mut self, sequence: usize, computed: usize, rows: usize) {
        let context = computed + rows;
        let block = |position: usize| (sequence + SEQUENCES * (BLOCKS_EACH - 1 - position / BLOCK_SIZE)) as u32;
        let (first_row, first_table_entry) = (self.ids.len(), self.block_tables.len());
        for position in computed..context {
            self.ids.push((1 + 7 * sequence + 5 * position) as u32 % 60);
            self.positions.push(position as u32);
            self.slots.push(block(position) * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32);
        }
        self.segments.push(Segment { first_row, rows, context, first_table_entry });
        self.block_tables.extend((0..context.div_ceil(BLOCK_SIZE)).map(|i| block(i * BLOCK_SIZE)));
    }

    fn input(&self) -> StepInput<'_> {
        let Self { ids, positions, slots, segments, block_tables } = self;
        StepInput { ids, positions, slots, segments, block_tables }
    }
}

/// The sequences of a batch come and go, begin blocks, and one of them gets longer than attention takes in one go.
#[test]
fn repeated_steps_give_the_bits_of_launched_ones() {
    for name in ["tiny/gemma3/bf16", "tiny/mixtral/bf16"] {
        let model = oracle::fixture(name);
        let [mut repeats, mut launches] = [0; 2].map(|_| runner::decoder(&model.path, cuda_shim()));
        let mut computed = [0; SEQUENCES];
        for step in 0..36 {
            let mut arrays = Arrays::default();
            let count = [SEQUENCES, 1, 3, 4, 2][step % 5];
            for sequence in (0..count).map(|i| (i + step / 5) % SEQUENCES) {
                let rows = if step == 0 { [250, 13, 1, 15, 30][sequence] } else { 1 };
                arrays.add(sequence, computed[sequence], rows);
                computed[sequence] += rows;
            }
            repeats.forward(&arrays.input());
            launches.forward_observed(&arrays.input(), &mut |_, _| ());
            let rows: Vec<u32> = arrays.segments.iter().map(|s| (s.first_row + s.rows - 1) as u32).collect();
            let [got, wanted] = [&mut repeats, &mut launches].map(|decoder| {
                decoder.head(&rows);
                decoder.logits(rows.len()).iter().map(|logit| logit.to_bits()).collect::<Vec<_>>()
            });
            assert!(got == wanted, "{name}, step {step}: {count} sequences of {computed:?} positions");
        }
        assert!(computed[0] > 256, "{computed:?}");
        assert_eq!((repeats.backend().graphs(), launches.backend().graphs()), (4, 0), "of 1, 2, 4 and 8 rows");
        assert_eq!(repeats.backend().failure(), None);
    }
}

/// A device that has no byte more than the plan says holds the model, and steps of every kind take nothing further. One that
/// has a block less does not.
#[test]
fn what_is_sized_at_load_is_what_is_taken() {
    const LONGEST: usize = 512;
    for name in ["tiny/qwen3/f32", "tiny/mixtral/bf16", "gguf/llama-q8_0"] {
        let model = oracle::fixture(name);
        let files = ModelFiles::open(&model.path).unwrap();
        let spec = Model::of(&files).unwrap().spec.up_to(LONGEST);
        let (rows, seqs, dtype) = (LIMITS.rows, LIMITS.segments, CacheDtype::Fp8E4m3);
        let block_bytes = LayerGroups::new(&spec, 0).cache_shape(&spec, 1, BLOCK_SIZE, dtype).block_bytes();
        let request = MemoryRequest {
            free_bytes: Some(1 << 30),
            weights_bytes: weights::check(&files, &Model::of(&files).unwrap()).unwrap().as_run,
            max_num_batched_tokens: rows,
            max_num_seqs: seqs,
            max_model_len: Some(LONGEST),
            block_size: BLOCK_SIZE,
            kv_cache_dtype: dtype,
            kv_cache_bytes: Some((BLOCKS * block_bytes) as u64),
            device_bytes: Some(&|rows, seqs, longest| {
                device_bytes(&spec, (rows, seqs), (BLOCK_SIZE, dtype), longest).unwrap()
            }),
        };
        let plan = MemoryPlan::new(&spec, &request).unwrap();
        let load = |memory_bytes: u64| {
            let device = cuda::Device::shim_of(memory_bytes);
            let limits = step_limits(rows, seqs, &plan.layout(), LONGEST);
            let mut backend = CudaBackend::open(device.clone(), limits).map_err(|error| error.to_string())?;
            let model = Model::of(&files).unwrap();
            let weights = Weights::load(&files, &model, &mut backend, &mut |_, _| true).map_err(|e| e.to_string())?;
            let decoder = Decoder::new(backend, spec.clone(), weights, &plan.groups, plan.cache, rows);
            decoder.map(|decoder| (decoder, device)).map_err(|error| error.to_string())
        };
        let planned = plan.total_bytes() - plan.reserved_bytes;
        let (decoder, device) = load(planned).unwrap();
        let left = device.driver().free_bytes().unwrap();
        assert!(left < planned / 20 + PAGE_BYTES, "{name}: {left} of {planned} bytes were not taken");
        let prompts: Vec<&[u32]> = model.expected.prompts.iter().map(|prompt| prompt.ids.as_slice()).collect();
        let mut executor = LocalExecutor::new(decoder);
        let outcomes = runner::run(&mut executor, &prompts, 24, 61);
        assert!(outcomes.iter().all(|outcome| outcome.tokens.len() == 24));
        assert_eq!((device.failure(), device.driver().free_bytes().unwrap()), (None, left), "{name}");
        let refused = load(planned - left - block_bytes as u64).map(|_| ()).unwrap_err();
        assert!(refused.contains("no memory for"), "{name}: {refused}");
    }
}

/// More rows than logits are computed of at once, and every kind of draw: what the device draws in a step that is launched,
/// recorded or repeated is what the host draws when it gets the same step's logits.
#[test]
fn draws_of_a_step_are_those_of_its_logits() {
    const ROWS: usize = LOGIT_ROWS + 8;
    let limits = StepLimits { segments: ROWS, ..LIMITS };
    let backend = CudaBackend::open(cuda::Device::shim().unwrap(), limits).unwrap();
    let mut executor = LocalExecutor::new(runner::decoder(&oracle::fixture("tiny/qwen3/f32").path, backend));
    let params: Vec<Arc<SamplingParams>> = (0..ROWS)
        .map(|row| {
            Arc::new(SamplingParams {
                temperature: [0.0, 0.7, 1.3][row % 3],
                top_k: [0, 9][row % 2],
                top_p: [1.0, 0.8, 0.3][row / 3 % 3],
                min_p: [0.0, 0.05][row / 2 % 2],
                logprobs: [None, Some(0), Some(4)][row / 9 % 3],
                presence_penalty: [0.0, 0.0, 0.9][row / 4 % 3],
                allowed_token_ids: (row % 7 == 3).then(|| (0..500).step_by(3).collect()),
                ..SamplingParams::default()
            })
        })
        .collect();
    for step in 0..4 {
        let mut draws = crate::executor::greedy(&[1]);
        for (row, params) in params.iter().enumerate() {
            let id = (1 + 3 * row + 50 * step) as u32;
            let next = crate::executor::greedy(&[id]);
            let history = params.needs_history().then(|| Arc::new(TokenHistory::new(&[id, 2, 9])));
            let draw = Draw { params: params.clone(), seed: 5, position: step, history, banned: [7].into() };
            draws.ids.push(id);
            draws.positions.push(0);
            draws.slots.push(((4 + row) * BLOCK_SIZE) as u32);
            draws.block_tables.push(4 + row as u32);
            draws.segments.push(Segment { first_row: 1 + row, first_table_entry: 1 + row, ..next.segments[0] });
            draws.entries.push(Entry { draw: Some(draw), goes_on: false, ..next.entries[0].clone() });
        }
        let draws = draws.part(|entry| entry > 0);
        let mut logits = draws.clone();
        logits.entries.iter_mut().for_each(|entry| entry.logits = LogitRows::Last);
        let [there, here] = [&draws, &logits].map(|batch| {
            executor.launch(batch).unwrap();
            executor.collect().unwrap().entries
        });
        for (row, (there, here)) in there.iter().zip(&here).enumerate() {
            assert!(there.logits.is_empty() && !here.logits.is_empty());
            assert_eq!(there.drawn, here.drawn, "step {step}, row {row}: {:?}", params[row]);
        }
    }
    assert_eq!(executor.decoder().backend().graphs(), 2, "with draws, and without");
}

#[test]
fn a_failing_device_ends_the_step_with_its_words() {
    let device = cuda::Device::shim().unwrap();
    let backend = CudaBackend::open(device.clone(), LIMITS).unwrap();
    let mut executor = LocalExecutor::new(runner::decoder(&oracle::fixture("tiny/qwen3/f32").path, backend));
    let batch = crate::executor::greedy(&[1, 2, 3]);
    executor.launch(&batch).unwrap();
    assert!(executor.collect().unwrap().entries[0].drawn.as_ref().is_some_and(Result::is_ok));
    device.attempt(|_| Err(BackendError::Device("it fell off the bus".into())));
    for _ in 0..2 {
        assert!(executor.launch(&batch).unwrap_err().contains("fell off the bus"));
        assert!(executor.collect().is_err());
    }
}
