//! The fused operations of a decoder, as one trait.
//!
//! A backend owns its memory: weights are handed over once ([`Backend::matrix`], [`Backend::vector`]), buffers and the
//! paged KV cache are taken at load. A step begins with [`Backend::begin`], which gives the backend everything about the
//! step that is not a float (ids, positions, block tables); the operations then run in order on buffers. None of them
//! allocates, none returns a tensor.
//!
//! **Bit-exactness.** The value of an output row depends on that row's inputs alone, never on how many rows are in the
//! step, which chunk of a prompt they came in, or how many threads run: every implementation fixes one order of
//! additions per output element. Attention walks a sequence's cached positions in one fixed order, in splits of
//! [`KV_SPLIT`] positions counted from the sequence's start.

use std::ops::Range;

use crate::draw::{DrawnRow, RowDraw};
use crate::{DType, Result};

/// Attention accumulates over runs of this many positions and then merges the runs in order. Counted from position 0 of
/// the sequence, so that the order of additions depends on a sequence's own length alone.
pub const KV_SPLIT: usize = 256;

/// A weight as it lies in its file: row-major `(rows, cols)`, `rows` outputs by `cols` inputs.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    /// Element or block type of `bytes`.
    pub dtype: DType,
    /// Outputs.
    pub rows: usize,
    /// Inputs; a multiple of the type's block length.
    pub cols: usize,
    /// Exactly `rows · dtype.row_bytes(cols)` bytes.
    pub bytes: &'a [u8],
    /// The type to run it as, a native one. Rows are converted as they are taken, see [`crate::convert`].
    pub run_as: DType,
}

/// The largest step a backend must be ready for. Buffers and scratch are sized by it, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Token rows in one step.
    pub rows: usize,
    /// Sequences in one step.
    pub segments: usize,
    /// Groups of layers with block tables of their own.
    pub groups: usize,
    /// Entries of one sequence's block table in one group.
    pub table_entries: usize,
}

/// One sequence's part of a step: consecutive rows, and the blocks that hold its keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The first of its rows.
    pub first_row: usize,
    /// How many rows; at least 1.
    pub rows: usize,
    /// Tokens in the cache once this step's rows are written. Row `i` sits at position `context - rows + i`.
    pub context: usize,
    /// Where its block table begins in each group's part of [`StepInput::block_tables`], behind that of the segment before;
    /// it has `ceil(context / block_size)` entries. Entries wholly outside every row's window may be [`StepInput::NO_BLOCK`].
    pub first_table_entry: usize,
}

/// Everything about a step that is not a float.
///
/// Layers that see equally far back share a block table; a model whose layers differ in that has several *groups* of
/// layers, and in each of them a sequence has blocks of its own. `slots` and `block_tables` hold one part of equal length
/// for each group, one after another.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Token id of every row, see also [`StepInput::DRAWN`].
    pub ids: &'a [u32],
    /// Position of every row in its own sequence.
    pub positions: &'a [u32],
    /// Where every row's key and value go, `(groups, rows)`: `block · block_size + offset`.
    pub slots: &'a [u32],
    /// The sequences, in row order, covering all rows.
    pub segments: &'a [Segment],
    /// The block tables of all segments, one after another: `(groups, entries)`.
    pub block_tables: &'a [u32],
}

impl StepInput<'_> {
    /// A block table entry whose block has been given back (it lies before every window of the segment).
    pub const NO_BLOCK: u32 = u32::MAX;
    /// An id from here on is the token that draw number `id - DRAWN` of the last step with draws gave, which nobody on the
    /// host need have seen. In steps with draws of backends that draw.
    pub const DRAWN: u32 = 1 << 31;
}

/// How attention heads share one projected row: `[query heads | key heads | value heads] · head_dim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// Key (and value) heads; divides `query`.
    pub kv: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl Heads {
    /// Width of a projected row: queries, keys and values side by side.
    pub fn qkv_width(&self) -> usize {
        (self.query + 2 * self.kv) * self.head_dim
    }
    /// Width of the attention's output row.
    pub fn query_width(&self) -> usize {
        self.query * self.head_dim
    }
}

/// Which two components of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(i, i + rotary_dim/2)`: GPT-NeoX, and every Hugging Face checkpoint.
    Halves,
    /// `(2i, 2i + 1)`: the original RoFormer order, and `llama` GGUF files.
    Interleaved,
}

/// A rotary embedding: `angle[i] = position · inv_freq[i]`; cos and sin are multiplied by `scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Pairing.
    pub style: RopeStyle,
    /// One frequency per rotated pair; `rotary_dim = 2 · inv_freq.len()`, the rest of the head passes through.
    pub inv_freq: Vec<f32>,
    /// Multiplies cos and sin (yarn and longrope set it; 1 otherwise).
    pub scale: f32,
}

