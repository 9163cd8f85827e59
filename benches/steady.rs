//! The scheduler under a load that is the same in every step: sequences of all ages run, and whoever ends is replaced by one
//! who waits. So every step decodes, ends, admits and reads prompts, always as much of each.
#![allow(dead_code)] // whoever includes it uses a part

use std::sync::Arc;

use octavo::execute::{Batch, Drawn, EntryOutput, StepOutput};
use octavo::kv::KvLayout;
use octavo::request::{Request, RequestId, SamplingParams, Time, Wanted};
use octavo::schedule::{Command, Event, Scheduler, SchedulerConfig};

pub const BLOCK_SIZE: usize = 16;
const USERS: usize = 50;

/// What there is to do, forever.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Sequences that run.
    pub running: usize,
    /// Requests that wait besides.
    pub waiting: usize,
    /// Blocks of the pool.
    pub blocks: usize,
    /// Tokens of a prompt.
    pub prompt: usize,
    /// How many of them all prompts begin with.
    pub shared: usize,
    /// Tokens of an answer.
    pub answer: usize,
}

impl Load {
    /// Blocks that hold all who run, twice.
    pub fn enough_blocks(running: usize, prompt: usize, answer: usize) -> usize {
        2 * running * (prompt + answer).div_ceil(BLOCK_SIZE)
    }
}

pub struct World {
    pub scheduler: Scheduler,
    load: Load,
    now: Time,
    submitted: u64,
    users: [Arc<str>; USERS],
}

impl World {
    pub fn new(load: Load) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: load.running,
            // All begin in the first step.
            max_num_batched_tokens: load.running * load.prompt,
            max_queue: load.running + load.waiting,
            itl_target_ns: None,
            max_model_len: load.prompt + load.answer,
            layout: KvLayout::new(BLOCK_SIZE),
            blocks: load.blocks,
        };
        let scheduler = Scheduler::new(config).expect("settings that can be");
        let users = std::array::from_fn(|user| format!("user {user}").into());
        let mut world = Self { scheduler, load, now: Time(0), submitted: 0, users };
        // The first ones end one after the other, and so does everybody from then on.
        (0..load.running).for_each(|i| world.submit(1 + i % load.answer));
        world.step(|| ());
        (0..load.waiting).for_each(|_| world.submit(load.answer));
        (0..3 * load.answer).for_each(|_| world.step(|| ()));
        world
    }

    fn submit(&mut self, max_tokens: usize) {
        let id = self.submitted;
        self.submitted += 1;
        let token = |i: usize| if i < self.load.shared { i as u32 } else { (id as u32).wrapping_mul(31) + i as u32 };
        let request = Request {
            id: RequestId(id),
            call: RequestId(id),
            arrived: self.now,
            prompt: (0..self.load.prompt).map(token).collect(),
            params: Arc::new(SamplingParams { max_tokens, ..SamplingParams::default() }),
            wanted: Wanted::Tokens,
            seed: id,
            end_token_ids: Arc::new([]),
            guide: None,
            priority: 0,
            deadline: None,
            cache_salt: Some("".into()),
            session: None,
            user: self.users[id as usize % USERS].clone(),
        };
        self.scheduler.apply(Command::Submit(Box::new(request)), self.now);
    }

    /// One step, with an executor that answers at once. `mark` is called before and after whatever the scheduler does.
    pub fn step(&mut self, mark: impl Fn()) {
        self.now = Time(self.now.0 + 1_000_000);
        mark();
        let batch = self.scheduler.schedule(self.now);
        mark();
        let batch = batch.expect("somebody runs");
        let output = answer(&batch);
        mark();
        self.scheduler.commit(batch, output, self.now);
        mark();
        while let Some(event) = self.scheduler.next_event() {
            if let Event::Finished { .. } = event {
                self.submit(self.load.answer);
            }
        }
    }

    /// Asserts that the load is what it should be. Walks the pool and the queue.
    pub fn check(&mut self) {
        let Load { running, waiting, shared, .. } = self.load;
        let before = self.scheduler.stats();
        (0..20).for_each(|_| self.step(|| ()));
        let after = self.scheduler.stats();
        self.scheduler.check();
        // Those who have ended in the last step are replaced in the next.
        let ended = running.div_ceil(self.load.answer);
        assert!(after.running + ended >= running && after.waiting <= waiting + ended, "{after:?}");
        assert!(after.tokens_generated - before.tokens_generated >= 10 * running as u64, "{before:?} {after:?}");
        assert_eq!(after.preemptions, 0, "the pool is large enough");
        assert_eq!(after.tokens_cached > 0, shared > 0, "only what is shared is found");
    }
}

fn answer(batch: &Batch) -> StepOutput {
    let token = |draws: bool| draws.then_some(Ok(Drawn { token_id: batch.step as u32, logprobs: None }));
    let entries = batch.entries.iter();
    StepOutput {
        entries: entries
            .map(|entry| EntryOutput { drawn: token(entry.draw.is_some()), ..Default::default() })
            .collect(),
    }
}
