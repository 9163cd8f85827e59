//! The trait [`Backend`] over a device: each operation is a launch or a few, see `cu/`.

mod attention; // which kernels, over how many warps
mod memory; // what lies on the device
mod products; // which kernels, over how many rows
mod run; // a step, launched or repeated

pub use memory::{Buffer, Cache, Rope, Routing, Vector};

use std::ops::Range;

use super::changes::Changes;
use super::device::{Device, Memory, bytes_of, bytes_of_mut, columns, row_threads};
use super::draws::{Draws, MOST_CHANGES};
use super::graphs::Graphs;
use super::linear::Rounded;
use super::matrix::Matrix;
use super::step::StepOnDevice;
use crate::draw::{DrawnRow, RowDraw};
use crate::{
    Activation, Backend, BackendError, BlockCopy, CacheDtype, CacheLayer, CacheShape, Heads, Mask, Result, RopeSpec,
    RopeStyle, StepInput, StepLimits, Weight, step::Step,
};
use memory::RopeTable;
use run::{most_draws, most_spares};

/// The backend over a GPU.
pub struct CudaBackend {
    device: Device,
    step: Step,
    on_device: StepOnDevice,
    changes: Changes,
    ropes: Vec<RopeTable>,
    graphs: Graphs,
    /// Where rows that belong to nobody write their keys and values: there is a block for them. None before the cache.
    null_slot: Option<u32>,
    /// Blocks for rows that run ahead.
    spares: Range<u32>,
    /// Once they are asked for.
    draws: Option<Draws>,
    drawn: Vec<DrawnRow>,
    /// Where `read` puts what it reads.
    host: Vec<f32>,
    limits: StepLimits,
    rounded: Rounded,
    /// What attention keeps of splits.
    partials: Option<Memory>,
}

/// Heads of a block of `rope_and_cache`: one for each warp.
const ROPE_HEADS: usize = 4;
/// The widest head that `attention` takes.
const MOST_HEAD_DIM: usize = 256;
const NO_DRAWS: &str = "draws were asked for";

impl CudaBackend {
    /// Takes what does not depend on a model from `device`.
    pub fn open(device: Device, limits: StepLimits) -> Result<Self> {
        let on_device = StepOnDevice::new(&device, limits, most_draws(&limits))?;
        Ok(Self {
            on_device,
            changes: Changes::new(&device)?,
            step: Step::new(limits),
            ropes: Vec::new(),
            graphs: Graphs::new(&device),
            null_slot: None,
            spares: 0..0,
            draws: None,
            drawn: Vec::new(),
            host: Vec::new(),
            limits,
            device,
            rounded: Rounded::new(limits.rows),
            partials: None,
        })
    }

    /// How many sizes of decode steps have been recorded.
    pub fn graphs(&self) -> usize {
        self.graphs.count()
    }
}

impl Backend for CudaBackend {
    type Matrix = Matrix;
    type Vector = Vector;
    type Buffer = Buffer;
    type Cache = Cache;
    type Rope = Rope;
    type Routing = Routing;

    fn describe(&self) -> String {
        let info = self.device.driver().info();
        let (major, minor) = info.capability;
        format!("{}, compute capability {major}.{minor}, {} multiprocessors", info.name, info.processors)
    }

