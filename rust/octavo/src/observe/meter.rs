//! Adds up where a request's time goes, while it goes. At any moment a request is in exactly one state; a change of state
//! charges the time since the last change to the state that ends. So the parts sum to the whole, to the nanosecond.

use super::anatomy::{QueueTimes, StageTimes};
use crate::request::Time;

/// Why requests wait in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueReason {
    /// As many sequences run as may.
    Sequences,
    /// The KV cache has no room.
    Blocks,
    /// A running request is computing what this prompt begins with, to be shared when it is there.
    Prefix,
    /// The step's rows are given out; or simply: the step under way has to end first.
    #[default]
    Budget,
}

/// One clock for the whole queue. Everybody in it waits for what its head waits for, so a step moves one clock and not
/// every waiting request; a request's share is the difference between two readings.
#[derive(Clone, Copy, Debug, Default)]
pub struct QueueClock {
    totals: QueueTimes,
    reason: QueueReason,
    since: Time,
}

impl QueueClock {
    /// From `now` on, the queue waits for this.
    pub fn because(&mut self, reason: QueueReason, now: Time) {
        *self = Self { totals: self.read(now), reason, since: now };
    }

    /// Time that has passed, by reason.
    pub fn read(&self, now: Time) -> QueueTimes {
        let mut totals = self.totals;
        let elapsed = now.since(self.since);
        match self.reason {
            QueueReason::Sequences => totals.sequences += elapsed,
            QueueReason::Blocks => totals.blocks += elapsed,
            QueueReason::Prefix => totals.prefix += elapsed,
            QueueReason::Budget => totals.budget += elapsed,
        }
        totals
    }
}

/// What a request that has left the queue is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// A part of its prompt is in the step under way.
    PrefillComputing,
    /// Between two parts of its prompt.
    PrefillWaiting,
    /// Its next token is in the step under way.
    DecodeComputing,
    /// Between two tokens.
    DecodeWaiting,
    /// It lost its blocks: back in the queue, or computing again what it had.
    DecodePreempted,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Queued { clock_at_entry: QueueTimes },
    Active(Activity),
}

/// The stopwatch of one request.
#[derive(Clone, Debug)]
pub struct Meter {
    times: StageTimes,
    state: State,
    since: Time,
}

impl Meter {
    /// For a request that arrived at `arrived` and enters the queue `now`; until then it waited for the step under way.
    pub fn queued(arrived: Time, now: Time, clock: &QueueClock) -> Self {
        let mut times = StageTimes::default();
        times.queue.budget = now.since(arrived);
        Self { times, state: State::Queued { clock_at_entry: clock.read(now) }, since: now }
    }

    /// Leaves the queue; does nothing for a request that was preempted and so is not charged for queueing.
    pub fn leave_queue(&mut self, now: Time, clock: &QueueClock) {
        if let State::Queued { clock_at_entry } = self.state {
            self.times.queue.add(clock.read(now).minus(clock_at_entry));
            self.state = State::Active(Activity::PrefillWaiting);
            self.since = now;
        }
    }

    /// Does something else from `now` on.
    pub fn enter(&mut self, activity: Activity, now: Time) {
        let State::Active(ending) = self.state else {
            unreachable!("a request leaves the queue before it does anything")
        };
        let elapsed = now.since(self.since);
        match ending {
            Activity::PrefillComputing => self.times.prefill.computing += elapsed,
            Activity::PrefillWaiting => self.times.prefill.waiting += elapsed,
            Activity::DecodeComputing => self.times.decode.computing += elapsed,
            Activity::DecodeWaiting => self.times.decode.waiting += elapsed,
            Activity::DecodePreempted => self.times.decode.preempted += elapsed,
        }
        self.state = State::Active(activity);
        self.since = now;
    }

    /// The sums at the end.
    pub fn finish(mut self, now: Time, clock: &QueueClock) -> StageTimes {
        self.leave_queue(now, clock);
        self.enter(Activity::DecodeWaiting, now);
        self.times
    }
}
