//! `out = matrix · x + bias`, for any number of rows.
//!
//! A step's rows are taken in blocks whose activations stay in a core's cache; within a block, tasks are runs of tiles.
//! A task keeps a tile and walks the block's rows, up to 8 at a time in registers, so weights come from memory once for
//! a block of rows. Every output has one accumulator that walks the inputs in order: how rows and tiles are divided does
//! not touch a single bit.

mod dense; // F32, F16, BF16: a fused multiply-add per input
mod gated; // two products with a gate between them
mod quantised; // block types: products of bytes

use std::ops::Range;

use super::format::LANES;
use super::isa::Isa;
use super::pack::{Matrix, Part};
use super::pool::{self, Pool, SharedSlice};
use super::quantise::{Activations, GROUP, Quantisation};
use super::vector::Vector;
use crate::routing::Routing;
pub(super) use gated::{GatedMlp, gated_mlp};

/// Bytes of activations that one block of rows may have: half of a small second-level cache.
const ROW_BLOCK_BYTES: usize = 512 << 10;

/// How many tasks each thread gets, so that an uneven start evens out.
const TASKS_PER_THREAD: usize = 8;
/// But tasks of fewer bytes of weights would be over before memory has heard of the next.
const TASK_BYTES: usize = 32 << 10;

/// `out[r] = matrix · x[r] (+ bias)`. `x` is `(rows, inputs)`, `out` is `(rows, outputs)`.
///
/// # Panics
/// When a length does not fit, or `activations` has no room (see [`Activations::reserve`]).
#[allow(clippy::too_many_arguments)]
pub fn linear(
    isa: Isa,
    pool: &mut Pool,
    activations: &mut Activations,
    out: &mut [f32],
    x: &[f32],
    matrix: &Matrix,
    bias: Option<&[f32]>,
    rows: usize,
) {
    let (inputs, outputs) = (matrix.inputs(), matrix.outputs());
    assert_eq!(x.len(), rows * inputs);
    assert_eq!(out.len(), rows * outputs);
    assert!(bias.is_none_or(|bias| bias.len() == outputs));
    let activations = activations.quantisation(isa, if matrix.has_blocks() { x } else { &[] }, inputs);
    let product = Product { x, bias, ..Product::new(matrix, activations, SharedSlice::new(out), outputs) };
    let tasks = Tasks::of(matrix, rows, pool.threads());
    pool.run_stages([
        (activations.tasks(), &|task| activations.run(task)),
        (tasks.count, &|task| tasks.run(isa, &product, task)),
    ]);
}

/// The tasks of one product: runs of tiles, for blocks of rows.
#[derive(Clone, Copy)]
struct Tasks {
    rows: usize,
    block_rows: usize,
    runs: usize,
    threads: usize,
    count: usize,
}

impl Tasks {
    fn of(matrix: &Matrix, rows: usize, threads: usize) -> Self {
        let (block_rows, runs) = (block_rows(matrix.inputs()), runs(matrix, threads));
        Self { rows, block_rows, runs, threads, count: rows.div_ceil(block_rows) * runs }
    }

    /// The rows of a task.
    fn rows(&self, task: usize) -> Range<usize> {
        let first = task / self.runs * self.block_rows;
        first..self.rows.min(first + self.block_rows)
    }

    /// The part of `units` of a task, of which every run gets as many.
    fn part_of(&self, units: usize, task: usize) -> Range<usize> {
        let run = task % self.runs;
        run * units / self.runs..(run + 1) * units / self.runs
    }

    /// The task that the thread of this one likely does next; `Err`: none of these, and who the thread is.
    fn next(&self, task: usize) -> Result<usize, usize> {
        let sharer = pool::sharer(task, self.count, self.threads);
        let next = task + 1;
        if next < self.count && pool::sharer(next, self.count, self.threads) == sharer { Ok(next) } else { Err(sharer) }
    }

    fn run(&self, isa: Isa, product: &Product<'_>, task: usize) {
        let matrix = product.matrix;
        let next = match self.next(task) {
            Ok(next) => Some(matrix.address(self.part_of(matrix.tiles(), next).start)),
            Err(sharer) => matrix.successor.share(sharer),
        };
        Product { next, ..*product }.run(isa, self.rows(task), self.part_of(matrix.tiles(), task));
    }
}

