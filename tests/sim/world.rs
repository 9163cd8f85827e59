//! A scheduler, an executor and a clock, and a notary who writes down what comes out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use octavo::execute::simulated::{CostModel, Simulated};
use octavo::execute::{Batch, Executor, StepOutput};
use octavo::kv::KvLayout;
use octavo::observe::anatomy::RequestRecord;
use octavo::observe::record::LogWriter;
use octavo::request::{Finish, Request, RequestId, SamplingParams, Time, TokenLogprobs, Wanted};
use octavo::schedule::{Command, Event, Scheduler, SchedulerConfig};
use octavo::stages::queue::door::{Ahead, Call, Door, Full};

pub const VOCAB: u32 = 50;

/// Coins of a test, from its seed alone.
pub struct Coins(pub u64);

impl Coins {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// From `low` to `high`, both included.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }
    pub fn one_in(&mut self, n: usize) -> bool {
        self.within(1, n) == 1
    }
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.within(0, of.len() - 1)]
    }
}

/// What a request got.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub begun: bool,
    pub tokens: Vec<u32>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub logits: Vec<f32>,
    pub end: Option<(Finish, RequestRecord)>,
}

impl Outcome {
    pub fn finish(&self) -> &Finish {
        &self.end.as_ref().expect("has ended").0
    }
    pub fn record(&self) -> &RequestRecord {
        &self.end.as_ref().expect("has ended").1
    }
}

pub struct World {
    pub scheduler: Scheduler,
    pub executor: Simulated,
    pub now: Time,
    pub outcomes: BTreeMap<RequestId, Outcome>,
    /// Requests whose draws fail.
    pub failing: BTreeSet<RequestId>,
    /// Walk the whole pool after every change.
    pub checked: bool,
    /// All that the scheduler is told and decides, if that is wanted.
    pub log: Option<LogWriter>,
    /// What a step takes, by its number and what it should take.
    pub weather: Box<dyn FnMut(u64, u64) -> u64>,
    launched: Option<(Batch, StepOutput)>,
}

pub fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_queue: 100,
        itl_target_ns: None,
        max_model_len: 200,
        layout: KvLayout::new(4),
        blocks: 100,
    }
}

const COST: CostModel = CostModel { step_ns: 1000.0, row_ns: 70.0, context_ns: 0.5 };

impl World {
    pub fn new(config: SchedulerConfig) -> Self {
        Self {
            executor: Simulated::with_cache(COST, VOCAB, config.layout.clone(), config.blocks),
            scheduler: Scheduler::new(config).expect("a possible configuration"),
            now: Time(1000),
            outcomes: BTreeMap::new(),
            failing: BTreeSet::new(),
            checked: true,
            log: None,
            weather: Box::new(|_, ns| ns),
            launched: None,
        }
    }

    /// Without a model of the cache and without checks, for large numbers.
    pub fn unchecked(config: SchedulerConfig) -> Self {
        let executor = Simulated::new(COST, VOCAB);
        let small = SchedulerConfig { blocks: 1, ..config.clone() };
        let scheduler = Scheduler::new(config).expect("a possible configuration");
        Self { scheduler, executor, checked: false, ..Self::new(small) }
    }

    pub fn apply(&mut self, command: Command) {
        if let Some(log) = &mut self.log {
            log.command(&command, self.now);
        }
        self.scheduler.apply(command, self.now);
        self.settle();
    }

    /// The executor is gone, and with it the step under way.
    pub fn fail_all(&mut self, why: &str) {
        self.scheduler.fail_all(why, self.now);
        self.settle();
    }

    pub fn submit(&mut self, request: Request) -> RequestId {
        let id = request.id;
        assert!(self.outcomes.insert(id, Outcome::default()).is_none(), "{id} twice");
        // It came through the door a little before the scheduler hears of it.
        self.apply(Command::Submit(Box::new(Request { arrived: Time(self.now.0 - 7), ..request })));
        id
    }

    pub fn cancel(&mut self, id: RequestId) {
        self.apply(Command::Cancel(id));
    }

