//! What the host does in a step of decoding on a device, all of it: plan, upload, repeat the recorded launches, take the
//! tokens, commit. The device is one that does nothing, so its own time is not in it. Floor: the batch's arrays are touched
//! once. Contexts begin at the length that the line says, so that some sequences begin a block in every step, and grow by a
//! token a step. Each line says what went up to the device, on average.

mod support;

use std::path::Path;
use std::sync::Arc;

use octavo::execute::Executor;
use octavo::execute::local::LocalExecutor;
use octavo::kv::KvLayout;
use octavo::load::ModelFiles;
use octavo::model::{Decoder, LayerGroups, Model, Weights};
use octavo::request::{Request, RequestId, SamplingParams, Time, Wanted};
use octavo::schedule::{Command, Event, Scheduler, SchedulerConfig};
use octavo_kernels::cuda::null::{Calls, Null};
use octavo_kernels::cuda::{self, CudaBackend};
use octavo_kernels::{CacheDtype, StepLimits};
use support::{Bench, Work};

const BLOCK_SIZE: usize = 16;
const MODEL: &str = "tests/fixtures/oracle/gguf/llama-q8_0.gguf";

struct World {
    scheduler: Scheduler,
    executor: LocalExecutor<CudaBackend>,
    device: Arc<Null>,
    now: Time,
    submitted: u64,
    context: usize,
    params: Arc<SamplingParams>,
}

impl World {
    /// `sequences` that decode, from `context` tokens on up to `longest`.
    fn new(sequences: usize, context: usize, longest: usize, params: SamplingParams) -> Self {
        let files = ModelFiles::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(MODEL)).expect("a model");
        let model = Model::of(&files).expect("a model");
        let config = SchedulerConfig {
            max_num_seqs: sequences,
            max_num_batched_tokens: 2048.max(sequences),
            max_queue: 1,
            itl_target_ns: None,
            max_model_len: longest,
            layout: KvLayout::new(BLOCK_SIZE),
            blocks: sequences * longest.div_ceil(BLOCK_SIZE),
        };
        let limits = StepLimits {
            rows: config.max_num_batched_tokens,
            segments: sequences,
            groups: 1,
            table_entries: longest.div_ceil(BLOCK_SIZE),
        };
        let (device, null) = cuda::Device::null();
        let mut backend = CudaBackend::open(device, limits).expect("a device");
        let weights = Weights::load(&files, &model, &mut backend, &mut |_, _| true).expect("weights");
        let groups = LayerGroups::new(&model.spec, 0);
        let cache = groups.cache_shape(&model.spec, config.blocks, BLOCK_SIZE, CacheDtype::F16);
        let spec = model.spec.clone().up_to(longest);
        let decoder = Decoder::new(backend, spec, weights, &groups, cache, limits.rows).expect("memory");
        let (scheduler, executor) = (Scheduler::new(config).expect("settings"), LocalExecutor::new(decoder));
        let params = Arc::new(SamplingParams { max_tokens: longest, ..params });
        let mut world = Self { scheduler, executor, device: null, now: Time(0), submitted: 0, context, params };
        (0..sequences).for_each(|_| world.submit());
        while world.scheduler.stats().tokens_generated < 4 * sequences as u64 {
            world.step();
        }
        world
    }

    fn submit(&mut self) {
        let request = Request {
            id: RequestId(self.submitted),
            call: RequestId(self.submitted),
            prompt: (0..(self.context + self.submitted as usize % BLOCK_SIZE) as u32).map(|i| i % 50).collect(),
            params: self.params.clone(),
            wanted: Wanted::Tokens,
            seed: self.submitted,
            end_token_ids: Arc::new([]),
            guide: None,
            priority: 0,
            deadline: None,
            cache_salt: Some("".into()),
            session: None,
            user: "".into(),
            arrived: self.now,
        };
        self.submitted += 1;
        self.scheduler.apply(Command::Submit(Box::new(request)), self.now);
    }

    fn step(&mut self) {
        self.now = Time(self.now.0 + 1_000_000);
        let batch = self.scheduler.schedule(self.now).expect("somebody runs");
        self.executor.launch(&batch).expect("a device that cannot fail");
        let output = self.executor.collect().expect("a device that cannot fail");
        self.scheduler.commit(batch, output, self.now);
        while let Some(event) = self.scheduler.next_event() {
            if let Event::Finished { .. } = event {
                self.submit();
            }
        }
    }
}

fn main() {
    let bench = Bench::start("host work of a step", Some(1));
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let sampled = SamplingParams { temperature: 0.8, top_p: 0.95, logprobs: Some(0), ..SamplingParams::default() };
    let penalties = SamplingParams { repetition_penalty: 1.1, ..sampled.clone() };
    for (name, params) in [("greedy", greedy), ("sampled, logprobs", sampled), ("the same, penalties", penalties)] {
        for (sequences, context) in [(1, 1000), (8, 1000), (64, 1000), (64, 8000)] {
            let context = bench.size(context, 20);
            let longest = bench.size((1 << 20) / sequences.max(8), 200);
            let mut world = World::new(sequences, context, longest, params.clone());
            let uploaded = check(&mut world, sequences as u64);
            let shape = format!("batch {sequences}, context {context}, up {uploaded}");
            let table_bytes = context / BLOCK_SIZE * size_of::<u32>();
            bench.line(name, &shape, Work::cache(sequences * table_bytes), || world.step());
        }
    }
}

/// A token for everybody in every step, and few calls. Says how many uploads there were in a step, and of how many bytes.
fn check(world: &mut World, sequences: u64) -> String {
    let (before, calls) = (world.scheduler.stats(), world.device.calls());
    (0..BLOCK_SIZE).for_each(|_| world.step());
    assert_eq!(world.scheduler.stats().tokens_generated - before.tokens_generated, BLOCK_SIZE as u64 * sequences);
    let Calls { replays, taken, uploads, uploaded_bytes, .. } = world.device.calls();
    assert_eq!((replays - calls.replays, taken - calls.taken), (BLOCK_SIZE as u64, 0), "graphs, and nothing taken");
    let of_step = |before: u64, after: u64| (after - before) as f64 / BLOCK_SIZE as f64;
    let (bytes, times) = (of_step(calls.uploaded_bytes, uploaded_bytes), of_step(calls.uploads, uploads));
    format!("{bytes:.0} B in {times:.1}")
}
