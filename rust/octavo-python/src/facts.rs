//! What was fixed at load, and counters.

use octavo::engine::handle;
use octavo::schedule::SchedulerStats;
use pyo3::prelude::*;

/// What was fixed when the model was loaded.
#[pyclass(module = "octavo._octavo", frozen, get_all)]
pub struct Facts {
    architecture: String,
    device: String,
    vocab: usize,
    weights_bytes: u64,
    kv_cache_bytes: u64,
    block_bytes: u64,
    block_size: usize,
    blocks: usize,
    max_model_len: usize,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    memory: String,
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
    fn __repr__(&self) -> String {
        let Self { architecture, device, blocks, block_size, max_model_len, .. } = self;
        format!(
            "Facts(architecture={architecture:?}, device={device:?}, blocks={blocks}, block_size={block_size}, \
             max_model_len={max_model_len})"
        )
    }
}

/// Counts, now and since the beginning.
#[pyclass(module = "octavo._octavo", frozen, get_all)]
pub struct Stats {
    running: usize,
    waiting: usize,
    blocks: usize,
    blocks_free: usize,
    blocks_remembered: usize,
    blocks_owned: usize,
    blocks_pinned: usize,
    sessions: usize,
    steps: u64,
    tokens_computed: u64,
    tokens_cached: u64,
    tokens_generated: u64,
    preemptions: u64,
    finished: u64,
}

impl From<SchedulerStats> for Stats {
    fn from(stats: SchedulerStats) -> Self {
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
