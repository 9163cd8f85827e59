//! Conducts queue → prefill → decode, one batch per step.
//!
//! A pure state machine: it takes commands and the time and gives a batch; it takes what the batch gave and gives events.
//! A whole day can be played in a second, and any failure replayed from its seed. One step takes time in the number of
//! running sequences, whatever the size of the pool and the length of the queue.
//!
//! ```text
//! apply(command)*  →  schedule() → batch  →  (executor)  →  commit(batch, output)  →  next_event()*
//! ```
//! Commands may also come between `schedule` and `commit`. What ends while it is in the step under way gives its blocks
//! back at the commit: until then the executor may write them.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

use octavo_kernels::BlockCopy;

use crate::execute::{Batch, EntryOutput, StepOutput};
use crate::kv::{CacheExplanation, KvCache, MissReason, SessionReport, Sessions};
use crate::observe::events::{EngineEvent, Notes};
use crate::observe::meter::QueueReason;
use crate::request::{Finish, Request, RequestId, SessionId, StopReason, Time, Wanted};
use crate::sequence::Sequence;
use crate::stages::queue::limits;
use crate::stages::queue::waiting::{Order, Waiting};
use crate::stages::{decode, prefill};

mod assemble;
mod interface;
mod pace;
mod step;

pub use interface::{Command, Event, SchedulerConfig, SchedulerStats};
use pace::Pace;
pub use step::Step;

/// Decides what runs when.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    queue: Waiting,
    /// In order: the first is the last to lose its blocks.
    running: Vec<Sequence>,
    kv: KvCache,
    sessions: Sessions,
    /// Where each living request stands in line; it is in the queue or running.
    orders: HashMap<RequestId, Order>,
    events: VecDeque<Event>,
    /// The latest time it was told; time never goes back.
    now: Time,
    arrivals: u64,
    in_flight: Option<Flight>,
    pace: Pace,
    closed: bool,
    /// An empty batch, for its memory.
    spare: Batch,
    /// What becomes of requests, for whoever wants to know.
    notes: Notes,
    totals: SchedulerStats,
}

/// The step under way.
#[derive(Clone, Copy, Debug)]
struct Flight {
    since: Time,
    /// Sequences that get one more token.
    decoding: usize,
    /// Rows of prompts.
    prompt_rows: usize,
}

impl Scheduler {
    /// The error names the setting that cannot be.
    pub fn new(config: SchedulerConfig) -> Result<Self, String> {
        config.validate()?;
        Ok(Self {
            queue: Waiting::default(),
            running: Vec::new(),
            kv: KvCache::new(config.blocks, config.layout.clone()),
            sessions: Sessions::default(),
            orders: HashMap::new(),
            events: VecDeque::new(),
            now: Time(0),
            arrivals: 0,
            in_flight: None,
            pace: Pace::new(config.itl_target_ns),
            closed: false,
            spare: Batch::default(),
            notes: Notes::default(),
            totals: SchedulerStats::default(),
            config,
        })
    }

    /// Does as told. Whatever it has to say about it is an event; a command about a request that has ended says nothing.
    pub fn apply(&mut self, command: Command, now: Time) {
        let now = self.at(now);
        self.sessions.expire(&mut self.kv, now);
        match command {
            Command::Submit(request) => self.submit(request, now),
            Command::Cancel(id) => self.end(id, Finish::Cancelled, now),
            Command::StopString { id, text } => self.end(id, Finish::Stop(StopReason::StopString(text)), now),
            Command::OpenSession { id, ttl_ns } => self.sessions.open(id, ttl_ns),
            Command::CloseSession(id) => self.sessions.close(id, &mut self.kv, now),
        }
    }

