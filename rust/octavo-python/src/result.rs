//! Finished answers.

use std::sync::Arc;

use octavo::engine::{ChoiceResult, Options, Origin, Prompt, Ticket};
use octavo::observe::anatomy;
use octavo::request::{Finish, SamplingParams, StopReason};
use pyo3::prelude::*;

use crate::anatomy::Anatomy;
use crate::chunk::{TokenLogprobs, logprobs};
use crate::repr::quoted;

/// How many tokens a request took.
#[pyclass(module = "octavo", frozen, get_all)]
#[derive(Clone, Copy)]
pub struct Usage {
    prompt_tokens: usize,
    cached_tokens: usize,
    /// Over all choices.
    completion_tokens: usize,
}

#[pymethods]
impl Usage {
    fn __repr__(&self) -> String {
        let Self { prompt_tokens, cached_tokens, completion_tokens } = self;
        format!(
            "Usage(prompt_tokens={prompt_tokens}, cached_tokens={cached_tokens}, completion_tokens={completion_tokens})"
        )
    }
}

/// What ended a generation that stopped by itself.
#[derive(Clone, IntoPyObject)]
pub enum StoppedBy {
    Text(String),
    Token(u32),
}

/// One of the ``n`` answers.
#[pyclass(module = "octavo", frozen)]
pub struct Choice {
    #[pyo3(get)]
    index: usize,
    #[pyo3(get)]
    text: String,
    /// Every token that was drawn, the one that ended it included.
    #[pyo3(get)]
    token_ids: Vec<u32>,
    logprobs: Option<Vec<Py<TokenLogprobs>>>,
    /// ``stop``, ``length``, ``cancelled``; in ``error.partial`` also ``deadline``, ``rejected``, ``error``.
    #[pyo3(get)]
    finish_reason: &'static str,
    stop_reason: Option<StoppedBy>,
    /// Of its coins, also when the request brought none: a request with this seed (and ``n=1``) gives it again.
    #[pyo3(get)]
    seed: u64,
    /// Its name inside the engine, as in :class:`octavo.Event`.
    #[pyo3(get)]
    request_id: u64,
    #[pyo3(get)]
    anatomy: Py<Anatomy>,
}

#[pymethods]
impl Choice {
    #[getter]
    fn logprobs(&self, py: Python<'_>) -> Option<Vec<Py<TokenLogprobs>>> {
        self.logprobs.as_ref().map(|all| all.iter().map(|one| one.clone_ref(py)).collect())
    }

    /// The stop string or stop token that ended it; ``None`` for the model's own end.
    #[getter]
    fn stop_reason(&self) -> Option<StoppedBy> {
        self.stop_reason.clone()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { index, text, finish_reason, .. } = self;
        let text = quoted(py, text)?;
        Ok(format!("Choice(index={index}, text={text}, finish_reason='{finish_reason}')"))
    }
}

/// A finished request. ``text``, ``token_ids``, ``logprobs``, ``finish_reason``, ``stop_reason`` and ``anatomy`` are
/// those of the first choice.
#[pyclass(module = "octavo", name = "Result", frozen)]
pub struct RequestResult {
    choices: Vec<Py<Choice>>,
    #[pyo3(get)]
    prompt_token_ids: Vec<u32>,
    prompt_logprobs: Option<Vec<Option<Py<TokenLogprobs>>>>,
    #[pyo3(get)]
    usage: Usage,
    params: Arc<SamplingParams>,
    pub origin: Arc<Origin>,
}

/// What the choices do not say.
pub struct Asked {
    pub logprobs: bool,
    pub prompt_logprobs: bool,
    pub block_bytes: usize,
    pub origin: Arc<Origin>,
}

