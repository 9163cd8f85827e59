//! A conversation, as callers hold it. The blocks themselves are kept by [`kv`](crate::kv); here is what the door needs of
//! it: which tokens were said, so that the next prompt, which tells the same in text, is the same tokens again.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::call::{SubmitError, check_name};
use super::handle::Engine;
use super::shared::{Message, Reply, Shared};
use crate::kv::SessionReport;
use crate::request::{Finish, SessionId, Time};
use crate::schedule::Command;
use crate::stages::tokenize::{Encoding, Tokenizer};

/// Most sessions that may be open.
const MOST_SESSIONS: usize = 1 << 16;

/// A conversation that keeps its blocks between turns. Dropping it closes it.
pub struct Session {
    id: SessionId,
    cache_salt: String,
    pub(super) transcript: Arc<Transcript>,
    opened: Time,
    inbox: Sender<Message>,
    shared: Arc<Shared>,
}

impl Engine {
    /// Begins a conversation whose blocks are kept for `ttl` after every turn, in a namespace.
    pub fn open_session(&self, ttl: Duration, cache_salt: String) -> Result<Session, SubmitError> {
        self.shared.open()?;
        check_name("cache_salt", &cache_salt)?;
        let open = self.shared.sessions.fetch_add(1, Ordering::AcqRel);
        // Gives its place back as it is dropped.
        let session = Session {
            id: SessionId(self.next_id.fetch_add(1, Ordering::Relaxed)),
            cache_salt,
            transcript: Arc::default(),
            opened: self.shared.now(),
            inbox: self.inbox.clone(),
            shared: self.shared.clone(),
        };
        if open >= MOST_SESSIONS {
            return Err(SubmitError::Invalid(format!("{open} sessions are open, as many as may; close one first")));
        }
        let ttl_ns = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        let _ = self.inbox.send(Message::Tell(Command::OpenSession { id: session.id, ttl_ns }));
        Ok(session)
    }
}

impl Session {
    /// Its name.
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Its namespace.
    pub fn cache_salt(&self) -> &str {
        &self.cache_salt
    }

    /// When it was opened.
    pub fn opened(&self) -> Time {
        self.opened
    }

    /// Asks how it stands; `None`: it is closed.
    pub fn report(&self) -> Result<Reply<Option<SessionReport>>, SubmitError> {
        self.shared.open()?;
        let (answer, reply) = sync_channel(1);
        // A closed inbox drops the message, and the reply says so.
        let _ = self.inbox.send(Message::Session(self.id, answer));
        Ok(Reply { reply, shared: self.shared.clone() })
    }

    /// Whether a turn is running.
    pub fn is_running(&self) -> bool {
        self.transcript.lock().running
    }

    /// Gives up what it keeps; a turn that is running goes on. Later turns are requests like any other.
    pub fn close(&self) {
        let _ = self.inbox.send(Message::Tell(Command::CloseSession(self.id)));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
        self.shared.sessions.fetch_sub(1, Ordering::AcqRel);
    }
}

/// How long a turn waits for the one before that was given up: it ends within a step.
const PATIENCE: Duration = Duration::from_secs(5);

/// What was said, as tokens and as text, and whether a turn is running.
#[derive(Debug, Default)]
pub(super) struct Transcript {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    said: Said,
    running: bool,
    /// Turns so far, the one that is running included.
    turns: u64,
    /// Nobody waits for the turn that is running.
    given_up: bool,
}

/// Tokens and the text that they stand for.
#[derive(Clone, Debug, Default)]
pub(super) struct Said {
    ids: Vec<u32>,
    /// `None`: the prompt came as tokens.
    text: Option<Vec<u8>>,
    /// Special tokens, each with its place in the text.
    special: Vec<(usize, u32)>,
}

