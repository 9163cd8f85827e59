//! The gated layer in one region: what the gate lets through goes straight into the activations of the second product.
//!
//! Gate and up of a token are three times as wide as what comes of them, or more, and rows of many tokens outgrow a core's
//! cache. So a task computes both for the same 32 columns of a few rows, in a piece of memory that stays in the first-level
//! cache, and leaves one block of int8 for each row. Every value is the one that the three operations by themselves give.

use std::ops::Range;

use super::{Product, Tasks};
use crate::Activation;
use crate::cpu::format::{BLOCK, LANES};
use crate::cpu::gated::Gate;
use crate::cpu::isa::Isa;
use crate::cpu::pack::Matrix;
use crate::cpu::pool::{Pool, SharedSlice};
use crate::cpu::quantise::{Activations, GROUP, Quantisation};

/// Rows of a piece of gates and ups.
const PIECE_ROWS: usize = 64;
/// Values of it: 16 KiB.
const PIECE: usize = PIECE_ROWS * 2 * BLOCK;
/// Tiles of a block of the second product's inputs.
const BLOCK_TILES: usize = BLOCK / LANES;

const _: () = assert!(PIECE_ROWS.is_multiple_of(GROUP));

/// `out = down · (activation(gate · x) · (up · x))`, the outputs of `gate_up` being those of gate and then those of up.
pub struct GatedMlp<'a> {
    /// `(rows, inputs)`
    pub x: &'a [f32],
    pub gate_up: &'a Matrix,
    pub gate_up_bias: Option<&'a [f32]>,
    pub activation: Activation,
    pub down: &'a Matrix,
    pub down_bias: Option<&'a [f32]>,
    /// `(rows, outputs of down)`
    pub out: &'a mut [f32],
    pub rows: usize,
}

impl GatedMlp<'_> {
    /// Whether it can be done so: both products read int8.
    pub fn fits(gate_up: &Matrix, down: &Matrix) -> bool {
        gate_up.is_all_blocks() && down.is_all_blocks()
    }
}

/// Does it. `activations` are for the inputs of the first product and of the second.
///
/// # Panics
/// When a length does not fit, or `activations` have no room (see [`Activations::reserve`]).
pub fn gated_mlp(isa: Isa, pool: &mut Pool, activations: &mut [Activations; 2], mlp: GatedMlp<'_>) {
    let GatedMlp { x, gate_up, gate_up_bias, activation, down, down_bias, out, rows } = mlp;
    let width = down.inputs();
    assert_eq!(gate_up.outputs(), 2 * width);
    assert_eq!(x.len(), rows * gate_up.inputs());
    assert_eq!(out.len(), rows * down.outputs());
    assert!(gate_up_bias.is_none_or(|bias| bias.len() == 2 * width));
    assert!(down_bias.is_none_or(|bias| bias.len() == down.outputs()));

    let [read, gated] = activations;
    let read = read.quantisation(isa, x, gate_up.inputs());
    let gated = gated.room(isa, rows, width);
    let gates = Gates {
        isa,
        tasks: Tasks::of(gate_up, rows, pool.threads()),
        gate_up,
        bias: gate_up_bias,
        read,
        activation,
        gated,
        width,
    };
    let second = Product { bias: down_bias, ..Product::new(down, gated, SharedSlice::new(out), down.outputs()) };
    let tasks = Tasks::of(down, rows, pool.threads());
    pool.run_stages([
        (read.tasks(), &|task| read.run(task)),
        (gates.tasks.count, &|task| gates.run(task)),
        (tasks.count, &|task| tasks.run(isa, &second, task)),
    ]);
}

/// The first product and the gate.
struct Gates<'a> {
    isa: Isa,
    tasks: Tasks,
    gate_up: &'a Matrix,
    bias: Option<&'a [f32]>,
    read: Quantisation<'a>,
    activation: Activation,
    gated: Quantisation<'a>,
    width: usize,
}

impl Gates<'_> {
    /// A run of blocks for a block of rows, piece by piece.
    fn run(&self, task: usize) {
        let (rows, blocks) = (self.tasks.rows(task), self.tasks.part_of(self.width / BLOCK, task));
        let next = match self.tasks.next(task) {
            Ok(next) => Some(self.gate_address(self.tasks.part_of(self.width / BLOCK, next).start)),
            Err(sharer) => self.gate_up.successor.share(sharer),
        };
        let at_once = PIECE / (2 * BLOCK * rows.len().min(PIECE_ROWS));
        for first in blocks.clone().step_by(at_once) {
            let piece = first..blocks.end.min(first + at_once);
            let next = if piece.end < blocks.end { Some(self.gate_address(piece.end)) } else { next };
            for first_row in rows.clone().step_by(PIECE_ROWS) {
                self.piece(first_row..rows.end.min(first_row + PIECE_ROWS), piece.clone(), next);
            }
        }
    }

    /// `blocks` of `rows`; the weights at `next` are read after theirs.
    fn piece(&self, rows: Range<usize>, blocks: Range<usize>, next: Option<usize>) {
        let Self { isa, gate_up, bias, read, activation, gated, width, .. } = *self;
        let columns = blocks.len() * BLOCK;
        let mut values = [0.0; PIECE];
        let values = &mut values[..rows.len() * 2 * columns];
        let out = SharedSlice::new(&mut *values);
        let product = Product { bias, first_row: rows.start, ..Product::new(gate_up, read, out, 2 * columns) };
        let (gate, up) = (blocks.start * BLOCK_TILES..blocks.end * BLOCK_TILES, width / LANES);
        let ups = gate.start + up..gate.end + up;
        let (first, next_up) = (blocks.start * BLOCK, Some(gate_up.address(ups.start)));
        Product { first_output: first, next: next_up, ..product }.run(isa, rows.clone(), gate);
        // Side by side with the gates.
        Product { first_output: first + width - columns, next, ..product }.run(isa, rows.clone(), ups);
        isa.run(Gate { values, columns, activation, rows, first_block: blocks.start, gated });
    }

    /// Where the gate's weights of a block begin.
    fn gate_address(&self, block: usize) -> usize {
        self.gate_up.address(block * BLOCK_TILES)
    }
}
