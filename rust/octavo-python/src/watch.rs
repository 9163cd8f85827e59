//! Events, recordings and replays.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use octavo::engine::{self, RecordError, ReplayError, ReplayOptions, Replayed};
use octavo::observe::events::EngineEvent;
use octavo::observe::readers::{EventReader, MAX_CAPACITY, NextEvent, Stamped};
use octavo::observe::record::{self, LogError, Summary};
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{EngineClosedError, OctavoError, invalid, not_loaded, not_set, of_file, refused};
use crate::fields::{flag, number, patience};
use crate::home::Home;
use crate::repr::quoted;
use crate::wait::wait_for;

// ---- events ----------------------------------------------------------------------------------------------------------

/// Something that happened in an engine.
///
/// ``type`` is ``queued``, ``admitted``, ``first_token``, ``preempted`` or ``finished`` of a request; ``session`` of
/// what a session keeps; or ``BlockStored``, ``BlockRemoved`` or ``AllBlocksCleared`` of the prefix cache, in the
/// words of vLLM's KV events.
#[pyclass(module = "octavo", frozen)]
pub struct Event {
    stamped: Arc<Stamped>,
    block_size: usize,
}

#[pymethods]
impl Event {
    #[getter]
    fn r#type(&self) -> &'static str {
        match self.stamped.event {
            EngineEvent::Queued { .. } => "queued",
            EngineEvent::Admitted { .. } => "admitted",
            EngineEvent::FirstToken { .. } => "first_token",
            EngineEvent::Preempted { .. } => "preempted",
            EngineEvent::Finished { .. } => "finished",
            EngineEvent::Session { .. } => "session",
            EngineEvent::BlockStored { .. } => "BlockStored",
            EngineEvent::BlockRemoved { .. } => "BlockRemoved",
            EngineEvent::AllBlocksCleared => "AllBlocksCleared",
        }
    }

    /// Counts all events of the engine since somebody first read: what lies between two, this reader has lost.
    #[getter]
    fn sequence_number(&self) -> u64 {
        self.stamped.sequence_number
    }

    /// When, on the engine's clock (nanoseconds since it was loaded); to the edge of a step.
    #[getter]
    fn time_ns(&self) -> u64 {
        self.stamped.at.0
    }

    /// Whose, as in :attr:`Choice.request_id`.
    #[getter]
    fn request_id(&self) -> Option<u64> {
        match self.stamped.event {
            EngineEvent::Queued { id, .. }
            | EngineEvent::Admitted { id, .. }
            | EngineEvent::FirstToken { id }
            | EngineEvent::Preempted { id, .. }
            | EngineEvent::Finished { id, .. } => Some(id.0),
            EngineEvent::Session { .. }
            | EngineEvent::BlockStored { .. }
            | EngineEvent::BlockRemoved { .. }
            | EngineEvent::AllBlocksCleared => None,
        }
    }

    /// ``type`` and all that belongs to it: ``request_id``, ``user``, ``prompt_tokens``, ``cached_tokens``,
    /// ``computed_tokens``, ``completion_tokens``, ``finish_reason``; ``session_id``, and ``kind``, ``tokens``,
    /// ``blocks`` as in :class:`SessionEvent`; ``block_hashes`` (64 bits of a hash over all
    /// tokens up to the block's end and the ``cache_salt``), ``parent_block_hash``, ``token_ids``, ``block_size``,
    /// ``group_idx`` (of layers that see equally far back), ``medium``.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("type", self.r#type())?;
        if let Some(id) = self.request_id() {
            dict.set_item("request_id", id)?;
        }
        match &self.stamped.event {
            EngineEvent::Queued { user, prompt_tokens, .. } => {
                dict.set_item("user", &**user)?;
                dict.set_item("prompt_tokens", prompt_tokens)?;
            }
            EngineEvent::Admitted { cached_tokens, .. } => dict.set_item("cached_tokens", cached_tokens)?,
            EngineEvent::Preempted { computed_tokens, .. } => dict.set_item("computed_tokens", computed_tokens)?,
            EngineEvent::Finished { finish_reason, completion_tokens, .. } => {
                dict.set_item("finish_reason", finish_reason)?;
                dict.set_item("completion_tokens", completion_tokens)?;
            }
            EngineEvent::Session { id, event } => {
                dict.set_item("session_id", id.0)?;
                dict.set_item("kind", event.fate.name())?;
                dict.set_item("tokens", event.tokens)?;
                dict.set_item("blocks", event.blocks)?;
            }
            EngineEvent::BlockStored { hash, parent, token_ids, group } => {
                dict.set_item("block_hashes", [hash])?;
                dict.set_item("parent_block_hash", parent)?;
                dict.set_item("token_ids", token_ids.to_vec())?;
                dict.set_item("block_size", self.block_size)?;
                dict.set_item("group_idx", group)?;
                dict.set_item("medium", MEDIUM)?;
            }
            EngineEvent::BlockRemoved { hash, group } => {
                dict.set_item("block_hashes", [hash])?;
                dict.set_item("group_idx", group)?;
                dict.set_item("medium", MEDIUM)?;
            }
            EngineEvent::FirstToken { .. } | EngineEvent::AllBlocksCleared => {}
        }
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Event({}: {})", self.stamped.sequence_number, self.to_dict(py)?.repr()?))
    }
}