/// What a query may see.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mask {
    /// Multiplies `q·k`.
    pub scale: f32,
    /// A query at position `p` sees positions `> p - window`; `None`: all up to `p`.
    pub window: Option<usize>,
    /// `cap · tanh(score / cap)` before the softmax.
    pub soft_cap: Option<f32>,
}

/// The gate's non-linearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CacheDtype {
    /// 4 bytes, exact.
    #[default]
    F32,
    /// 2 bytes, IEEE half.
    F16,
    /// 2 bytes, bfloat16.
    Bf16,
    /// 1 byte: four bits of exponent, three of mantissa; what is beyond ±448 becomes that. For GPUs.
    Fp8E4m3,
    /// 1 byte, an integer, and for each key and value of a head 4 bytes more, their scale; heads are mixed before, see
    /// [`crate::reference::int8`]. For CPUs.
    Int8,
}

impl CacheDtype {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Fp8E4m3, Self::Int8];

    /// As settings spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Int8 => "int8",
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8E4m3 | Self::Int8 => 1,
        }
    }

    /// Bytes of one key, or value, of one head.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        head_dim * self.bytes() + if self == Self::Int8 { size_of::<f32>() } else { 0 }
    }
}

/// Where the keys and values of one of a decoder's layers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayer {
    /// The group whose block tables say which blocks.
    pub group: usize,
    /// Its layer of the cache: its place in the group.
    pub layer: usize,
}

/// The paged KV cache: `[layer][block][k|v][kv_head][block_size][head_dim]`, the inner order being the backend's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers of the largest group: a block holds positions for all layers of one group.
    pub layers: usize,
    /// Blocks in the pool, which all groups share.
    pub blocks: usize,
    /// Positions in a block; a multiple of 16.
    pub block_size: usize,
    /// Key heads (and as many value heads).
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Element type.
    pub dtype: CacheDtype,
}

impl CacheShape {
    /// Bytes of one block over all layers, keys and values.
    pub fn block_bytes(&self) -> usize {
        2 * self.layers * self.kv_heads * self.block_size * self.dtype.head_bytes(self.head_dim)
    }
    /// Bytes of the whole pool.
    pub fn bytes(&self) -> usize {
        self.blocks * self.block_bytes()
    }
}

/// The contents of one block become those of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// What is copied.
    pub from: u32,
    /// What is overwritten.
    pub to: u32,
}

/// A matrix, and the bias that is added to what it gives.
pub type Projection<'a, B> = (&'a <B as Backend>::Matrix, Option<&'a <B as Backend>::Vector>);

