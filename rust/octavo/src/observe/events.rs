//! What happens to requests and blocks, for programs around the engine: dashboards, routers that follow the prefix cache.
//! Noted down where it happens, if somebody reads (see [`super::readers`]); otherwise a note costs one branch.
//!
//! Blocks are told in the words of vLLM's KV events, so that what such a consumer wants can be made of them without looking
//! anything up.

use std::sync::Arc;

use crate::kv::SessionEvent;
use crate::request::{RequestId, SessionId};

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// A request came in.
    Queued {
        /// Which.
        id: RequestId,
        /// Whose it is.
        user: Arc<str>,
        /// Tokens of its prompt.
        prompt_tokens: usize,
    },
    /// It left the queue, and is in the step that is being planned. Again after every preemption.
    Admitted {
        /// Which.
        id: RequestId,
        /// Tokens that were found in the cache.
        cached_tokens: usize,
    },
    /// Its first token is there.
    FirstToken {
        /// Which.
        id: RequestId,
    },
    /// It lost its blocks and waits again.
    Preempted {
        /// Which.
        id: RequestId,
        /// Tokens that were computed and are lost, unless they are still found in the cache.
        computed_tokens: usize,
    },
    /// It has ended.
    Finished {
        /// Which.
        id: RequestId,
        /// `stop | length | cancelled | deadline | rejected | error`; a stop string found in the very last token is told
        /// to the caller as `stop`, and here as `length`.
        finish_reason: &'static str,
        /// Tokens that were generated.
        completion_tokens: usize,
    },
    /// Something has become of what a session keeps between turns.
    Session {
        /// Which session.
        id: SessionId,
        /// What.
        event: SessionEvent,
    },
    /// A full block can be found by its prefix from now on.
    BlockStored {
        /// Its name: all tokens up to its end, and the namespace.
        hash: u64,
        /// The name of the block before it; `None`: it is the first.
        parent: Option<u64>,
        /// Its tokens, as many as a block has positions.
        token_ids: Arc<[u32]>,
        /// Which group of layers.
        group: u32,
    },
    /// Its contents were given up for others'.
    BlockRemoved {
        /// Its name.
        hash: u64,
        /// Which group of layers.
        group: u32,
    },
    /// No block can be found any more.
    AllBlocksCleared,
}

/// What the scheduler and the cache note down while somebody reads.
#[derive(Debug, Default)]
pub struct Notes(Option<Vec<EngineEvent>>);

impl Notes {
    /// From now on, or no longer.
    pub fn watch(&mut self, on: bool) {
        self.0 = on.then(|| self.0.take().unwrap_or_default());
    }

    /// Somebody reads.
    pub fn are_watched(&self) -> bool {
        self.0.is_some()
    }

    /// Notes what `event` says, if somebody reads.
    pub fn push(&mut self, event: impl FnOnce() -> EngineEvent) {
        if let Some(notes) = &mut self.0 {
            notes.push(event());
        }
    }

    /// What was noted since the last time.
    pub fn drain(&mut self) -> impl Iterator<Item = EngineEvent> {
        self.0.iter_mut().flat_map(|notes| notes.drain(..))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_noted_for_nobody() {
        let mut notes = Notes::default();
        notes.push(|| unreachable!("nobody reads"));
        notes.watch(true);
        notes.push(|| EngineEvent::FirstToken { id: RequestId(1) });
        notes.watch(true);
        assert_eq!(notes.drain().count(), 1);
        notes.push(|| EngineEvent::FirstToken { id: RequestId(1) });
        notes.watch(false);
        assert_eq!(notes.drain().count(), 0);
    }
}