impl RequestResult {
    /// Of a ticket whose choices have all ended.
    pub fn new(py: Python<'_>, ticket: &Ticket, mut results: Vec<ChoiceResult>, asked: &Asked) -> PyResult<Self> {
        let first = results.first_mut();
        let prompt_logprobs = first.map(|first| std::mem::take(&mut first.prompt_logprobs)).unwrap_or_default();
        let usage = Usage {
            prompt_tokens: ticket.prompt_token_ids().len(),
            cached_tokens: results.first().map_or(0, |first| first.record.cached_tokens),
            completion_tokens: results.iter().map(|result| result.token_ids.len()).sum(),
        };
        // The first token of a prompt has no probability: nothing is before it.
        let aligned = || -> PyResult<_> {
            Ok(std::iter::once(None).chain(logprobs(py, prompt_logprobs)?.into_iter().map(Some)).collect())
        };
        let choices = results.into_iter().enumerate();
        Ok(Self {
            prompt_token_ids: ticket.prompt_token_ids().to_vec(),
            prompt_logprobs: asked.prompt_logprobs.then(aligned).transpose()?,
            usage,
            params: ticket.params().clone(),
            origin: asked.origin.clone(),
            choices: choices
                .map(|(index, result)| Py::new(py, choice(py, ticket, index, result, asked)?))
                .collect::<PyResult<_>>()?,
        })
    }

    fn first(&self) -> &Choice {
        self.choices[0].get()
    }

    /// What asks for one of its choices again, alone: nothing is shared with other requests. One that did not come to its
    /// own end is asked for as far as it got.
    pub fn again(&self, index: usize) -> Option<(Prompt, SamplingParams, Options)> {
        let choice = self.choices.get(index)?.get();
        let mut params = SamplingParams { seed: Some(choice.seed), ..SamplingParams::clone(&self.params) };
        if !matches!(choice.finish_reason, "stop" | "length") {
            params.max_tokens = choice.token_ids.len().max(params.min_tokens).max(1);
        }
        // They are the first choice's.
        params.prompt_logprobs = params.prompt_logprobs.filter(|_| index == 0);
        let options = Options { shares_prefixes: false, ..Options::default() };
        Some((Prompt::Tokens(self.prompt_token_ids.clone()), params, options))
    }
}

fn choice(py: Python<'_>, ticket: &Ticket, index: usize, result: ChoiceResult, asked: &Asked) -> PyResult<Choice> {
    let anatomy = anatomy::Anatomy {
        tokenize_ns: ticket.tokenize_ns(),
        stream_ns: ticket.now().since(result.record.finished),
        block_bytes: asked.block_bytes,
        predicted_ttft_ns: ticket.predicted_ttft_ns(),
        record: result.record,
    };
    let found = logprobs(py, result.logprobs)?;
    Ok(Choice {
        index,
        text: result.text,
        token_ids: result.token_ids,
        logprobs: asked.logprobs.then_some(found),
        finish_reason: result.finish.name(),
        stop_reason: match result.finish {
            Finish::Stop(StopReason::StopString(text)) => Some(StoppedBy::Text(text)),
            Finish::Stop(StopReason::StopToken(id)) => Some(StoppedBy::Token(id)),
            _ => None,
        },
        seed: ticket.seeds()[index],
        request_id: ticket.request_ids().start + index as u64,
        anatomy: Py::new(py, Anatomy(anatomy))?,
    })
}

#[pymethods]
impl RequestResult {
    #[getter]
    fn text(&self) -> &str {
        &self.first().text
    }

    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.first().token_ids.clone()
    }

    #[getter]
    fn logprobs(&self, py: Python<'_>) -> Option<Vec<Py<TokenLogprobs>>> {
        self.first().logprobs(py)
    }

    #[getter]
    fn finish_reason(&self) -> &'static str {
        self.first().finish_reason
    }

    #[getter]
    fn stop_reason(&self) -> Option<StoppedBy> {
        self.first().stop_reason()
    }

    #[getter]
    fn anatomy(&self, py: Python<'_>) -> Py<Anatomy> {
        self.first().anatomy.clone_ref(py)
    }

    #[getter]
    fn choices(&self, py: Python<'_>) -> Vec<Py<Choice>> {
        self.choices.iter().map(|choice| choice.clone_ref(py)).collect()
    }

    /// One per token of the prompt, when asked for; the first is ``None``.
    #[getter]
    fn prompt_logprobs(&self, py: Python<'_>) -> Option<Vec<Option<Py<TokenLogprobs>>>> {
        let copy = |one: &Option<Py<TokenLogprobs>>| one.as_ref().map(|one| one.clone_ref(py));
        self.prompt_logprobs.as_ref().map(|all| all.iter().map(copy).collect())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Choice { text, finish_reason, .. } = self.first();
        let (text, usage) = (quoted(py, text)?, self.usage.__repr__());
        Ok(format!("Result(text={text}, finish_reason='{finish_reason}', usage={usage})"))
    }
}
