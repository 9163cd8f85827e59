//! The door for those who watch: recordings and events.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use super::call::SubmitError;
use super::config::EngineConfig;
use super::handle::Engine;
use super::shared::Message;
use crate::observe::readers::{EventReader, MAX_CAPACITY};
use crate::observe::record::{Header, ModelIdentity, Recorder, Recording};

/// Why a recording cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be written, or the model's files cannot be read again.
    #[error("{}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not now: the text says why.
    #[error("{0}")]
    Refused(String),
    /// The engine has been closed, or has died of the reason given.
    #[error("{0}")]
    Closed(String),
}

/// A recording that the engine has been asked for.
pub struct RecordReply<'a> {
    engine: &'a Engine,
    reply: Receiver<Result<(), String>>,
    recording: Recording,
}

impl Engine {
    /// Asks for a recording, from now on, of all that goes into the scheduler and all that it decides. Nobody may run or
    /// wait, and no session be open; the prefix cache is emptied, so that the log is the whole story.
    pub fn record(&self, path: &Path) -> Result<RecordReply<'_>, RecordError> {
        self.shared.open().map_err(|closed| RecordError::Closed(closed.to_string()))?;
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| RecordError::File { path, source }
        };
        let header = Header {
            octavo: env!("CARGO_PKG_VERSION").to_owned(),
            model: ModelIdentity::of(&self.path, &self.facts.architecture).map_err(failed(&self.path))?,
            device: self.facts.device.clone(),
            // What was chosen then, whatever another machine would choose.
            config: EngineConfig { kv_cache_dtype: Some(self.origin.kv_cache_dtype), ..self.config.clone() },
            kv_cache_bytes: self.facts.kv_cache_bytes,
            limits: self.limits.clone(),
            vocab: self.facts.vocab,
        };
        let (recorder, recording) = Recorder::new(path).map_err(failed(path))?;
        let (answer, reply) = sync_channel(1);
        let _ = self.inbox.send(Message::Record(Box::new((recorder, header)), answer));
        Ok(RecordReply { engine: self, reply, recording })
    }

    /// Ends a recording with the current step. One that has ended stays as it is.
    pub fn end_recording(&self, recording: &Recording) {
        let _ = self.inbox.send(Message::EndRecording(recording.clone()));
    }

    /// A reader of what happens from now on, which keeps up to `capacity` events.
    pub fn events(&self, capacity: usize) -> Result<EventReader, SubmitError> {
        self.shared.open()?;
        if !(1..=MAX_CAPACITY).contains(&capacity) {
            let what = format!("capacity must be a number of events from 1 to {MAX_CAPACITY}, not {capacity}");
            return Err(SubmitError::Invalid(what));
        }
        let (reader, teller) = EventReader::new(capacity);
        // A closed inbox drops the message, and the reader hears of the end.
        let _ = self.inbox.send(Message::Watch(teller));
        Ok(reader)
    }
}

/// How long a recording that never began may take to let go of its file.
const PATIENCE_TO_LEAVE: Duration = Duration::from_secs(1);

impl RecordReply<'_> {
    /// The recording is no longer wanted, whether it has begun or not.
    pub fn give_up(&self) {
        self.engine.end_recording(&self.recording);
    }

    /// Waits for the recording, up to `patience`. `None`: not yet.
    pub fn within(&mut self, patience: Duration) -> Option<Result<Recording, RecordError>> {
        let refused = match self.reply.recv_timeout(patience) {
            Ok(Ok(())) => return Some(Ok(self.recording.clone())),
            Ok(Err(why)) => RecordError::Refused(why),
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => RecordError::Closed(self.engine.shared.reason()),
        };
        // Nothing is to be written, so this is soon; then the file is free, or gone if it was new.
        let _ = self.recording.ended_within(PATIENCE_TO_LEAVE);
        Some(Err(refused))
    }
}
