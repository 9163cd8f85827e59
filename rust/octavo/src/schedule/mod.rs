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

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use octavo_kernels::BlockCopy;

use crate::execute::{Batch, EntryOutput, StepOutput};
use crate::kv::{KvCache, Sessions};
use crate::observe::events::{EngineEvent, Notes};
use crate::observe::meter::QueueReason;
use crate::request::{Finish, Request, RequestId, StopReason, Time, Wanted};
use crate::sequence::Sequence;
use crate::stages::queue::limits;
use crate::stages::queue::waiting::Waiting;
use crate::stages::{decode, prefill};

mod assemble;
mod ask;
mod check;
mod forecast;
mod interface;
mod pace;
mod running;
mod step;

use forecast::Habits;
pub use forecast::{Forecast, Load, Unseen};
pub use interface::{Command, Event, SchedulerConfig, SchedulerStats};
use pace::{Pace, PromptRows};
pub use running::Running;
pub use step::Step;

/// Decides what runs when.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    queue: Waiting,
    running: Running,
    kv: KvCache,
    sessions: Sessions,
    /// Of all that live.
    deadlines: BTreeSet<(Time, RequestId)>,
    /// Requests that live of each call.
    calls: BTreeMap<RequestId, usize>,
    events: VecDeque<Event>,
    /// The latest time it was told; time never goes back.
    now: Time,
    arrivals: u64,
    in_flight: Option<Flight>,
    pace: Pace,
    habits: Habits,
    /// Tokens of half-read prompts that are still to be computed: of all, and of users who give way to others.
    half_read_tokens: [usize; 2],
    /// When the latest step was over.
    committed: Time,
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
    prompt_rows: PromptRows,
    /// Whether it was planned to keep to the target.
    paced: bool,
    /// Requests that had ended before.
    finished: u64,
}

impl Scheduler {
    /// The error names the setting that cannot be.
    pub fn new(config: SchedulerConfig) -> Result<Self, String> {
        config.validate()?;
        Ok(Self {
            queue: Waiting::default(),
            running: Running::default(),
            kv: KvCache::new(config.blocks, config.layout.clone()),
            sessions: Sessions::default(),
            deadlines: BTreeSet::new(),
            calls: BTreeMap::new(),
            events: VecDeque::new(),
            now: Time(0),
            arrivals: 0,
            in_flight: None,
            pace: Pace::new(config.itl_target_ns),
            habits: Habits::default(),
            half_read_tokens: [0; 2],
            committed: Time(0),
            closed: false,
            spare: Batch::default(),
            notes: Notes::default(),
            totals: SchedulerStats::default(),
            config,
        })
    }

    /// Its bounds.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// A step takes about as long, as far as can be told before one has run: for what callers are told until then.
    pub fn guess_step_ns(&mut self, ns: f64) {
        self.pace.guess(ns);
    }

    /// Does as told. Whatever it has to say about it is an event; a command about a request that has ended says nothing.
    pub fn apply(&mut self, command: Command, now: Time) {
        let now = self.at(now);
        self.sessions.expire(&mut self.kv, now);
        match command {
            Command::Submit(request) => self.submit(request, now),
            Command::Cancel(id) => self.cancel(id, now),
            Command::StopString { id, text } => self.end(id, Finish::Stop(StopReason::StopString(text)), now),
            Command::OpenSession { id, ttl_ns } => self.sessions.open(id, ttl_ns),
            Command::CloseSession(id) => self.sessions.close(id, &mut self.kv, now),
        }
        self.reckon_pins();
    }

