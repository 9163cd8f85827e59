//! What goes into the scheduler and what comes out.

use crate::execute::Drawn;
use crate::kv::KvLayout;
use crate::observe::anatomy::RequestRecord;
use crate::request::{Finish, Request, RequestId, SessionId, TokenLogprobs};

/// The scheduler's bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most sequences that run at a time.
    pub max_num_seqs: usize,
    /// Most token rows in one step; at least `max_num_seqs`.
    pub max_num_batched_tokens: usize,
    /// Most requests that live beyond the `max_num_seqs` that may run.
    pub max_queue: usize,
    /// Most tokens of prompt and answer together.
    pub max_model_len: usize,
    /// How positions lie in blocks of the KV cache.
    pub layout: KvLayout,
    /// Blocks of the KV cache.
    pub blocks: usize,
    /// How long a step may take while sequences decode, in nanoseconds; `None`: as long as it takes.
    pub itl_target_ns: Option<u64>,
}

impl SchedulerConfig {
    /// Checks that the settings can work together. The error names them.
    pub fn validate(&self) -> Result<(), String> {
        for (name, value) in [
            ("max_num_seqs", self.max_num_seqs),
            ("max_model_len", self.max_model_len),
            ("block_size", self.layout.block_size),
            ("the number of KV cache blocks", self.blocks),
        ] {
            if value == 0 {
                return Err(format!("{name} must be at least 1, not 0"));
            }
        }
        assert!(!self.layout.windows.is_empty() && !self.layout.windows.contains(&Some(0)), "{:?}", self.layout);
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(format!(
                "max_num_batched_tokens ({}) must be at least max_num_seqs ({}): every sequence that decodes needs a row",
                self.max_num_batched_tokens, self.max_num_seqs
            ));
        }
        let slots = self.blocks.checked_mul(self.layout.block_size);
        if slots.is_none_or(|slots| slots >= u32::MAX as usize) || self.max_model_len >= u32::MAX as usize {
            return Err(format!(
                "{} KV cache blocks of {} tokens and a max_model_len of {}: positions are 32 bits wide",
                self.blocks, self.layout.block_size, self.max_model_len
            ));
        }
        Ok(())
    }
}

/// What the scheduler can be told.
#[derive(Debug)]
pub enum Command {
    /// Take this request.
    Submit(Box<Request>),
    /// Its caller gave it up.
    Cancel(RequestId),
    /// One of its stop strings has appeared in its text.
    StopString {
        /// Whose text.
        id: RequestId,
        /// Which string.
        text: String,
    },
    /// Begin a conversation.
    OpenSession {
        /// Its name.
        id: SessionId,
        /// How long its blocks are kept after a turn.
        ttl_ns: u64,
    },
    /// Nobody goes on with it.
    CloseSession(SessionId),
}

/// What the scheduler has to say.
#[derive(Debug)]
pub enum Event {
    /// The request has left the queue for the first time, and is in the step that is planned.
    Begun {
        /// Which.
        id: RequestId,
    },
    /// A token was generated.
    Token {
        /// For whom.
        id: RequestId,
        /// The token.
        drawn: Drawn,
    },
    /// Log-probabilities of the next tokens of the prompt, in order, from its second token on.
    PromptLogprobs {
        /// For whom.
        id: RequestId,
        /// One for each token.
        logprobs: Vec<TokenLogprobs>,
    },
    /// Raw logits of the next rows that were wanted, in order.
    Logits {
        /// For whom.
        id: RequestId,
        /// Rows of as many values as the vocabulary has tokens.
        logits: Vec<f32>,
    },
    /// The request has ended: the last that is said of it, once for every request.
    Finished {
        /// Which.
        id: RequestId,
        /// How.
        finish: Finish,
        /// What it used.
        record: Box<RequestRecord>,
    },
}

/// Counts, now and since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Sequences that run.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Blocks of the KV cache.
    pub blocks: usize,
    /// Blocks with nothing in them.
    pub blocks_free: usize,
    /// Blocks that nobody holds and whose contents can still be found.
    pub blocks_remembered: usize,
    /// Blocks that sequences or sessions hold.
    pub blocks_owned: usize,
    /// Blocks that sessions hold between turns; one that several hold counts for each.
    pub blocks_pinned: usize,
    /// Sessions that are open.
    pub sessions: usize,
    /// Steps since the beginning.
    pub steps: u64,
    /// Token rows that were run.
    pub tokens_computed: u64,
    /// Tokens that were found in the cache instead.
    pub tokens_cached: u64,
    /// Tokens that were generated.
    pub tokens_generated: u64,
    /// How often a sequence lost its blocks.
    pub preemptions: u64,
    /// Requests that have ended.
    pub finished: u64,
}
