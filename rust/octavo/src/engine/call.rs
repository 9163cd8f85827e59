//! A call, in the words of the door: what is sent, what is asked of it, and why it may not be taken.

use std::sync::Arc;
use std::time::Duration;

use super::mailbox::Wake;
use super::session::Session;
use crate::request::{RequestId, Wanted};
use crate::stages::tokenize::RenderInput;

/// What a caller may send.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Text; tokens that the tokenizer adds by itself (BOS) are added, special tokens in it are recognised.
    Text(String),
    /// Messages for the model's chat template.
    Chat(Box<RenderInput>),
    /// Token ids, taken as they are.
    Tokens(Vec<u32>),
}

/// Everything about a call besides its prompt and parameters.
#[derive(Clone)]
pub struct Options {
    /// How many answers.
    pub choices: usize,
    /// What is wanted back.
    pub wanted: Wanted,
    /// Higher goes first.
    pub priority: i32,
    /// How long the answer is worth something.
    pub deadline: Option<Duration>,
    /// Namespace of cached prefixes.
    pub cache_salt: String,
    /// Whether it may share cached prefixes at all.
    pub shares_prefixes: bool,
    /// The conversation whose turn it is. Its namespace is that of its session.
    pub session: Option<Arc<Session>>,
    /// Whose call it is.
    pub user: String,
    /// Whether the caller reads tokens as they come, or only the end.
    pub every_token: bool,
    /// Told when something arrives.
    pub waker: Option<Arc<dyn Wake>>,
    /// The call that this goes on with (see [`super::Ticket::call`]): prompts of a list are one. `None`: it begins one.
    pub call: Option<RequestId>,
    /// Another one comes at once. An engine that has nothing to do waits for it, so that what comes together begins together.
    pub more: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            choices: 1,
            wanted: Wanted::Tokens,
            priority: 0,
            deadline: None,
            cache_salt: String::new(),
            shares_prefixes: true,
            session: None,
            user: String::new(),
            every_token: false,
            waker: None,
            call: None,
            more: false,
        }
    }
}

/// Why a call was not taken. Nothing has been computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The prompt or a parameter is impossible.
    #[error("{0}")]
    Invalid(String),
    /// As many requests are running and waiting as may, or the places that are left are kept for others.
    #[error(
        "the queue is full: {live} requests are running or waiting, at most {most} may (max_num_seqs + max_queue){}",
        if *kept > 0 { format!("; {kept} places are kept for calls that were refused and have a better claim") }
        else { String::new() }
    )]
    QueueFull {
        /// Running and waiting.
        live: usize,
        /// Places that are kept for others.
        kept: usize,
        /// `max_num_seqs + max_queue`.
        most: usize,
        /// When there will be room.
        retry_after: Duration,
    },
    /// Not even its first token would be there in time.
    #[error(
        "deadline_s cannot be met: it is {:.3} s, the requests before this one take {:.3} s at a third of their time of late, and \
         its first token is expected after {:.3} s",
        deadline.as_secs_f64(), wait.as_secs_f64(), expected.as_secs_f64()
    )]
    TooLate {
        /// What was asked.
        deadline: Duration,
        /// How long it would wait at least.
        wait: Duration,
        /// When its first token is expected.
        expected: Duration,
    },
    /// The engine has been closed, or has died of the reason given.
    #[error("{0}")]
    Closed(String),
}

/// The longest name of a user or a namespace, in bytes.
pub const MOST_NAME_BYTES: usize = 256;

/// Names are kept as long as anything of theirs is.
pub(super) fn check_name(what: &str, name: &str) -> Result<(), SubmitError> {
    match name.len() {
        0..=MOST_NAME_BYTES => Ok(()),
        bytes => Err(SubmitError::Invalid(format!("{what} has {bytes} bytes, a name has at most {MOST_NAME_BYTES}"))),
    }
}
