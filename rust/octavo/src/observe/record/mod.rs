//! The flight recorder: all that went into the scheduler, and what came of it, in a file; and how it is played again.
//!
//! The scheduler is a pure function of its commands, of the times it was told, and of the tokens that were drawn. All three
//! are in the log, in the order in which the scheduler got them, together with what it decided. So a log can be played
//! again: over the model, which has to draw the same tokens, or over the log's own tokens, which needs no model.
//!
//! ```text
//! the engine thread                                   a thread of its own
//! Recorder: command, plan, tokens → bytes   ──(a bounded pipe)──→   the file
//! ```
//! The engine never waits for the disk: a pipe that is full loses entries. A log is played up to its first loss, so what
//! comes after it is counted and not kept.
//!
//! The file: `octavo log\n`, the version (32 bits, little-endian as all such numbers), then chunks, each as large as what
//! one step had to say (`chunks.rs`), with sums that tell damage from a log that was cut. The first chunk is the header, as
//! JSON; the others hold entries: a kind (one byte), the nanoseconds since the entry before, and what the kind has.

use crate::request::{RequestId, Time};
use crate::schedule::Command;

mod chunks; // what of the file is whole
mod file; // where a recording may go
mod header; // what was recorded, and on what
mod log; // entries, read and written
mod player; // plays a log again
mod recorder; // the engine's end, and the thread that writes
mod request; // a request as bytes
mod wire; // numbers and texts as bytes

pub use chunks::Sealer;
pub use header::{Header, ModelIdentity};
pub use log::{Log, LogError, LogWriter};
pub use player::{Difference, Player, Report, Tokens};
pub use recorder::{Recorder, Recording, Summary};

/// One line of the log.
#[derive(Debug)]
pub enum Entry {
    /// The scheduler was told something.
    Told {
        /// When.
        now: Time,
        /// What.
        command: Command,
    },
    /// The scheduler planned a step, or found nothing to do.
    Planned {
        /// When.
        now: Time,
        /// Who is in it. Empty: there was nothing to do.
        rows: Vec<Rows>,
    },
    /// The step is over.
    Committed {
        /// When.
        now: Time,
        /// What it gave, in the plan's order.
        outcomes: Vec<Outcome>,
    },
    /// The recording ended.
    End {
        /// Entries that were lost before.
        lost: u64,
    },
}

/// A sequence's part of a step: positions `[first, first + count)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Whose.
    pub id: RequestId,
    /// The first position that is run; what is before it is in the cache.
    pub first: usize,
    /// How many.
    pub count: usize,
}

/// What a step gave a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No token was to be drawn.
    Nothing,
    /// A token.
    Token(u32),
    /// None: its grammar is complete.
    Complete,
    /// None: something is wrong with its logits or its grammar.
    Failed(String),
}
