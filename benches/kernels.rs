//! The operations of the CPU backend, on all threads. Products with one row and attention with one row per sequence are
//! decode: they must stream their weights or their cache from memory. With many rows they are prefill: arithmetic.
//!
//! With `--cuda` those of the CUDA backend on the first GPU, in the shapes of models of 0.6 and 8 billion weights, held
//! against what copies within its memory reach and against `OCTAVO_MATRIX_RATE`, the operations per second that a large
//! matrix product reaches there.

#[allow(dead_code)]
#[path = "../tests/kernels/harness.rs"]
mod harness;
mod support;

use harness::{Random, Tolerance, upload, weight_bytes};
use octavo_kernels::cpu::CpuBackend;
use octavo_kernels::cpu::limits::{Limits, last_cache_bytes};
use octavo_kernels::cuda::{self, CudaBackend};
use octavo_kernels::reference::Activations;
use octavo_kernels::reference::experts::route;
use octavo_kernels::routing::Choice;
use octavo_kernels::{
    Activation, Backend, CacheDtype, CacheLayer, CacheShape, DType, Heads, Mask, RopeSpec, RopeStyle, Segment,
    StepInput, StepLimits, Weight,
};
use std::hint::black_box;
use std::time::Instant;
use support::{Bench, Work};

/// An operation at one size.
trait Operation {
    fn title(&self) -> (String, String);
    fn work(&self) -> Work;
    /// The same at a size that the reference gets through.
    fn small(&self) -> Self;
    /// How far the CPU may be from the reference.
    fn tolerance(&self) -> f32 {
        1e-4
    }
    /// Makes everything that it needs.
    fn prepare<B: Backend>(&self, backend: &mut B) -> Ready<B>;
}

/// What is timed: an operation with its inputs, over the backend and an output buffer.
type Run<B> = Box<dyn FnMut(&mut B, &mut <B as Backend>::Buffer)>;

/// An operation that can be run again and again.
struct Ready<B: Backend> {
    out: B::Buffer,
    rows: usize,
    width: usize,
    run: Run<B>,
}

impl<B: Backend> Ready<B> {
    fn run(&mut self, backend: &mut B) {
        (self.run)(backend, &mut self.out);
    }
    fn result(mut self, backend: &mut B) -> Vec<f32> {
        self.run(backend);
        backend.read(&self.out, self.rows, self.width).to_vec()
    }
}

/// Checks an operation of the CPU against the reference, then times it.
fn line(bench: &Bench, backend: &mut CpuBackend, operation: &impl Operation) {
    checked_line(bench, backend, operation, Activations::Int8, |_| operation.tolerance());
}

/// The same on a GPU, whose kernels may round activations. The sweep of `tests/kernels` is stricter.
fn line_on_gpu(bench: &Bench, backend: &mut CudaBackend, operation: &impl Operation) {
    checked_line(bench, backend, operation, Activations::F32, |largest| 0.02 * largest);
}

fn checked_line<B: Backend>(
    bench: &Bench,
    backend: &mut B,
    operation: &impl Operation,
    activations: Activations,
    tolerance: impl Fn(f32) -> f32,
) {
    let small = operation.small();
    let mut reference = harness::reference(activations);
    let want = small.prepare(&mut reference).result(&mut reference);
    let got = small.prepare(backend).result(backend);
    assert_eq!(backend.failure(), None);
    let absolute = tolerance(want.iter().fold(0.0, |largest, value| value.abs().max(largest)));
    harness::assert_near(&small.title().0, &got, &want, Tolerance { absolute, relative: 1e-4 });

    let operation = if bench.is_tiny() { &small } else { operation };
    let (name, shape) = operation.title();
    let mut ready = operation.prepare(backend);
    bench.line_of_runs(&name, &shape, operation.work(), |runs| {
        (0..runs).for_each(|_| ready.run(backend));
        // Waits for a device.
        black_box(backend.read(&ready.out, 1, 1));
    });
}

