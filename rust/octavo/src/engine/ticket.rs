//! A call in flight, as its caller holds it.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::mailbox::{ChoiceResult, Mailbox, Next};
use super::session::Transcript;
use super::shared::{Message, Shared};
use crate::observe::anatomy::RequestRecord;
use crate::request::{Finish, RequestId, SamplingParams, Time, Wanted};
use crate::schedule::Command;

/// A call in flight. Dropping it gives it up.
pub struct Ticket {
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) inbox: Sender<Message>,
    pub(super) ids: std::ops::Range<u64>,
    pub(super) call: RequestId,
    pub(super) prompt: Arc<[u32]>,
    pub(super) params: Arc<SamplingParams>,
    pub(super) seeds: Vec<u64>,
    pub(super) tokenize_ns: u64,
    pub(super) predicted_ttft_ns: u64,
    pub(super) wanted: Wanted,
    /// Whose it is, and its priority: so its places were counted.
    pub(super) user: Arc<str>,
    pub(super) priority: i32,
    /// Tokens that an answer may have.
    pub(super) most_tokens: usize,
    /// When it went to the engine.
    pub(super) arrived: Time,
    /// As it was asked, and when that is.
    pub(super) deadline: Option<(Duration, Time)>,
    /// Of its session, and which turn of it this is.
    pub(super) turn: Option<(Arc<Transcript>, u64)>,
    pub(super) shared: Arc<Shared>,
}

impl Ticket {
    /// Waits for something new, up to `patience`.
    pub fn next_within(&self, patience: Duration) -> Next {
        self.expiring_within(patience, |patience| match self.mailbox.next_within(patience) {
            Next::NotYet => None,
            next => Some(next),
        })
        .unwrap_or(Next::NotYet)
    }

    /// Whether all is over; waits for it up to `patience`.
    pub fn finished_within(&self, patience: Duration) -> bool {
        self.expiring_within(patience, |patience| self.mailbox.finished_within(patience).then_some(())).is_some()
    }

    /// Looks until there is something, up to `patience`; at its deadline it ends, if it still waits.
    fn expiring_within<T>(&self, patience: Duration, look: impl Fn(Duration) -> Option<T>) -> Option<T> {
        let Some(left) = self.expires_in().filter(|left| *left <= patience) else { return look(patience) };
        look(left).or_else(|| {
            self.end_waiting(&Finish::Deadline);
            look(patience - left)
        })
    }

    /// How long it is until its deadline; `None`: it has none.
    pub fn expires_in(&self) -> Option<Duration> {
        self.deadline.map(|(_, at)| Duration::from_nanos(at.since(self.shared.now())))
    }

    /// Ends choices that wait. Whatever is in the step under way ends with it, by the engine thread.
    fn end_waiting(&self, finish: &Finish) {
        let mut record = RequestRecord::waited(self.arrived, self.shared.now());
        record.prompt_tokens = self.prompt.len();
        self.mailbox.end_waiting(finish, &record, |ended| {
            if let Some((transcript, turn)) = &self.turn {
                transcript.give_up(*turn);
            }
            // Before anybody comes who gets their places.
            self.tell_engine();
            (0..ended).for_each(|_| self.shared.door().leave(&self.user, self.priority));
        });
    }

    fn tell_engine(&self) {
        for id in self.ids.clone() {
            let _ = self.inbox.send(Message::Tell(Command::Cancel(RequestId(id))));
        }
    }

    /// Moves the finished choices out. `None` before the end, or if they have been taken.
    pub fn take_results(&self) -> Option<Vec<ChoiceResult>> {
        self.mailbox.take_results()
    }

    /// Gives it up: freed within one step. The choices end as `cancelled`, unless they have ended; those that wait at once.
    pub fn cancel(&self) {
        if let Some((transcript, turn)) = &self.turn {
            transcript.give_up(*turn);
        }
        self.tell_engine();
        let is_late = self.expires_in().is_some_and(|left| left.is_zero());
        self.end_waiting(&if is_late { Finish::Deadline } else { Finish::Cancelled });
    }

    /// How far a choice got that its deadline ended.
    pub fn progress(&self, result: &ChoiceResult) -> String {
        let RequestRecord { steps, prompt_tokens, completion_tokens, .. } = result.record;
        let asked = self.deadline.map_or(0.0, |(asked, _)| asked.as_secs_f64());
        let read = (result.record.cached_tokens + result.record.computed_tokens)
            .saturating_sub(result.record.recomputed_tokens);
        let told = format!("deadline_s ({asked} s) passed before the answer was complete:");
        let most = self.most_tokens;
        match self.wanted {
            _ if steps == 0 => format!("{told} it waited, and nothing of it was computed"),
            Wanted::Tokens if completion_tokens > 0 => {
                format!("{told} it was decoding, and had {completion_tokens} of at most {most} tokens")
            }
            _ => {
                let read = read.min(prompt_tokens);
                format!("{told} its prompt was being read, and {read} of {prompt_tokens} tokens were")
            }
        }
    }

    /// The prompt's token ids.
    pub fn prompt_token_ids(&self) -> &Arc<[u32]> {
        &self.prompt
    }

    /// How tokens are chosen.
    pub fn params(&self) -> &Arc<SamplingParams> {
        &self.params
    }

    /// The seed of each choice, also where the call brought none.
    pub fn seeds(&self) -> &[u64] {
        &self.seeds
    }

    /// The name of each choice inside the engine.
    pub fn request_ids(&self) -> std::ops::Range<u64> {
        self.ids.clone()
    }

    /// The call that it is of: what the other prompts of a list go on with.
    pub fn call(&self) -> RequestId {
        self.call
    }

    /// Nanoseconds from the door to the queue: template, tokenizing, checks.
    pub fn tokenize_ns(&self) -> u64 {
        self.tokenize_ns
    }

    /// When the first token was expected, in nanoseconds from the door.
    pub fn predicted_ttft_ns(&self) -> u64 {
        self.predicted_ttft_ns
    }

    /// The engine's clock, for the time a finished answer waits for its reader.
    pub fn now(&self) -> Time {
        self.shared.now()
    }

    /// Tokens that have arrived so far, over all choices.
    pub fn tokens(&self) -> usize {
        self.mailbox.tokens()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.mailbox.finished_within(Duration::ZERO) {
            self.cancel();
        }
    }
}