/// Where all of our blocks are.
const MEDIUM: &str = "CPU";

/// A reader of an engine's events. Iterating waits for the next one, and ends when the engine or the reader is
/// closed.
#[pyclass(module = "octavo", frozen)]
pub struct Events {
    reader: Home<EventReader>,
    block_size: usize,
}

impl Events {
    pub fn new(engine: &engine::Engine, capacity: &Bound<'_, PyAny>) -> PyResult<Self> {
        let wanted = format!("a number of events from 1 to {MAX_CAPACITY}");
        let capacity = number("capacity", &wanted, capacity).map_err(invalid)?;
        let reader = engine.events(capacity).map_err(refused)?;
        Ok(Self { reader: Home::new(reader), block_size: engine.facts().block_size })
    }

    fn event(&self, stamped: Arc<Stamped>) -> Event {
        Event { stamped, block_size: self.block_size }
    }
}

#[pymethods]
impl Events {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        self.next(py, None)
    }

    /// The next event, waiting up to ``patience_s`` for it (``None`` or infinity: for ever); ``None``: there is
    /// none, yet or any more.
    #[pyo3(signature = (patience_s=None))]
    fn next(&self, py: Python<'_>, patience_s: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Event>> {
        let patience = patience("patience_s", patience_s).map_err(invalid)?;
        let reader = self.reader.get()?;
        let found = wait_for(py, patience, |patience| match reader.next_within(patience) {
            NextEvent::NotYet => None,
            next => Some(next),
        })?;
        Ok(match found {
            Some(NextEvent::Event(stamped)) => Some(self.event(stamped)),
            _ => None,
        })
    }

    /// All that are there.
    fn take(&self) -> PyResult<Vec<Event>> {
        Ok(self.reader.get()?.take().into_iter().map(|stamped| self.event(stamped)).collect())
    }

    /// Events that were lost, the oldest first, because there were more than ``capacity`` unread ones.
    #[getter]
    fn dropped(&self) -> PyResult<u64> {
        Ok(self.reader.get()?.dropped())
    }

    /// Ends the telling; what is there can still be read.
    fn close(&self) {
        // In a forked child nobody tells anything.
        if let Ok(reader) = self.reader.get() {
            reader.close();
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyAny>) {
        self.close();
    }
}

// ---- recordings ------------------------------------------------------------------------------------------------------

/// A recording under way, or ended. It goes on until :meth:`close`, the end of its ``with`` block, or of the
/// engine, also when nobody holds it: :attr:`octavo.LLM.recording` is still there.
#[pyclass(module = "octavo", frozen)]
pub struct Recording {
    engine: Home<Arc<engine::Engine>>,
    recording: record::Recording,
}

impl Recording {
    pub fn begin(py: Python<'_>, engine: &Arc<engine::Engine>, path: PathBuf) -> PyResult<Self> {
        let mut reply = py.detach(|| engine.record(&path)).map_err(not_recorded)?;
        let begun = wait_for(py, None, |patience| reply.within(patience));
        let begun = begun.inspect_err(|_| reply.give_up())?;
        let begun = begun.unwrap_or(Err(RecordError::Refused("nobody answered".into())));
        Ok(Self { engine: Home::new(engine.clone()), recording: begun.map_err(not_recorded)? })
    }

    /// What became of it, if it has ended well.
    fn summary(&self) -> Option<Summary> {
        self.recording.ended_within(Duration::ZERO).and_then(Result::ok)
    }
}

#[pymethods]
impl Recording {
    #[getter]
    fn path(&self) -> PathBuf {
        self.recording.path().to_owned()
    }

    /// Entries so far.
    #[getter]
    fn entries(&self) -> u64 {
        self.recording.counts().0
    }

    /// Entries that the disk was too slow for: a replay ends where the first of them would be.
    #[getter]
    fn lost(&self) -> u64 {
        self.recording.counts().1
    }

    /// Whether it has ended, and all is in the file, or cannot be.
    #[getter]
    fn ended(&self) -> bool {
        self.recording.ended_within(Duration::ZERO).is_some()
    }