/// The operations of a decoder over one device's memory.
///
/// Buffers are `(rows, width)` row-major f32; an operation touches the first `rows` rows it is told of. Callers pass
/// shapes that fit; implementations check them once, with `assert!`, before any fast loop.
pub trait Backend: Send + 'static {
    /// A packed weight `(outputs, inputs)`.
    type Matrix: Send;
    /// A vector of f32 on the device.
    type Vector: Send;
    /// Scratch or activations: `(max rows, width)` of f32.
    type Buffer: Send;
    /// The paged KV cache of all layers.
    type Cache: Send;
    /// A registered rotary embedding.
    type Rope: Send;
    /// Which experts a step's rows go to.
    type Routing: Send;

    /// One line for people: instruction set or card, threads.
    fn describe(&self) -> String;

    /// Packs one or several weights with equal `cols` into one matrix whose outputs are theirs one after another (so q,
    /// k and v, or gate and up, run as one product whatever their types).
    fn matrix(&mut self, parts: &[Weight<'_>]) -> Result<Self::Matrix>;
    /// Bytes that `matrix` occupies.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize;
    /// Takes a vector (a norm's weight, a bias).
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector>;
    /// Takes a buffer of `(rows, width)`, zeroed.
    fn buffer(&mut self, rows: usize, width: usize) -> Result<Self::Buffer>;
    /// Takes the KV cache, all blocks at once.
    fn cache(&mut self, shape: CacheShape) -> Result<Self::Cache>;
    /// Takes what attention of such heads over blocks of `block_size` needs beside its inputs, so that no step takes memory.
    fn room_for_attention(&mut self, _heads: Heads, _block_size: usize) -> Result<()> {
        Ok(())
    }
    /// Keys of a layer lie around `centre`, `(kv heads, head_dim)`, and may be kept less that: it changes all scores of a query
    /// alike, so no weight. Before the first step, and not where scores are capped. Matters to caches whose elements are
    /// integers; others take no notice.
    fn centre_keys(&mut self, _cache: &mut Self::Cache, _place: CacheLayer, _centre: Vec<f32>) {}
    /// Registers a rotary embedding; its angles for a step's rows are ready after [`Backend::begin`].
    fn rope(&mut self, spec: &RopeSpec) -> Result<Self::Rope>;
    /// Takes room for the routing of steps of up to `rows` rows, each of which goes to `per_row` of `experts`.
    fn routing(&mut self, experts: usize, per_row: usize, rows: usize) -> Result<Self::Routing>;

    /// Copies blocks, spare ones too, keys and values of all their layers. Between two steps.
    fn copy_blocks(&mut self, cache: &mut Self::Cache, copies: &[BlockCopy]);

    /// Begins a step: keeps a copy of `input` for the operations that follow. Panics if it exceeds the limits the
    /// backend was opened with.
    fn begin(&mut self, input: &StepInput<'_>);

    /// Begins a step and does its `operations`, which are told how many rows there are: those of `input`, and maybe some
    /// more that belong to nobody. They are the same ones on the same buffers in every step with or without `draws`, of which
    /// there are none or one for each row, and read nothing, so a backend may record them, and repeat what it has recorded.
    fn run(&mut self, input: &StepInput<'_>, draws: &[RowDraw<'_>], operations: impl FnOnce(&mut Self, usize))
    where
        Self: Sized,
    {
        self.begin(input);
        self.set_draws(draws);
        operations(self, input.ids.len());
    }

    /// What has failed on the device, if anything. From then on operations do nothing, and what is read is not a number.
    fn failure(&self) -> Option<String> {
        None
    }

    /// `out[r] = table[ids[r]] · scale`. `out` is `(rows, cols)`.
    fn embed(&mut self, out: &mut Self::Buffer, table: &Self::Matrix, scale: f32);

    /// `out[r] = x[r] / rms(x[r]) · weight`, `rms(x) = √(mean(x²) + eps)`.
    fn rms_norm(&mut self, out: &mut Self::Buffer, x: &Self::Buffer, weight: &Self::Vector, eps: f32, rows: usize);

    /// A norm in place over neighbouring columns of `x`, `(rows, width)`: those from `first` on, as many as `weight` has.
    fn rms_norm_columns(
        &mut self,
        x: &mut Self::Buffer,
        width: usize,
        first: usize,
        weight: &Self::Vector,
        eps: f32,
        rows: usize,
    );

    /// The residual step between two sub-layers, in one pass over the row:
    /// `residual += scale · (post ? rms_norm(delta, post) : delta)`, then `out = next ? rms_norm(residual, next) :
    /// residual`.
    #[allow(clippy::too_many_arguments)]
    fn residual_norm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: &Self::Buffer,
        post: Option<&Self::Vector>,
        scale: f32,
        out: &mut Self::Buffer,
        next: Option<&Self::Vector>,
        eps: f32,
        rows: usize,
    );

    /// `out[r] = matrix · x[r] (+ bias)`. `x` is `(rows, inputs)`, `out` is `(rows, outputs)`.
    fn linear(
        &mut self,
        out: &mut Self::Buffer,
        x: &Self::Buffer,
        matrix: &Self::Matrix,
        bias: Option<&Self::Vector>,
        rows: usize,
    );

    /// For every row of the step: norms each query and key head (where a norm is given), rotates them in place, and
    /// writes key and value into the cache at the row's slot of the group. `qkv` is `(rows, heads.qkv_width())`.
    #[allow(clippy::too_many_arguments)]
    fn rope_and_cache(
        &mut self,
        qkv: &mut Self::Buffer,
        cache: &mut Self::Cache,
        place: CacheLayer,
        heads: Heads,
        query_norm: Option<&Self::Vector>,
        key_norm: Option<&Self::Vector>,
        eps: f32,
        rope: &Self::Rope,
    );

    /// Causal attention of every row of the step over its sequence's cached positions. Reads the queries from `qkv`,
    /// writes `(rows, heads.query_width())`.
    fn attention(
        &mut self,
        out: &mut Self::Buffer,
        qkv: &Self::Buffer,
        cache: &Self::Cache,
        place: CacheLayer,
        heads: Heads,
        mask: Mask,
    );

    /// `out[r] = activation(gate_up[r][..width]) · gate_up[r][width..]`. `gate_up` is `(rows, 2 · width)`.
    fn gated(
        &mut self,
        out: &mut Self::Buffer,
        gate_up: &Self::Buffer,
        activation: Activation,
        width: usize,
        rows: usize,
    );

    /// The gated layer: `out = down · gated(gate_up · x)`, see [`Backend::linear`] and [`Backend::gated`], with the same bits.
    /// `x` is `(rows, inputs of gate_up)`, `out` is `(rows, outputs of down)`. `between` are buffers for what lies between the
    /// three, of which a backend may have no need: `(rows, 2 · width)` and `(rows, width)`.
    #[allow(clippy::too_many_arguments)]
    fn gated_mlp(
        &mut self,
        out: &mut Self::Buffer,
        x: &Self::Buffer,
        gate_up: Projection<'_, Self>,
        activation: Activation,
        down: Projection<'_, Self>,
        between: (&mut Self::Buffer, &mut Self::Buffer),
        width: usize,
        rows: usize,
    ) where
        Self: Sized,
    {
        gated_mlp_by_steps(self, out, x, gate_up, activation, down, between, width, rows);
    }

    /// Sends every row to its experts: those with the largest of its `logits`, `(rows, experts)`, the smaller index first
    /// among equals. A choice's weight is its softmax over all experts, divided by the sum over the row's choices where
    /// `renormalise`. The choices of all rows, sorted by expert and then by row, are the slots that follow.
    fn route(&mut self, routing: &mut Self::Routing, logits: &Self::Buffer, renormalise: bool, rows: usize);

    /// `out[slot] = x[row of slot]`, rows as wide as `x` is.
    fn dispatch(&mut self, out: &mut Self::Buffer, x: &Self::Buffer, routing: &Self::Routing);

    /// `out[slot] = matrix of the slot's expert · x[slot]`. `matrix` holds the experts' own one after another, each of as
    /// many parts with as many outputs; `x` is `(slots, inputs)`, `out` is `(slots, outputs of one expert)`. Every expert's
    /// weights are read once for all the rows that chose it, and those of the others not at all.
    fn expert_linear(
        &mut self,
        out: &mut Self::Buffer,
        x: &Self::Buffer,
        matrix: &Self::Matrix,
        routing: &Self::Routing,
    );

    /// `out[row] = Σ weight · x[slot]` over the row's choices, best first, rows as wide as `out` is.
    fn combine(&mut self, out: &mut Self::Buffer, x: &Self::Buffer, routing: &Self::Routing);

    /// `out[i] = x[rows[i]]`: the rows that need logits.
    fn gather(&mut self, out: &mut Self::Buffer, x: &Self::Buffer, rows: &[u32]);

    /// `x = soft_cap ? cap · tanh(x · scale / cap) : x · scale`, in place, over `(rows, width)`.
    fn scale_and_cap(&mut self, x: &mut Self::Buffer, scale: f32, soft_cap: Option<f32>, width: usize, rows: usize);

    /// Takes what drawing tokens where the logits are needs, from up to `rows` rows of `vocab` logits at once. `false`: they
    /// are on the host, and so are draws. Then there is nothing of what follows.
    fn draws(&mut self, _vocab: usize, _rows: usize) -> Result<bool> {
        Ok(false)
    }

    /// Whether there is room for what changes a row's logits.
    fn draws_from(&self, _draw: &RowDraw<'_>) -> bool {
        false
    }

    /// Blocks of the cache beyond its shape, for rows that run before anybody has said which blocks are theirs.
    fn spare_blocks(&self) -> Range<u32> {
        0..0
    }

    /// How tokens are drawn next, in the step that has begun.
    fn set_draws(&mut self, _draws: &[RowDraw<'_>]) {}

    /// Draws a token from each of `rows` rows of logits, as the draws from number `first` on say.
    fn draw(&mut self, _logits: &Self::Buffer, _first: usize, _rows: usize) {}

    /// Sends what becomes of the first `rows` draws to the host, where it is read with [`Backend::drawn`].
    fn send_drawn(&mut self, _rows: usize) {}

    /// What was sent first of all that has not been read. Waits for the device.
    fn drawn(&mut self) -> &[DrawnRow] {
        &[]
    }

    /// How many threads [`Backend::look`] uses.
    fn threads(&self) -> usize {
        1
    }

    /// Shows `look` every row of `(rows, width)` on the host, once and with its number, in any order and on several threads
    /// where the backend has them.
    fn look(&mut self, x: &Self::Buffer, rows: usize, width: usize, look: &(dyn Fn(usize, &[f32]) + Sync)) {
        for (number, row) in self.read(x, rows, width).chunks_exact(width).enumerate() {
            look(number, row);
        }
    }

    /// The first `rows · width` values on the host. Waits for the device.
    fn read<'a>(&'a mut self, buffer: &'a Self::Buffer, rows: usize, width: usize) -> &'a [f32];
}

/// [`Backend::gated_mlp`], one operation after another.
#[allow(clippy::too_many_arguments)]
pub(crate) fn gated_mlp_by_steps<B: Backend>(
    backend: &mut B,
    out: &mut B::Buffer,
    x: &B::Buffer,
    gate_up: Projection<'_, B>,
    activation: Activation,
    down: Projection<'_, B>,
    between: (&mut B::Buffer, &mut B::Buffer),
    width: usize,
    rows: usize,
) {
    backend.linear(between.0, x, gate_up.0, gate_up.1, rows);
    backend.gated(between.1, between.0, activation, width, rows);
    backend.linear(out, between.1, down.0, down.1, rows);
}
