//! The trait [`Backend`] over this machine's cores. Each operation is one parallel region over the pool.

use std::sync::Arc;

use super::{
    array::Array,
    attention::{self, Scratch},
    cache::{Cache, Element, LayerWriter, TILE, Values},
    embed,
    experts::Combine,
    gated,
    isa::Isa,
    linear::{self, GatedMlp},
    memory::Arena,
    norm::{ResidualNorm, RmsNorm, RmsNormColumns},
    pack::{Matrix, Successor},
    pool::{Pool, SharedSlice},
    quantise::Activations,
    rope::{RopeAndCache, RopeTable},
};
use crate::{
    Activation, Backend, BackendError, BlockCopy, CacheLayer, CacheShape, Heads, Mask, Projection, Result, RopeSpec,
    StepInput, StepLimits, Weight, ops::gated_mlp_by_steps, reference::experts::route, routing::Routing, step::Step,
};

/// How the CPU backend is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuConfig {
    /// Threads that compute, the caller's among them. `None`: as many as this process may use.
    pub threads: Option<usize>,
    /// Pin the calling thread to a core of its own, as the workers are: for a thread that does nothing but run steps.
    pub pin_caller: bool,
    /// The instruction set. `None`: what `OCTAVO_CPU_ISA` says, or the best that this CPU has.
    pub isa: Option<Isa>,
}

/// The backend over a CPU.
pub struct CpuBackend {
    isa: Isa,
    pool: Pool,
    limits: StepLimits,
    step: Step,
    /// For matrices.
    weights: Arena,
    /// Of a product, and of the second of two.
    activations: [Activations; 2],
    /// Most rows of a product, and most inputs of one whose weights are blocks.
    product: (usize, usize),
    /// Of the product before: the next one's weights are what follows on its own.
    last_matrix: Option<Arc<Successor>>,
    attention: Option<(Scratch, usize)>, // and the head_dim it is for
    ropes: Vec<RopeTable>,
}

/// `(rows, width)` of f32.
pub struct Buffer {
    values: Array<f32>,
    width: usize,
}

/// A vector of f32.
#[derive(Debug)]
pub struct Vector(Vec<f32>);

/// The number of a registered rotary embedding.
#[derive(Clone, Copy, Debug)]
pub struct Rope(usize);

/// Values that one task goes through: a microsecond's worth at least, about what it costs to hand it to another thread. A
/// small step is one task, which the calling thread runs by itself.
const TASK_VALUES: usize = 1 << 12;

/// Tasks of as many rows each as can be.
fn rows_per_task(rows: usize, width: usize) -> usize {
    let most = (TASK_VALUES / width.max(1)).max(1);
    rows.div_ceil(rows.div_ceil(most).max(1)).max(1)
}

impl CpuBackend {
    /// Starts the threads and takes what does not depend on a model.
    pub fn open(config: CpuConfig, limits: StepLimits) -> Result<Self> {
        let isa = config.isa.map_or_else(Isa::from_environment, Ok)?;
        let pool = Pool::new(config.threads)
            .map_err(|error| BackendError::Unsupported(format!("worker threads cannot be started: {error}")))?;
        if config.pin_caller {
            pool.pin_caller();
        }
        let (activations, step) = (Default::default(), Step::new(limits));
        let product = (limits.rows, 0);
        Ok(Self {
            isa,
            pool,
            limits,
            step,
            weights: Arena::default(),
            activations,
            product,
            last_matrix: None,
            attention: None,
            ropes: Vec::new(),
        })
    }

    fn room_for_products(&mut self) -> Result<()> {
        let (rows, inputs) = self.product;
        self.activations.iter_mut().try_for_each(|activations| activations.reserve(rows, inputs))
    }

    /// Notes which matrix is read next, the threads' shares beginning at equal parts of its first `bytes`.
    fn reads(&mut self, matrix: &Matrix, bytes: usize) {
        if let Some(last) = self.last_matrix.replace(matrix.successor.clone()) {
            last.set(matrix, bytes / self.pool.threads());
        }
    }
}

impl Buffer {
    fn rows(&self, rows: usize, width: usize) -> &[f32] {
        &self.values[..rows * width]
    }
    fn rows_mut(&mut self, rows: usize, width: usize) -> &mut [f32] {
        &mut self.values[..rows * width]
    }
}

fn weight(vector: Option<&Vector>, width: usize) -> Option<&[f32]> {
    vector.map(|vector| {
        assert_eq!(vector.0.len(), width);
        vector.0.as_slice()
    })
}

