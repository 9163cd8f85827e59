//! Conversations that keep their blocks, and what the cache says about a prompt.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use octavo::engine::{self, Reply};
use octavo::kv::{self, MissReason};
use octavo::request::Time;
use pyo3::prelude::*;

use crate::errors::{OctavoError, invalid, refused};
use crate::fields::{TEXT, argument, seconds};
use crate::home::Home;
use crate::wait::wait_for;

/// Waits for an answer of the engine thread.
pub fn answer<T: Send>(py: Python<'_>, mut reply: Reply<T>) -> PyResult<T> {
    match wait_for(py, None, |patience| reply.within(patience))? {
        Some(answer) => answer.map_err(refused),
        None => Err(OctavoError::new_err("the engine has no answer")),
    }
}

/// A session of an engine. Dropping it closes it.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct SessionHandle {
    pub session: Home<Arc<engine::Session>>,
    block_bytes: u64,
}

impl SessionHandle {
    pub fn open(engine: &engine::Engine, ttl_s: &Bound<'_, PyAny>, cache_salt: &Bound<'_, PyAny>) -> PyResult<Self> {
        let wanted = "a finite number of seconds above 0";
        let ttl = seconds("ttl_s", wanted, ttl_s).map_err(invalid)?;
        if ttl_s.eq(0.0)? {
            return Err(invalid(format!("ttl_s must be {wanted}, not 0")));
        }
        // What rounds to nothing is still some time.
        let ttl = ttl.max(Duration::from_nanos(1));
        let cache_salt = argument("cache_salt", TEXT, cache_salt).map_err(invalid)?;
        let session = engine.open_session(ttl, cache_salt).map_err(refused)?;
        Ok(Self { session: Home::new(Arc::new(session)), block_bytes: engine.facts().block_bytes })
    }
}

#[pymethods]
impl SessionHandle {
    /// ``None``: it is closed.
    fn report(&self, py: Python<'_>) -> PyResult<Option<SessionReport>> {
        let session = self.session.get()?;
        let report = answer(py, session.report().map_err(refused)?)?;
        report.map(|report| SessionReport::new(py, &report, session.opened(), self.block_bytes)).transpose()
    }

    #[getter]
    fn id(&self) -> PyResult<u64> {
        Ok(self.session.get()?.id().0)
    }

    /// Whether a turn is.
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
#[pyclass(module = "octavo", frozen, get_all)]
pub struct SessionReport {
    tokens_held: usize,
    blocks_held: usize,
    /// Bytes of the KV cache that it holds now, while no turn runs.
    bytes_held: u64,
    /// What it cost so far: bytes times how long it held them between turns; what several hold is split.
    byte_seconds: f64,
    /// Until what it holds is given up; ``None``: it holds nothing.
    expires_in_s: Option<f64>,
    /// What has happened, oldest first; the latest 64.
    events: Vec<Py<SessionEvent>>,
    /// How many there were before these.
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
    /// Seconds after the session was opened.
    at_s: f64,
    /// ``kept``: a turn ended; ``resumed``: the next one went on from what was kept; ``diverged``: it did not, for
    /// it has other tokens; ``recomputed``: it has the same, and asked for what only computing them tells
    /// (``prompt_logprobs``); ``expired``: ``ttl_s`` passed; ``evicted``: somebody needed the blocks; ``over_limit``:
    /// all sessions together held more than half of the cache, or this one alone; ``replaced``: by another turn;
    /// ``lost``: the turn failed; ``closed``.
    kind: &'static str,
    /// How many tokens it kept; of ``diverged`` and ``recomputed`` how many of them the turn has too.
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
        format!("SessionEvent(at_s={at_s:.3}, kind='{kind}', tokens={tokens}, blocks={blocks})")
    }
}

/// What a prompt would find in the cache, and why not more. ``print`` says it in a sentence.
#[pyclass(module = "octavo", frozen)]
pub struct CacheExplanation {
    #[pyo3(get)]
    prompt_tokens: usize,
    /// How many of them would be found. The last is always computed: its logits choose the next token.
    #[pyo3(get)]
    cached_tokens: usize,
    /// How many are to be computed, but for the last.
    #[pyo3(get)]
    lost_tokens: usize,
    /// About how long that takes, from what prompts took lately; ``None``: none was read yet.
    #[pyo3(get)]
    lost_ms: Option<f64>,
    /// ``complete``: nothing is lost; ``differs``: what is cached goes on otherwise, see ``differs_at``;
    /// ``evicted``: it was there, see ``evicted_s_ago``; ``not_yet_filled``: a running request is computing it;
    /// ``shorter_than_block``: what is left, but for the last token, does not fill a block; ``never_seen``: nothing
    /// that is cached goes on like this; ``empty_namespace``: nothing is cached under this ``cache_salt``;
    /// ``disabled``: prefix caching is off.
    #[pyo3(get)]
    reason: &'static str,
    /// The first token that differs.
    #[pyo3(get)]
    differs_at: Option<usize>,
    sides: Option<[Side; 2]>,
    #[pyo3(get)]
    evicted_s_ago: Option<f64>,
    #[pyo3(get)]
    block_size: usize,
}