impl Transcript {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change below is whole before the guard drops.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a turn, once one that was given up has ended. `None`: one is running.
    pub fn begin(self: &Arc<Self>, tokenizer: &Arc<Tokenizer>) -> Option<Turn> {
        let state = self.lock();
        let waits = |state: &mut State| state.running && state.given_up;
        let waited = self.ended.wait_timeout_while(state, PATIENCE, waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.running {
            return None;
        }
        (state.running, state.given_up) = (true, false);
        state.turns += 1;
        let number = state.turns;
        Some(Turn { transcript: self.clone(), number, said: Said::default(), tokenizer: tokenizer.clone() })
    }

    /// Nobody waits for this turn. One that has ended meanwhile is not taken for the one after it.
    pub fn give_up(&self, turn: u64) {
        let mut state = self.lock();
        state.given_up |= state.turns == turn;
    }

    /// The tokens of a prompt that tells in text what was said, and more: those that were said, and then its own. Text is
    /// split into tokens in more than one way, and a model does not write as the tokenizer would. `encoding` is what the
    /// tokenizer makes of it; it stays as it is if the texts part ways, or a token reaches across the end of what was
    /// said, or a special token stands where there was none.
    pub fn go_on(&self, text: &str, encoding: &Encoding, tokenizer: &Tokenizer) -> Vec<u32> {
        let said = &self.lock().said;
        let Encoding { ids, offsets } = encoding;
        let Some(before) = said.text.as_deref().filter(|before| text.as_bytes().starts_with(before)) else {
            return ids.clone();
        };
        let first_new = offsets.partition_point(|bytes| bytes.start < before.len());
        let at_edge = offsets.get(first_new).is_none_or(|bytes| bytes.start == before.len())
            && offsets[..first_new].iter().all(|bytes| bytes.end <= before.len());
        if !at_edge || specials(&ids[..first_new], offsets, tokenizer) != said.special {
            return ids.clone();
        }
        said.ids.iter().chain(&ids[first_new..]).copied().collect()
    }
}

impl Said {
    /// The tokens of a prompt, and the text that they came from with what the tokenizer made of it.
    pub fn prompt(ids: &[u32], text: Option<(&str, &Encoding)>, tokenizer: &Tokenizer) -> Self {
        let special = text.map(|(_, encoding)| specials(&encoding.ids, &encoding.offsets, tokenizer));
        let text = text.map(|(text, _)| text.as_bytes().to_vec());
        Self { ids: ids.to_vec(), text, special: special.unwrap_or_default() }
    }

    /// One more token was generated.
    pub fn push(&mut self, id: u32, tokenizer: &Tokenizer) {
        self.ids.push(id);
        if let Some(text) = &mut self.text {
            if tokenizer.is_special(id) {
                self.special.push((text.len(), id));
            }
            text.extend(tokenizer.piece(id).unwrap_or_default());
        }
    }
}

/// A turn on its way: what was said in it becomes its session's transcript when it ends. There is one at a time.
pub(super) struct Turn {
    pub transcript: Arc<Transcript>,
    /// Which of its session's turns.
    pub number: u64,
    pub said: Said,
    tokenizer: Arc<Tokenizer>,
}

impl Turn {
    /// One more token was generated.
    pub fn push(&mut self, id: u32) {
        self.said.push(id, &self.tokenizer);
    }

    /// It has ended; an error leaves the session as it was.
    pub fn finish(mut self, finish: &Finish) {
        if !matches!(finish, Finish::Error(_) | Finish::Rejected(_)) {
            self.transcript.lock().said = std::mem::take(&mut self.said);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.transcript.lock().running = false;
        self.transcript.ended.notify_all();
    }
}

fn specials(ids: &[u32], offsets: &[Range<usize>], tokenizer: &Tokenizer) -> Vec<(usize, u32)> {
    let special = ids.iter().zip(offsets).filter(|(id, _)| tokenizer.is_special(**id));
    special.map(|(&id, bytes)| (bytes.start, id)).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Instant;

    use super::*;
    use crate::load::ModelFiles;

    #[test]
    fn a_turn_that_has_ended_cannot_give_up_the_next() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/oracle/gguf/llama-q8_0.gguf");
        let files = ModelFiles::open(Path::new(path)).expect("a model of the tests");
        let tokenizer = Arc::new(files.tokenizer().expect("it has one"));
        let transcript: Arc<Transcript> = Arc::default();
        let first = transcript.begin(&tokenizer).expect("nobody speaks").number;
        let second = transcript.begin(&tokenizer).expect("the first has been dropped");
        transcript.give_up(first);
        let begun = Instant::now();
        assert!(transcript.begin(&tokenizer).is_none() && begun.elapsed() < PATIENCE / 2, "somebody waits for it");
        transcript.give_up(second.number);
        let waiting = {
            let (transcript, tokenizer) = (transcript.clone(), tokenizer.clone());
            std::thread::spawn(move || transcript.begin(&tokenizer).is_some())
        };
        drop(second);
        assert!(waiting.join().expect("it only waits"), "the next one begins when it has ended");
    }
}
