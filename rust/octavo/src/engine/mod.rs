//! The only thread. It owns the scheduler, the executor and everything they own, and talks to the world through an inbox
//! of commands and one mailbox per call. It never touches Python, and nobody else touches what it owns.
//!
//! Always true: every call gets exactly one terminal outcome per choice, also when the engine is closed or dies.

pub mod config; // what can be set, and what it is when it is not
pub mod origin; // what an answer's bits depend on
pub mod open; // from a path to a running engine
pub mod call; // a call, in the words of the door
pub mod handle; // the door: submit, stats, close
pub mod ticket; // a call in flight
pub mod mailbox; // what a call has been given so far
pub mod session; // a conversation, as callers hold it
pub mod watch; // the door for those who watch: recordings and events
pub mod replay; // plays a recording again
mod shared; // what the door and the engine thread have in common
mod outlet; // tokens → text → mailbox, on the engine thread
mod run; // the loop

pub use call::{Options, Prompt, SubmitError};
pub use config::EngineConfig;
pub use handle::{Engine, Facts};
pub use mailbox::{ChoiceResult, Next, Update, Wake};
pub use open::open;
pub use origin::Origin;
pub use replay::{Replay, ReplayError, ReplayOptions, Replayed};
pub use session::Session;
pub use shared::{EngineStats, Reply, StepTime};
pub use ticket::Ticket;
pub use watch::{RecordError, RecordReply};
