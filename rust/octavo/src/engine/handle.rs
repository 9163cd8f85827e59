//! The door: callers of any thread come in here. Everything that one request costs before the engine thread sees it
//! (template, tokenizing, checking) happens on the caller's thread.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::mailbox::{ChoiceResult, Mailbox, Next, Wake};
use super::outlet::Outlet;
use crate::grammar::{Grammars, Guide};
use crate::request::{Request, RequestId, SamplingParams, Time, Wanted};
use crate::sample::random;
use crate::schedule::{SchedulerConfig, SchedulerStats};
use crate::stages::queue::limits;
use crate::stages::stream::{StreamParams, TextStream};
use crate::stages::tokenize::{ChatError, ChatTemplate, RenderInput, Rendered, Special, Tokenizer};

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
    },
    /// The engine has been closed, or has died of the reason given.
    #[error("{0}")]
    Closed(String),
}

/// What is fixed once a model is loaded.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Family, as the file names it.
    pub architecture: String,
    /// Device, instruction set, threads.
    pub device: String,
    /// Tokens in the model's output (logits per row).
    pub vocab: usize,
    /// Bytes of packed weights.
    pub weights_bytes: u64,
    /// Bytes of the KV cache pool.
    pub kv_cache_bytes: u64,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Positions of one block.
    pub block_size: usize,
    /// Blocks in the pool.
    pub blocks: usize,
    /// Longest prompt and answer together.
    pub max_model_len: usize,
    /// Most sequences in one step.
    pub max_num_seqs: usize,
    /// Most token rows in one step.
    pub max_num_batched_tokens: usize,
    /// How the memory was divided, as text.
    pub memory: String,
    /// What the user should know and did not ask for, such as weights that take more memory than their file.
    pub notices: Vec<String>,
}

/// What goes to the engine thread.
pub(super) enum Message {
    /// A new request and where its answer goes.
    Submit(Box<Request>, Box<Outlet>),
    /// Give this one up.
    Cancel(RequestId),
    /// Answer with the state of things.
    Stats(SyncSender<SchedulerStats>),
    /// End everything and stop.
    Close,
}

/// What the door and the engine thread share.
pub(super) struct Shared {
    /// Requests between the door and their end.
    pub live: AtomicUsize,
    /// Why no request is taken any more; `None`: open.
    pub closed: Mutex<Option<String>>,
    /// Asked by the engine thread between steps, so that closing does not wait for the queue.
    pub closing: AtomicBool,
    /// The engine has died of its device.
    pub device_failed: AtomicBool,
    /// Zero of [`Time`].
    pub epoch: Instant,
}

impl Shared {
    /// The engine's clock.
    pub fn now(&self) -> Time {
        Time(u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Refuses everything from now on, for `reason`. The first reason stays.
    pub fn close(&self, reason: &str) {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| reason.to_owned());
    }

    /// Why it is closed.
    pub fn reason(&self) -> String {
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        closed.clone().unwrap_or_else(|| CLOSED.to_owned())
    }

    fn is_open(&self) -> bool {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn open(&self) -> Result<(), SubmitError> {
        if self.is_open() { Ok(()) } else { Err(SubmitError::Closed(self.reason())) }
    }
}

/// A loaded model and the thread that runs it. Shared by any number of callers; dropping it closes it.
pub struct Engine {
    pub(super) shared: Arc<Shared>,
    pub(super) inbox: Sender<Message>,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) next_id: AtomicU64,
    pub(super) seed: u64,
    pub(super) limits: SchedulerConfig,
    pub(super) prefix_caching: bool,
    pub(super) facts: Facts,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) template: Option<ChatTemplate>,
    pub(super) end_token_ids: Arc<[u32]>,
    pub(super) grammars: Grammars,
    /// No text longer than this fits, whatever it says.
    pub(super) most_prompt_bytes: usize,
}

impl Engine {
    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// What is fixed about this engine.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The chat template's prompt for these messages, as text and token ids.
    pub fn render(&self, input: &RenderInput) -> Result<Rendered, SubmitError> {
        let invalid = |error: ChatError| SubmitError::Invalid(error.to_string());
        let own = match &input.chat_template {
            Some(source) => Some(ChatTemplate::of(&self.tokenizer, source).map_err(invalid)?),
            None => None,
        };
        let template = own.as_ref().or(self.template.as_ref());
        let template = template.ok_or_else(|| SubmitError::Invalid(NO_TEMPLATE.into()))?;
        template.render_ids(&self.tokenizer, input).map_err(invalid)
    }

