//! Pieces of answers, and log-probabilities.

use octavo::engine::Update;
use octavo::request;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::repr::quoted;

/// A token with its log-probability: the natural logarithm of the softmax of the raw logits, before any sampling
/// step.
#[pyclass(module = "octavo", frozen, get_all)]
pub struct TokenLogprobs {
    token_id: u32,
    logprob: f32,
    /// How many tokens are likelier, plus 1.
    rank: u32,
    /// The best tokens and their log-probabilities, best first; ties by the smaller id.
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

/// The newest part of an answer. A reader that was slow gets several tokens in one.
#[pyclass(module = "octavo", frozen)]
pub struct Chunk {
    /// Which of the ``n`` answers.
    #[pyo3(get)]
    index: usize,
    /// New text, always whole characters. May be empty: a token need not complete one.
    #[pyo3(get)]
    text: String,
    #[pyo3(get)]
    token_ids: Vec<u32>,
    logprobs: Option<Vec<Py<TokenLogprobs>>>,
    /// Why the answer ended, with its last part.
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
    /// The new text as UTF-8.
    #[getter]
    fn bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.text.as_bytes())
    }

    /// One per new token, when asked for.
    #[getter]
    fn logprobs(&self, py: Python<'_>) -> Option<Vec<Py<TokenLogprobs>>> {
        self.logprobs.as_ref().map(|all| all.iter().map(|one| one.clone_ref(py)).collect())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { index, text, token_ids, .. } = self;
        let text = quoted(py, text)?;
        let finish = self.finish_reason.map_or(String::new(), |reason| format!(", finish_reason='{reason}'"));
        Ok(format!("Chunk(text={text}, token_ids={token_ids:?}, index={index}{finish})"))
    }
}