impl Backend for CpuBackend {
    type Matrix = Matrix;
    type Vector = Vector;
    type Buffer = Buffer;
    type Cache = Cache;
    type Rope = Rope;
    type Routing = Routing;

    fn describe(&self) -> String {
        let threads = self.pool.threads();
        format!("{}, {threads} thread{}", self.isa.describe(), if threads == 1 { "" } else { "s" })
    }

    fn matrix(&mut self, parts: &[Weight<'_>]) -> Result<Matrix> {
        let matrix = Matrix::pack(&mut self.pool, &mut self.weights, parts)?;
        if matrix.has_blocks() {
            self.product.1 = self.product.1.max(matrix.inputs());
            self.room_for_products()?;
        }
        Ok(matrix)
    }

    fn matrix_bytes(&self, matrix: &Matrix) -> usize {
        matrix.bytes()
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector> {
        Ok(Vector(values.to_vec()))
    }

    fn buffer(&mut self, rows: usize, width: usize) -> Result<Buffer> {
        Ok(Buffer { values: Array::new("a buffer", &[rows, width])?, width })
    }

    fn cache(&mut self, shape: CacheShape) -> Result<Cache> {
        let cache = Cache::new(shape)?;
        if self.attention.as_ref().is_none_or(|(_, head_dim)| *head_dim < shape.head_dim) {
            self.attention = Some((Scratch::new(shape.head_dim, self.pool.threads())?, shape.head_dim));
        }
        Ok(cache)
    }

    fn centre_keys(&mut self, cache: &mut Cache, place: CacheLayer, centre: Vec<f32>) {
        if matches!(cache.values, Values::Int8(_)) {
            assert_eq!(centre.len(), cache.shape.kv_heads * cache.shape.head_dim);
            cache.centres.set(place, centre);
        }
    }

    fn rope(&mut self, spec: &RopeSpec) -> Result<Rope> {
        self.ropes.push(RopeTable::new(spec, self.limits.rows));
        Ok(Rope(self.ropes.len() - 1))
    }

    fn routing(&mut self, experts: usize, per_row: usize, rows: usize) -> Result<Routing> {
        let routing = Routing::new(experts, per_row, rows)?;
        self.product.0 = self.product.0.max(rows * per_row);
        self.room_for_products()?;
        Ok(routing)
    }

    fn copy_blocks(&mut self, cache: &mut Cache, copies: &[BlockCopy]) {
        cache.copy_blocks(copies);
    }

    fn begin(&mut self, input: &StepInput<'_>) {
        self.step.begin(input);
        for rope in &mut self.ropes {
            rope.begin(&mut self.pool, &self.step.positions);
        }
    }

    fn embed(&mut self, out: &mut Buffer, table: &Matrix, scale: f32) {
        let out = out.rows_mut(self.step.rows(), table.inputs());
        embed::embed(&mut self.pool, out, table, &self.step.ids, scale);
    }

    fn rms_norm(&mut self, out: &mut Buffer, x: &Buffer, weight: &Vector, eps: f32, rows: usize) {
        let (isa, weight) = (self.isa, weight.0.as_slice());
        let piece = rows_per_task(rows, weight.len()) * weight.len();
        let (out, x) = (out.rows_mut(rows, weight.len()), x.rows(rows, weight.len()));
        self.pool.run_pieces(out, piece, &|i, out| {
            let x = &x[i * piece..][..out.len()];
            isa.run(RmsNorm { out, x, weight, eps });
        });
    }

    fn rms_norm_columns(&mut self, x: &mut Buffer, width: usize, first: usize, weight: &Vector, eps: f32, rows: usize) {
        let (isa, weight) = (self.isa, weight.0.as_slice());
        assert!(first + weight.len() <= width);
        let piece = rows_per_task(rows, weight.len()) * width;
        self.pool.run_pieces(x.rows_mut(rows, width), piece, &|_, x| {
            isa.run(RmsNormColumns { x, width, first, weight, eps });
        });
    }

    fn residual_norm(
        &mut self,
        residual: &mut Buffer,
        delta: &Buffer,
        post: Option<&Vector>,
        scale: f32,
        out: &mut Buffer,
        next: Option<&Vector>,
        eps: f32,
        rows: usize,
    ) {
        let (isa, width) = (self.isa, residual.width);
        let (post, next) = (weight(post, width), weight(next, width));
        let piece = rows_per_task(rows, width) * width;
        let (delta, out) = (delta.rows(rows, width), SharedSlice::new(out.rows_mut(rows, width)));
        self.pool.run_pieces(residual.rows_mut(rows, width), piece, &|i, residual| {
            let delta = &delta[i * piece..][..residual.len()];
            // SAFETY: the same part as of `residual`, whose parts do not overlap.
            let out = unsafe { out.slice(i * piece, residual.len()) };
            isa.run(ResidualNorm { residual, delta, post, scale, out, next, eps, width });
        });
    }

    fn linear(&mut self, out: &mut Buffer, x: &Buffer, matrix: &Matrix, bias: Option<&Vector>, rows: usize) {
        let (out, x) = (out.rows_mut(rows, matrix.outputs()), x.rows(rows, matrix.inputs()));
        let bias = weight(bias, matrix.outputs());
        self.reads(matrix, matrix.bytes());
        linear::linear(self.isa, &mut self.pool, &mut self.activations[0], out, x, matrix, bias, rows);
    }

    fn gated_mlp(
        &mut self,
        out: &mut Buffer,
        x: &Buffer,
        first: Projection<'_, Self>,
        activation: Activation,
        second: Projection<'_, Self>,
        between: (&mut Buffer, &mut Buffer),
        width: usize,
        rows: usize,
    ) {
        let ((gate_up, gate_up_bias), (down, down_bias)) = (first, second);
        if !GatedMlp::fits(gate_up, down, rows) {
            return gated_mlp_by_steps(self, out, x, first, activation, second, between, width, rows);
        }
        // A thread begins with its share of the gates, and up goes along.
        self.reads(gate_up, gate_up.bytes() / 2);
        self.reads(down, down.bytes());
        let mlp = GatedMlp {
            x: x.rows(rows, gate_up.inputs()),
            gate_up,
            gate_up_bias: weight(gate_up_bias, 2 * width),
            activation,
            down,
            down_bias: weight(down_bias, down.outputs()),
            out: out.rows_mut(rows, down.outputs()),
            rows,
        };
        linear::gated_mlp(self.isa, &mut self.pool, &mut self.activations, mlp);
    }

    fn rope_and_cache(
        &mut self,
        qkv: &mut Buffer,
        cache: &mut Cache,
        place: CacheLayer,
        heads: Heads,
        query_norm: Option<&Vector>,
        key_norm: Option<&Vector>,
        eps: f32,
        rope: &Rope,
    ) {
        let shape = cache.shape;
        assert!(heads.kv == shape.kv_heads && heads.head_dim == shape.head_dim, "{heads:?} over {shape:?}");
        let pass = RopePass {
            qkv: qkv.rows_mut(self.step.rows(), heads.qkv_width()),
            shape,
            place,
            centre: cache.centres.get(place),
            heads,
            query_norm: weight(query_norm, heads.head_dim),
            key_norm: weight(key_norm, heads.head_dim),
            eps,
            rope: &self.ropes[rope.0],
        };
        match &mut cache.values {
            Values::F32(values) => pass.run(self.isa, &mut self.pool, &self.step, values),
            Values::F16(values) => pass.run(self.isa, &mut self.pool, &self.step, values),
            Values::Bf16(values) => pass.run(self.isa, &mut self.pool, &self.step, values),
            Values::Int8(values) => pass.run(self.isa, &mut self.pool, &self.step, values),
        }
    }

    fn attention(
        &mut self,
        out: &mut Buffer,
        qkv: &Buffer,
        cache: &Cache,
        place: CacheLayer,
        heads: Heads,
        mask: Mask,
    ) {
        let (scratch, _) = self.attention.as_mut().expect("a cache was taken, and scratch with it");
        let out = out.rows_mut(self.step.rows(), heads.query_width());
        let qkv = qkv.rows(self.step.rows(), heads.qkv_width());
        attention::attention(self.isa, &mut self.pool, scratch, &self.step, out, qkv, cache, place, heads, mask);
    }

    fn gated(&mut self, out: &mut Buffer, gate_up: &Buffer, activation: Activation, width: usize, rows: usize) {
        let isa = self.isa;
        // An exponential costs about as much as eight other operations.
        let piece = rows_per_task(rows, 8 * width) * width;
        let gate_up = gate_up.rows(rows, 2 * width);
        self.pool.run_pieces(out.rows_mut(rows, width), piece, &|i, out| {
            let gate_up = &gate_up[2 * i * piece..][..2 * out.len()];
            isa.run(gated::Gated { out, gate_up, activation, width });
        });
    }

    fn route(&mut self, routing: &mut Routing, logits: &Buffer, renormalise: bool, rows: usize) {
        let (experts, per_row) = (routing.experts(), routing.per_row());
        let logits = logits.rows(rows, experts);
        // An exponential and a comparison for each choice, of every expert.
        let rows_per_task = rows_per_task(rows, (8 + per_row) * experts);
        self.pool.run_pieces(routing.begin(rows), rows_per_task * per_row, &|i, choices| {
            let logits = logits.chunks_exact(experts).skip(i * rows_per_task);
            choices
                .chunks_exact_mut(per_row)
                .zip(logits)
                .for_each(|(choices, logits)| route(choices, logits, renormalise));
        });
        routing.sort();
    }

    fn dispatch(&mut self, out: &mut Buffer, x: &Buffer, routing: &Routing) {
        let width = x.width;
        let (x, slots) = (&x.values, rows_per_task(routing.slots(), width));
        self.pool.run_pieces(out.rows_mut(routing.slots(), width), slots * width, &|i, out| {
            for (out, &row) in out.chunks_exact_mut(width).zip(&routing.slot_rows()[i * slots..]) {
                out.copy_from_slice(&x[row as usize * width..][..width]);
            }
        });
    }

    fn expert_linear(&mut self, out: &mut Buffer, x: &Buffer, matrix: &Matrix, routing: &Routing) {
        let slots = routing.slots();
        let (out, x) = (out.rows_mut(slots, matrix.outputs() / routing.experts()), x.rows(slots, matrix.inputs()));
        linear::expert_linear(self.isa, &mut self.pool, &mut self.activations[0], out, x, matrix, routing);
    }

    fn combine(&mut self, out: &mut Buffer, x: &Buffer, routing: &Routing) {
        let (isa, width, rows) = (self.isa, out.width, routing.slots() / routing.per_row());
        let x = x.rows(routing.slots(), width);
        let rows_per_task = rows_per_task(rows, width * routing.per_row());
        self.pool.run_pieces(out.rows_mut(rows, width), rows_per_task * width, &|i, out| {
            isa.run(Combine { out, first_row: i * rows_per_task, x, routing, width });
        });
    }

    fn gather(&mut self, out: &mut Buffer, x: &Buffer, rows: &[u32]) {
        let width = x.width;
        assert_eq!(out.width, width);
        for (out, &row) in out.rows_mut(rows.len(), width).chunks_exact_mut(width).zip(rows) {
            out.copy_from_slice(&x.values[row as usize * width..][..width]);
        }
    }

    fn scale_and_cap(&mut self, x: &mut Buffer, scale: f32, soft_cap: Option<f32>, width: usize, rows: usize) {
        if scale == 1.0 && soft_cap.is_none() {
            return;
        }
        let isa = self.isa;
        self.pool.run_pieces(x.rows_mut(rows, width), TASK_VALUES, &|_, x| {
            isa.run(gated::ScaleAndCap { x, scale, cap: soft_cap });
        });
    }

    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn look(&mut self, x: &Buffer, rows: usize, width: usize, look: &(dyn Fn(usize, &[f32]) + Sync)) {
        let values = x.rows(rows, width);
        self.pool.run(rows, &|number| look(number, &values[number * width..][..width]));
    }

    fn read<'a>(&'a mut self, buffer: &'a Buffer, rows: usize, width: usize) -> &'a [f32] {
        buffer.rows(rows, width)
    }
}

/// The arguments of `rope_and_cache` that do not depend on the cache's type.
struct RopePass<'a> {
    qkv: &'a mut [f32],
    shape: CacheShape,
    place: CacheLayer,
    centre: Option<&'a [f32]>,
    heads: Heads,
    query_norm: Option<&'a [f32]>,
    key_norm: Option<&'a [f32]>,
    eps: f32,
    rope: &'a RopeTable,
}

impl RopePass<'_> {
    fn run<E: Element>(self, isa: Isa, pool: &mut Pool, step: &Step, values: &mut [E]) {
        let Self { qkv, shape, place, centre, heads, query_norm, key_norm, eps, rope } = self;
        let cache = &LayerWriter { shape, values: SharedSlice::new(values), layer: place.layer };
        let all_slots = step.slots(place.group);
        let rope = rope.view();
        let mut rows = rows_per_task(step.rows(), heads.qkv_width());
        if step.segments.len() < step.rows() {
            rows = rows.next_multiple_of(TILE); // neighbours write to the same lines
        }
        pool.run_pieces(qkv, rows * heads.qkv_width(), &|i, qkv| {
            // `Step::begin` has seen to it that no two rows have one slot.
            let slots = &all_slots[i * rows..];
            let first_row = i * rows;
            isa.run(RopeAndCache { qkv, first_row, slots, cache, centre, heads, query_norm, key_norm, eps, rope });
        });
    }
}