    /// Plans one step. `None`: nobody lives, and nothing is to be computed until a command comes.
    ///
    /// The order is the policy: who speaks keeps speaking; the oldest half-read prompt gets on; short prompts may overtake
    /// it, and others that have a better claim begin beside it; what is left goes to half-read prompts and then to whoever is
    /// next.
    pub fn schedule(&mut self, now: Time) -> Option<Batch> {
        assert!(self.in_flight.is_none(), "one step at a time");
        let now = self.at(now);
        self.end_expired(now);
        self.sessions.expire(&mut self.kv, now);
        let mut step = Step {
            now,
            rows_left: self.config.max_num_batched_tokens,
            prompt_ns_left: f64::INFINITY,
            prompt_rows: PromptRows::default(),
            pace: &self.pace,
            max_num_seqs: self.config.max_num_seqs,
            queue: &mut self.queue,
            running: &mut self.running,
            kv: &mut self.kv,
            sessions: &mut self.sessions,
            half_read: 0,
            promised: 0,
            preemptions: 0,
            tokens_admitted: 0,
            tokens_cached: 0,
            copies: Vec::new(),
            notes: &mut self.notes,
            events: &mut self.events,
        };
        decode::advance(&mut step);
        let decoding = self.config.max_num_batched_tokens - step.rows_left;
        // The target is about others' prompts. A list's own are no others': they hold nobody up who has not asked for them.
        let paced = self.calls.len() > 1;
        step.prompt_ns_left = match step.running.len() + step.queue.len() {
            _ if paced => self.pace.prompt_ns(decoding),
            0 | 1 => f64::INFINITY,
            _ => self.pace.own_prompt_ns(decoding),
        };
        prefill::read_oldest(&mut step);
        let mut reason = prefill::admit(&mut step, prefill::Rule::Whole);
        if reason == Some(QueueReason::Budget) {
            reason = prefill::admit(&mut step, prefill::Rule::Beside);
        }
        prefill::read_on(&mut step);
        if reason == Some(QueueReason::Budget) {
            reason = prefill::admit(&mut step, prefill::Rule::Part);
        }
        prefill::unblock(&mut step);
        step.queue.clock.because(reason.unwrap_or_default(), now);
        self.totals.preemptions += step.preemptions;
        self.totals.tokens_cached += step.tokens_cached;
        self.half_read_tokens = prefill::unread(&mut step);
        self.habits.admitted(step.tokens_admitted, step.tokens_cached);
        let (copies, prompt_rows) = (step.copies, step.prompt_rows);
        self.reckon_pins();
        let flight = Flight { since: now, decoding, prompt_rows, paced, finished: self.totals.finished };
        self.assemble(flight, copies)
    }

    fn assemble(&mut self, flight: Flight, copies: Vec<BlockCopy>) -> Option<Batch> {
        let mut batch = std::mem::take(&mut self.spare);
        batch.copies = copies;
        batch.step = self.totals.steps;
        assemble::assemble(&mut batch, &mut self.running, &self.config.layout, flight.since);
        if batch.rows() == 0 {
            assert_eq!(self.living(), 0, "somebody could run and nobody does");
            self.spare = batch;
            return None;
        }
        self.in_flight = Some(flight);
        Some(batch)
    }