    fn matrix(&mut self, parts: &[Weight<'_>]) -> Result<Matrix> {
        let matrix = Matrix::upload(&self.device, parts)?;
        self.rounded.make_room_for(&self.device, &matrix)?;
        Ok(matrix)
    }

    fn matrix_bytes(&self, matrix: &Matrix) -> usize {
        matrix.bytes()
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector> {
        Ok(Vector { memory: self.device.take_with("a vector", bytes_of(values))?, len: values.len() })
    }

    fn buffer(&mut self, rows: usize, width: usize) -> Result<Buffer> {
        let memory = self.device.take_array("a buffer", 4, &[rows, width])?;
        self.device.driver().fill(memory.at(), 0, memory.bytes())?;
        Ok(Buffer { memory, width })
    }

    fn cache(&mut self, shape: CacheShape) -> Result<Cache> {
        let CacheShape { layers, blocks, block_size, kv_heads, head_dim, dtype } = shape;
        if head_dim > MOST_HEAD_DIM || block_size % 16 != 0 {
            return Err(BackendError::Unsupported(format!(
                "the CUDA kernels take heads of up to {MOST_HEAD_DIM} components and blocks of a multiple of 16 \
                 positions, not {head_dim} and {block_size}"
            )));
        }
        if dtype == CacheDtype::Int8 {
            let message = "a KV cache of int8 is for CPUs: on a GPU there are f32, f16, bf16 and fp8_e4m3";
            return Err(BackendError::Unsupported(message.to_owned()));
        }
        let refused = BackendError::OutOfMemory { what: "the KV cache", bytes: usize::MAX };
        let slots = blocks.checked_add(1 + most_spares(&self.limits)).and_then(|all| all.checked_mul(block_size));
        let Some(slots) = slots.filter(|&slots| u32::try_from(slots).is_ok()) else { return Err(refused) };
        let lens = [layers, slots, 2, kv_heads, head_dim];
        let memory = self.device.take_array("the KV cache", dtype.bytes(), &lens)?;
        self.on_device.set_null_block(self.device.driver(), blocks as u32)?;
        self.null_slot = Some((blocks * block_size) as u32);
        let spares = blocks as u32 + 1;
        self.spares = spares..spares + most_spares(&self.limits) as u32;
        Ok(Cache { memory, shape, blocks: slots / block_size })
    }

    fn room_for_attention(&mut self, heads: Heads, block_size: usize) -> Result<()> {
        self.take_partials(heads, block_size)
    }

    fn rope(&mut self, spec: &RopeSpec) -> Result<Rope> {
        let pairs = spec.inv_freq.len();
        let inv_freq = self.device.take_with("a rotary embedding", bytes_of(&spec.inv_freq))?;
        let angles = self.device.take_array("a rotary embedding's angles", 8, &[self.limits.rows, pairs])?;
        self.ropes.push(RopeTable { inv_freq, angles, pairs, scale: spec.scale, style: spec.style });
        Ok(Rope(self.ropes.len() - 1))
    }

    fn routing(&mut self, experts: usize, per_row: usize, rows: usize) -> Result<Routing> {
        if per_row == 0 || per_row > experts {
            return Err(BackendError::Unsupported(format!("a row cannot go to {per_row} of {experts} experts")));
        }
        let array = |lens: &[usize]| self.device.take_array("the choices of experts", 4, lens);
        let choices = || array(&[rows, per_row]);
        let routing = Routing {
            experts,
            per_row,
            rows: 0,
            most_rows: rows,
            experts_of: choices()?,
            weights_of: choices()?,
            slots: choices()?,
            slot_rows: choices()?,
            first_slots: array(&[experts + 1])?,
        };
        self.rounded.make_room_for_rows(&self.device, rows * per_row)?;
        Ok(routing)
    }

    fn copy_blocks(&mut self, cache: &mut Cache, copies: &[BlockCopy]) {
        let (layers, blocks) = (cache.shape.layers, cache.blocks());
        let block_bytes = cache.shape.block_bytes() / layers;
        // One after another: what one copy overwrites, an earlier one may have read.
        for &BlockCopy { from, to } in copies {
            assert!((from as usize) < blocks && (to as usize) < blocks, "{from} to {to} of {blocks} blocks");
            self.device
                .launch("copy_block", [layers], 256)
                .pointer(cache.memory.at())
                .int(blocks)
                .int(block_bytes / 16)
                .int(from as usize)
                .int(to as usize)
                .go();
        }
    }

    fn begin(&mut self, input: &StepInput<'_>) {
        self.step.begin(input);
        self.on_device.begin(&self.device, &mut self.changes, &self.step, &[]);
        self.advance();
        self.rope_angles();
    }

    fn run(&mut self, input: &StepInput<'_>, draws: &[RowDraw<'_>], operations: impl FnOnce(&mut Self, usize)) {
        self.run_step(input, draws, operations);
    }

    fn failure(&self) -> Option<String> {
        self.device.failure()
    }

    fn embed(&mut self, out: &mut Buffer, table: &Matrix, scale: f32) {
        let [run] = table.runs() else { panic!("an embedding is of one type") };
        let known = self.step.ids.iter().filter(|&&id| id < StepInput::DRAWN);
        let most = known.max().map_or(0, |&id| id as usize);
        assert!(most < table.outputs(), "id {most} of {}", table.outputs());
        self.device
            .launch(format!("embed_{}", run.dtype.name()), [self.step.rows()], row_threads(table.inputs()))
            .pointer(out.rows(self.step.rows(), table.inputs()))
            .pointer(table.at(run))
            .pointer(self.on_device.ids())
            .int(table.inputs())
            .float(scale)
            .go();
    }

    fn rms_norm(&mut self, out: &mut Buffer, x: &Buffer, weight: &Vector, eps: f32, rows: usize) {
        let width = weight.len;
        self.device
            .launch("rms_norm", [rows], row_threads(width))
            .pointer(out.rows(rows, width))
            .pointer(x.rows(rows, width))
            .pointer(weight.of(width))
            .int(width)
            .float(eps)
            .go();
    }

    fn rms_norm_columns(&mut self, x: &mut Buffer, width: usize, first: usize, weight: &Vector, eps: f32, rows: usize) {
        assert!(first + weight.len <= width);
        self.device
            .launch("rms_norm_columns", [rows], row_threads(weight.len))
            .pointer(x.rows(rows, width))
            .pointer(weight.of(weight.len))
            .int(width)
            .int(first)
            .int(weight.len)
            .float(eps)
            .go();
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
        let width = residual.width;
        self.device
            .launch("residual_norm", [rows], row_threads(width))
            .pointer(residual.rows(rows, width))
            .pointer(delta.rows(rows, width))
            .pointer_if(post.map(|post| post.of(width)))
            .float(scale)
            .pointer(out.rows(rows, width))
            .pointer_if(next.map(|next| next.of(width)))
            .int(width)
            .float(eps)
            .go();
    }

    fn linear(&mut self, out: &mut Buffer, x: &Buffer, matrix: &Matrix, bias: Option<&Vector>, rows: usize) {
        assert!(bias.is_none_or(|bias| bias.len == matrix.outputs()));
        self.products(out, x, matrix, bias, rows);
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
        cache.check(heads);
        let (rows, rope) = (self.step.rows(), &self.ropes[rope.0]);
        assert!(2 * rope.pairs <= heads.head_dim, "{} pairs in a head of {}", rope.pairs, heads.head_dim);
        let all_heads = heads.query + 2 * heads.kv;
        self.device
            .launch(
                of_cache("rope_and_cache", cache.shape.dtype),
                [rows, all_heads.div_ceil(ROPE_HEADS)],
                32 * ROPE_HEADS,
            )
            .shared(4 * ROPE_HEADS * heads.head_dim)
            .pointer(qkv.rows(rows, heads.qkv_width()))
            .pointer(cache.layer(place))
            .pointer(self.on_device.slots(place.group))
            .pointer(rope.angles.at())
            .pointer_if(query_norm.map(|norm| norm.of(heads.head_dim)))
            .pointer_if(key_norm.map(|norm| norm.of(heads.head_dim)))
            .int(heads.query)
            .int(heads.kv)
            .int(heads.head_dim)
            .int(cache.shape.block_size)
            .int(rope.pairs)
            .int(usize::from(rope.style == RopeStyle::Interleaved))
            .float(eps)
            .go();
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
        self.attend(out, qkv, cache, place, heads, mask);
    }

    fn gated(&mut self, out: &mut Buffer, gate_up: &Buffer, activation: Activation, width: usize, rows: usize) {
        let kernel = match activation {
            Activation::Silu => "gated_silu",
            Activation::GeluTanh => "gated_gelu_tanh",
        };
        let (threads, blocks) = columns(width);
        self.device
            .launch(kernel, [rows, blocks], threads)
            .pointer(out.rows(rows, width))
            .pointer(gate_up.rows(rows, 2 * width))
            .int(width)
            .go();
    }

    fn route(&mut self, routing: &mut Routing, logits: &Buffer, renormalise: bool, rows: usize) {
        assert!(rows <= routing.most_rows);
        let Routing { experts, per_row, .. } = *routing;
        routing.rows = rows;
        self.device
            .launch("route", [rows.div_ceil(4)], 4 * 32)
            .pointer(routing.experts_of.at())
            .pointer(routing.weights_of.at())
            .pointer(logits.rows(rows, experts))
            .int(rows)
            .int(experts)
            .int(per_row)
            .int(usize::from(renormalise))
            .go();
        self.device
            .launch("sort_choices", [1], (32 * experts).min(1024))
            .pointer(routing.slots.at())
            .pointer(routing.slot_rows.at())
            .pointer(routing.first_slots.at())
            .pointer(routing.experts_of.at())
            .int(rows * per_row)
            .int(experts)
            .int(per_row)
            .go();
    }

    fn dispatch(&mut self, out: &mut Buffer, x: &Buffer, routing: &Routing) {
        let (width, slots) = (x.width, routing.rows * routing.per_row);
        self.device
            .launch("gather", [slots], row_threads(width))
            .pointer(out.rows(slots, width))
            .pointer(x.rows(routing.rows, width))
            .pointer(routing.slot_rows.at())
            .int(0)
            .int(width)
            .go();
    }

    fn expert_linear(&mut self, out: &mut Buffer, x: &Buffer, matrix: &Matrix, routing: &Routing) {
        self.products_of_experts(out, x, matrix, routing);
    }

    fn combine(&mut self, out: &mut Buffer, x: &Buffer, routing: &Routing) {
        let (width, rows) = (out.width, routing.rows);
        let (threads, blocks) = columns(width);
        self.device
            .launch("combine", [rows, blocks], threads)
            .pointer(out.rows(rows, width))
            .pointer(x.rows(rows * routing.per_row, width))
            .pointer(routing.slots.at())
            .pointer(routing.weights_of.at())
            .int(width)
            .int(routing.per_row)
            .go();
    }

    fn gather(&mut self, out: &mut Buffer, x: &Buffer, rows: &[u32]) {
        let width = x.width;
        assert_eq!(width, out.width);
        let most = rows.iter().max().map_or(0, |&row| row as usize);
        let (out, x) = (out.rows(rows.len(), width), x.rows(most + 1, width));
        // Neighbours are only counted: nothing is uploaded, so that a recording may do it.
        let neighbours = rows.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        let numbers = (!neighbours).then(|| self.on_device.gather(&self.device, rows));
        self.device
            .launch("gather", [rows.len()], row_threads(width))
            .pointer(out)
            .pointer(x)
            .pointer_if(numbers)
            .int(rows.first().map_or(0, |&row| row as usize))
            .int(width)
            .go();
    }

    fn scale_and_cap(&mut self, x: &mut Buffer, scale: f32, soft_cap: Option<f32>, width: usize, rows: usize) {
        if scale == 1.0 && soft_cap.is_none() {
            return;
        }
        let (threads, blocks) = columns(width);
        self.device
            .launch("scale_and_cap", [rows, blocks], threads)
            .pointer(x.rows(rows, width))
            .int(width)
            .float(scale)
            .float(soft_cap.unwrap_or(0.0))
            .go();
    }

    fn draws(&mut self, vocab: usize, rows: usize) -> Result<bool> {
        self.draws = Some(Draws::new(&self.device, vocab, rows, most_draws(&self.limits))?);
        Ok(true)
    }

    fn draws_from(&self, draw: &RowDraw<'_>) -> bool {
        draw.biases.len() + draw.counts.len() <= MOST_CHANGES
    }

    fn spare_blocks(&self) -> Range<u32> {
        self.spares.clone()
    }

    fn set_draws(&mut self, draws: &[RowDraw<'_>]) {
        let words = self.draws.as_mut().expect(NO_DRAWS).begin(&self.device, None, draws, draws.len());
        self.on_device.set_draws(&self.device, words);
    }

    fn draw(&mut self, logits: &Buffer, first: usize, rows: usize) {
        let draws = self.draws.as_ref().expect(NO_DRAWS);
        draws.launch(&self.device, logits.rows(rows, draws.vocab()), self.on_device.draws(), first, rows);
    }

    fn send_drawn(&mut self, rows: usize) {
        self.draws.as_mut().expect(NO_DRAWS).send(rows);
    }

    fn drawn(&mut self) -> &[DrawnRow] {
        self.draws.as_mut().expect(NO_DRAWS).read(&mut self.drawn);
        &self.drawn
    }

    fn read<'a>(&'a mut self, buffer: &'a Buffer, rows: usize, width: usize) -> &'a [f32] {
        let at = buffer.rows(rows, width);
        self.host.resize(rows * width, 0.0);
        self.device.attempt(|driver| driver.download(bytes_of_mut(&mut self.host), at));
        if self.device.failure().is_some() {
            self.host.fill(f32::NAN);
        }
        &self.host
    }
}

/// The form of a kernel for a cache of `dtype`.
fn of_cache(kernel: &str, dtype: CacheDtype) -> String {
    format!("{kernel}_{}", dtype.name())
}