#[derive(Clone)]
struct Linear {
    dtype: DType,
    outputs: usize,
    inputs: usize,
    rows: usize,
}

impl Linear {
    fn matrix<B: Backend>(&self, backend: &mut B, random: &mut Random) -> B::Matrix {
        let Self { dtype, outputs, inputs, .. } = *self;
        // The same few outputs again and again: making random ones takes longer than the bench.
        let some = outputs.min(64);
        let bytes = weight_bytes(random, dtype, some, inputs).repeat(outputs / some + 1);
        let bytes = &bytes[..outputs * dtype.row_bytes(inputs).expect("whole blocks")];
        backend.matrix(&[Weight { dtype, rows: outputs, cols: inputs, bytes, run_as: dtype }]).expect("memory")
    }
}

impl Operation for Linear {
    fn title(&self) -> (String, String) {
        let Self { dtype, outputs, inputs, rows } = self;
        (format!("linear {}", dtype.name()), format!("{outputs} × {inputs}, {rows} row(s)"))
    }
    fn work(&self) -> Work {
        let row_bytes = self.dtype.row_bytes(self.inputs).expect("whole blocks");
        let bytes = self.outputs * row_bytes;
        // Weights that fit the last cache stay there from one run to the next.
        let work = if bytes > last_cache_bytes() { Work::memory(bytes) } else { Work::cache(bytes) };
        let operations = 2 * self.rows * self.outputs * self.inputs;
        if self.dtype.is_dense() { work.f32(operations) } else { work.int8(operations) }
    }
    fn small(&self) -> Self {
        Self { outputs: 50, inputs: 512, rows: self.rows.min(9), ..self.clone() }
    }
    fn prepare<B: Backend>(&self, backend: &mut B) -> Ready<B> {
        let Self { outputs, inputs, rows, .. } = *self;
        let random = &mut Random::new(1);
        let x = upload(backend, &random.normals(rows * inputs), inputs);
        let matrix = self.matrix(backend, random);
        let out = backend.buffer(rows, outputs).expect("memory");
        let run = Box::new(move |backend: &mut B, out: &mut B::Buffer| backend.linear(out, &x, &matrix, None, rows));
        Ready { out, rows, width: outputs, run }
    }
}

/// A gated layer of one type.
#[derive(Clone)]
struct GatedLayer {
    dtype: DType,
    hidden: usize,
    width: usize,
    rows: usize,
}

impl GatedLayer {
    fn halves(&self) -> [Linear; 2] {
        let Self { dtype, hidden, width, rows } = *self;
        [
            Linear { dtype, outputs: 2 * width, inputs: hidden, rows },
            Linear { dtype, outputs: hidden, inputs: width, rows },
        ]
    }
}

impl Operation for GatedLayer {
    fn title(&self) -> (String, String) {
        let Self { dtype, hidden, width, rows } = self;
        (format!("gated layer {}", dtype.name()), format!("{hidden} × {width}, {rows} row(s)"))
    }
    fn work(&self) -> Work {
        // There are as many weights in one of them.
        Linear { dtype: self.dtype, outputs: 3 * self.width, inputs: self.hidden, rows: self.rows }.work()
    }
    fn tolerance(&self) -> f32 {
        // A code of what the gate lets through may be the next one.
        1e-2
    }
    fn small(&self) -> Self {
        Self { hidden: 256, width: 512, rows: self.rows.min(65), ..self.clone() }
    }
    fn prepare<B: Backend>(&self, backend: &mut B) -> Ready<B> {
        let Self { hidden, width, rows, .. } = *self;
        let (random, [first, second]) = (&mut Random::new(5), self.halves());
        let x = upload(backend, &random.normals(rows * hidden), hidden);
        let (gate_up, down) = (first.matrix(backend, random), second.matrix(backend, random));
        let [mut between, mut gated, out] =
            [2 * width, width, hidden].map(|width| backend.buffer(rows, width).expect("memory"));
        let run = Box::new(move |backend: &mut B, out: &mut B::Buffer| {
            let between = (&mut between, &mut gated);
            backend.gated_mlp(out, &x, (&gate_up, None), Activation::Silu, (&down, None), between, width, rows);
        });
        Ready { out, rows, width: hidden, run }
    }
}

