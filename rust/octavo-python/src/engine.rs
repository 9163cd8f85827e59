//! A loaded model.

use std::path::PathBuf;
use std::sync::Arc;

use octavo::engine;
use octavo::request::{RequestId, SamplingParams};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::{invalid, not_loaded, refused};
use crate::facts::{Facts, Stats};
use crate::fields::{TEXT, argument};
use crate::home::Home;
use crate::params;
use crate::prompt::{Chat, prompt};
use crate::result::{Asked, RequestResult};
use crate::session::{CacheExplanation, SessionHandle, answer};
use crate::ticket::Ticket;
use crate::tokenizer::{Encoding, known};
use crate::waker::Waker;
use crate::watch::{Events, Recording};

/// A loaded model and the thread that runs it.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct Engine(Home<Arc<engine::Engine>>);

#[pymethods]
impl Engine {
    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf, settings: &Bound<'_, PyAny>, progress: Option<Py<PyAny>>) -> PyResult<Self> {
        let config = params::engine_config(settings)?;
        let mut stopped_by = None;
        let mut report = |done: u64, total: u64| {
            let told = Python::attach(|py| {
                py.check_signals()?;
                progress.as_ref().map_or(Ok(()), |listener| listener.call1(py, (done, total)).map(drop))
            });
            told.inspect_err(|_| ()).map_err(|error| stopped_by = Some(error)).is_ok()
        };
        let opened = py.detach(|| engine::open(&path, config, &mut report));
        match (opened, stopped_by) {
            (_, Some(error)) => Err(error),
            (opened, None) => Ok(Self(Home::new(Arc::new(opened.map_err(not_loaded)?)))),
        }
    }

    #[getter]
    fn facts(&self) -> PyResult<Option<Facts>> {
        // Also in a forked child: whoever is told that a model lives elsewhere wants to see which.
        Ok(self.0.anywhere().map(|engine| Facts::from(engine.facts())))
    }

    /// ``call``: the :attr:`Ticket.call` that it goes on with, as prompts of one list do. ``more``: another follows
    /// at once, for which an engine that has nothing to do waits.
    #[pyo3(signature = (prompt, params, options, *, wanted="tokens", score_from=None, every_token=false, waker=None,
        session=None, call=None, more=false))]
    #[expect(clippy::too_many_arguments, reason = "a call has these")]
    fn submit(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        params: &Bound<'_, PyAny>,
        options: &Bound<'_, PyAny>,
        wanted: &str,
        score_from: Option<usize>,
        every_token: bool,
        waker: Option<Py<Waker>>,
        session: Option<Py<SessionHandle>>,
        call: Option<u64>,
        more: bool,
    ) -> PyResult<Ticket> {
        let engine = self.0.get()?.clone();
        let (params, choices) = params::sampling_params(params)?;
        let mut options = params::options(options, choices, params::wanted(wanted, score_from)?)?;
        options.every_token = every_token;
        (options.call, options.more) = (call.map(RequestId), more);
        options.session = session.map(|session| session.get().session.get().cloned()).transpose()?;
        options.waker = waker.map(|waker| waker.get().0.clone() as Arc<dyn engine::Wake>);
        submit(py, engine, &self::prompt(prompt)?, params, options)
    }

    /// Asks for one choice of a finished request again, with its seed and without sharing anything.
    fn submit_again(&self, py: Python<'_>, result: &Bound<'_, RequestResult>, choice: usize) -> PyResult<Ticket> {
        let (prompt, params, options) =
            result.get().again(choice).ok_or_else(|| invalid(format!("the result has no choice {choice}")))?;
        submit(py, self.0.get()?.clone(), &prompt, params, options)
    }

    fn token_ids(&self, py: Python<'_>, prompt: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let engine = self.0.get()?;
        let prompt = self::prompt(prompt)?;
        py.detach(|| engine.token_ids(&prompt, None)).map_err(refused)
    }

    /// What a result was made with that this model has not: a name, how it was there, and how it is here.
    fn made_otherwise(&self, result: &Bound<'_, RequestResult>) -> PyResult<Vec<(&'static str, String, String)>> {
        Ok(result.get().origin.otherwise(self.0.get()?.origin()))
    }

    fn open_session(&self, ttl_s: &Bound<'_, PyAny>, cache_salt: &Bound<'_, PyAny>) -> PyResult<SessionHandle> {
        SessionHandle::open(self.0.get()?, ttl_s, cache_salt)
    }

    fn explain(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        cache_salt: &Bound<'_, PyAny>,
        session: Option<Py<SessionHandle>>,
    ) -> PyResult<CacheExplanation> {
        let engine = self.0.get()?;
        let prompt = self::prompt(prompt)?;
        let session = session.map(|session| session.get().session.get().cloned()).transpose()?;
        let session = session.as_deref();
        let cache_salt: String = argument("cache_salt", TEXT, cache_salt).map_err(invalid)?;
        let ids = py.detach(|| engine.token_ids(&prompt, session)).map_err(refused)?;
        let said = answer(py, engine.explain(ids.clone(), &cache_salt, session).map_err(refused)?)?;
        Ok(CacheExplanation::new(engine, &ids, &said, engine.now()))
    }

    #[pyo3(signature = (text, *, special, add_special_tokens))]
    fn tokenize(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyString>,
        special: bool,
        add_special_tokens: bool,
    ) -> PyResult<Encoding> {
        Encoding::of(py, self.0.get()?.tokenizer(), text, special, add_special_tokens)
    }

    #[pyo3(signature = (token_ids, *, skip_special_tokens))]
    fn detokenize(&self, py: Python<'_>, token_ids: &Bound<'_, PyAny>, skip_special_tokens: bool) -> PyResult<String> {
        let engine = self.0.get()?;
        let ids = known(token_ids, engine.facts().vocab, "the vocabulary")?;
        Ok(py.detach(|| engine.tokenizer().decode(&ids, skip_special_tokens)))
    }

    fn render(&self, py: Python<'_>, chat: &Bound<'_, Chat>) -> PyResult<(String, Vec<u32>)> {
        let engine = self.0.get()?;
        let input = &chat.get().0;
        let rendered = py.detach(|| engine.render(input)).map_err(refused)?;
        Ok((rendered.text, rendered.encoding.ids))
    }

    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        answer(py, self.0.get()?.stats().map_err(refused)?).map(Stats::from)
    }

    fn record(&self, py: Python<'_>, path: PathBuf) -> PyResult<Recording> {
        Recording::begin(py, self.0.get()?, path)
    }

    fn events(&self, capacity: &Bound<'_, PyAny>) -> PyResult<Events> {
        Events::new(self.0.get()?, capacity)
    }

    fn close(&self, py: Python<'_>) {
        // A forked child has no thread to stop and no model of its own to free.
        if let Ok(engine) = self.0.get() {
            py.detach(|| engine.close());
        }
    }
}

fn submit(
    py: Python<'_>,
    engine: Arc<engine::Engine>,
    prompt: &engine::Prompt,
    params: SamplingParams,
    options: engine::Options,
) -> PyResult<Ticket> {
    let asked = Asked {
        logprobs: params.logprobs.is_some(),
        prompt_logprobs: params.prompt_logprobs.is_some(),
        block_bytes: engine.facts().block_bytes as usize,
        origin: engine.origin().clone(),
    };
    let ticket = py.detach(|| engine.submit(prompt, params, options)).map_err(refused)?;
    Ok(Ticket::new(ticket, engine, asked))
}