    /// Ends it, and returns when all is in the file. Warns (:class:`UserWarning`) if entries were lost.
    ///
    /// Raises:
    ///     OSError: The file could not be written.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // In a forked child nothing is recorded.
        let Ok(engine) = self.engine.get() else { return Ok(()) };
        engine.end_recording(&self.recording);
        match wait_for(py, None, |patience| self.recording.ended_within(patience))? {
            Some(Err(why)) => Err(of_file(self.recording.path(), &why)),
            Some(Ok(Summary { lost, .. })) if lost > 0 => {
                let path = self.recording.path().display();
                let what = format!("{path}: {lost} entries were lost, because the disk was too slow for them");
                let what = CString::new(what.replace('\0', " ")).unwrap_or_default();
                PyErr::warn(py, &py.get_type::<PyUserWarning>(), &what, 1)
            }
            _ => Ok(()),
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (entries, lost) = self.recording.counts();
        let ended = self.summary().map_or(String::new(), |summary| format!(", bytes={}", summary.bytes));
        let path = quoted(py, &self.recording.path().to_string_lossy())?;
        Ok(format!("Recording({path}, entries={entries}, lost={lost}{ended})"))
    }
}

fn not_recorded(error: RecordError) -> PyErr {
    match error {
        RecordError::File { path, source } => of_file(&path, &source),
        RecordError::Refused(why) => OctavoError::new_err(why),
        RecordError::Closed(reason) => EngineClosedError::new_err(reason),
    }
}

// ---- replays ---------------------------------------------------------------------------------------------------------

/// What a replay has found. True if all that the log has came out again; ``print`` says so, or the first
/// difference.
#[pyclass(module = "octavo", frozen)]
pub struct Replay(Replayed);

#[pyfunction]
#[pyo3(signature = (path, *, model, schedule_only, threads, check))]
pub fn replay(
    py: Python<'_>,
    path: PathBuf,
    model: Option<PathBuf>,
    schedule_only: &Bound<'_, PyAny>,
    threads: &Bound<'_, PyAny>,
    check: &Bound<'_, PyAny>,
) -> PyResult<Replay> {
    let threads = number("threads", "a whole number from 1 up, or None", threads).map_err(not_set)?;
    let schedule_only = flag("schedule_only", schedule_only).map_err(invalid)?;
    let check = flag("check", check).map_err(invalid)?;
    let mut replay = engine::Replay::start(&path, ReplayOptions { model, schedule_only, threads, check })?;
    let played = wait_for(py, None, |patience| replay.ended_within(patience));
    // Ending one that is under way waits for its thread.
    py.detach(|| drop(replay));
    match played? {
        Some(Ok(replayed)) => Ok(Replay(replayed)),
        Some(Err(ReplayError::Load(error))) => Err(not_loaded(error)),
        Some(Err(ReplayError::Log { source: LogError::Read(error), path })) => Err(of_file(&path, &error)),
        Some(Err(error)) => Err(OctavoError::new_err(error.to_string())),
        None => Err(OctavoError::new_err("the replay has no outcome")),
    }
}

#[pymethods]
impl Replay {
    /// Where the model was.
    #[getter]
    fn model(&self) -> PathBuf {
        self.0.header.model.path.clone()
    }

    /// Device, instruction set, threads.
    #[getter]
    fn recorded_on(&self) -> &str {
        &self.0.header.device
    }

    /// Likewise; ``None``: the log's own tokens were taken.
    #[getter]
    fn replayed_on(&self) -> Option<&str> {
        self.0.device.as_deref()
    }

    #[getter]
    fn requests(&self) -> u64 {
        self.0.report.requests
    }

    #[getter]
    fn steps(&self) -> u64 {
        self.0.report.steps
    }

    #[getter]
    fn tokens(&self) -> u64 {
        self.0.report.tokens
    }

    /// From the log's first entry to its last.
    #[getter]
    fn span_s(&self) -> f64 {
        self.0.report.span_ns as f64 / 1e9
    }

    /// Step, request, what the log has and what was found.
    #[getter]
    fn difference(&self) -> Option<String> {
        self.0.report.difference.as_ref().map(ToString::to_string)
    }

    /// Why the log has no more than this, if it is not complete.
    #[getter]
    fn incomplete(&self) -> Option<&str> {
        self.0.report.incomplete.as_deref()
    }

    fn __bool__(&self) -> bool {
        self.0.report.difference.is_none()
    }

    fn __str__(&self) -> String {
        let record::Report { requests, steps, tokens, difference, incomplete, .. } = &self.0.report;
        let mut text = format!(
            "{requests} requests, {steps} steps, {tokens} tokens in {:.3} s, recorded on {}, replayed on {}\n",
            self.span_s(),
            self.0.header.device,
            self.0.device.as_deref().unwrap_or("the log's own tokens")
        );
        text += &match (difference, &self.0.device) {
            (Some(difference), _) => format!("different from {difference}"),
            (None, Some(_)) => "the schedule and the tokens are exactly those of the log".to_owned(),
            (None, None) => "the schedule is exactly that of the log".to_owned(),
        };
        if let Some(incomplete) = incomplete {
            text += &format!("\nthe log is incomplete: {incomplete}");
        }
        text
    }

    fn __repr__(&self) -> String {
        let record::Report { requests, steps, tokens, difference, .. } = &self.0.report;
        let equal = if difference.is_none() { "True" } else { "False" };
        format!("Replay(equal={equal}, requests={requests}, steps={steps}, tokens={tokens})")
    }
}