    /// The token ids of a prompt, as the engine will run them.
    pub fn token_ids(&self, prompt: &Prompt) -> Result<Vec<u32>, SubmitError> {
        let ids = match prompt {
            Prompt::Tokens(ids) => ids.clone(),
            Prompt::Text(text) if text.len() > self.most_prompt_bytes => {
                // Said before megabytes are tokenized for nothing.
                return Err(SubmitError::Invalid(format!(
                    "the prompt has {} bytes, more than max_model_len ({}) tokens can hold",
                    text.len(),
                    self.limits.max_model_len
                )));
            }
            Prompt::Text(text) => match self.tokenizer.encode(text, Special::Parse, true) {
                Ok(encoding) => without_second_bos(encoding.ids, self.tokenizer.bos()),
                Err(error) => return Err(SubmitError::Invalid(error.to_string())),
            },
            Prompt::Chat(input) => self.render(input)?.encoding.ids,
        };
        // A tokenizer may know more tokens than the model has embeddings for.
        match ids.iter().position(|&id| id as usize >= self.facts.vocab) {
            None => Ok(ids),
            Some(at) => {
                let (id, vocab) = (ids[at], self.facts.vocab);
                Err(SubmitError::Invalid(format!("prompt[{at}] is {id}, the vocabulary has {vocab} tokens")))
            }
        }
    }

    /// Takes a call. Answers at once: a ticket, or why not.
    pub fn submit(&self, prompt: &Prompt, params: SamplingParams, options: Options) -> Result<Ticket, SubmitError> {
        let begun = self.shared.now();
        self.shared.open()?;
        params.validate(self.facts.vocab).map_err(SubmitError::Invalid)?;
        if options.choices == 0 || options.choices > self.limits.max_num_seqs {
            return Err(SubmitError::Invalid(format!(
                "n must be from 1 to max_num_seqs ({}), not {}",
                self.limits.max_num_seqs, options.choices
            )));
        }
        let ids: Arc<[u32]> = self.token_ids(prompt)?.into();
        if let Wanted::Scores { from } = options.wanted
            && !(1..ids.len()).contains(&from)
        {
            let what = format!(
                "tokens from {from} on of a prompt of {} cannot be scored: one before, and one to score",
                ids.len()
            );
            return Err(SubmitError::Invalid(what));
        }
        limits::fits(&self.limits, ids.len(), options.wanted).map_err(SubmitError::Invalid)?;
        let guides = self.guides(&params, &options).map_err(SubmitError::Invalid)?;
        self.enter(options.choices)?;
        Ok(self.send(ids, params, guides, options, begun))
    }

