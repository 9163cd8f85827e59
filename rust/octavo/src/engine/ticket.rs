//! A call in flight, as its caller holds it.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::mailbox::{ChoiceResult, Mailbox, Next};
use super::session::Transcript;
use super::shared::{Message, Shared};
use crate::request::{RequestId, SamplingParams, Time};
use crate::schedule::Command;

/// A call in flight. Dropping it gives it up.
pub struct Ticket {
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) inbox: Sender<Message>,
    pub(super) ids: std::ops::Range<u64>,
    pub(super) prompt: Arc<[u32]>,
    pub(super) params: Arc<SamplingParams>,
    pub(super) seeds: Vec<u64>,
    pub(super) tokenize_ns: u64,
    pub(super) predicted_ttft_ns: Option<u64>,
    /// Of its session.
    pub(super) transcript: Option<Arc<Transcript>>,
    pub(super) shared: Arc<Shared>,
}

impl Ticket {
    /// Waits for something new, up to `patience`.
    pub fn next_within(&self, patience: Duration) -> Next {
        self.mailbox.next_within(patience)
    }

    /// Whether all is over; waits for it up to `patience`.
    pub fn finished_within(&self, patience: Duration) -> bool {
        self.mailbox.finished_within(patience)
    }

    /// Moves the finished choices out. `None` before the end, or if they have been taken.
    pub fn take_results(&self) -> Option<Vec<ChoiceResult>> {
        self.mailbox.take_results()
    }

    /// Gives it up: freed within one step. The choices end as `cancelled`, unless they have ended.
    pub fn cancel(&self) {
        if let Some(transcript) = self.transcript.as_ref().filter(|_| !self.finished_within(Duration::ZERO)) {
            transcript.give_up();
        }
        for id in self.ids.clone() {
            let _ = self.inbox.send(Message::Tell(Command::Cancel(RequestId(id))));
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

    /// Nanoseconds from the door to the queue: template, tokenizing, checks.
    pub fn tokenize_ns(&self) -> u64 {
        self.tokenize_ns
    }

    /// When the first token was expected, in nanoseconds from the door; `None`: nothing was known yet.
    pub fn predicted_ttft_ns(&self) -> Option<u64> {
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
