//! What a caller asks for, and the ways a request can end.

use std::fmt;
use std::sync::Arc;

use crate::grammar::Guide;

/// A moment on the engine's monotonic clock, in nanoseconds since the engine started. The pure parts of the engine get
/// it as an argument; only `engine/` reads a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// Nanoseconds since `earlier`; 0 when `earlier` is later.
    pub fn since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// A request's name inside one engine. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// A session's name inside one engine. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// How tokens are chosen and when to stop. Made by callers, checked once by [`SamplingParams::validate`]; inside the
/// engine it is known to be possible.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Smallest set of tokens whose probability reaches this, in (0, 1].
    pub top_p: f32,
    /// Only the k likeliest tokens; 0 is off.
    pub top_k: u32,
    /// Only tokens at least this fraction as likely as the likeliest, in [0, 1].
    pub min_p: f32,
    /// Most tokens to generate, at least 1.
    pub max_tokens: usize,
    /// No end before this many tokens: end-of-sequence and stop tokens cannot be drawn, stop strings do not end.
    pub min_tokens: usize,
    /// Texts that end the generation.
    pub stop: Vec<String>,
    /// Tokens that end the generation (the model's own end tokens come on top, unless `ignore_eos`).
    pub stop_token_ids: Vec<u32>,
    /// Keep the text that ended it.
    pub include_stop_str_in_output: bool,
    /// The model's own end tokens do not end the generation.
    pub ignore_eos: bool,
    /// Seed of the coins; `None`: drawn from the engine's seed and the request's id.
    pub seed: Option<u64>,
    /// Subtracted once from the logit of every token that was generated.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a generated token for every time it was generated.
    pub frequency_penalty: f32,
    /// Divides positive, multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Token sequences that must not be generated: the last token of one is banned after its others.
    pub bad_words: Vec<Vec<u32>>,
    /// Only these tokens may be generated.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Log-probability of every generated token, and this many of the best (0: only the chosen one's).
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// Special tokens leave no text.
    pub skip_special_tokens: bool,
    /// What the answer is held to.
    pub constraint: Option<Constraint>,
}

/// What an answer is held to. Its end tokens can be drawn exactly where it may end; where nothing can follow, it ends, also
/// before `min_tokens` and with `ignore_eos`. An answer that `max_tokens` cuts off need not be complete.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Constraint {
    /// A JSON schema, as JSON; `true` and `{}` stand for any JSON.
    JsonSchema(String),
    /// A regular expression that the whole answer matches.
    Regex(String),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl Constraint {
    /// The parameter's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) => "json_schema",
            Self::Regex(_) => "regex",
            Self::Lark(_) => "grammar",
            Self::Choice(_) => "choice",
        }
    }

    /// Bytes of all its texts.
    pub fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(choices) => choices.iter().map(String::len).sum(),
        }
    }

    fn validate(&self) -> Result<(), String> {
        let name = self.name();
        if self.bytes() > MAX_CONSTRAINT_BYTES {
            return Err(format!("{name} has {} bytes, at most {MAX_CONSTRAINT_BYTES} are taken", self.bytes()));
        }
        match self {
            Self::Choice(choices) if choices.is_empty() => {
                Err("choice is empty: there is nothing to choose from".into())
            }
            Self::Choice(choices) => match choices.iter().position(String::is_empty) {
                Some(i) => Err(format!("choice[{i}] is an empty string, which no token can stand for")),
                None => Ok(()),
            },
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) if text.trim_ascii().is_empty() => {
                Err(format!("{name} is an empty text"))
            }
            _ => Ok(()),
        }
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            max_tokens: 256,
            min_tokens: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            include_stop_str_in_output: false,
            ignore_eos: false,
            seed: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            allowed_token_ids: None,
            logprobs: None,
            prompt_logprobs: None,
            skip_special_tokens: true,
            constraint: None,
        }
    }
}

