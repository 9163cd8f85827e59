//! Read the prompt into the KV cache.
//!
//! Long prompts are read in parts, one part a step, in what the decoding sequences leave of the step. The oldest prompt
//! that is being read has half of that for itself whenever others wait, so it gets on; the other half is for short
//! prompts, which so overtake it, and for those of users who have been served less.

mod admit; // from the queue into the step
mod chunk; // how much of a prompt this step

pub use admit::{OVERTAKERS_SEEN, Rule, admit};
use chunk::readers;
pub use chunk::{read, read_oldest, read_on, unblock, unread};
