//! Where a request's time and memory went.

use octavo::kv::PinFate;
use octavo::observe::anatomy;
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};

/// Where a request's time and memory went. The times are a partition of its life on one monotonic clock: exclusive,
/// in whole nanoseconds, and their sum is the whole. ``print`` draws it.
#[pyclass(module = "octavo", frozen)]
pub struct Anatomy(pub anatomy::Anatomy);

/// What it cost a request to lose its blocks.
#[pyclass(module = "octavo._octavo", frozen, get_all)]
pub struct Preemption {
    /// When, in seconds since it arrived.
    at_s: f64,
    /// Tokens whose keys and values were given up.
    lost_tokens: usize,
    /// Of these, those that were computed again; the others were still in the cache.
    recomputed_tokens: usize,
    /// Seconds until it had again what it had, or ended, or lost its blocks once more.
    lost_s: f64,
}

#[pymethods]
impl Preemption {
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("at_s", self.at_s)?;
        dict.set_item("lost_tokens", self.lost_tokens)?;
        dict.set_item("recomputed_tokens", self.recomputed_tokens)?;
        dict.set_item("lost_s", self.lost_s)?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        let Self { at_s, lost_tokens, recomputed_tokens, lost_s } = self;
        format!(
            "Preemption(at_s={at_s}, lost_tokens={lost_tokens}, recomputed_tokens={recomputed_tokens}, lost_s={lost_s})"
        )
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

impl Anatomy {
    /// Every part, in the order of the stages.
    fn parts(&self) -> [(&'static str, u64); 11] {
        let anatomy::StageTimes { queue, prefill, decode } = &self.0.record.stages;
        [
            ("tokenize", self.0.tokenize_ns),
            ("queue_sequences", queue.sequences),
            ("queue_blocks", queue.blocks),
            ("queue_prefix", queue.prefix),
            ("queue_budget", queue.budget),
            ("prefill_computing", prefill.computing),
            ("prefill_waiting", prefill.waiting),
            ("decode_computing", decode.computing),
            ("decode_waiting", decode.waiting),
            ("decode_preempted", decode.preempted),
            ("stream", self.0.stream_ns),
        ]
    }
}

#[pymethods]
impl Anatomy {
    /// Every part by name, in the order of the stages; the values sum to :attr:`total_ns`.
    #[getter]
    fn parts_ns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let parts = PyDict::new(py);
        for (name, ns) in self.parts() {
            parts.set_item(name, ns)?;
        }
        Ok(parts)
    }

    #[getter]
    fn total_ns(&self) -> u64 {
        self.0.total_ns()
    }

    #[getter]
    fn total_s(&self) -> f64 {
        seconds(self.0.total_ns())
    }

    /// From the call to the queue: template, tokenizer, checks.
    #[getter]
    fn tokenize_s(&self) -> f64 {
        seconds(self.0.tokenize_ns)
    }

    /// Waiting for a sequence, for blocks, or for room in a step.
    #[getter]
    fn queue_s(&self) -> f64 {
        seconds(self.0.record.stages.queue.total())
    }

    /// Until the first token.
    #[getter]
    fn prefill_s(&self) -> f64 {
        seconds(self.0.record.stages.prefill.total())
    }

    /// After the first token.
    #[getter]
    fn decode_s(&self) -> f64 {
        seconds(self.0.record.stages.decode.total())
    }

    /// From the last token until the reader had everything.
    #[getter]
    fn stream_s(&self) -> f64 {
        seconds(self.0.stream_ns)
    }

    /// Time to first token: tokenize + queue + prefill.
    #[getter]
    fn ttft_s(&self) -> Option<f64> {
        self.0.ttft_ns().map(seconds)
    }

    /// What :attr:`ttft_s` was expected to be when the request was taken, from what there was to do and how fast the
    /// engine was lately. Requests that come later may come first: shorter ones, and those of users who were served
    /// less. Before its first step that is 1 ms for a token of a prompt, and 20 ms for a step.
    #[getter]
    fn predicted_ttft_s(&self) -> f64 {
        seconds(self.0.predicted_ttft_ns)
    }

    /// Mean time per token after the first.
    #[getter]
    fn tpot_s(&self) -> Option<f64> {
        self.0.record.tpot_ns().map(|ns| ns / 1e9)
    }

