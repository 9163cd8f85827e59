//! Pieces of answers, and log-probabilities.

use octavo::engine::Update;
use octavo::request;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A token with its log-probability.
#[pyclass(module = "octavo", frozen, get_all)]
pub struct TokenLogprobs {
    token_id: u32,
    logprob: f32,
    rank: u32,
    top: Vec<(u32, f32)>,
}

#[pymethods]
impl TokenLogprobs {
    fn __repr__(&self) -> String {
        let Self { token_id, logprob, rank, top } = self;
        format!("TokenLogprobs(token_id={token_id}, logprob={logprob}, rank={rank}, top={top:?})")
    }
}

/// Log-probabilities as Python objects.
pub fn logprobs(py: Python<'_>, all: Vec<request::TokenLogprobs>) -> PyResult<Vec<Py<TokenLogprobs>>> {
    let convert = |one: request::TokenLogprobs| {
        let request::TokenLogprobs { token_id, logprob, rank, top } = one;
        Py::new(py, TokenLogprobs { token_id, logprob, rank, top })
    };
    all.into_iter().map(convert).collect()
}

/// The newest part of an answer.
#[pyclass(module = "octavo", frozen)]
pub struct Chunk {
    #[pyo3(get)]
    index: usize,
    #[pyo3(get)]
    text: String,
    #[pyo3(get)]
    token_ids: Vec<u32>,
    logprobs: Option<Vec<Py<TokenLogprobs>>>,
    #[pyo3(get)]
    finish_reason: Option<&'static str>,
}

impl Chunk {
    pub fn new(py: Python<'_>, update: Update) -> PyResult<Self> {
        let has_logprobs = !update.logprobs.is_empty();
        Ok(Self {
            index: update.index,
            text: update.text,
            token_ids: update.token_ids,
            logprobs: has_logprobs.then(|| logprobs(py, update.logprobs)).transpose()?,
            finish_reason: update.finish.map(|finish| finish.name()),
        })
    }
}

#[pymethods]
impl Chunk {
    #[getter]
    fn bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.text.as_bytes())
    }

    #[getter]
    fn logprobs(&self, py: Python<'_>) -> Option<Vec<Py<TokenLogprobs>>> {
        self.logprobs.as_ref().map(|all| all.iter().map(|one| one.clone_ref(py)).collect())
    }

    fn __repr__(&self) -> String {
        let Self { index, text, token_ids, .. } = self;
        let finish = self.finish_reason.map_or(String::new(), |reason| format!(", finish_reason={reason:?}"));
        format!("Chunk(text={text:?}, token_ids={token_ids:?}, index={index}{finish})")
    }
}
