//! Steps that a device begins before they are asked for change nothing that anybody sees: whole histories, played twice.

use std::sync::Arc;

use octavo::execute::local::LocalExecutor;
use octavo::execute::{Batch, Executor};
use octavo::kv::KvLayout;
use octavo::model::{Decoder, LayerGroups, Model, Weights};
use octavo::request::{Request, RequestId, SamplingParams, SessionId, Time, Wanted};
use octavo::sample::random::coin;
use octavo::schedule::{Command, Event, Scheduler, SchedulerConfig};
use octavo_kernels::cuda::{self, CudaBackend};
use octavo_kernels::{CacheDtype, StepLimits};

use crate::oracle;

const BLOCK_SIZE: usize = 16;
const MOST_SEQUENCES: usize = 4;
const MOST_POSITIONS: usize = 120;
const VOCAB: usize = 60;

/// An engine without threads: one side of the comparison.
struct Side {
    scheduler: Scheduler,
    executor: LocalExecutor<CudaBackend>,
    looks_ahead: bool,
    said: Vec<String>,
}

impl Side {
    fn new(name: &str, blocks: usize, looks_ahead: bool) -> Self {
        Self::on(cuda::Device::shim().unwrap(), name, blocks, looks_ahead)
    }

    fn on(device: cuda::Device, name: &str, blocks: usize, looks_ahead: bool) -> Self {
        let files = oracle::fixture(name).files();
        let model = Model::of(&files).unwrap();
        let groups = LayerGroups::new(&model.spec, MOST_POSITIONS);
        let layout = KvLayout { block_size: BLOCK_SIZE, windows: groups.windows.clone() };
        let blocks = blocks * layout.groups();
        let config = SchedulerConfig {
            max_num_seqs: MOST_SEQUENCES,
            max_num_batched_tokens: 24,
            max_queue: 100,
            itl_target_ns: None,
            max_model_len: MOST_POSITIONS,
            layout: layout.clone(),
            blocks,
        };
        let limits = StepLimits {
            rows: config.max_num_batched_tokens,
            segments: MOST_SEQUENCES,
            groups: layout.groups(),
            table_entries: layout.entries(MOST_POSITIONS),
        };
        let mut backend = CudaBackend::open(device, limits).unwrap();
        let weights = Weights::load(&files, &model, &mut backend, &mut |_, _| true).unwrap();
        let cache = groups.cache_shape(&model.spec, blocks, BLOCK_SIZE, CacheDtype::F32);
        let spec = model.spec.clone().up_to(MOST_POSITIONS);
        let decoder = Decoder::new(backend, spec, weights, &groups, cache, limits.rows).unwrap();
        let (scheduler, executor) = (Scheduler::new(config).unwrap(), LocalExecutor::new(decoder));
        Self { scheduler, executor, looks_ahead, said: Vec::new() }
    }

    fn apply(&mut self, command: Command, now: Time) {
        self.scheduler.apply(command, now);
        self.scheduler.check();
    }

    /// Plans a step and launches it. Between this and `commit`, as between two steps, commands may come.
    fn launch(&mut self, now: Time) -> Option<Batch> {
        let batch = self.scheduler.schedule(now)?;
        self.scheduler.check();
        let mut asked = batch.clone();
        // Nothing is begun for those that do not go on.
        asked.entries.iter_mut().for_each(|entry| entry.goes_on &= self.looks_ahead);
        self.executor.launch(&asked).unwrap();
        Some(batch)
    }

    fn commit(&mut self, batch: Batch, now: Time) {
        let output = self.executor.collect().unwrap();
        self.scheduler.commit(batch, output, now);
        self.scheduler.check();
        while let Some(event) = self.scheduler.next_event() {
            self.said.push(match event {
                Event::Begun { id } => format!("{id} begins"),
                Event::Token { id, drawn } => format!("{id}: {drawn:?}"),
                Event::PromptLogprobs { id, logprobs } => format!("{id}: {logprobs:?}"),
                Event::Logits { id, logits } => format!("{id}: {logits:?}"),
                Event::Finished { id, finish, record } => format!("{id}: {finish:?} {record:?}"),
            });
        }
    }
}

/// A number from 0 to `below`, decided by seed, step and which of its choices this is.
fn dice(seed: u64, step: usize, choice: usize, below: usize) -> usize {
    (coin(seed * 1000 + step as u64, choice) * below as f64) as usize
}

fn request(seed: u64, step: usize, id: u64, now: Time) -> Request {
    let dice = |choice, below| dice(seed, step, choice, below);
    let prefix = dice(1, 2) as u32 * 16;
    let prompt: Vec<u32> = (0..prefix).chain((0..=dice(2, 30)).map(|i| dice(100 + i, VOCAB) as u32)).collect();
    let params = SamplingParams {
        temperature: [0.0, 0.0, 0.8, 1.5][dice(3, 4)],
        top_k: [0, 0, 5][dice(4, 3)],
        top_p: [1.0, 0.9][dice(5, 2)],
        max_tokens: [1, 2, 20, 40, 200][dice(6, 5)],
        min_tokens: [0, 0, 1][dice(7, 3)],
        logprobs: [None, None, Some(0), Some(3)][dice(8, 4)],
        prompt_logprobs: [None, None, None, Some(1)][dice(9, 4)],
        repetition_penalty: [1.0, 1.0, 1.0, 1.0, 1.3][dice(10, 5)],
        allowed_token_ids: (dice(11, 6) == 0).then(|| (0..VOCAB as u32).step_by(3).collect()),
        logit_bias: if dice(12, 6) == 0 { vec![(7, 3.0), (5, -2.0), (7, 1.0)] } else { Vec::new() },
        stop_token_ids: (0..dice(13, 20) as u32).collect(),
        ..SamplingParams::default()
    };
    Request {
        id: RequestId(id),
        call: RequestId(id),
        prompt: prompt.into(),
        params: Arc::new(params),
        wanted: if dice(14, 12) == 0 { Wanted::LastLogits } else { Wanted::Tokens },
        seed: seed + id,
        end_token_ids: [].into(),
        guide: None,
        priority: 0,
        deadline: (dice(15, 8) == 0).then_some(Time(now.0 + 9000)),
        cache_salt: (dice(16, 4) > 0).then(|| "".into()),
        session: (dice(17, 5) == 0).then_some(SessionId(0)),
        user: "".into(),
        arrived: now,
    }
}