    /// Takes what the batch gave: counters advance, full blocks become findable, tokens go out, sequences end.
    pub fn commit(&mut self, mut batch: Batch, output: StepOutput, now: Time) {
        let flight = self.in_flight.take().expect("nothing was scheduled");
        self.running.prefetch();
        assert_eq!(batch.step, self.totals.steps, "the batch of another step");
        assert_eq!(batch.entries.len(), output.entries.len(), "one output for each entry");
        let now = self.at(now);
        // Whoever decodes got a token with the step before: what it waits for is also what happens between two steps.
        let since = if flight.decoding > 0 { self.committed } else { flight.since };
        let step_ns = now.since(since);
        self.pace.observe(flight.decoding, &flight.prompt_rows, flight.paced, step_ns);
        self.committed = now;
        let crowded = self.running.len() >= self.config.max_num_seqs || !self.queue.is_empty();
        let (rows, outputs) = (batch.rows(), output.entries);
        // The entries share the sequences' histories; those can only grow in place once the batch lets go of them.
        batch.clear();
        self.spare = batch;
        self.totals.steps += 1;
        self.queue.users.step();
        self.totals.tokens_computed += rows as u64;
        let sequences = outputs.len();
        let generated = self.totals.tokens_generated;
        let Self { running, kv, events, totals, notes, .. } = self;
        // In the batch's order: whoever is in it kept its place, whatever came meanwhile.
        for (sequence, output) in running.iter_mut().filter(|sequence| sequence.planned > 0).zip(outputs) {
            let gave_rows = sequence.gives_rows();
            sequence.advance(sequences, now);
            sequence.give_back_borrowed(kv, now);
            if sequence.shares() {
                sequence.publish(kv);
            }
            sequence.record.block_ns += kv.give_back_outside(&mut sequence.table, sequence.computed, now);
            if sequence.ending.is_none() {
                let before = sequence.generated.len();
                give(events, sequence, output, gave_rows, now);
                totals.tokens_generated += (sequence.generated.len() - before) as u64;
                if before == 0 && !sequence.generated.is_empty() {
                    notes.push(|| EngineEvent::FirstToken { id: sequence.request.id });
                }
            }
            sequence.meter.enter(sequence.activity(false), now);
        }
        self.habits.step(step_ns, flight.decoding, self.totals.tokens_generated - generated);
        self.end_ending(now);
        if crowded {
            let ends = (self.totals.finished - flight.finished) as usize;
            self.habits.crowded_step(step_ns, ends, self.config.max_num_seqs);
        }
    }

    fn submit(&mut self, request: Box<Request>, now: Time) {
        let id = request.id;
        let lives = self.queue.get(id).is_some() || self.running.position(id).is_some();
        assert!(!lives, "{id} was submitted twice");
        self.arrivals += 1;
        let refused = if self.closed {
            Some(Finish::Error(CLOSED.into()))
        } else {
            let retry_after_ns = || self.load().place_ns(1, &Unseen::default(), now);
            limits::refusal(&self.config, &request, self.living(), retry_after_ns).map(Finish::Rejected)
        };
        let most_new_tokens = limits::most_new_tokens(&self.config, &request);
        let table = self.kv.table();
        let user = self.queue.users.enter(&request.user);
        if let Some(session) = request.session {
            self.sessions.touch(session, now);
        }
        self.deadlines.extend(request.deadline.map(|deadline| (deadline, id)));
        *self.calls.entry(request.call).or_default() += 1;
        let sequence =
            Box::new(Sequence::new(request, (user, self.arrivals), most_new_tokens, table, now, &self.queue.clock));
        self.notes.push(|| {
            let Request { user, prompt, .. } = &*sequence.request;
            EngineEvent::Queued { id, user: user.clone(), prompt_tokens: prompt.len() }
        });
        match refused {
            None => self.queue.push(sequence, now),
            Some(finish) => self.finish(sequence, finish, now),
        }
    }

    /// Ends a request: at once, or with the step under way if it is in it. One that has ended stays as it is.
    fn end(&mut self, id: RequestId, finish: Finish, now: Time) {
        if let Some(sequence) = self.queue.remove(id) {
            return self.finish(sequence, finish, now);
        }
        let Some(index) = self.running.position(id) else { return };
        if self.running[index].planned > 0 {
            self.running[index].ending.get_or_insert(finish);
        } else {
            let sequence = self.running.remove(index);
            self.finish(sequence, finish, now);
        }
    }

    /// Ends one that was given up. If its deadline has passed, that was first.
    fn cancel(&mut self, id: RequestId, now: Time) {
        let running = self.running.position(id).map(|index| &*self.running[index]);
        let sequence = running.or_else(|| self.queue.get(id));
        let is_late = sequence.and_then(|sequence| sequence.request.deadline).is_some_and(|deadline| deadline <= now);
        self.end(id, if is_late { Finish::Deadline } else { Finish::Cancelled }, now);
    }

    /// Ends whatever nobody waits for any more. In the queue, it never ran.
    fn end_expired(&mut self, now: Time) {
        while let Some(&(deadline, id)) = self.deadlines.first()
            && deadline <= now
        {
            self.end(id, Finish::Deadline, now);
        }
    }

