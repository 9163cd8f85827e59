//! A call, in the words of the door: what is sent, what is asked of it, and why it may not be taken.

use std::sync::Arc;
use std::time::Duration;

use super::mailbox::Wake;
use super::session::Session;
use crate::request::Wanted;
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
        }
    }
}

/// Why a call was not taken. Nothing has been computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The prompt or a parameter is impossible.
    #[error("{0}")]
    Invalid(String),
    /// As many requests are running and waiting as may.
    #[error("the queue is full: {live} requests are running or waiting, at most {most} may (max_num_seqs + max_queue)")]
    QueueFull {
        /// Running and waiting.
        live: usize,
        /// `max_num_seqs + max_queue`.
        most: usize,
        /// When there will be room, as far as is known.
        retry_after: Option<Duration>,
    },
    /// Not even its first token would be there in time.
    #[error(
        "deadline_s cannot be met: it is {:.3} s, and the requests before this one take at least {:.3} s",
        deadline.as_secs_f64(), wait.as_secs_f64()
    )]
    TooLate {
        /// What was asked.
        deadline: Duration,
        /// How long it would wait at least.
        wait: Duration,
        /// When it would be worth asking again.
        retry_after: Duration,
    },
    /// The engine has been closed, or has died of the reason given.
    #[error("{0}")]
    Closed(String),
}