    /// Seconds between one token and the next.
    #[getter]
    fn inter_token_times<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bytes: Vec<u8> = self.0.record.itl_ns().flat_map(|ns| seconds(ns).to_le_bytes()).collect();
        let numpy = py.import("numpy").map_err(|_| {
            PyImportError::new_err(
                "inter_token_times come back as a numpy array, and numpy is not installed: pip install numpy",
            )
        })?;
        numpy.call_method1("frombuffer", (PyByteArray::new(py, &bytes), "<f8"))
    }

    #[getter]
    fn prompt_tokens(&self) -> usize {
        self.0.record.prompt_tokens
    }

    /// Tokens of the prompt that came from the prefix cache.
    #[getter]
    fn cached_tokens(&self) -> usize {
        self.0.record.cached_tokens
    }

    /// Tokens that were run, those run again after a preemption included.
    #[getter]
    fn computed_tokens(&self) -> usize {
        self.0.record.computed_tokens
    }

    #[getter]
    fn recomputed_tokens(&self) -> usize {
        self.0.record.recomputed_tokens
    }

    #[getter]
    fn completion_tokens(&self) -> usize {
        self.0.record.completion_tokens
    }

    /// Steps that read a part of the prompt.
    #[getter]
    fn chunks(&self) -> usize {
        self.0.record.chunks
    }

    #[getter]
    fn steps(&self) -> usize {
        self.0.record.steps
    }

    /// How often its blocks were taken away.
    #[getter]
    fn preemptions(&self) -> usize {
        self.0.record.preemptions
    }

    /// What that cost, each time.
    #[getter]
    fn preempted(&self) -> Vec<Preemption> {
        let cost = |cost: &anatomy::Preemption| Preemption {
            at_s: seconds(cost.at_ns),
            lost_tokens: cost.lost_tokens,
            recomputed_tokens: cost.recomputed_tokens,
            lost_s: seconds(cost.lost_ns),
        };
        self.0.record.preempted.iter().map(cost).collect()
    }

    /// Other sequences in its steps, on average.
    #[getter]
    fn neighbours(&self) -> f64 {
        self.0.record.neighbour_sequences as f64 / self.0.record.steps.max(1) as f64
    }

    /// The rent of the KV cache: blocks times how long they were held; a shared block is split among its holders.
    #[getter]
    fn block_seconds(&self) -> f64 {
        self.0.block_seconds()
    }

    #[getter]
    fn byte_seconds(&self) -> f64 {
        self.0.byte_seconds()
    }

    /// For a turn of a :class:`octavo.Session`: what became of what the turn before had left. ``resumed``: this one
    /// went on from it, and ``cached_tokens`` is how much it was; ``diverged``: it has other tokens, and only whole
    /// blocks were looked for; ``recomputed``: it has the same, and asked for ``prompt_logprobs``, which only computing
    /// all of them again tells; ``expired``, ``evicted``, ``over_limit``: it was given up before this turn came.
    #[getter]
    fn kept(&self) -> Option<&'static str> {
        self.0.record.kept.map(PinFate::name)
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("total_ns", self.total_ns())?;
        dict.set_item("parts_ns", self.parts_ns(py)?)?;
        dict.set_item("ttft_s", self.ttft_s())?;
        dict.set_item("predicted_ttft_s", self.predicted_ttft_s())?;
        dict.set_item("tpot_s", self.tpot_s())?;
        dict.set_item("prompt_tokens", self.prompt_tokens())?;
        dict.set_item("cached_tokens", self.cached_tokens())?;
        dict.set_item("computed_tokens", self.computed_tokens())?;
        dict.set_item("recomputed_tokens", self.recomputed_tokens())?;
        dict.set_item("completion_tokens", self.completion_tokens())?;
        dict.set_item("chunks", self.chunks())?;
        dict.set_item("steps", self.steps())?;
        dict.set_item("preemptions", self.preemptions())?;
        let preempted = self.preempted().into_iter().map(|cost| cost.to_dict(py)).collect::<PyResult<Vec<_>>>()?;
        dict.set_item("preempted", preempted)?;
        dict.set_item("neighbours", self.neighbours())?;
        dict.set_item("kept", self.kept())?;
        dict.set_item("block_seconds", self.block_seconds())?;
        dict.set_item("byte_seconds", self.byte_seconds())?;
        Ok(dict)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Anatomy of {} tokens in {:.3} s>", self.completion_tokens(), self.total_s())
    }
}
