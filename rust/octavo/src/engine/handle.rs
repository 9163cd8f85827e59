//! The door: callers of any thread come in here. Everything that one request costs before the engine thread sees it
//! (template, tokenizing, checking) happens on the caller's thread.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::call::{Options, Prompt, SubmitError, check_name};
use super::config::EngineConfig;
use super::mailbox::Mailbox;
use super::origin::Origin;
use super::outlet::Outlet;
use super::session::{Said, Session, Turn};
use super::shared::{CLOSED, EngineStats, Message, Reply, Shared};
use super::ticket::Ticket;
use crate::grammar::{Grammars, Guide};
use crate::kv::CacheExplanation;
use crate::request::{Request, RequestId, SamplingParams, Time, Wanted};
use crate::sample::random;
use crate::schedule::{Forecast, SchedulerConfig, Unseen};
use crate::stages::queue::door::{Ahead, Call};
use crate::stages::queue::limits;
use crate::stages::stream::{StreamParams, TextStream};
use crate::stages::tokenize::{ChatError, ChatTemplate, Encoding, RenderInput, Rendered, Special, Tokenizer};

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

/// A loaded model and the thread that runs it. Shared by any number of callers; dropping it closes it.
pub struct Engine {
    pub(super) shared: Arc<Shared>,
    pub(super) inbox: Sender<Message>,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) next_id: AtomicU64,
    pub(super) limits: SchedulerConfig,
    /// Where the model is, and how it was loaded.
    pub(super) path: PathBuf,
    pub(super) config: EngineConfig,
    pub(super) facts: Facts,
    pub(super) origin: Arc<Origin>,
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

    /// What its answers' bits depend on, besides the request.
    pub fn origin(&self) -> &Arc<Origin> {
        &self.origin
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
    pub fn token_ids(&self, prompt: &Prompt, session: Option<&Session>) -> Result<Vec<u32>, SubmitError> {
        self.read(prompt, session).map(|(ids, _)| ids)
    }

    /// The token ids of a prompt, which go on from what was said in its session as far as they can. And what is said then.
    fn read(&self, prompt: &Prompt, session: Option<&Session>) -> Result<(Vec<u32>, Option<Said>), SubmitError> {
        let rendered;
        let (text, encoding) = match prompt {
            Prompt::Tokens(ids) => (None, Encoding { ids: ids.clone(), offsets: Vec::new() }),
            Prompt::Text(text) if text.len() > self.most_prompt_bytes => {
                // Said before megabytes are tokenized for nothing.
                return Err(SubmitError::Invalid(format!(
                    "the prompt has {} bytes, more than max_model_len ({}) tokens can hold",
                    text.len(),
                    self.limits.max_model_len
                )));
            }
            Prompt::Text(text) => match self.tokenizer.encode(text, Special::Parse, true) {
                Ok(encoding) => (Some(text), without_second_bos(encoding, self.tokenizer.bos())),
                Err(error) => return Err(SubmitError::Invalid(error.to_string())),
            },
            Prompt::Chat(input) => {
                let Rendered { text, encoding } = self.render(input)?;
                rendered = text;
                (Some(&rendered), encoding)
            }
        };
        let ids = match (session, text) {
            (Some(session), Some(text)) => session.transcript.go_on(text, &encoding, &self.tokenizer),
            _ => encoding.ids.clone(),
        };
        let said = session.map(|_| Said::prompt(&ids, text.map(|text| (text.as_str(), &encoding)), &self.tokenizer));
        // A tokenizer may know more tokens than the model has embeddings for.
        match ids.iter().position(|&id| id as usize >= self.facts.vocab) {
            None => Ok((ids, said)),
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
        check_name("user", &options.user)?;
        check_name("cache_salt", &options.cache_salt)?;
        if options.choices == 0 || options.choices > self.limits.max_num_seqs {
            return Err(SubmitError::Invalid(format!(
                "n must be from 1 to max_num_seqs ({}), not {}",
                self.limits.max_num_seqs, options.choices
            )));
        }
        let session = options.session.as_deref();
        if session.is_some() && (options.choices > 1 || options.wanted != Wanted::Tokens) {
            return Err(SubmitError::Invalid(format!(
                "a session goes on with one answer, so n must be 1 in it, not {}",
                options.choices
            )));
        }
        let mut turn = match session.map(|session| session.transcript.begin(&self.tokenizer)) {
            Some(None) => return Err(SubmitError::Invalid(ONE_TURN.into())),
            begun => begun.flatten(),
        };
        let (ids, said) = self.read(prompt, session)?;
        if let Some((turn, said)) = turn.as_mut().zip(said) {
            turn.said = said;
        }
        let ids: Arc<[u32]> = ids.into();
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
        let call = Call { user: options.user.as_str().into(), priority: options.priority, count: options.choices };
        let ahead = self.enter(&call)?;
        let forecast = self.shared.forecast(ids.len(), options.call, &ahead);
        if let Some(error) = self.too_late(&forecast, &options, begun) {
            (0..call.count).for_each(|_| self.shared.door().leave(&call.user, call.priority));
            return Err(error);
        }
        let mut ticket = self.send(ids, params, guides, options, turn, begun);
        ticket.predicted_ttft_ns = forecast.ttft_ns.saturating_add(ticket.tokenize_ns);
        Ok(ticket)
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

    /// Takes a place for each choice, or none. Says who was there before.
    fn enter(&self, call: &Call) -> Result<Ahead, SubmitError> {
        let now = self.shared.now();
        let entered = self.shared.door().enter(&self.limits, call, now);
        entered.map_err(|full| {
            let retry_after_ns = self.shared.place_ns(full.ends);
            self.shared.door().claim(call, now, retry_after_ns);
            let (live, kept, most) = (full.living, full.kept, limits::most_living(&self.limits));
            SubmitError::QueueFull { live, kept, most, retry_after: Duration::from_nanos(retry_after_ns) }
        })
    }

    /// Why a call is not worth taking, if so: the turns before its own take longer than it has.
    fn too_late(&self, forecast: &Forecast, options: &Options, begun: Time) -> Option<SubmitError> {
        let deadline = options.deadline?;
        let spent = self.shared.now().since(begun);
        let wait = Duration::from_nanos(forecast.least_ns.saturating_add(spent));
        let expected = Duration::from_nanos(forecast.ttft_ns.saturating_add(spent)).max(wait);
        let late = forecast.least_ns > 0 && wait > deadline;
        late.then_some(SubmitError::TooLate { deadline, wait, expected })
    }

    fn send(
        &self,
        prompt: Arc<[u32]>,
        params: SamplingParams,
        guides: Vec<Arc<Guide>>,
        options: Options,
        mut turn: Option<Turn>,
        begun: Time,
    ) -> Ticket {
        let first = self.next_id.fetch_add(options.choices as u64, Ordering::Relaxed);
        let cache_salt = self.namespace(&options, first);
        let mailbox = Arc::new(Mailbox::new(options.choices, options.every_token, options.waker));
        let params = Arc::new(params);
        let end_token_ids = if params.ignore_eos { Arc::from([]) } else { self.end_token_ids.clone() };
        let user: Arc<str> = options.user.into();
        let arrived = self.shared.now();
        let deadline = options.deadline.map(|span| {
            let nanoseconds = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
            (span, Time(begun.0.saturating_add(nanoseconds)))
        });
        let named_turn = turn.as_ref().map(|turn| (turn.transcript.clone(), turn.number));
        let call = options.call.unwrap_or(RequestId(first));
        let seeds: Vec<u64> = (0..options.choices).map(|index| self.seed(&params, first, index)).collect();
        for (index, &seed) in seeds.iter().enumerate() {
            let id = RequestId(first + index as u64);
            let request = Request {
                id,
                call,
                prompt: prompt.clone(),
                params: params.clone(),
                wanted: options.wanted,
                seed,
                end_token_ids: end_token_ids.clone(),
                guide: guides.get(index).cloned(),
                priority: options.priority,
                deadline: deadline.map(|(_, at)| at),
                cache_salt: cache_salt.clone(),
                session: options.session.as_ref().map(|session| session.id()),
                user: user.clone(),
                arrived,
            };
            let text = TextStream::new(self.tokenizer.clone(), stream_params(&params));
            let outlet = Outlet::new(&request, text, mailbox.clone(), index, turn.take(), self.shared.clone());
            self.shared.send(Unseen::of(&request, &self.limits));
            let more = options.more || index + 1 < options.choices;
            // A closed inbox drops the message, and the outlet in it ends the choice.
            let _ = self.inbox.send(Message::Submit { request: Box::new(request), outlet: Box::new(outlet), more });
        }
        let most_tokens = params.max_tokens.min(limits::longest(&self.limits).saturating_sub(prompt.len()));
        Ticket {
            mailbox,
            inbox: self.inbox.clone(),
            ids: first..first + options.choices as u64,
            call,
            prompt,
            params,
            seeds,
            tokenize_ns: arrived.since(begun),
            predicted_ttft_ns: 0,
            wanted: options.wanted,
            user,
            priority: options.priority,
            most_tokens,
            arrived,
            deadline,
            turn: named_turn,
            shared: self.shared.clone(),
        }
    }

    /// Who may share blocks with a call. Without prefix caching only its own choices, and scores of one namespace.
    fn namespace(&self, options: &Options, first: u64) -> Option<Arc<str>> {
        let salt = options.session.as_ref().map_or(options.cache_salt.as_str(), |session| session.cache_salt());
        if !options.shares_prefixes {
            return None;
        }
        match (self.config.enable_prefix_caching, options.wanted, options.choices) {
            (true, ..) => Some(salt.into()),
            (false, Wanted::Scores { .. }, _) => Some(format!("scores\0{salt}").into()),
            (false, _, 1) => None,
            (false, ..) => Some(format!("choices\0{first}").into()),
        }
    }

    /// A request's own seed; the first choice of a seeded call keeps the call's, so that `n` does not change it.
    fn seed(&self, params: &SamplingParams, first: u64, index: usize) -> u64 {
        let call = params.seed.unwrap_or_else(|| random::mix(self.config.seed, first));
        if index == 0 { call } else { random::mix(call, index as u64) }
    }

    /// Its clock.
    pub fn now(&self) -> Time {
        self.shared.now()
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
    pub fn stats(&self) -> Result<Reply<EngineStats>, SubmitError> {
        self.ask(Message::Stats)
    }

    /// Asks what a prompt would find in the cache, and why not more. Only what is in its own namespace enters.
    pub fn explain(
        &self,
        prompt: Vec<u32>,
        cache_salt: &str,
        session: Option<&Session>,
    ) -> Result<Reply<CacheExplanation>, SubmitError> {
        check_name("cache_salt", cache_salt)?;
        let salt = session.map_or(cache_salt, Session::cache_salt);
        let salt = self.config.enable_prefix_caching.then(|| salt.into());
        self.ask(|answer| Message::Explain(prompt, salt, session.map(Session::id), answer))
    }

    fn ask<T>(&self, question: impl FnOnce(SyncSender<T>) -> Message) -> Result<Reply<T>, SubmitError> {
        self.shared.open()?;
        let (answer, reply) = sync_channel(1);
        // A closed inbox drops the message, and the reply says so.
        let _ = self.inbox.send(question(answer));
        Ok(Reply { reply, shared: self.shared.clone() })
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

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

/// A text that already begins with BOS (a rendered template, say) gets no second one.
fn without_second_bos(mut encoding: Encoding, bos: Option<u32>) -> Encoding {
    let Encoding { ids, offsets } = &mut encoding;
    if bos.is_some() && ids.len() > 1 && [ids[0], ids[1]].map(Some) == [bos; 2] {
        ids.remove(0);
        offsets.remove(0);
    }
    encoding
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

const ONE_TURN: &str = "the session's last turn is still running: a conversation has one turn at a time";

const NO_TEMPLATE: &str =
    "this model has no chat template; give one as chat_template, or the prompt as text or token ids";