/// Rows that go to different experts each, at random, and back.
#[derive(Clone)]
struct Experts {
    dtype: DType,
    experts: usize,
    per_row: usize,
    outputs: usize,
    inputs: usize,
    rows: usize,
}

impl Experts {
    fn logits(&self) -> Vec<f32> {
        Random::new(2).normals(self.rows * self.experts)
    }
    /// Experts that anyone chose.
    fn busy(&self) -> usize {
        let mut chosen = vec![false; self.experts];
        for logits in self.logits().chunks(self.experts) {
            let mut choices = vec![Choice::default(); self.per_row];
            route(&mut choices, logits, true);
            choices.iter().for_each(|choice| chosen[choice.expert as usize] = true);
        }
        chosen.into_iter().filter(|&chosen| chosen).count()
    }
}

impl Operation for Experts {
    fn title(&self) -> (String, String) {
        let Self { dtype, experts, per_row, outputs, inputs, rows } = self;
        (format!("experts {}", dtype.name()), format!("{per_row} of {experts} × {outputs} × {inputs}, {rows} row(s)"))
    }
    fn work(&self) -> Work {
        let bytes = self.busy() * self.outputs * self.dtype.row_bytes(self.inputs).expect("whole blocks");
        let work = if bytes > last_cache_bytes() { Work::memory(bytes) } else { Work::cache(bytes) };
        let operations = 2 * self.rows * self.per_row * self.outputs * self.inputs;
        if self.dtype.is_dense() { work.f32(operations) } else { work.int8(operations) }
    }
    fn small(&self) -> Self {
        Self { experts: 9, per_row: 2, outputs: 50, inputs: 512, rows: self.rows.min(9), ..self.clone() }
    }
    fn prepare<B: Backend>(&self, backend: &mut B) -> Ready<B> {
        let Self { dtype, experts, per_row, outputs, inputs, rows } = *self;
        let random = &mut Random::new(1);
        let x = upload(backend, &random.normals(rows * inputs), inputs);
        let logits = upload(backend, &self.logits(), experts);
        let bytes = weight_bytes(random, dtype, outputs, inputs);
        let expert = Weight { dtype, rows: outputs, cols: inputs, bytes: &bytes, run_as: dtype };
        let matrix = backend.matrix(&vec![expert; experts]).expect("memory");
        let mut routing = backend.routing(experts, per_row, rows).expect("memory");
        let mut sent = backend.buffer(rows * per_row, inputs).expect("memory");
        let mut made = backend.buffer(rows * per_row, outputs).expect("memory");
        let out = backend.buffer(rows, outputs).expect("memory");
        let run = Box::new(move |backend: &mut B, out: &mut B::Buffer| {
            backend.route(&mut routing, &logits, true, rows);
            backend.dispatch(&mut sent, &x, &routing);
            backend.expert_linear(&mut made, &sent, &matrix, &routing);
            backend.combine(out, &made, &routing);
        });
        Ready { out, rows, width: outputs, run }
    }
}

/// Every sequence runs its last `rows` positions.
#[derive(Clone)]
struct Attention {
    sequences: usize,
    rows: usize,
    context: usize,
    heads: Heads,
    dtype: CacheDtype,
}

const BLOCK_SIZE: usize = 16;
const PLACE: CacheLayer = CacheLayer { group: 0, layer: 0 };
/// Enough for 64 sequences of 8192 positions.
const GPU_LIMITS: StepLimits = StepLimits { rows: 4096, segments: 64, groups: 1, table_entries: 512 };
/// Rows at a time that fill the cache.
const CHUNK: usize = 256;