impl CacheExplanation {
    pub fn new(engine: &engine::Engine, prompt: &[u32], said: &kv::CacheExplanation, now: Time) -> Self {
        let (mut differs_at, mut sides, mut evicted) = (None, None, None);
        match &said.reason {
            MissReason::Differs { index, stored } => {
                sides = Some(Side::both(engine, prompt, *index, stored));
                differs_at = Some(*index);
            }
            MissReason::Evicted { at } => evicted = Some(now.since(*at) as f64 / 1e9),
            _ => {}
        }
        Self {
            prompt_tokens: said.prompt_tokens,
            cached_tokens: said.cached_tokens,
            lost_tokens: said.prompt_tokens.saturating_sub(1 + said.cached_tokens),
            lost_ms: said.lost_ns.map(|ns| ns as f64 / 1e6),
            reason: said.reason.name(),
            differs_at,
            sides,
            evicted_s_ago: evicted,
            block_size: engine.facts().block_size,
        }
    }

    fn side(&self, which: usize) -> Option<String> {
        self.sides.as_ref().map(|sides| match &sides[which] {
            Side::Text(text) => text.clone(),
            bytes @ Side::Bytes(_) => bytes.to_string(),
        })
    }

    fn because(&self) -> String {
        let Self { block_size, .. } = self;
        match self.reason {
            "complete" => "all but the last token, which is always computed".into(),
            "disabled" => "prefix caching is off".into(),
            "shorter_than_block" => format!(
                "what is left, but for the last token, which is always computed, does not fill a block of {block_size} tokens"
            ),
            "not_yet_filled" => "a running request is computing the rest; who asks now waits for it".into(),
            "evicted" => format!("the next block was evicted {:.1} s ago", self.evicted_s_ago.unwrap_or_default()),
            "differs" => {
                let at = self.differs_at.unwrap_or_default();
                match &self.sides {
                    Some([ours, theirs]) if ours != theirs => {
                        format!("token {at} differs: the prompt has {ours}, the cache {theirs}")
                    }
                    Some([both, _]) => format!("token {at} differs: prompt and cache have {both}, in other tokens"),
                    None => format!("token {at} differs"),
                }
            }
            "empty_namespace" => "nothing is cached under this cache_salt".into(),
            _ => "nothing that is cached goes on like this".into(),
        }
    }
}

/// What prompt or cache has from where they differ, up to the end of a block.
#[derive(PartialEq)]
enum Side {
    Text(String),
    /// Where text would not tell the two apart.
    Bytes(Vec<u8>),
}

impl Side {
    /// Of the prompt, and of the cache. A character that is begun before counts from its beginning; one that is cut off at
    /// the end does not count, unless there is nothing else to tell the two apart by.
    fn both(engine: &engine::Engine, prompt: &[u32], index: usize, stored: &[u32]) -> [Self; 2] {
        let bytes = |ids: &[u32]| engine.tokenizer().decode_bytes(ids);
        let before = bytes(&prompt[index.saturating_sub(MOST_BYTES)..index]);
        let begun = &before[before.len() - unfinished(&before)..];
        let end = prompt.len().min(index + stored.len());
        let sides = [&prompt[index..end], stored].map(|ids| [begun, &bytes(ids)[..]].concat());
        let whole = |bytes: &[u8]| bytes.len() - unfinished(bytes);
        let [ours, theirs] = [0, 1].map(|side| &sides[side][..whole(&sides[side])]);
        let cut = sides.iter().any(|side| unfinished(side) > 0);
        if cut && (ours.starts_with(theirs) || theirs.starts_with(ours)) {
            return sides.map(Self::Bytes);
        }
        [ours, theirs].map(|bytes| Self::Text(String::from_utf8_lossy(bytes).into_owned()))
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Bytes(bytes) => write!(f, "b\"{}\"", bytes.escape_ascii()),
        }
    }
}

/// Most bytes of a character, and so most tokens.
const MOST_BYTES: usize = 4;

/// How many bytes at the end begin a character that does not end there.
fn unfinished(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    let begins = std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    if begins { last.len() } else { 0 }
}

#[pymethods]
impl CacheExplanation {
    /// The prompt's text from the character on in which that token stands, as far as ``cached_text`` goes.
    #[getter]
    fn prompt_text(&self) -> Option<String> {
        self.side(0)
    }

    /// What is cached instead, to the end of a block. A character that the block's end cuts off is left out of both;
    /// where nothing else differs both are bytes, written ``b"\xf0\x9f"``.
    #[getter]
    fn cached_text(&self) -> Option<String> {
        self.side(1)
    }

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
        format!("CacheExplanation(cached_tokens={cached_tokens}, prompt_tokens={prompt_tokens}, reason='{reason}')")
    }
}