    /// Plans one step. `None`: nobody lives, and nothing is to be computed until a command comes.
    ///
    /// The order is the policy: who speaks keeps speaking; the oldest half-read prompt gets on; short prompts may overtake
    /// it; what is left goes to half-read prompts and then to whoever is next.
    pub fn schedule(&mut self, now: Time) -> Option<Batch> {
        assert!(self.in_flight.is_none(), "one step at a time");
        let now = self.at(now);
        self.end_expired(now);
        self.sessions.expire(&mut self.kv, now);
        let mut step = Step {
            now,
            rows_left: self.config.max_num_batched_tokens,
            max_num_seqs: self.config.max_num_seqs,
            queue: &mut self.queue,
            running: &mut self.running,
            kv: &mut self.kv,
            sessions: &mut self.sessions,
            preemptions: 0,
            tokens_cached: 0,
            copies: Vec::new(),
            notes: &mut self.notes,
        };
        decode::advance(&mut step);
        let decoding = self.config.max_num_batched_tokens - step.rows_left;
        step.rows_left = step.rows_left.min(self.pace.prompt_rows(decoding));
        prefill::read_oldest(&mut step);
        let mut reason = prefill::admit(&mut step, prefill::Rule::Whole);
        prefill::read_on(&mut step);
        if reason == Some(QueueReason::Budget) {
            reason = prefill::admit(&mut step, prefill::Rule::Part);
        }
        step.queue.clock.because(reason.unwrap_or_default(), now);
        self.totals.preemptions += step.preemptions;
        self.totals.tokens_cached += step.tokens_cached;
        let copies = step.copies;
        self.assemble(decoding, copies, now)
    }

    fn assemble(&mut self, decoding: usize, copies: Vec<BlockCopy>, now: Time) -> Option<Batch> {
        let mut batch = std::mem::take(&mut self.spare);
        batch.copies = copies;
        batch.step = self.totals.steps;
        assemble::assemble(&mut batch, &mut self.running, &self.config.layout, now);
        if batch.rows() == 0 {
            assert!(self.orders.is_empty(), "somebody could run and nobody does");
            self.spare = batch;
            return None;
        }
        self.in_flight = Some(Flight { since: now, decoding, prompt_rows: batch.rows() - decoding });
        Some(batch)
    }

    /// Takes what the batch gave: counters advance, full blocks become findable, tokens go out, sequences end.
    pub fn commit(&mut self, mut batch: Batch, output: StepOutput, now: Time) {
        let flight = self.in_flight.take().expect("nothing was scheduled");
        assert_eq!(batch.step, self.totals.steps, "the batch of another step");
        assert_eq!(batch.entries.len(), output.entries.len(), "one output for each entry");
        let now = self.at(now);
        self.pace.observe(flight.decoding, flight.prompt_rows, now.since(flight.since));
        let (rows, mut outputs) = (batch.rows(), output.entries);
        // The entries share the sequences' histories; those can only grow in place once the batch lets go of them.
        batch.clear();
        self.spare = batch;
        self.totals.steps += 1;
        self.totals.tokens_computed += rows as u64;
        let sequences = outputs.len();
        let mut running = std::mem::take(&mut self.running);
        for sequence in running.iter_mut().filter(|sequence| sequence.planned > 0) {
            let output = std::mem::take(&mut outputs[sequence.entry]);
            let gave_rows = sequence.gives_rows();
            sequence.advance(sequences);
            sequence.give_back_borrowed(&mut self.kv, now);
            if sequence.shares() {
                sequence.publish(&mut self.kv);
            }
            let outside = self.kv.give_back_outside(&mut sequence.table, sequence.computed, now);
            sequence.record.block_ns += outside;
            if sequence.ending.is_none() {
                self.give(sequence, output, gave_rows, now);
            }
            sequence.meter.enter(sequence.activity(false), now);
        }
        self.running = running;
        self.end_ending(now);
    }

