//! Conversations that keep their blocks, and what the cache says about a prompt.

use std::sync::Arc;
use std::time::Duration;

use octavo::engine::{self, Reply};
use octavo::kv::{self, MissReason};
use octavo::request::Time;
use pyo3::prelude::*;

use crate::errors::{invalid, refused};
use crate::home::Home;
use crate::ticket::SLICE;

/// Waits for an answer of the engine thread, in slices and without the GIL, so that Ctrl-C gets through.
pub fn answer<T: Send>(py: Python<'_>, mut reply: Reply<T>) -> PyResult<T> {
    loop {
        match py.detach(|| reply.within(SLICE)) {
            Some(answer) => return answer.map_err(refused),
            None => py.check_signals()?,
        }
    }
}

/// A session of an engine. Dropping it closes it.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct SessionHandle {
    pub session: Home<Arc<engine::Session>>,
    block_bytes: u64,
}

impl SessionHandle {
    pub fn open(engine: &engine::Engine, ttl_s: f64, cache_salt: String) -> PyResult<Self> {
        let ttl = Duration::try_from_secs_f64(ttl_s).ok().filter(|ttl| !ttl.is_zero());
        let ttl = ttl.ok_or_else(|| invalid(format!("ttl_s must be a number of seconds above 0, not {ttl_s}")))?;
        let session = engine.open_session(ttl, cache_salt).map_err(refused)?;
        Ok(Self { session: Home::new(Arc::new(session)), block_bytes: engine.facts().block_bytes })
    }
}

#[pymethods]
impl SessionHandle {
    fn report(&self, py: Python<'_>) -> PyResult<Option<SessionReport>> {
        let session = self.session.get()?;
        let report = answer(py, session.report().map_err(refused)?)?;
        report.map(|report| SessionReport::new(py, &report, session.opened(), self.block_bytes)).transpose()
    }

    #[getter]
    fn id(&self) -> PyResult<u64> {
        Ok(self.session.get()?.id().0)
    }

    #[getter]
    fn running(&self) -> PyResult<bool> {
        Ok(self.session.get()?.is_running())
    }

    fn close(&self) {
        // In a forked child there is nothing to give up.
        if let Ok(session) = self.session.get() {
            session.close();
        }
    }
}

/// A session as it stands.
#[pyclass(module = "octavo._octavo", frozen, get_all)]
pub struct SessionReport {
    tokens_held: usize,
    blocks_held: usize,
    bytes_held: u64,
    byte_seconds: f64,
    expires_in_s: Option<f64>,
    events: Vec<Py<SessionEvent>>,
    forgotten_events: u64,
}

impl SessionReport {
    fn new(py: Python<'_>, report: &kv::SessionReport, opened: Time, block_bytes: u64) -> PyResult<Self> {
        let event = |event: &kv::SessionEvent| Py::new(py, SessionEvent::new(event, opened));
        Ok(Self {
            tokens_held: report.tokens,
            blocks_held: report.blocks,
            bytes_held: report.blocks as u64 * block_bytes,
            byte_seconds: report.rent_block_ns as f64 * block_bytes as f64 / 1e9,
            expires_in_s: report.expires_in_ns.map(|ns| ns as f64 / 1e9),
            events: report.events.iter().map(event).collect::<PyResult<_>>()?,
            forgotten_events: report.forgotten_events,
        })
    }
}

#[pymethods]
impl SessionReport {
    fn __repr__(&self) -> String {
        let Self { tokens_held, bytes_held, byte_seconds, .. } = self;
        format!("SessionReport(tokens_held={tokens_held}, bytes_held={bytes_held}, byte_seconds={byte_seconds})")
    }
}

/// Something that has happened to what a session keeps.
#[pyclass(module = "octavo", frozen, get_all)]
pub struct SessionEvent {
    at_s: f64,
    kind: &'static str,
    tokens: usize,
    blocks: usize,
}