/// The most alternatives that `logprobs` and `prompt_logprobs` may ask for.
pub const MAX_LOGPROBS: usize = 64;
/// The most stop strings, and the longest one in bytes: both are looked for at every token.
pub const MAX_STOP_STRINGS: usize = 64;
/// See [`MAX_STOP_STRINGS`].
pub const MAX_STOP_BYTES: usize = 4096;
/// The longest schema, regex or grammar, and the most text of all choices together.
pub const MAX_CONSTRAINT_BYTES: usize = 512 << 10;

impl SamplingParams {
    /// Checks every value against what is possible for a vocabulary of `vocab` tokens. The error names the parameter,
    /// what was wanted and what was found.
    pub fn validate(&self, vocab: usize) -> Result<(), String> {
        let within = |name: &str, value: f32, low: f32, high: f32| {
            if value.is_finite() && value >= low && value <= high {
                Ok(())
            } else {
                Err(format!("{name} must be a number from {low} to {high}, not {value}"))
            }
        };
        within("temperature", self.temperature, 0.0, 100.0)?;
        // Neither `0.0` nor what is no number is above 0.
        let above_zero = |name: &str, value: f32, high: f32| {
            let what = format!("{name} must be a number above 0, and at most {high}, not {value}; 1 turns it off");
            if value > 0.0 && value <= high { Ok(()) } else { Err(what) }
        };
        above_zero("top_p", self.top_p, 1.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("presence_penalty", self.presence_penalty, -100.0, 100.0)?;
        within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)?;
        above_zero("repetition_penalty", self.repetition_penalty, 100.0)?;
        if self.max_tokens == 0 {
            return Err("max_tokens must be at least 1, not 0".into());
        }
        if self.min_tokens > self.max_tokens {
            return Err(format!("min_tokens ({}) is above max_tokens ({})", self.min_tokens, self.max_tokens));
        }
        for (name, asked) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if asked.is_some_and(|k| k > MAX_LOGPROBS) {
                return Err(format!("{name} may be at most {MAX_LOGPROBS}, not {}", asked.unwrap_or(0)));
            }
        }
        self.constraint.as_ref().map_or(Ok(()), Constraint::validate)?;
        self.validate_stops()?;
        self.validate_token_ids(vocab)
    }

    fn validate_stops(&self) -> Result<(), String> {
        if self.stop.len() > MAX_STOP_STRINGS {
            return Err(format!("at most {MAX_STOP_STRINGS} stop strings, not {}", self.stop.len()));
        }
        for (i, stop) in self.stop.iter().enumerate() {
            if stop.is_empty() {
                return Err(format!("stop[{i}] is an empty string, which would end every generation at once"));
            }
            if stop.len() > MAX_STOP_BYTES {
                return Err(format!("stop[{i}] has {} bytes, at most {MAX_STOP_BYTES} are looked for", stop.len()));
            }
        }
        Ok(())
    }

    fn validate_token_ids(&self, vocab: usize) -> Result<(), String> {
        let known = |name: &str, id: u32| {
            if (id as usize) < vocab {
                Ok(())
            } else {
                Err(format!("{name}: there is no token {id}, the vocabulary has {vocab}"))
            }
        };
        for &id in &self.stop_token_ids {
            known("stop_token_ids", id)?;
        }
        for &(id, bias) in &self.logit_bias {
            known("logit_bias", id)?;
            if !bias.is_finite() {
                return Err(format!("logit_bias of token {id} must be a finite number, not {bias}"));
            }
        }
        for word in &self.bad_words {
            if word.is_empty() {
                return Err("bad_words: an empty word would ban every token".into());
            }
            for &id in word {
                known("bad_words", id)?;
            }
        }
        if let Some(allowed) = &self.allowed_token_ids {
            if allowed.is_empty() {
                return Err("allowed_token_ids is empty: no token could be generated".into());
            }
            for &id in allowed {
                known("allowed_token_ids", id)?;
            }
        }
        Ok(())
    }

    /// Whether the choice depends on which tokens came before (so counts must be kept).
    pub fn needs_history(&self) -> bool {
        self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.repetition_penalty != 1.0
            || !self.bad_words.is_empty()
    }
}