    /// Hands out what the executor gave for a sequence, and notes whether it has ended.
    fn give(&mut self, sequence: &mut Sequence, output: EntryOutput, gave_rows: bool, now: Time) {
        let id = sequence.request.id;
        if let Some(Err(why)) = output.drawn {
            // Also of a chunk that was to draw nothing: its rows are no numbers, and none of them is given out.
            sequence.ending = Some(Finish::Error(why));
            return;
        }
        if gave_rows {
            sequence.rows_given = sequence.computed.min(sequence.request.prompt.len());
        }
        if !output.prompt_logprobs.is_empty() {
            self.events.push_back(Event::PromptLogprobs { id, logprobs: output.prompt_logprobs });
        }
        if !output.logits.is_empty() {
            self.events.push_back(Event::Logits { id, logits: output.logits });
        }
        if sequence.unread() > 0 {
            return;
        }
        if output.complete {
            sequence.ending = Some(Finish::Stop(StopReason::Complete));
            return;
        }
        if sequence.request.wanted == Wanted::Tokens {
            let Some(Ok(drawn)) = output.drawn else { unreachable!("a token was to be drawn") };
            sequence.push(drawn.token_id, now);
            self.totals.tokens_generated += 1;
            if sequence.generated.len() == 1 {
                self.notes.push(|| EngineEvent::FirstToken { id });
            }
            self.events.push_back(Event::Token { id, drawn });
        }
        if sequence.ending.is_none() {
            sequence.ending = decode::finish(sequence);
        }
    }

    fn submit(&mut self, request: Box<Request>, now: Time) {
        let id = request.id;
        assert!(!self.orders.contains_key(&id), "{id} was submitted twice");
        if let Some(session) = request.session {
            self.sessions.touch(session, now);
        }
        let order = Order { priority: Reverse(request.priority), arrival: self.arrivals };
        self.arrivals += 1;
        let refused = if self.closed {
            Some(Finish::Error(CLOSED.into()))
        } else {
            limits::refusal(&self.config, &request, self.orders.len()).map(Finish::Rejected)
        };
        let most_new_tokens = limits::most_new_tokens(&self.config, &request);
        let table = self.kv.table();
        let sequence = Sequence::new(request, order, most_new_tokens, table, now, &self.queue.clock);
        self.orders.insert(id, order);
        self.notes.push(|| {
            let Request { user, prompt, .. } = &*sequence.request;
            EngineEvent::Queued { id, user: user.clone(), prompt_tokens: prompt.len() }
        });
        match refused {
            None => self.queue.push(sequence),
            Some(finish) => self.finish(sequence, finish, now),
        }
    }

    /// Ends a request: at once, or with the step under way if it is in it. One that has ended stays as it is.
    fn end(&mut self, id: RequestId, finish: Finish, now: Time) {
        let Some(&order) = self.orders.get(&id) else { return };
        if let Some(sequence) = self.queue.remove(order) {
            return self.finish(sequence, finish, now);
        }
        let found = self.running.binary_search_by_key(&order, |sequence| sequence.order);
        let index = found.expect("a living request waits or runs");
        if self.running[index].planned > 0 {
            self.running[index].ending.get_or_insert(finish);
        } else {
            let sequence = self.running.remove(index);
            self.finish(sequence, finish, now);
        }
    }

    /// Ends whatever nobody waits for any more. In the queue, it never ran.
    fn end_expired(&mut self, now: Time) {
        while let Some(sequence) = self.queue.pop_expired(now) {
            self.finish(sequence, Finish::Deadline, now);
        }
        let expired = |sequence: &&mut Sequence| sequence.request.deadline.is_some_and(|deadline| deadline <= now);
        self.running.iter_mut().filter(expired).for_each(|sequence| sequence.ending = Some(Finish::Deadline));
        self.end_ending(now);
    }

    fn end_ending(&mut self, now: Time) {
        let ending: Vec<_> = self.running.extract_if(.., |sequence| sequence.ending.is_some()).collect();
        for mut sequence in ending {
            if let Some(finish) = sequence.ending.take() {
                self.finish(sequence, finish, now);
            }
        }
    }