    fn end_ending(&mut self, now: Time) {
        for mut sequence in self.running.take_ending() {
            if let Some(finish) = sequence.ending.take() {
                self.finish(sequence, finish, now);
            }
        }
    }

    /// The one place where a request ends.
    fn finish(&mut self, mut sequence: Box<Sequence>, finish: Finish, now: Time) {
        sequence.mark_blocks(&mut self.kv);
        match sequence.request.session {
            Some(id) if matches!(finish, Finish::Error(_)) || sequence.computed == 0 => {
                self.sessions.lose(id, &mut self.kv, now)
            }
            Some(id) => sequence.leave_to(id, &mut self.sessions, &mut self.kv, now),
            None => {}
        }
        // Before its user may be forgotten.
        self.reckon_pins();
        sequence.release(&mut self.kv, now);
        let id = sequence.request.id;
        if let Some(deadline) = sequence.request.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        if let Entry::Occupied(mut living) = self.calls.entry(sequence.request.call) {
            *living.get_mut() -= 1;
            if *living.get() == 0 {
                living.remove();
            }
        }
        self.queue.leave(sequence.user);
        if !sequence.generated.is_empty() {
            self.habits.answered(sequence.generated.len() < sequence.most_new_tokens);
        }
        let record = Box::new(sequence.close(now, &self.queue.clock));
        self.totals.finished += 1;
        self.notes.push(|| EngineEvent::Finished {
            id,
            finish_reason: finish.name(),
            completion_tokens: record.completion_tokens,
        });
        self.events.push_back(Event::Finished { id, finish, record });
    }

    /// What is held for conversations is held for their users. A step ends only when all of that is told, so it does not
    /// matter when within one.
    fn reckon_pins(&mut self) {
        for (user, blocks) in self.sessions.take_held() {
            self.queue.users.hold(user, blocks);
        }
    }

    /// The executor is gone, and the step under way with it: everything ends with this error.
    pub fn fail_all(&mut self, message: &str, now: Time) {
        let now = self.at(now);
        self.in_flight = None;
        self.closed = true;
        let waiting = std::iter::from_fn(|| self.queue.pop());
        let living: Vec<_> = self.running.take_all().into_iter().chain(waiting).collect();
        for sequence in living {
            self.finish(sequence, Finish::Error(message.to_owned()), now);
        }
    }

    /// The next thing it has to say. Whoever drives it asks until there is nothing more, after every call.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The tokens among what it will say next.
    pub fn next_tokens(&self) -> impl Iterator<Item = (RequestId, u32)> {
        self.events.iter().filter_map(|event| match event {
            Event::Token { id, drawn } => Some((*id, drawn.token_id)),
            _ => None,
        })
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
        if self.living() > 0 || !self.sessions.is_empty() {
            return false;
        }
        let fresh = Self::new(self.config.clone()).expect("the settings were possible before");
        let (events, notes) = (std::mem::take(&mut self.events), std::mem::take(&mut self.notes));
        let pace = self.pace.forgotten();
        *self = Self { now: self.now, totals: self.totals, events, notes, pace, ..fresh };
        self.watch(self.is_watched());
        self.kv.notes.push(|| EngineEvent::AllBlocksCleared);
        true
    }

    /// Requests that run or wait.
    fn living(&self) -> usize {
        self.running.len() + self.queue.len()
    }

    fn at(&mut self, now: Time) -> Time {
        self.now = self.now.max(now);
        self.now
    }
}

/// Hands out what the executor gave for a sequence, and notes whether it has ended.
fn give(events: &mut VecDeque<Event>, sequence: &mut Sequence, output: EntryOutput, gave_rows: bool, now: Time) {
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
        events.push_back(Event::PromptLogprobs { id, logprobs: output.prompt_logprobs });
    }
    if !output.logits.is_empty() {
        events.push_back(Event::Logits { id, logits: output.logits });
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
        events.push_back(Event::Token { id, drawn });
    }
    if sequence.ending.is_none() {
        sequence.ending = decode::finish(sequence);
    }
}

const CLOSED: &str = "the engine has been closed";