    /// First half of a step.
    pub fn launch(&mut self) -> Option<&Batch> {
        let batch = self.scheduler.schedule(self.now);
        if let Some(log) = &mut self.log {
            log.planned(batch.as_ref(), self.now);
        }
        self.settle();
        let batch = batch?;
        let before = self.executor.elapsed_ns();
        self.executor.launch(&batch).expect("a simulated device does not fail");
        let mut output = self.executor.collect().expect("it was launched");
        for (entry, output) in batch.entries.iter().zip(&mut output.entries) {
            if entry.draw.is_some() && self.failing.contains(&entry.id) {
                output.drawn = Some(Err("logits that are no numbers".into()));
            }
        }
        self.now.0 += (self.weather)(batch.step, self.executor.elapsed_ns() - before);
        Some(&self.launched.insert((batch, output)).0)
    }

    /// Second half.
    pub fn commit(&mut self) {
        let (batch, output) = self.launched.take().expect("a step is under way");
        if let Some(log) = &mut self.log {
            log.committed(&output, self.now);
        }
        self.scheduler.commit(batch, output, self.now);
        self.settle();
    }

    /// One step, or `false`.
    pub fn step(&mut self) -> bool {
        let any = self.launch().is_some();
        if any {
            self.commit();
        }
        self.now.0 += 10; // the host is never infinitely fast
        any
    }

    /// Steps until nothing is to be done. Whatever is alive must end within `most` steps.
    pub fn finish(&mut self, most: usize) {
        for _ in 0..most {
            if !self.step() {
                self.assert_home();
                return;
            }
        }
        panic!("no end after {most} steps: {:?}", self.scheduler.stats());
    }

    pub fn outcome(&self, id: RequestId) -> &Outcome {
        &self.outcomes[&id]
    }

    pub fn living(&self) -> Vec<RequestId> {
        self.outcomes.iter().filter(|(_, outcome)| outcome.end.is_none()).map(|(&id, _)| id).collect()
    }

    /// Writes down what came out, and looks whether all is well.
    fn settle(&mut self) {
        while let Some(event) = self.scheduler.next_event() {
            let (Event::Begun { id }
            | Event::Token { id, .. }
            | Event::PromptLogprobs { id, .. }
            | Event::Logits { id, .. }
            | Event::Finished { id, .. }) = event;
            let outcome = self.outcomes.get_mut(&id).expect("an event of a known request");
            assert!(outcome.end.is_none(), "{id}: an event after its last: {event:?}");
            match event {
                Event::Begun { .. } => assert!(!std::mem::replace(&mut outcome.begun, true), "{id} begins once"),
                Event::Token { drawn, .. } => outcome.tokens.push(drawn.token_id),
                Event::PromptLogprobs { logprobs, .. } => outcome.prompt_logprobs.extend(logprobs),
                Event::Logits { logits, .. } => outcome.logits.extend(logits),
                Event::Finished { finish, record, .. } => {
                    assert!(outcome.begun || record.steps == 0, "{id}: ran and never began");
                    check_record(outcome, &record);
                    outcome.end = Some((finish, *record));
                }
            }
        }
        if self.checked {
            self.scheduler.check();
        }
    }

    /// Nothing is alive and nothing leaks.
    pub fn assert_home(&mut self) {
        assert_eq!(self.living(), [], "somebody is still alive");
        let stats = self.scheduler.stats();
        assert_eq!((stats.running, stats.waiting), (0, 0), "{stats:?}");
        // What sessions share counts for each of them.
        assert!(stats.blocks_owned <= stats.blocks_pinned, "{stats:?}");
        assert_eq!(stats.blocks_free + stats.blocks_remembered + stats.blocks_owned, stats.blocks);
        assert_eq!(stats.finished as usize, self.outcomes.len());
        let records = || self.outcomes.values().map(Outcome::record);
        assert_eq!(records().map(|record| record.computed_tokens as u64).sum::<u64>(), stats.tokens_computed);
        assert_eq!(records().map(|record| record.preemptions as u64).sum::<u64>(), stats.preemptions);
        let rents: u128 = records().map(|record| record.block_ns).sum();
        let rents = rents + self.scheduler.session_block_ns(self.now);
        let owned = self.scheduler.owned_block_ns(self.now);
        // A nanosecond that does not divide evenly is paid by the last of those who hold a block.
        let unpaid = (stats.blocks_pinned * stats.sessions) as u128;
        assert!((rents..=rents + unpaid).contains(&owned), "the rents sum to the time that blocks were owned");
    }
}

