//! Plays a log again, over its model or without one. On a thread of its own, as an engine: a backend keeps its thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::open::Loader;
use super::run::panic_text;
use super::shared::Shared;
use crate::error::LoadError;
use crate::grammar::Grammars;
use crate::observe::record::{Header, Log, LogError, ModelIdentity, Player, Report, Tokens};

/// How a log is played.
#[derive(Clone, Debug, Default)]
pub struct ReplayOptions {
    /// Where the model is; `None`: where it was.
    pub model: Option<PathBuf>,
    /// Without the model: the log's own tokens are taken.
    pub schedule_only: bool,
    /// Worker threads; `None`: as many as then.
    pub threads: Option<usize>,
    /// Whether to prove the scheduler's invariants after every entry.
    pub check: bool,
}

/// A log that was played.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// What was recorded, and on what.
    pub header: Header,
    /// What it was played on; `None`: on the log's own tokens.
    pub device: Option<String>,
    /// What was found.
    pub report: Report,
}

/// Why a log could not be played.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The log cannot be read.
    #[error("{}: {source}", path.display())]
    Log {
        /// Which.
        path: PathBuf,
        /// Why.
        source: LogError,
    },
    /// The model cannot be loaded.
    #[error("{0}")]
    Load(#[from] LoadError),
    /// It cannot be the same here; the text says why.
    #[error("{0}")]
    Impossible(String),
}

/// A replay under way. Dropping it ends it.
pub struct Replay {
    outcome: Receiver<Result<Replayed, ReplayError>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Replay {
    /// Begins to play the log at `path`.
    pub fn start(path: &Path, options: ReplayOptions) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new());
        let (answer, outcome) = sync_channel(1);
        let job = Job { path: path.to_owned(), options, shared: shared.clone() };
        let thread = std::thread::Builder::new().name("octavo-replay".to_owned()).spawn(move || {
            // Our own mistake, or an invariant that was to be proved and does not hold.
            let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job.run()));
            let played = played.unwrap_or_else(|panic| {
                let what = format!("the replay stopped on an internal error: {}", panic_text(&*panic));
                Err(ReplayError::Impossible(what))
            });
            // Whoever asked may have stopped waiting.
            let _ = answer.send(played);
        })?;
        Ok(Self { outcome, shared, thread: Some(thread) })
    }

    /// The outcome, once; waits for it up to `patience`. `None`: not yet.
    pub fn ended_within(&mut self, patience: Duration) -> Option<Result<Replayed, ReplayError>> {
        match self.outcome.recv_timeout(patience) {
            Ok(outcome) => Some(outcome),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(ReplayError::Impossible("the replay has ended, and its outcome was taken".into())))
            }
        }
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // It turns its panics into errors.
            let _ = thread.join();
        }
    }
}

struct Job {
    path: PathBuf,
    options: ReplayOptions,
    shared: Arc<Shared>,
}

impl Job {
    fn run(&self) -> Result<Replayed, ReplayError> {
        let failed = |source| ReplayError::Log { path: self.path.clone(), source };
        let log = Log::open(&self.path).map_err(failed)?;
        let header = log.header.clone();
        let (tokens, device) = if self.options.schedule_only {
            (Tokens::Recorded, None)
        } else {
            let (tokens, device) = self.load(&header)?;
            (tokens, Some(device))
        };
        let mut player = Player::new(log, tokens, self.options.check)
            .map_err(|why| ReplayError::Impossible(format!("{}: {why}", self.path.display())))?;
        while player.advance().map_err(failed)? {
            if self.shared.closing.load(Ordering::Acquire) {
                return Err(LoadError::Interrupted.into());
            }
        }
        Ok(Replayed { header, device, report: player.report().clone() })
    }

    /// The model of the log, loaded as it was then.
    fn load(&self, header: &Header) -> Result<(Tokens, String), ReplayError> {
        let path = self.options.model.as_ref().unwrap_or(&header.model.path);
        let found = ModelIdentity::of(path, &header.model.architecture)
            .map_err(|source| LoadError::Read { path: path.clone(), source })?;
        let wanted = &header.model;
        if (found.bytes, &found.sha256) != (wanted.bytes, &wanted.sha256) {
            return Err(ReplayError::Impossible(format!(
                "{} is another model than the one that was recorded ({} bytes and sha256 {:.12}…, not {} and {:.12}…)",
                path.display(),
                found.bytes,
                found.sha256,
                wanted.bytes,
                wanted.sha256
            )));
        }
        let mut config = header.config.clone();
        config.threads = self.options.threads.or(config.threads);
        config.validate().map_err(LoadError::Setting)?;
        let (news, _) = channel();
        let (loaded, _, executor) = Loader { config, shared: self.shared.clone(), news }.load(path)?;
        if loaded.facts.vocab != header.vocab {
            let (now, then) = (loaded.facts.vocab, header.vocab);
            return Err(ReplayError::Impossible(format!("the model has {now} tokens, in the log it has {then}")));
        }
        let (now, then) = (&loaded.limits, &header.limits);
        if (&now.layout, now.blocks, now.max_model_len) != (&then.layout, then.blocks, then.max_model_len) {
            return Err(ReplayError::Impossible(format!(
                "the KV cache is another one than then: {} blocks, not {}; {:?}, not {:?}; max_model_len {}, not {}",
                now.blocks, then.blocks, now.layout, then.layout, now.max_model_len, then.max_model_len
            )));
        }
        let grammars = Grammars::new(loaded.tokenizer, loaded.facts.vocab, loaded.end_token_ids);
        Ok((Tokens::Model { executor, grammars: Some(grammars) }, loaded.facts.device))
    }
}