    /// A guide for each choice, if the answer is held to something.
    fn guides(&self, params: &SamplingParams, options: &Options) -> Result<Vec<Arc<Guide>>, String> {
        match &params.constraint {
            Some(constraint) if options.wanted == Wanted::Tokens => {
                let grammar = self.grammars.compile(constraint)?;
                let own: &[u32] = if params.ignore_eos { &[] } else { &self.end_token_ids };
                let ends: Arc<[u32]> = own.iter().chain(&params.stop_token_ids).copied().collect();
                (0..options.choices).map(|_| self.grammars.guide(&grammar, ends.clone())).collect()
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Takes `count` places, or none.
    fn enter(&self, count: usize) -> Result<(), SubmitError> {
        let most = limits::most_living(&self.limits);
        let entered = self.shared.live.fetch_update(Ordering::AcqRel, Ordering::Acquire, |live| {
            Some(live + count).filter(|&after| after <= most)
        });
        entered.map(drop).map_err(|live| SubmitError::QueueFull { live, most })
    }

    fn send(
        &self,
        prompt: Arc<[u32]>,
        params: SamplingParams,
        guides: Vec<Arc<Guide>>,
        options: Options,
        begun: Time,
    ) -> Ticket {
        let first = self.next_id.fetch_add(options.choices as u64, Ordering::Relaxed);
        let cache_salt = self.namespace(&options, first);
        let mailbox = Arc::new(Mailbox::new(options.choices, options.every_token, options.waker));
        let params = Arc::new(params);
        let end_token_ids = if params.ignore_eos { Arc::from([]) } else { self.end_token_ids.clone() };
        let user: Arc<str> = options.user.into();
        let arrived = self.shared.now();
        for index in 0..options.choices {
            let id = RequestId(first + index as u64);
            let request = Request {
                id,
                prompt: prompt.clone(),
                params: params.clone(),
                wanted: options.wanted,
                seed: self.seed(&params, first, index),
                end_token_ids: end_token_ids.clone(),
                guide: guides.get(index).cloned(),
                priority: options.priority,
                deadline: options.deadline.map(|span| {
                    let nanoseconds = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
                    Time(begun.0.saturating_add(nanoseconds))
                }),
                cache_salt: cache_salt.clone(),
                user: user.clone(),
                arrived,
            };
            let text = TextStream::new(self.tokenizer.clone(), stream_params(&params));
            let outlet = Outlet::new(&request, text, mailbox.clone(), index, self.shared.clone());
            // A closed inbox drops the message, and the outlet in it ends the choice.
            let _ = self.inbox.send(Message::Submit(Box::new(request), Box::new(outlet)));
        }
        Ticket {
            mailbox,
            inbox: self.inbox.clone(),
            ids: first..first + options.choices as u64,
            prompt,
            tokenize_ns: arrived.since(begun),
            shared: self.shared.clone(),
        }
    }

    /// Who may share blocks with a call. Without prefix caching only its own choices, and scores of one namespace.
    fn namespace(&self, options: &Options, first: u64) -> Option<Arc<str>> {
        let salt = options.cache_salt.as_str();
        match (self.prefix_caching, options.wanted, options.choices) {
            (true, ..) => Some(salt.into()),
            (false, Wanted::Scores { .. }, _) => Some(format!("scores\0{salt}").into()),
            (false, _, 1) => None,
            (false, ..) => Some(format!("choices\0{first}").into()),
        }
    }

    /// A request's own seed; the first choice of a seeded call keeps the call's, so that `n` does not change it.
    fn seed(&self, params: &SamplingParams, first: u64, index: usize) -> u64 {
        let call = params.seed.unwrap_or_else(|| random::mix(self.seed, first));
        if index == 0 { call } else { random::mix(call, index as u64) }
    }

    /// Whether it takes calls.
    pub fn is_open(&self) -> bool {
        self.shared.is_open()
    }

    /// Whether the device has failed, and the engine and every request in it with that.
    pub fn device_failed(&self) -> bool {
        self.shared.device_failed.load(Ordering::Acquire)
    }

    /// Asks for counters and gauges, as of the end of the current step.
    pub fn stats(&self) -> Result<StatsReply, SubmitError> {
        self.shared.open()?;
        let (answer, reply) = sync_channel(1);
        // A closed inbox drops the message, and the reply says so.
        let _ = self.inbox.send(Message::Stats(answer));
        Ok(StatsReply { reply, shared: self.shared.clone() })
    }

    /// Ends every request in flight with an error, stops the thread and frees the model. Idempotent; returns once all is
    /// freed.
    pub fn close(&self) {
        self.shared.close(CLOSED);
        self.shared.closing.store(true, Ordering::Release);
        let _ = self.inbox.send(Message::Close);
        // Held while waiting, so that a second caller waits as well.
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // The thread turns its own panics into errors of the requests; there is nothing left to report.
            let _ = thread.join();
        }
    }
}

/// Counters that have been asked for.
pub struct StatsReply {
    reply: Receiver<SchedulerStats>,
    shared: Arc<Shared>,
}

impl StatsReply {
    /// Waits for them, up to `patience`. `None`: not yet.
    pub fn within(&mut self, patience: Duration) -> Option<Result<SchedulerStats, SubmitError>> {
        match self.reply.recv_timeout(patience) {
            Ok(stats) => Some(Ok(stats)),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(SubmitError::Closed(self.shared.reason()))),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

/// What calls hear that come after the end.
pub(super) const CLOSED: &str = "the engine has been closed";

/// A text that already begins with BOS (a rendered template, say) gets no second one.
fn without_second_bos(mut ids: Vec<u32>, bos: Option<u32>) -> Vec<u32> {
    if bos.is_some() && ids.len() > 1 && [ids[0], ids[1]].map(Some) == [bos; 2] {
        ids.remove(0);
    }
    ids
}

fn stream_params(params: &SamplingParams) -> StreamParams {
    StreamParams {
        stop: params.stop.clone(),
        include_stop: params.include_stop_str_in_output,
        skip_special: params.skip_special_tokens,
        // The streamed text is what decoding the new ids alone gives.
        continues_text: false,
    }
}

const NO_TEMPLATE: &str =
    "this model has no chat template; give one as chat_template, or the prompt as text or token ids";

/// A call in flight. Dropping it gives it up.
pub struct Ticket {
    mailbox: Arc<Mailbox>,
    inbox: Sender<Message>,
    ids: std::ops::Range<u64>,
    prompt: Arc<[u32]>,
    tokenize_ns: u64,
    shared: Arc<Shared>,
}

impl Ticket {
    /// Waits for something new, up to `patience`.
    pub fn next_within(&self, patience: Duration) -> Next {
        self.mailbox.next_within(patience)
    }

    /// Whether all is over; waits for it up to `patience`.
    pub fn finished_within(&self, patience: Duration) -> bool {
        self.mailbox.finished_within(patience)
    }

    /// Moves the finished choices out. `None` before the end, or if they have been taken.
    pub fn take_results(&self) -> Option<Vec<ChoiceResult>> {
        self.mailbox.take_results()
    }

    /// Gives it up: freed within one step. The choices end as `cancelled`, unless they have ended.
    pub fn cancel(&self) {
        for id in self.ids.clone() {
            let _ = self.inbox.send(Message::Cancel(RequestId(id)));
        }
    }

    /// The prompt's token ids.
    pub fn prompt_token_ids(&self) -> &Arc<[u32]> {
        &self.prompt
    }

    /// Nanoseconds from the door to the queue: template, tokenizing, checks.
    pub fn tokenize_ns(&self) -> u64 {
        self.tokenize_ns
    }

    /// The engine's clock, for the time a finished answer waits for its reader.
    pub fn now(&self) -> Time {
        self.shared.now()
    }

    /// Tokens that have arrived so far, over all choices.
    pub fn tokens(&self) -> usize {
        self.mailbox.tokens()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.mailbox.finished_within(Duration::ZERO) {
            self.cancel();
        }
    }
}