/// What a request wants back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Generated tokens.
    Tokens,
    /// The raw logits after the last token of the prompt, nothing generated.
    LastLogits,
    /// The raw logits after every token of the prompt, nothing generated.
    AllLogits,
    /// The log-probabilities of the prompt's tokens from this one on, nothing generated. What comes before may be shared.
    Scores {
        /// The first token that is scored; at least 1.
        from: usize,
    },
}

/// One request, its prompt already tokenised and its parameters checked.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its name.
    pub id: RequestId,
    /// The call that it is of: the name of the first request of that. A list of prompts is one call.
    pub call: RequestId,
    /// Token ids; at least one.
    pub prompt: Arc<[u32]>,
    /// How to choose and when to stop.
    pub params: Arc<SamplingParams>,
    /// What to give back.
    pub wanted: Wanted,
    /// Seed of this request's coins (from `params.seed`, or drawn at the door).
    pub seed: u64,
    /// The model's own end tokens, empty with `ignore_eos`. With `params.stop_token_ids` they end the generation.
    pub end_token_ids: Arc<[u32]>,
    /// Leads it through `params.constraint`.
    pub guide: Option<Arc<Guide>>,
    /// Higher goes first.
    pub priority: i32,
    /// When it stops being worth anything.
    pub deadline: Option<Time>,
    /// Namespace of blocks: prefixes are shared only inside one. `None`: with nobody.
    pub cache_salt: Option<Arc<str>>,
    /// The conversation whose turn it is.
    pub session: Option<SessionId>,
    /// Whose request it is.
    pub user: Arc<str>,
    /// When it came through the door; it has been queueing since.
    pub arrived: Time,
}

impl Request {
    /// All tokens that end it.
    pub fn ends(&self) -> Arc<[u32]> {
        match self.params.stop_token_ids[..] {
            [] => self.end_token_ids.clone(),
            _ => self.end_token_ids.iter().chain(&self.params.stop_token_ids).copied().collect(),
        }
    }
}

/// The one way in which a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Finish {
    /// A stop token or end-of-sequence was drawn, or a stop string appeared.
    Stop(StopReason),
    /// `max_tokens`, or the model's longest length.
    Length,
    /// The caller gave it up.
    Cancelled,
    /// Its deadline passed.
    Deadline,
    /// There was no room to wait, or it could never fit; nothing was computed.
    Rejected(Rejection),
    /// Something failed for this request alone, or the engine closed.
    Error(String),
}

/// What ended a generation that stopped by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// One of the model's end tokens.
    EndToken(u32),
    /// One of `stop_token_ids`.
    StopToken(u32),
    /// One of `stop`.
    StopString(String),
    /// It is complete: it wanted no tokens (logits), or nothing can follow in its grammar.
    Complete,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// As many run and wait as may.
    QueueFull {
        /// Requests that run or wait.
        living: usize,
        /// As many as may: `max_num_seqs + max_queue`.
        most: usize,
        /// When there will be a place.
        retry_after_ns: u64,
    },
    /// It can never run here; the text says the numbers and the setting that would fit it.
    Impossible(String),
}

impl Finish {
    /// `stop | length | cancelled | deadline | rejected | error`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
            Self::Rejected(_) => "rejected",
            Self::Error(_) => "error",
        }
    }
}

/// A token with its log-probability, before any sampling step (natural logarithm of the softmax of the raw logits).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub token_id: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// How many tokens are likelier, plus 1.
    pub rank: u32,
    /// The best tokens and their log-probabilities, best first; ties by the smaller id.
    pub top: Vec<(u32, f32)>,
}
