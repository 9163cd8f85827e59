//! From a drawn token to the caller's mailbox: text, stop strings, wake-ups. Runs on the engine thread.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use octavo_kernels::prefetch::{prefetch, prefetch_end};

use super::mailbox::{Mailbox, News};
use super::session::Turn;
use super::shared::Shared;
use crate::execute::Drawn;
use crate::observe::anatomy::RequestRecord;
use crate::request::{Finish, Request, RequestId, StopReason, Time};
use crate::stages::stream::TextStream;

/// Everybody's way out.
pub(super) type Outlets = HashMap<RequestId, Box<Outlet>, BuildHasherDefault<IdHasher>>;

/// For numbers that were counted up: nobody chooses them, so they need no hash that withstands anybody.
#[derive(Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(self.0 ^ u64::from(byte)));
    }
    fn write_u64(&mut self, id: u64) {
        self.0 = id.wrapping_mul(0x9e37_79b9_7f4a_7c15); // odd, and every bit of `id` reaches the upper ones
    }
}

/// One choice's way out, made at the door. Whatever becomes of it, its choice ends: one that is dropped before its end (the
/// engine closed or died, or was gone already) ends it with an error.
pub(super) struct Outlet {
    text: TextStream,
    /// What the mailbox has not been given yet. A reader who wants only the end is given all of it then: until that, a token
    /// takes no lock, and touches nothing besides this.
    news: News,
    mailbox: Arc<Mailbox>,
    index: usize,
    /// Tokens that end it.
    ends: Arc<[u32]>,
    /// Their text, and that of a stop string, is shown.
    shows_ends: bool,
    min_tokens: usize,
    arrived: Time,
    /// Whose it is, and its priority: so its place was counted.
    user: Arc<str>,
    priority: i32,
    tokens: usize,
    /// The stop string that has ended the text; later tokens of the same step are not shown.
    stopped: Option<String>,
    ended: bool,
    /// Whose turn it is, if it is one of a session.
    turn: Option<Box<Turn>>,
    shared: Arc<Shared>,
}

impl Outlet {
    /// For the choice `index` of `mailbox`. Holds one of the places that `shared` counts.
    pub fn new(
        request: &Request,
        text: TextStream,
        mailbox: Arc<Mailbox>,
        index: usize,
        turn: Option<Turn>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            text,
            news: News::default(),
            mailbox,
            index,
            ends: request.ends(),
            shows_ends: request.params.include_stop_str_in_output,
            min_tokens: request.params.min_tokens,
            arrived: request.arrived,
            user: request.user.clone(),
            priority: request.priority,
            tokens: 0,
            stopped: None,
            ended: false,
            turn: turn.map(Box::new),
            shared,
        }
    }

    /// Asks the memory for what passing `token_id` on touches: the outlet itself, what it points to, what that does, and so
    /// on. To be called for all before it is called for any at the next of [`Outlet::DEPTHS`].
    pub fn prefetch(&self, token_id: u32, depth: usize) {
        match depth {
            0 => prefetch(self),
            1 => {
                prefetch(&*self.mailbox);
                prefetch(&*self.ends);
                prefetch_end(self.news.text.as_bytes());
                prefetch_end(&self.news.token_ids);
                self.text.prefetch(token_id, false);
            }
            2 => {
                self.mailbox.prefetch(self.index, false);
                self.text.prefetch(token_id, true);
            }
            _ => self.mailbox.prefetch(self.index, true),
        }
    }

    /// How far it is from an outlet to what a token changes.
    pub const DEPTHS: std::ops::Range<usize> = 0..4;

    /// It has left the queue. Says no if whoever waits for it has ended it meanwhile.
    #[must_use]
    pub fn begin(&self) -> bool {
        self.mailbox.begin(self.index)
    }

    /// Passes a token on. Returns the stop string that it completed, if any: the scheduler is to end the request.
    pub fn push(&mut self, drawn: Drawn) -> Option<String> {
        if self.stopped.is_some() {
            return None;
        }
        self.tokens += 1;
        if let Some(turn) = &mut self.turn {
            turn.push(drawn.token_id);
        }
        self.news.token_ids.push(drawn.token_id);
        self.news.logprobs.extend(drawn.logprobs);
        // A token that ends the generation leaves no text of its own (it cannot be drawn before `min_tokens`).
        if self.shows_ends || !self.ends.contains(&drawn.token_id) {
            self.stopped = self.text.push(drawn.token_id, self.may_stop(), &mut self.news.text);
        }
        self.mailbox.count_token();
        if self.mailbox.every_token() {
            self.mailbox.push(self.index, &mut self.news);
        }
        self.stopped.clone()
    }

    fn may_stop(&self) -> bool {
        self.tokens >= self.min_tokens
    }

    /// Ends the choice and gives its place back, unless whoever waits for it has done so.
    pub fn finish(&mut self, finish: Finish, record: RequestRecord) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let found = self.text.finish(self.may_stop(), &mut self.news.text);
        let finish = match (self.stopped.take(), found, finish) {
            // A stop string found in a request's very last token: the scheduler had already ended it for its length.
            (Some(stop), _, Finish::Length) => Finish::Stop(StopReason::StopString(stop)),
            // Found in what the end settled, which was before any token that ended it.
            (_, Some(stop), Finish::Length | Finish::Stop(_)) => Finish::Stop(StopReason::StopString(stop)),
            (_, _, finish) => finish,
        };
        if let Some(turn) = self.turn.take() {
            turn.finish(&finish);
        }
        let leave = || self.shared.door().leave(&self.user, self.priority);
        self.mailbox.finish(self.index, &mut self.news, finish, record, leave);
    }

    /// The call's mailbox.
    pub fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    /// Which choice of its call this is.
    pub fn index(&self) -> usize {
        self.index
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let now = self.shared.now();
        let record = RequestRecord { completion_tokens: self.tokens, ..RequestRecord::waited(self.arrived, now) };
        self.finish(Finish::Error(self.shared.reason()), record);
        self.mailbox.tell();
    }
}