impl Attention {
    /// A step in which `sequences` run `rows` positions each, up to `context`.
    fn begin<B: Backend>(&self, backend: &mut B, sequences: std::ops::Range<usize>, rows: usize, context: usize) {
        let blocks = context.div_ceil(BLOCK_SIZE);
        // Block i of sequence s is i · sequences + s: neighbours in a sequence are strangers in memory, as in real life.
        let block = |sequence: usize, i: usize| (i * self.sequences + sequence) as u32;
        let (mut positions, mut slots, mut segments, mut block_tables) = (vec![], vec![], vec![], vec![]);
        for sequence in sequences {
            segments.push(Segment { first_row: positions.len(), rows, context, first_table_entry: block_tables.len() });
            for position in context - rows..context {
                positions.push(position as u32);
                let slot = block(sequence, position / BLOCK_SIZE) as usize * BLOCK_SIZE + position % BLOCK_SIZE;
                slots.push(slot as u32);
            }
            block_tables.extend((0..blocks).map(|i| block(sequence, i)));
        }
        let (ids, block_tables) = (vec![0; positions.len()], &block_tables);
        backend.begin(&StepInput {
            ids: &ids,
            positions: &positions,
            slots: &slots,
            segments: &segments,
            block_tables,
        });
    }
}

impl Operation for Attention {
    fn title(&self) -> (String, String) {
        let Self { sequences, rows, context, heads, dtype } = self;
        let name = if *rows == 1 { "attention, decode" } else { "attention, prefill" };
        let Heads { query, kv, head_dim } = heads;
        (format!("{name} {dtype:?}"), format!("{sequences} × {rows} of {context}, {query}/{kv} × {head_dim}"))
    }
    fn work(&self) -> Work {
        let Self { sequences, rows, context, heads, dtype } = self;
        let bytes = 2 * sequences * context * heads.kv * dtype.head_bytes(heads.head_dim);
        let seen = sequences * rows * (2 * context - rows).div_ceil(2);
        let (work, operations) = (Work::memory(bytes), 4 * seen * heads.query * heads.head_dim);
        match dtype {
            CacheDtype::Bf16 => work.bf16(operations),
            // Values take twice as many: their weights have 16 bits.
            CacheDtype::Int8 => work.int8(3 * operations / 2),
            _ => work.f32(operations),
        }
    }
    fn small(&self) -> Self {
        Self { sequences: 2, rows: self.rows.min(3), context: 300, ..self.clone() }
    }
    fn tolerance(&self) -> f32 {
        match self.dtype {
            // Queries and weights are rounded to bfloat16 as well.
            CacheDtype::Bf16 => 1.5e-2,
            // What is rounded to integers is the same, but for numbers in the middle between two.
            CacheDtype::Int8 => 2e-3,
            _ => 1e-4,
        }
    }
    fn prepare<B: Backend>(&self, backend: &mut B) -> Ready<B> {
        let Self { sequences, rows, context, heads, dtype } = *self;
        let (width, random) = (heads.qkv_width(), &mut Random::new(2));
        let qkv: Vec<f32> = (0..CHUNK.max(sequences * rows) * width).map(|_| random.normal()).collect();
        let mut qkv = upload(backend, &qkv, width);
        let blocks = context.div_ceil(BLOCK_SIZE) * sequences;
        let Heads { kv: kv_heads, head_dim, .. } = heads;
        let shape = CacheShape { layers: 1, blocks, block_size: BLOCK_SIZE, kv_heads, head_dim, dtype };
        let mut cache = backend.cache(shape).expect("memory");
        let inv_freq = (0..head_dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / head_dim as f32)).collect();
        let rope = backend.rope(&RopeSpec { style: RopeStyle::Halves, inv_freq, scale: 1.0 }).expect("memory");
        for sequence in 0..sequences {
            for first in (0..context).step_by(CHUNK) {
                let end = context.min(first + CHUNK);
                self.begin(backend, sequence..sequence + 1, end - first, end);
                backend.rope_and_cache(&mut qkv, &mut cache, PLACE, heads, None, None, 0.0, &rope);
            }
        }
        self.begin(backend, 0..sequences, rows, context);
        let out = backend.buffer(sequences * rows, heads.query_width()).expect("memory");
        let mask = Mask { scale: (head_dim as f32).sqrt().recip(), window: None, soft_cap: None };
        let run = Box::new(move |backend: &mut B, out: &mut B::Buffer| {
            backend.attention(out, &qkv, &cache, PLACE, heads, mask)
        });
        Ready { out, rows: sequences * rows, width: heads.query_width(), run }
    }
}