    /// The one place where a request ends.
    fn finish(&mut self, mut sequence: Sequence, finish: Finish, now: Time) {
        match sequence.request.session {
            Some(id) if matches!(finish, Finish::Error(_)) || sequence.computed == 0 => self.sessions.lose(id, now),
            Some(id) => sequence.leave_to(id, &mut self.sessions, &mut self.kv, now),
            None => {}
        }
        sequence.release(&mut self.kv, now);
        let id = sequence.request.id;
        let record = Box::new(sequence.close(now, &self.queue.clock));
        self.orders.remove(&id);
        self.totals.finished += 1;
        self.notes.push(|| EngineEvent::Finished {
            id,
            finish_reason: finish.name(),
            completion_tokens: record.completion_tokens,
        });
        self.events.push_back(Event::Finished { id, finish, record });
    }

    /// The executor is gone, and the step under way with it: everything ends with this error.
    pub fn fail_all(&mut self, message: &str, now: Time) {
        let now = self.at(now);
        self.in_flight = None;
        self.closed = true;
        let waiting = std::iter::from_fn(|| self.queue.pop());
        let living: Vec<_> = self.running.drain(..).chain(waiting).collect();
        for sequence in living {
            self.finish(sequence, Finish::Error(message.to_owned()), now);
        }
    }

    /// The next thing it has to say. Whoever drives it asks until there is nothing more, after every call.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Notes from now on what happens, or no longer.
    pub fn watch(&mut self, on: bool) {
        self.notes.watch(on);
        self.kv.notes.watch(on);
    }

    /// Whether it does.
    pub fn is_watched(&self) -> bool {
        self.notes.are_watched()
    }

    /// What has happened since the last time: first to blocks, then to requests.
    pub fn take_notes(&mut self) -> impl Iterator<Item = EngineEvent> {
        self.kv.notes.drain().chain(self.notes.drain())
    }

    /// As it was made, but for its counts: nothing is remembered, of prompts or of the time that steps take. Says no while
    /// somebody lives, or a session is open.
    #[must_use]
    pub fn start_over(&mut self) -> bool {
        if !(self.orders.is_empty() && self.sessions.is_empty()) {
            return false;
        }
        let fresh = Self::new(self.config.clone()).expect("the settings were possible before");
        let (events, notes) = (std::mem::take(&mut self.events), std::mem::take(&mut self.notes));
        *self = Self { now: self.now, totals: self.totals, events, notes, ..fresh };
        self.watch(self.is_watched());
        self.kv.notes.push(|| EngineEvent::AllBlocksCleared);
        true
    }

    /// When a session's blocks are due to be given up, if nobody goes on with it.
    pub fn next_expiry(&self) -> Option<Time> {
        self.sessions.next_expiry()
    }

    /// A session as it stands; `None`: it is closed.
    pub fn session(&mut self, id: SessionId, now: Time) -> Option<SessionReport> {
        let now = self.at(now);
        self.sessions.report(id, &mut self.kv, now)
    }

    /// How much of a prompt would be found in a namespace, or in what a session keeps, and why not more.
    pub fn explain(&self, prompt: &[u32], cache_salt: Option<&str>, session: Option<SessionId>) -> CacheExplanation {
        let last = prompt.len().saturating_sub(1);
        let pin = session.and_then(|id| self.sessions.pin(id)).filter(|pin| {
            pin.cache_salt.as_deref() == cache_salt && pin.common(prompt[..last].iter().copied()) == pin.tokens.len()
        });
        let (found, reason) = match cache_salt {
            Some(salt) => self.kv.explain(prompt, salt),
            None => (0, MissReason::Disabled),
        };
        let (cached_tokens, reason) = match pin {
            // Nobody can have seen what is new in a turn.
            Some(pin) if pin.tokens.len() >= found && pin.tokens.len() < last => {
                (pin.tokens.len(), MissReason::NeverSeen)
            }
            Some(pin) if pin.tokens.len() >= found => (last, MissReason::Complete),
            _ => (found, reason),
        };
        let lost = (last - cached_tokens) as f64;
        let lost_ns = self.pace.prompt_row_ns().map(|ns| (lost * ns) as u64);
        CacheExplanation { prompt_tokens: prompt.len(), cached_tokens, reason, lost_ns }
    }

