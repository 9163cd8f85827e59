//! What was fixed at load, and counters.

use octavo::engine::EngineStats;
use octavo::engine::handle;
use pyo3::prelude::*;

use crate::repr::quoted;

/// What was fixed when the model was loaded.
#[pyclass(module = "octavo._octavo", frozen, get_all)]
pub struct Facts {
    architecture: String,
    /// Device, instruction set, threads.
    device: String,
    /// Logits per row.
    vocab: usize,
    weights_bytes: u64,
    kv_cache_bytes: u64,
    block_bytes: u64,
    block_size: usize,
    blocks: usize,
    max_model_len: usize,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    /// How the memory was divided, as text.
    memory: String,
    /// What nobody asked for and everybody should know; :class:`octavo.LLM` warns of each.
    notices: Vec<String>,
}

impl From<&handle::Facts> for Facts {
    fn from(facts: &handle::Facts) -> Self {
        let handle::Facts { architecture, device, memory, notices, .. } = facts.clone();
        Self {
            architecture,
            device,
            vocab: facts.vocab,
            weights_bytes: facts.weights_bytes,
            kv_cache_bytes: facts.kv_cache_bytes,
            block_bytes: facts.block_bytes,
            block_size: facts.block_size,
            blocks: facts.blocks,
            max_model_len: facts.max_model_len,
            max_num_seqs: facts.max_num_seqs,
            max_num_batched_tokens: facts.max_num_batched_tokens,
            memory,
            notices,
        }
    }
}

#[pymethods]
impl Facts {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { blocks, block_size, max_model_len, .. } = self;
        let (architecture, device) = (quoted(py, &self.architecture)?, quoted(py, &self.device)?);
        Ok(format!(
            "Facts(architecture={architecture}, device={device}, blocks={blocks}, block_size={block_size}, \
             max_model_len={max_model_len})"
        ))
    }
}

/// Counts, now and since the model was loaded.
#[pyclass(module = "octavo", frozen, get_all)]
pub struct Stats {
    running: usize,
    waiting: usize,
    /// Blocks of the KV cache: ``blocks_free + blocks_remembered + blocks_owned``.
    blocks: usize,
    blocks_free: usize,
    /// Blocks that nobody holds and whose contents a new prompt may still find.
    blocks_remembered: usize,
    /// Blocks that running sequences and sessions hold.
    blocks_owned: usize,
    /// Blocks that sessions hold between turns, at most half of all; one that several hold counts for each.
    blocks_pinned: usize,
    /// Sessions that are open.
    sessions: usize,
    steps: u64,
    tokens_computed: u64,
    tokens_cached: u64,
    tokens_generated: u64,
    preemptions: u64,
    finished: u64,
    /// Seconds that all steps took, from planning to the last token handed out.
    steps_s: f64,
    /// Of these, seconds in the executor: the model's operations, and drawing tokens.
    executor_s: f64,
}

impl From<EngineStats> for Stats {
    fn from(EngineStats { scheduler: stats, time }: EngineStats) -> Self {
        Self {
            running: stats.running,
            waiting: stats.waiting,
            blocks: stats.blocks,
            blocks_free: stats.blocks_free,
            blocks_remembered: stats.blocks_remembered,
            blocks_owned: stats.blocks_owned,
            blocks_pinned: stats.blocks_pinned,
            sessions: stats.sessions,
            steps: stats.steps,
            tokens_computed: stats.tokens_computed,
            tokens_cached: stats.tokens_cached,
            tokens_generated: stats.tokens_generated,
            preemptions: stats.preemptions,
            finished: stats.finished,
            steps_s: time.steps_ns as f64 * 1e-9,
            executor_s: time.executor_ns as f64 * 1e-9,
        }
    }
}

#[pymethods]
impl Stats {
    fn __repr__(&self) -> String {
        let Self { running, waiting, blocks, blocks_free, blocks_remembered, blocks_owned, .. } = self;
        format!(
            "Stats(running={running}, waiting={waiting}, blocks={blocks}, blocks_free={blocks_free}, \
             blocks_remembered={blocks_remembered}, blocks_owned={blocks_owned}, tokens_generated={})",
            self.tokens_generated
        )
    }
}