/// `out[slot] = matrix of the slot's expert · x[slot]`: a product for every expert that was chosen, over the rows that
/// chose it. See [`crate::Backend::expert_linear`].
///
/// # Panics
/// When a length does not fit, or `activations` has no room (see [`Activations::reserve`]).
pub fn expert_linear(
    isa: Isa,
    pool: &mut Pool,
    activations: &mut Activations,
    out: &mut [f32],
    x: &[f32],
    matrix: &Matrix,
    routing: &Routing,
) {
    let (experts, slots, inputs) = (routing.experts(), routing.slots(), matrix.inputs());
    let (outputs, tiles, parts) = (matrix.outputs() / experts, matrix.tiles() / experts, matrix.parts.len() / experts);
    assert_eq!(x.len(), slots * inputs);
    assert_eq!(out.len(), slots * outputs);
    let begins = |expert: usize| (expert * outputs, expert * tiles);
    for (expert, part) in matrix.parts.iter().step_by(parts.max(1)).enumerate() {
        assert_eq!((part.first_output, part.first_tile), begins(expert), "experts of different shapes");
    }
    let activations = activations.quantisation(isa, if matrix.has_blocks() { x } else { &[] }, inputs);
    let out = SharedSlice::new(out);
    let product = Product { x, ..Product::new(matrix, activations, out, outputs) };
    let run_tiles = (routing.busy().len() * tiles).div_ceil(pool.threads() * TASKS_PER_THREAD).clamp(1, tiles);
    let runs = tiles.div_ceil(run_tiles);
    let multiply = |i: usize| {
        let expert = routing.busy()[i / runs] as usize;
        let (first_output, first_tile) = begins(expert);
        let tile = first_tile + i % runs * run_tiles;
        let tiles = tile..(first_tile + tiles).min(tile + run_tiles);
        let rows = routing.slots_of(expert);
        for row in rows.clone().step_by(block_rows(inputs)) {
            let rows = row..rows.end.min(row + block_rows(inputs));
            Product { first_output, ..product }.run(isa, rows, tiles.clone());
        }
    };
    pool.run_stages([(activations.tasks(), &|task| activations.run(task)), (routing.busy().len() * runs, &multiply)]);
}

/// How many runs a matrix's tiles are taken in: as many for each thread, so that all are through at the same time.
fn runs(matrix: &Matrix, threads: usize) -> usize {
    let for_each = (matrix.bytes() / (threads * TASK_BYTES)).clamp(1, TASKS_PER_THREAD);
    (threads * for_each).min(matrix.tiles())
}

/// Rows whose activations fit [`ROW_BLOCK_BYTES`].
fn block_rows(inputs: usize) -> usize {
    (ROW_BLOCK_BYTES / (inputs * size_of::<f32>())).next_multiple_of(GROUP).max(GROUP)
}

/// One product's arguments.
#[derive(Clone, Copy)]
struct Product<'a> {
    matrix: &'a Matrix,
    x: &'a [f32],
    activations: Quantisation<'a>,
    bias: Option<&'a [f32]>,
    /// `(rows, width)`, of the rows and the matrix's outputs from these on.
    out: SharedSlice<'a, f32>,
    first_row: usize,
    first_output: usize,
    width: usize,
    /// Where the weights lie that are read after these. `None`: just behind them.
    next: Option<usize>,
    /// How many bytes ahead of their use weights are asked for. `None`: they are not.
    ahead: Option<usize>,
}

impl<'a> Product<'a> {
    /// Of all outputs of a matrix, or some of them into rows of `width`.
    fn new(matrix: &'a Matrix, activations: Quantisation<'a>, out: SharedSlice<'a, f32>, width: usize) -> Self {
        Self {
            matrix,
            x: &[],
            activations,
            bias: None,
            out,
            first_row: 0,
            first_output: 0,
            width,
            next: None,
            ahead: Some(quantised::AHEAD),
        }
    }

    /// The outputs of `tiles` for `rows`. No two calls that run at once may share a tile and a row.
    fn run(&self, isa: Isa, rows: Range<usize>, tiles: Range<usize>) {
        for part in &self.matrix.parts {
            // Of the tiles asked for, those of this part, counted from its first.
            let begin = tiles.start.max(part.first_tile) - part.first_tile;
            let end = tiles.end.saturating_sub(part.first_tile).min(part.tiles);
            if begin >= end {
                continue;
            }
            let tiles = begin..end;
            if part.dtype.is_dense() {
                dense::run(isa, self, part, rows.clone(), tiles);
            } else {
                quantised::run(isa, self, part, rows.clone(), tiles);
            }
        }
    }

    /// Adds the bias and stores a tile's outputs for one row.
    #[inline(always)]
    fn store<V: Vector>(&self, v: V, part: &Part, tile: usize, row: usize, mut sum: V::F32) {
        let first = part.first_output + tile * LANES;
        let len = LANES.min(part.outputs - tile * LANES);
        if let Some(bias) = self.bias {
            sum = v.add(sum, v.load_partial(&bias[first..first + len], 0.0));
        }
        // SAFETY: tasks that run at once have different tiles or different rows, so different outputs.
        let out = unsafe { self.out.slice((row - self.first_row) * self.width + first - self.first_output, len) };
        v.store_partial(sum, out);
    }
}

#[cfg(test)]
mod tests;
