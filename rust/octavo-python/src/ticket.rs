//! A call in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use octavo::engine::{self, ChoiceResult, Next};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::chunk::{Chunk, TokenLogprobs, logprobs};
use crate::errors::{OctavoError, failed, invalid};
use crate::fields::patience;
use crate::home::Home;
use crate::result::{Asked, RequestResult};
use crate::wait::wait_for;

/// A call in flight. Dropping it gives it up.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct Ticket {
    ticket: Home<engine::Ticket>,
    /// Keeps the model alive as long as somebody waits for it.
    engine: Home<Arc<engine::Engine>>,
    asked: Asked,
    /// Everything has been read.
    ended: AtomicBool,
}

impl Ticket {
    pub fn new(ticket: engine::Ticket, engine: Arc<engine::Engine>, asked: Asked) -> Self {
        Self { ticket: Home::new(ticket), engine: Home::new(engine), asked, ended: AtomicBool::new(false) }
    }

    /// What `look` finds, within `patience_s` (`None`: however long it takes). Ctrl-C ends the wait and the call.
    fn wait_for<T: Send>(
        &self,
        py: Python<'_>,
        patience_s: Option<&Bound<'_, PyAny>>,
        look: impl Fn(&engine::Ticket, Duration) -> Option<T> + Sync,
    ) -> PyResult<Option<T>> {
        let ticket = self.ticket.get()?;
        let patience = patience("patience_s", patience_s).map_err(invalid)?;
        wait_for(py, patience, |patience| look(ticket, patience)).inspect_err(|_| ticket.cancel())
    }

    fn take(&self) -> PyResult<Vec<ChoiceResult>> {
        let results = self.ticket.get()?.take_results();
        results.ok_or_else(|| OctavoError::new_err("the answer is not complete, or has been taken already"))
    }

    /// The error that the choices' ends stand for, if any.
    fn failure(&self, results: &[ChoiceResult]) -> PyResult<Option<PyErr>> {
        let (ticket, engine) = (self.ticket.get()?, self.engine.get()?);
        Ok(results.iter().find_map(|result| failed(result, ticket, engine)))
    }
}

#[pymethods]
impl Ticket {
    /// The next piece, waiting up to ``patience_s`` (``None``: for ever); ``None`` when there is none yet, or, when
    /// ``ended``, any more.
    #[pyo3(signature = (patience_s=None))]
    pub fn next(&self, py: Python<'_>, patience_s: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Chunk>> {
        let found = self.wait_for(py, patience_s, |ticket, patience| match ticket.next_within(patience) {
            Next::NotYet => None,
            next => Some(next),
        })?;
        match found {
            Some(Next::Update(update)) => Chunk::new(py, update).map(Some),
            Some(Next::Finished) => {
                self.ended.store(true, Ordering::Release);
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// Whether it has finished; waits for it.
    #[pyo3(signature = (patience_s=None))]
    fn wait(&self, py: Python<'_>, patience_s: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let look = |ticket: &engine::Ticket, patience| ticket.finished_within(patience).then_some(());
        Ok(self.wait_for(py, patience_s, look)?.is_some())
    }

    /// The outcome, once, after it has finished. Raises what the request failed with.
    fn result(&self, py: Python<'_>) -> PyResult<Py<RequestResult>> {
        let results = self.take()?;
        let failure = self.failure(&results)?;
        let result = Py::new(py, RequestResult::new(py, self.ticket.get()?, results, &self.asked)?)?;
        match failure {
            None => Ok(result),
            Some(error) => {
                error.value(py).setattr("partial", result)?;
                Err(error)
            }
        }
    }

    /// Like ``result``, for a call that wanted logits: float32, little-endian, rows of the vocabulary.
    fn logits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        let results = self.take()?;
        if let Some(error) = self.failure(&results)? {
            return Err(error);
        }
        let logits = results.first().map_or(&[][..], |first| &first.logits);
        PyByteArray::new_with(py, logits.len() * 4, |bytes| {
            // All of a long prompt are hundreds of megabytes.
            py.detach(|| {
                for (bytes, value) in bytes.chunks_exact_mut(4).zip(logits) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
            });
            Ok(())
        })
    }

    fn scores(&self, py: Python<'_>) -> PyResult<Vec<Py<TokenLogprobs>>> {
        let mut results = self.take()?;
        if let Some(error) = self.failure(&results)? {
            return Err(error);
        }
        let scores = results.first_mut().map(|first| std::mem::take(&mut first.prompt_logprobs));
        logprobs(py, scores.unwrap_or_default())
    }

    pub fn cancel(&self) {
        // In a forked child there is nothing to give up.
        if let Ok(ticket) = self.ticket.get() {
            ticket.cancel();
        }
    }

    /// The call that it is of: what other prompts of the same list go on with.
    #[getter]
    fn call(&self) -> PyResult<u64> {
        Ok(self.ticket.get()?.call().0)
    }

    /// Whether everything has been read.
    #[getter]
    fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Seconds until its deadline; ``None``: it has none.
    #[getter]
    fn expires_in_s(&self) -> PyResult<Option<f64>> {
        Ok(self.ticket.get()?.expires_in().map(|left| left.as_secs_f64()))
    }

    /// How many have arrived, over all choices.
    #[getter]
    fn tokens(&self) -> PyResult<usize> {
        Ok(self.ticket.get()?.tokens())
    }

    #[getter]
    fn prompt_token_ids(&self) -> PyResult<Vec<u32>> {
        Ok(self.ticket.get()?.prompt_token_ids().to_vec())
    }
}

/// The pieces of an answer, one after another. The class that extends it has a method ``_ended``, which is called
/// after the last and raises what the call failed with.
#[pyclass(module = "octavo._octavo", frozen, subclass)]
pub struct Chunks(Py<Ticket>);

#[pymethods]
impl Chunks {
    #[new]
    fn new(ticket: Py<Ticket>) -> Self {
        Self(ticket)
    }

    fn __iter__(chunks: Py<Self>) -> Py<Self> {
        chunks
    }

    /// After the last chunk `_ended` is called, which is of the class that extends this one and may raise.
    fn __next__(chunks: &Bound<'_, Self>) -> PyResult<Option<Chunk>> {
        let py = chunks.py();
        let ticket = chunks.get().0.get();
        match ticket.next(py, None) {
            Ok(Some(chunk)) => Ok(Some(chunk)),
            Ok(None) => chunks.call_method0("_ended").map(|_| None),
            Err(error) => {
                // Ctrl-C, say. The exception may keep the stream alive: dropping it would come too late.
                ticket.cancel();
                Err(error)
            }
        }
    }
}
