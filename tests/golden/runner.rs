//! Runs sequences through an executor the way a scheduler would, without one: every sequence in every batch, prompts in
//! chunks, keys and values in blocks of shuffled order.

use std::path::Path;
use std::sync::Arc;

use octavo::execute::local::LocalExecutor;
use octavo::execute::{Batch, Draw, Entry, Executor, LogitRows};
use octavo::load::ModelFiles;
use octavo::model::{Decoder, DecoderSpec, LayerGroups, Model, Weights};
use octavo::request::{RequestId, SamplingParams};
use octavo_kernels::{Backend, CacheDtype, Segment, StepLimits};

pub const BLOCK_SIZE: usize = 16;
pub const LIMITS: StepLimits = StepLimits { rows: 640, segments: 8, groups: 1, table_entries: 128 };
pub const BLOCKS: usize = 512;

/// Loads a model onto a backend.
pub fn decoder<B: Backend>(path: &Path, backend: B) -> Decoder<B> {
    decoder_of(ModelFiles::open(path).unwrap(), backend, None)
}

/// The same, of files that have been told what to run their weights as, and for sequences of at most so many positions where
/// that is said.
pub fn decoder_of<B: Backend>(files: ModelFiles, mut backend: B, positions: Option<usize>) -> Decoder<B> {
    let model = Model::of(&files).unwrap();
    let weights = Weights::load(&files, &model, &mut backend, &mut |_, _| true).unwrap();
    let positions = positions.unwrap_or(model.spec.max_positions);
    assemble(backend, model.spec.up_to(positions), weights)
}

/// A decoder with a cache of [`BLOCKS`], all of whose layers keep everything.
pub fn assemble<B: Backend>(backend: B, spec: DecoderSpec, weights: Weights<B::Matrix, B::Vector>) -> Decoder<B> {
    let groups = LayerGroups::new(&spec, 0);
    let cache = groups.cache_shape(&spec, BLOCKS, BLOCK_SIZE, CacheDtype::F32);
    Decoder::new(backend, spec, weights, &groups, cache, LIMITS.rows).unwrap()
}

/// What a sequence gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// After the prompt's last token.
    pub logits: Vec<f32>,
    /// Of the prompt's tokens but the first.
    pub prompt_logprobs: Vec<f32>,
    /// Tokens that were drawn.
    pub tokens: Vec<u32>,
    /// Log-probabilities of those tokens.
    pub logprobs: Vec<f32>,
    /// The five best log-probabilities at every step.
    pub top5: Vec<Vec<f32>>,
}

/// Runs every prompt for `steps` tokens drawn greedily, all in one batch, prompts in chunks of at most `chunk`.
pub fn run<B: Backend>(
    executor: &mut LocalExecutor<B>,
    prompts: &[&[u32]],
    steps: usize,
    chunk: usize,
) -> Vec<Outcome> {
    let params = Arc::new(SamplingParams { temperature: 0.0, logprobs: Some(5), ..SamplingParams::default() });
    let mut pool = shuffled_blocks(executor.decoder().spec().vocab_size as u64);
    let mut sequences: Vec<Sequence> = prompts.iter().map(|ids| Sequence::new(ids, steps, &mut pool)).collect();
    let mut batch = Batch::default();
    while sequences.iter().any(|sequence| sequence.outcome.tokens.len() < steps) {
        batch.clear();
        let running: Vec<usize> = (0..sequences.len()).filter(|&i| sequences[i].outcome.tokens.len() < steps).collect();
        for &i in &running {
            sequences[i].join(&mut batch, i, chunk, &params);
        }
        executor.launch(&batch).unwrap();
        let output = executor.collect().unwrap();
        assert_eq!(output.entries.len(), running.len());
        for (&i, output) in running.iter().zip(output.entries) {
            let outcome = &mut sequences[i].outcome;
            outcome.logits.extend(output.logits);
            outcome.prompt_logprobs.extend(output.prompt_logprobs.iter().map(|entry| entry.logprob));
            if let Some(drawn) = output.drawn {
                let drawn = drawn.unwrap();
                let logprobs = drawn.logprobs.unwrap();
                outcome.tokens.push(drawn.token_id);
                outcome.logprobs.push(logprobs.logprob);
                outcome.top5.push(logprobs.top.iter().map(|&(_, logprob)| logprob).collect());
                sequences[i].ids.push(drawn.token_id);
            }
        }
        batch.step += 1;
    }
    sequences.into_iter().map(|sequence| sequence.outcome).collect()
}

struct Sequence {
    ids: Vec<u32>,
    prompt_len: usize,
    computed: usize,
    table: Vec<u32>,
    outcome: Outcome,
}

impl Sequence {
    fn new(prompt: &[u32], steps: usize, pool: &mut Vec<u32>) -> Self {
        let blocks = (prompt.len() + steps).div_ceil(BLOCK_SIZE);
        let outcome =
            Outcome { logits: vec![], prompt_logprobs: vec![], tokens: vec![], logprobs: vec![], top5: vec![] };
        Self {
            ids: prompt.to_vec(),
            prompt_len: prompt.len(),
            computed: 0,
            table: pool.split_off(pool.len() - blocks),
            outcome,
        }
    }

    fn join(&mut self, batch: &mut Batch, number: usize, chunk: usize, params: &Arc<SamplingParams>) {
        let rows = self.computed..self.ids.len().min(self.computed + chunk);
        let context = rows.end;
        let (first_row, first_table_entry) = (batch.rows(), batch.block_tables.len());
        for position in rows.clone() {
            batch.ids.push(self.ids[position]);
            batch.positions.push(position as u32);
            batch.slots.push(self.table[position / BLOCK_SIZE] * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32);
        }
        batch.segments.push(Segment { first_row, rows: rows.len(), context, first_table_entry });
        batch.block_tables.extend(&self.table[..context.div_ceil(BLOCK_SIZE)]);
        let ends = context == self.ids.len();
        let in_prompt = rows.start < self.prompt_len;
        let prompt_next = if in_prompt { &self.ids[rows.start + 1..self.prompt_len.min(context + 1)] } else { &[] };
        let draw = Draw { params: params.clone(), seed: 0, position: context, history: None, banned: [].into() };
        batch.entries.push(Entry {
            id: RequestId(number as u64),
            draw: ends.then_some(draw),
            goes_on: true,
            guide: None,
            prompt_logprobs: in_prompt.then_some(0),
            prompt_next: prompt_next.to_vec(),
            logits: if ends && in_prompt { LogitRows::Last } else { LogitRows::None },
        });
        self.computed = context;
    }
}

/// All blocks, in an order that has nothing to do with positions.
fn shuffled_blocks(seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut blocks: Vec<u32> = (0..BLOCKS as u32).collect();
    for i in (1..blocks.len()).rev() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        blocks.swap(i, (state >> 33) as usize % (i + 1));
    }
    blocks
}