/// Plays a history on both sides. How many of its batches were under way when they were asked for, and of how many.
fn play(name: &str, seed: u64, blocks: usize, steps: usize) -> (u64, usize) {
    let mut sides = [true, false].map(|looks_ahead| Side::new(name, blocks, looks_ahead));
    let (mut id, mut computed) = (0, 0);
    for side in &mut sides {
        side.apply(Command::OpenSession { id: SessionId(0), ttl_ns: 20_000 }, Time(0));
    }
    for step in 0..steps {
        let now = Time(1000 * step as u64);
        let dice = |choice, below| dice(seed, step, choice, below);
        let quiet = step % 20 > 3;
        let submitted: Vec<_> = (0..if quiet { 0 } else { dice(50, 3) })
            .map(|number| {
                id += 1;
                request(seed + 7 * number as u64, step, id, now)
            })
            .collect();
        let cancelled = (dice(51, 9) == 0).then(|| RequestId(dice(52, 1 + id as usize) as u64));
        let between = dice(53, 2) == 0;
        let mut batches = sides.each_mut().map(|side| {
            for request in &submitted {
                side.apply(Command::Submit(Box::new(request.clone())), now);
            }
            cancelled.filter(|_| !between).into_iter().for_each(|id| side.apply(Command::Cancel(id), now));
            side.launch(now)
        });
        computed += usize::from(batches[0].is_some());
        for (side, batch) in sides.iter_mut().zip(&mut batches) {
            cancelled.filter(|_| between).into_iter().for_each(|id| side.apply(Command::Cancel(id), now));
            if let Some(batch) = batch.take() {
                side.commit(batch, Time(now.0 + 700));
            }
        }
        let [ahead, plain] = &sides;
        assert_eq!(ahead.said, plain.said, "{name}, seed {seed}, step {step}");
    }
    let [ahead, plain] = sides.each_ref().map(|side| side.executor.batches_ahead());
    assert_eq!(plain, 0);
    assert_eq!(sides[0].executor.decoder().backend().graphs() > 0, ahead > 0);
    (ahead, computed)
}

#[test]
fn steps_that_are_begun_ahead_change_nothing() {
    let (mut ahead, mut computed) = (0, 0);
    // Room for everybody; and so little that sequences lose their blocks. One group of layers, and several with windows.
    for (name, seed, blocks) in
        [("tiny/qwen3/f32", 1, 64), ("tiny/qwen3/f32", 2, 10), ("tiny/gemma3/bf16", 3, 64), ("tiny/gemma3/bf16", 4, 10)]
    {
        let (of, all) = play(name, seed, blocks, 60);
        (ahead, computed) = (ahead + of, computed + all);
    }
    assert!(ahead > 60 && computed > 150, "{ahead} of {computed} batches were under way");
}

/// Tokens are the only thing that is read, the recorded launches are repeated, and what is uploaded is one list: of coins, and
/// where blocks begin, their numbers.
#[test]
fn a_steady_step_is_one_graph_one_download_and_what_is_new() {
    for (params, drawn, coins) in [
        (SamplingParams { temperature: 0.0, ..SamplingParams::default() }, "greedily", 0),
        (SamplingParams { temperature: 0.9, top_p: 0.9, logprobs: Some(0), ..SamplingParams::default() }, "sampled", 1),
    ] {
        let (device, null) = cuda::Device::null();
        let mut side = Side::on(device, "tiny/qwen3/f32", 64, true);
        let sequences = 3;
        for id in 0..sequences {
            let params = Arc::new(SamplingParams { max_tokens: 100, ..params.clone() });
            let prompt = [1, 2, 3].into();
            let session = None;
            let plain = Request { params, prompt, session, wanted: Wanted::Tokens, ..request(9, 0, id, Time(0)) };
            let request = Request { deadline: None, ..plain };
            side.apply(Command::Submit(Box::new(request)), Time(0));
        }
        for step in 0..60 {
            let before = null.calls();
            let batch = side.launch(Time(step)).unwrap();
            // In the step after this one somebody begins a block, or did in this one and was told which.
            let begins = batch.segments.iter().any(|segment| segment.context % BLOCK_SIZE <= 1);
            side.commit(batch, Time(step));
            let after = null.calls();
            if step < 4 {
                continue; // prompts, the first step of its size, and the one that is recorded
            }
            let calls = [
                after.replays - before.replays,
                after.downloads - before.downloads,
                after.taken - before.taken,
                after.uploads - before.uploads,
                after.launches - before.launches,
            ];
            let most = if begins { [1, 1, 0, 1, sequences] } else { [1, 1, 0, coins, 0] };
            assert_eq!(calls[..3], most[..3], "{drawn}, step {step}");
            assert!(calls.iter().zip(most).all(|(&calls, most)| calls <= most), "{drawn}, step {step}: {calls:?}");
        }
        assert!(side.executor.batches_ahead() > 50);
    }
}
