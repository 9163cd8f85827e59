//! The scheduler under a steady load, on one thread: whoever ends is replaced, so every step decodes, admits and reads
//! prompts. Time of a step: plan and commit; a model's own time is not in it. Floor: the batch's arrays are touched once.

mod support;

use std::sync::Arc;

use octavo::execute::{Batch, Drawn, EntryOutput, StepOutput};
use octavo::kv::KvLayout;
use octavo::request::{Request, RequestId, SamplingParams, Time, Wanted};
use octavo::schedule::{Command, Event, Scheduler, SchedulerConfig};
use support::{Bench, Work};

const BLOCK_SIZE: usize = 16;
const PROMPT: usize = 256;
const MAX_TOKENS: usize = 128;
const USERS: usize = 50;

struct World {
    scheduler: Scheduler,
    now: Time,
    submitted: u64,
    /// Tokens of a prompt that all share.
    shared: usize,
    users: [Arc<str>; USERS],
}

impl World {
    /// `running` sequences that run and `waiting` that wait, forever, in a pool of `blocks`.
    fn new(running: usize, waiting: usize, shared: usize, blocks: usize) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: running,
            max_num_batched_tokens: running + 2 * PROMPT.max(running * PROMPT / MAX_TOKENS),
            max_queue: running + waiting,
            itl_target_ns: None,
            max_model_len: PROMPT + MAX_TOKENS,
            layout: KvLayout::new(BLOCK_SIZE),
            blocks,
        };
        let scheduler = Scheduler::new(config).expect("settings that can be");
        let users = std::array::from_fn(|user| format!("user {user}").into());
        let mut world = Self { scheduler, now: Time(0), submitted: 0, shared, users };
        (0..running + waiting).for_each(|_| world.submit());
        // Long enough that sequences of all ages run together.
        (0..3 * MAX_TOKENS).for_each(|_| world.step());
        world
    }

    fn submit(&mut self) {
        let id = self.submitted;
        self.submitted += 1;
        let token = |i: usize| if i < self.shared { i as u32 } else { (id as u32).wrapping_mul(31) + i as u32 };
        // Answers of different lengths, so that ends do not come all at once.
        let max_tokens = MAX_TOKENS / 2 + (id as usize * 7) % (MAX_TOKENS / 2);
        let request = Request {
            id: RequestId(id),
            arrived: self.now,
            prompt: (0..PROMPT).map(token).collect(),
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

    /// One step, with an executor that answers at once.
    fn step(&mut self) {
        self.now = Time(self.now.0 + 1_000_000);
        let batch = self.scheduler.schedule(self.now).expect("somebody runs");
        let output = answer(&batch);
        self.scheduler.commit(batch, output, self.now);
        while let Some(event) = self.scheduler.next_event() {
            if let Event::Finished { .. } = event {
                self.submit();
            }
        }
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

fn main() {
    let bench = Bench::start("schedule", Some(1));
    let small = |running: usize| 2 * running * (PROMPT + MAX_TOKENS).div_ceil(BLOCK_SIZE);
    for (running, waiting, shared, blocks) in [
        (1, 0, 0, small(1)),
        (64, 0, 0, small(64)),
        (64, 10_000, 0, small(64)),
        (64, 0, PROMPT / 2, small(64)),
        (1024, 0, 0, small(1024)),
        (1024, 10_000, 0, 1_000_000),
    ] {
        let (running, waiting, blocks) = (bench.size(running, 2), bench.size(waiting, 3), bench.size(blocks, small(2)));
        let mut world = World::new(running, waiting, shared, blocks);
        check(&mut world, running, waiting);
        let row_bytes = 3 * size_of::<u32>() + size_of::<octavo_kernels::Segment>();
        let table_bytes = (PROMPT + MAX_TOKENS / 2) / BLOCK_SIZE * size_of::<u32>();
        let shape = format!("{running} run, {waiting} wait, {shared} shared, {blocks} blocks");
        bench.line("step", &shape, Work::cache(running * (row_bytes + table_bytes)), || world.step());
    }
}

fn check(world: &mut World, running: usize, waiting: usize) {
    let before = world.scheduler.stats();
    (0..20).for_each(|_| world.step());
    let after = world.scheduler.stats();
    world.scheduler.check();
    // One that ends leaves its place empty for a step or two.
    assert!(after.running + 2 + running / 16 >= running && after.waiting <= waiting + 2 + running / 16, "{after:?}");
    assert!(after.tokens_generated - before.tokens_generated >= 10 * running as u64, "{before:?} {after:?}");
    assert_eq!(after.preemptions, 0, "the pool is large enough");
    assert_eq!(after.tokens_cached > 0, world.shared > 0, "only what is shared is found");
}