/// What goes over rows of activations once.
#[derive(Clone)]
struct Rows {
    kind: Kind,
    rows: usize,
    width: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Norm,
    Gated,
}

impl Operation for Rows {
    fn title(&self) -> (String, String) {
        let name = if self.kind == Kind::Norm { "rms_norm" } else { "gated (silu)" };
        (name.into(), format!("{} row(s) of {}", self.rows, self.width))
    }
    fn work(&self) -> Work {
        let inputs = if self.kind == Kind::Norm { 1 } else { 2 };
        Work::cache(4 * self.rows * self.width * inputs)
    }
    fn small(&self) -> Self {
        Self { rows: self.rows.min(3), width: 96, ..self.clone() }
    }
    fn prepare<B: Backend>(&self, backend: &mut B) -> Ready<B> {
        let Self { kind, rows, width } = *self;
        let random = &mut Random::new(3);
        let x: Vec<f32> = (0..rows * width * 2).map(|_| random.normal()).collect();
        let out = backend.buffer(rows, width).expect("memory");
        let run: Run<B> = match kind {
            Kind::Norm => {
                let (x, weight) =
                    (upload(backend, &x[..rows * width], width), backend.vector(&x[..width]).expect("memory"));
                Box::new(move |backend, out| backend.rms_norm(out, &x, &weight, 1e-6, rows))
            }
            Kind::Gated => {
                let x = upload(backend, &x, 2 * width);
                Box::new(move |backend, out| backend.gated(out, &x, Activation::Silu, width, rows))
            }
        };
        Ready { out, rows, width, run }
    }
}

/// The shapes of Qwen3-0.6B and Llama-3.1-8B.
fn on_gpu(bench: &Bench, gpu: &mut CudaBackend) {
    let products = [(4096, 1024), (1024, 3072), (6144, 4096), (28672, 4096), (4096, 14336), (128_256, 4096)];
    for dtype in [DType::BF16, DType::Q8_0, DType::Q4_K] {
        for (outputs, inputs) in products {
            for rows in [1, 8, 64, 2048] {
                line_on_gpu(bench, gpu, &Linear { dtype, outputs, inputs, rows });
            }
        }
    }
    for heads in [Heads { query: 16, kv: 8, head_dim: 128 }, Heads { query: 32, kv: 8, head_dim: 128 }] {
        let dtype = CacheDtype::Bf16;
        for (sequences, context) in [(1, 1024), (1, 8192), (8, 1024), (8, 8192), (64, 1024), (64, 8192)] {
            line_on_gpu(bench, gpu, &Attention { sequences, rows: 1, context, heads, dtype });
        }
        for context in [1024, 8192] {
            line_on_gpu(bench, gpu, &Attention { sequences: 1, rows: 1024, context, heads, dtype });
        }
    }
    for rows in [1, 64, 2048] {
        line_on_gpu(bench, gpu, &Rows { kind: Kind::Norm, rows, width: 4096 });
        line_on_gpu(bench, gpu, &Rows { kind: Kind::Gated, rows, width: 14336 });
    }
}

