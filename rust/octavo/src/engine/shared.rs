//! What the door and the engine thread have in common: messages one way, replies the other, and a few counters.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::call::SubmitError;
use super::outlet::Outlet;
use crate::kv::{CacheExplanation, SessionReport};
use crate::observe::readers::Teller;
use crate::observe::record::{Header, Recorder, Recording};
use crate::request::{Request, RequestId, SessionId, Time};
use crate::schedule::{Command, Forecast, Load, SchedulerStats, Unseen};
use crate::stages::queue::door::{Ahead, Door};

/// What goes to the engine thread.
pub(super) enum Message {
    /// A new request and where its answer goes.
    Submit {
        /// The request.
        request: Box<Request>,
        /// Where its answer goes.
        outlet: Box<Outlet>,
        /// Whether its caller sends another one at once.
        more: bool,
    },
    /// Something else for the scheduler.
    Tell(Command),
    /// Answer with the state of things.
    Stats(SyncSender<EngineStats>),
    /// Answer with the state of a session.
    Session(SessionId, SyncSender<Option<SessionReport>>),
    /// Answer with what a prompt would find in a namespace, or in what a session keeps.
    Explain(Vec<u32>, Option<Arc<str>>, Option<SessionId>, SyncSender<CacheExplanation>),
    /// Write down what happens from now on, and answer whether it can be done.
    Record(Box<(Recorder, Header)>, SyncSender<Result<(), String>>),
    /// Stop writing it down.
    EndRecording(Recording),
    /// Tell this reader what happens from now on.
    Watch(Teller),
    /// End everything and stop.
    Close,
}

/// Counters and gauges.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStats {
    /// The scheduler's.
    pub scheduler: SchedulerStats,
    /// What the engine thread's time went to.
    pub time: StepTime,
}

/// Nanoseconds of all steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepTime {
    /// From planning to the last token handed out.
    pub steps_ns: u64,
    /// Of these, in the executor: the model's operations, and drawing tokens.
    pub executor_ns: u64,
}

/// What the door and the engine thread share.
pub(super) struct Shared {
    /// Who has a request between the door and its end; held to count, and for nothing else.
    door: Mutex<Door>,
    /// Sessions that are open.
    pub sessions: AtomicUsize,
    /// What there was to do after the step before, and who has come since; held to count and copy, and for nothing else.
    outlook: Mutex<(Load, Unseen)>,
    /// Why no request is taken any more; `None`: open.
    pub closed: Mutex<Option<String>>,
    /// Asked by the engine thread between steps, so that closing does not wait for the queue.
    pub closing: AtomicBool,
    /// The engine has died of its device.
    pub device_failed: AtomicBool,
    /// Zero of [`Time`].
    pub epoch: Instant,
}

impl Shared {
    /// Of an engine that begins now.
    pub fn new() -> Self {
        Self {
            door: Mutex::default(),
            sessions: AtomicUsize::new(0),
            outlook: Mutex::default(),
            closed: Mutex::new(None),
            closing: AtomicBool::new(false),
            device_failed: AtomicBool::new(false),
            epoch: Instant::now(),
        }
    }

    /// The engine's clock.
    pub fn now(&self) -> Time {
        Time(u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Refuses everything from now on, for `reason`. The first reason stays.
    pub fn close(&self, reason: &str) {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| reason.to_owned());
    }

    /// Why it is closed.
    pub fn reason(&self) -> String {
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        closed.clone().unwrap_or_else(|| CLOSED.to_owned())
    }

    fn outlook(&self) -> MutexGuard<'_, (Load, Unseen)> {
        self.outlook.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These are on their way to the scheduler.
    pub fn send(&self, requests: Unseen) {
        self.outlook().1.add(requests);
    }

    /// Says what there is to do, these included who have arrived.
    pub fn publish(&self, load: Load, seen: Unseen) {
        let (known, unseen) = &mut *self.outlook();
        *known = load;
        unseen.remove(seen);
    }

    /// Where calls are counted.
    pub fn door(&self) -> MutexGuard<'_, Door> {
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a request of `tokens` tokens can expect that is of `call`, with these before it.
    pub fn forecast(&self, tokens: usize, call: Option<RequestId>, ahead: &Ahead) -> Forecast {
        let (load, unseen) = self.outlook().clone();
        load.seen_by(call).forecast(tokens, ahead, &unseen, self.now())
    }

    /// How long it takes until `ends` places become free, when all are taken.
    pub fn place_ns(&self, ends: usize) -> u64 {
        let (load, unseen) = self.outlook().clone();
        load.place_ns(ends, &unseen, self.now())
    }

    /// Whether it takes calls.
    pub fn is_open(&self) -> bool {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Refuses, if it is closed.
    pub fn open(&self) -> Result<(), SubmitError> {
        if self.is_open() { Ok(()) } else { Err(SubmitError::Closed(self.reason())) }
    }
}

/// What the engine thread was asked for.
pub struct Reply<T> {
    pub(super) reply: Receiver<T>,
    pub(super) shared: Arc<Shared>,
}

impl<T> Reply<T> {
    /// Waits for it, up to `patience`. `None`: not yet.
    pub fn within(&mut self, patience: Duration) -> Option<Result<T, SubmitError>> {
        match self.reply.recv_timeout(patience) {
            Ok(answer) => Some(Ok(answer)),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(SubmitError::Closed(self.shared.reason()))),
        }
    }
}

/// What calls hear that come after the end.
pub(super) const CLOSED: &str = "the engine has been closed";