    /// Counts.
    pub fn stats(&self) -> SchedulerStats {
        let pool = self.kv.pool();
        SchedulerStats {
            running: self.running.len(),
            waiting: self.queue.len(),
            blocks: pool.len(),
            blocks_free: pool.free(),
            blocks_remembered: pool.idle(),
            blocks_owned: pool.owned(),
            blocks_pinned: self.sessions.pinned(),
            sessions: self.sessions.len(),
            ..self.totals
        }
    }

    /// Block-nanoseconds that sessions have held blocks between turns.
    pub fn session_block_ns(&mut self, now: Time) -> u128 {
        let now = self.at(now);
        self.sessions.rent_block_ns(&mut self.kv, now)
    }

    /// Block-nanoseconds owned so far: the sum of the rents of all requests and sessions, once all requests have ended.
    pub fn owned_block_ns(&mut self, now: Time) -> u128 {
        let now = self.at(now);
        self.kv.owned_ns(now)
    }

    fn at(&mut self, now: Time) -> Time {
        self.now = self.now.max(now);
        self.now
    }

    /// Asserts everything that is always true. Walks the pool and the queue: for tests.
    pub fn check(&self) {
        self.queue.check();
        let borrowed = self.running.iter().flat_map(|sequence| sequence.borrowed.iter().map(|&(block, _)| block));
        let tables = self.running.iter().map(|sequence| &sequence.table).chain(self.sessions.tables());
        self.kv.check(tables, borrowed);
        self.sessions.check(&self.kv);
        assert!(self.running.is_sorted_by_key(|sequence| sequence.order), "running sequences are in order");
        assert!(self.running.len() <= self.config.max_num_seqs, "more run than may");
        assert_eq!(self.orders.len(), self.running.len() + self.queue.len(), "every living request is somewhere");
        let announced = self.running.iter().map(Sequence::announcements);
        assert_eq!(self.kv.announcements(), announced.sum::<usize>(), "announced by somebody who runs");
        for sequence in &self.running {
            self.check_running(sequence);
        }
    }

    fn check_running(&self, sequence: &Sequence) {
        let id = sequence.request.id;
        assert_eq!(self.orders.get(&id), Some(&sequence.order), "{id}");
        assert!(self.in_flight.is_some() || sequence.planned == 0, "{id}: planned rows without a step");
        assert!(self.in_flight.is_some() || sequence.ending.is_none(), "{id}: should have ended");
        let end = sequence.computed + sequence.planned;
        assert!(end <= sequence.known(), "{id}: runs tokens that nobody knows");
        let layout = &self.config.layout;
        assert_eq!(sequence.table.len(), layout.entries(end), "{id}: as many blocks as it needs");
        assert!(sequence.known() <= limits::longest(&self.config), "{id}: longer than may be");
        let full = sequence.computed / layout.block_size;
        assert!(
            self.in_flight.is_some() || !sequence.shares() || sequence.published == full,
            "{id}: blocks nobody can find"
        );
        for (group, &window) in layout.windows.iter().enumerate() {
            let outside = layout.outside(window, sequence.computed);
            assert_eq!(sequence.table.outside(group), outside, "{id}: holds what its window shows, and no more");
            for (index, &block) in sequence.table.blocks(group).iter().enumerate().skip(full) {
                // Where its stem ends it writes behind what others know, and perhaps copy just now.
                if index != sequence.stem() / layout.block_size && sequence.inherited != Some(index) {
                    assert_eq!(self.kv.pool().owners(block), 1, "{id}: would write a shared block");
                    assert!(!self.kv.pool().is_remembered(block), "{id}: would write a remembered block");
                }
            }
        }
        let most = layout.blocks_for(sequence.known());
        assert!(self.in_flight.is_some() || sequence.table.held() <= most, "{id}: holds more than it ever needs");
    }
}

const CLOSED: &str = "the engine has been closed";