impl SessionEvent {
    fn new(event: &kv::SessionEvent, opened: Time) -> Self {
        let at_s = event.at.since(opened) as f64 / 1e9;
        Self { at_s, kind: event.fate.name(), tokens: event.tokens, blocks: event.blocks }
    }
}

#[pymethods]
impl SessionEvent {
    fn __repr__(&self) -> String {
        let Self { at_s, kind, tokens, blocks } = self;
        format!("SessionEvent(at_s={at_s:.3}, kind={kind:?}, tokens={tokens}, blocks={blocks})")
    }
}

/// What a prompt would find in the cache, and why not more.
#[pyclass(module = "octavo", frozen, get_all)]
pub struct CacheExplanation {
    prompt_tokens: usize,
    cached_tokens: usize,
    lost_tokens: usize,
    lost_ms: Option<f64>,
    reason: &'static str,
    differs_at: Option<usize>,
    prompt_text: Option<String>,
    cached_text: Option<String>,
    evicted_s_ago: Option<f64>,
    block_size: usize,
}

impl CacheExplanation {
    pub fn new(engine: &engine::Engine, prompt: &[u32], said: &kv::CacheExplanation, now: Time) -> Self {
        let (mut differs_at, mut texts, mut evicted) = (None, None, None);
        match &said.reason {
            MissReason::Differs { index, stored } => {
                let text = |ids: &[u32]| String::from_utf8_lossy(&engine.tokenizer().decode_bytes(ids)).into_owned();
                let end = prompt.len().min(index + stored.len());
                texts = Some((text(&prompt[*index..end]), text(stored)));
                differs_at = Some(*index);
            }
            MissReason::Evicted { at } => evicted = Some(now.since(*at) as f64 / 1e9),
            _ => {}
        }
        let (prompt_text, cached_text) = texts.unzip();
        Self {
            prompt_tokens: said.prompt_tokens,
            cached_tokens: said.cached_tokens,
            lost_tokens: said.prompt_tokens.saturating_sub(1 + said.cached_tokens),
            lost_ms: said.lost_ns.map(|ns| ns as f64 / 1e6),
            reason: said.reason.name(),
            differs_at,
            prompt_text,
            cached_text,
            evicted_s_ago: evicted,
            block_size: engine.facts().block_size,
        }
    }

    fn because(&self) -> String {
        let Self { block_size, .. } = self;
        match self.reason {
            "complete" => "all but the last token, which is always computed".into(),
            "disabled" => "prefix caching is off".into(),
            "shorter_than_block" => format!("what is left does not fill a block of {block_size} tokens"),
            "not_yet_filled" => "a running request is computing the rest; who asks now waits for it".into(),
            "evicted" => format!("the next block was evicted {:.1} s ago", self.evicted_s_ago.unwrap_or_default()),
            "differs" => format!(
                "token {} differs: the prompt has {:?}, the cache {:?}",
                self.differs_at.unwrap_or_default(),
                self.prompt_text.as_deref().unwrap_or_default(),
                self.cached_text.as_deref().unwrap_or_default()
            ),
            "empty_namespace" => "nothing is cached under this cache_salt".into(),
            _ => "nothing that is cached goes on like this".into(),
        }
    }
}

#[pymethods]
impl CacheExplanation {
    fn __str__(&self) -> String {
        let Self { prompt_tokens, cached_tokens, lost_tokens, .. } = self;
        let lost = match self.lost_ms {
            _ if *lost_tokens == 0 => String::new(),
            Some(ms) => format!("; {lost_tokens} are to be computed, in about {ms:.1} ms"),
            None => format!("; {lost_tokens} are to be computed"),
        };
        format!("{cached_tokens} of {prompt_tokens} tokens are cached: {}{lost}", self.because())
    }

    fn __repr__(&self) -> String {
        let Self { prompt_tokens, cached_tokens, reason, .. } = self;
        format!("CacheExplanation(cached_tokens={cached_tokens}, prompt_tokens={prompt_tokens}, reason={reason:?})")
    }
}