/// A door as engines have one: whoever came in is let out at their end.
#[derive(Default)]
pub struct Gate {
    pub door: Door,
    inside: Vec<(RequestId, Call)>,
}

impl Gate {
    pub fn enter(&mut self, config: &SchedulerConfig, request: &Request, now: Time) -> Result<Ahead, Full> {
        let call = Self::call(request);
        let ahead = self.door.enter(config, &call, now)?;
        self.inside.push((request.id, call));
        Ok(ahead)
    }

    pub fn call(request: &Request) -> Call {
        Call { user: request.user.clone(), priority: request.priority, count: 1 }
    }

    pub fn let_out(&mut self, world: &World) {
        for (_, call) in self.inside.extract_if(.., |(id, _)| world.outcome(*id).end.is_some()) {
            self.door.leave(&call.user, call.priority);
        }
        assert_eq!(self.door.living(), self.inside.len());
    }
}

/// Laws of every record, however the request ended.
fn check_record(outcome: &Outcome, record: &RequestRecord) {
    assert_eq!(record.stages.total(), record.finished.since(record.submitted), "the parts sum to the whole");
    assert_eq!(record.completion_tokens, outcome.tokens.len());
    assert_eq!(record.token_ns.len(), outcome.tokens.len());
    assert!(record.token_ns.is_sorted());
    if let Some(ttft) = record.ttft_ns() {
        assert_eq!(ttft, record.stages.queue.total() + record.stages.prefill.total(), "ttft has one meaning");
    } else {
        assert_eq!(record.stages.decode.total(), 0, "decode begins with the first token");
    }
    let fresh = record.computed_tokens - record.recomputed_tokens;
    assert!(record.cached_tokens + fresh <= record.prompt_tokens + record.completion_tokens);
    assert_eq!(record.preempted.len(), record.preemptions, "every preemption has its cost");
    let costs = || record.preempted.iter();
    assert_eq!(costs().map(|cost| cost.recomputed_tokens).sum::<usize>(), record.recomputed_tokens);
    assert!(costs().all(|cost| cost.at_ns + cost.lost_ns <= record.total_ns()));
    assert!(
        record.preempted.windows(2).all(|pair| pair[0].at_ns + pair[0].lost_ns <= pair[1].at_ns),
        "one after another"
    );
}

/// A greedy request that is no trouble.
pub fn request(id: u64, prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        id: RequestId(id),
        call: RequestId(id),
        prompt: prompt.into(),
        params: Arc::new(SamplingParams { temperature: 0.0, max_tokens, ..Default::default() }),
        wanted: Wanted::Tokens,
        seed: 0,
        end_token_ids: Arc::default(),
        guide: None,
        priority: 0,
        deadline: None,
        cache_salt: Some("".into()),
        session: None,
        user: "".into(),
        arrived: Time(0),
    }
}

/// `count` tokens that depend on `family`.
pub fn prompt(family: u64, count: usize) -> Vec<u32> {
    let mut coins = Coins(family);
    (0..count).map(|_| coins.next() as u32 % VOCAB).collect()
}

/// What the request gets when it has the machine for itself and nothing is remembered.
pub fn alone(config: &SchedulerConfig, request: &Request) -> Outcome {
    let mut world = World::new(config.clone());
    world.checked = false;
    let id = world.submit(Request { deadline: None, cache_salt: None, session: None, ..request.clone() });
    world.finish(10 * config.max_model_len);
    world.outcome(id).clone()
}