/// What copies within a device's memory reach, and within as little of it as its caches hold; in bytes read and written.
fn limits_of(device: &cuda::Device) -> Limits {
    let copied = |bytes: usize| {
        let [from, to] = [0; 2].map(|_| device.take("a measurement", bytes).expect("memory"));
        let run = |count: usize| {
            (0..count).for_each(|_| device.driver().copy(to.at(), from.at(), bytes).expect("a copy"));
            device.driver().synchronize().expect("a device that works");
        };
        let count = (16 << 30) / bytes;
        run(count);
        let begun = Instant::now();
        run(count);
        (2 * count * bytes) as f64 / begun.elapsed().as_secs_f64()
    };
    let rate = std::env::var("OCTAVO_MATRIX_RATE").ok().and_then(|rate| rate.parse().ok()).unwrap_or(f64::INFINITY);
    let (memory_bytes, cache_bytes) = (copied(1 << 30), copied(8 << 20));
    Limits { memory_bytes, cache_bytes, f32_operations: rate, int8_operations: rate, bf16_operations: rate }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--cuda") {
        let device = cuda::Device::gpu(0).expect("a GPU");
        let chosen = arguments.into_iter().filter(|argument| !argument.starts_with('-')).collect();
        let limits = limits_of(&device);
        let gpu = &mut CudaBackend::open(device, GPU_LIMITS).expect("memory");
        return on_gpu(&Bench::within(&format!("kernels, {}", gpu.describe()), limits, chosen), gpu);
    }
    let bench = Bench::start("kernels", None);
    if bench.is_tiny() {
        on_gpu(&bench, &mut harness::cuda_backends()[0]);
    }
    let cpu = &mut CpuBackend::open(Default::default(), harness::LIMITS).expect("threads");

    let inputs = 2048;
    for dtype in [
        DType::Q4_0,
        DType::Q4_1,
        DType::Q4_K,
        DType::Q6_K,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q8_16,
        DType::Q8_0,
        DType::BF16,
        DType::F32,
    ] {
        // So many outputs that the last cache is of no help from one run to the next.
        let bytes = bench.size(4 * last_cache_bytes(), 1);
        let outputs = (bytes / dtype.row_bytes(inputs).expect("whole blocks")).next_multiple_of(16);
        line(&bench, cpu, &Linear { dtype, outputs, inputs, rows: 1 });
        // And so few that they stay in the cores' own caches: what one row costs but for memory.
        line(&bench, cpu, &Linear { dtype, outputs: 512, inputs, rows: 1 });
        for rows in [8, 64, 256] {
            line(&bench, cpu, &Linear { dtype, outputs: 4096, inputs, rows });
        }
    }
    for rows in [1, 8, 512] {
        line(&bench, cpu, &GatedLayer { dtype: DType::Q4_1, hidden: 576, width: 1536, rows });
    }
    for rows in [1, 8, 256] {
        let (experts, per_row, outputs) = (bench.size(128, 9), 8, 1536);
        line(&bench, cpu, &Experts { dtype: DType::Q4_K, experts, per_row, outputs, inputs, rows });
    }
    let heads = Heads { query: 32, kv: 8, head_dim: 128 };
    for dtype in [CacheDtype::Int8, CacheDtype::F16, CacheDtype::Bf16, CacheDtype::F32] {
        line(&bench, cpu, &Attention { sequences: 32, rows: 1, context: 1024, heads, dtype });
        line(&bench, cpu, &Attention { sequences: 1, rows: 256, context: 2048, heads, dtype });
    }
    // A small model: a chunk of a prompt, a little after a long prefix, and a token.
    let heads = Heads { query: 9, kv: 3, head_dim: 64 };
    for dtype in [CacheDtype::Int8, CacheDtype::Bf16, CacheDtype::F32] {
        for (rows, context) in [(256, 2048), (16, 528), (1, 2048)] {
            line(&bench, cpu, &Attention { sequences: 1, rows, context, heads, dtype });
        }
    }
    for rows in [1, 64] {
        line(&bench, cpu, &Rows { kind: Kind::Norm, rows, width: 2048 });
        line(&bench, cpu, &Rows { kind: Kind::Gated, rows, width: 8192 });
    }

    let plain = Linear { dtype: DType::Q4_K, outputs: 256, inputs: bench.size(inputs, 256), rows: 1 };
    let reference = &mut harness::reference(Activations::Int8);
    let mut ready = plain.prepare(reference);
    let (name, shape) = plain.title();
    bench.line(&format!("  reference {name}"), &shape, plain.work(), || ready.run(reference));
}
