//! The gated layer in one region: what the gate lets through goes straight into the activations of the second product.
//!
//! Gate and up of a token are three times as wide as what comes of them, or more, and rows of many tokens outgrow a core's
//! cache. So a task computes both for the same 32 columns of a few rows, in a piece of memory that stays in the first-level
//! cache, and leaves one block of int8 for each row. Every value is the one that the three operations by themselves give.

use std::cell::RefCell;
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
        let most = PIECE / (2 * BLOCK * rows.len().min(PIECE_ROWS));
        // As long as each other, since each asks for what the next one reads.
        let at_once = (blocks.len() / blocks.len().div_ceil(most).max(1)).max(1);
        // After a share comes what is read after this matrix: one half is asked for beside the gates, one beside ups.
        let successor = self.tasks.next(task).err().and_then(|sharer| self.gate_up.successor.share(sharer));
        PIECE_VALUES.with_borrow_mut(|values| {
            for first in blocks.clone().step_by(at_once) {
                let piece = first..blocks.end.min(first + at_once);
                let next = successor.filter(|_| piece.end == blocks.end);
                for first_row in rows.clone().step_by(PIECE_ROWS) {
                    let some_rows = first_row..rows.end.min(first_row + PIECE_ROWS);
                    self.piece(some_rows, piece.clone(), first_row == rows.start, next, values);
                }
            }
        });
    }

    /// `blocks` of `rows`. What the next piece reads may be asked for, from just behind or at `next`.
    fn piece(
        &self,
        rows: Range<usize>,
        blocks: Range<usize>,
        asks: bool,
        next: Option<usize>,
        values: &mut [f32; PIECE],
    ) {
        let Self { isa, gate_up, bias, read, activation, gated, width, .. } = *self;
        let columns = blocks.len() * BLOCK;
        let values = &mut values[..rows.len() * 2 * columns];
        let out = SharedSlice::new(&mut *values);
        let (gates, ups) = (self.tiles(blocks.clone(), 0), self.tiles(blocks.clone(), width / LANES));
        let bytes = gate_up.address(gates.end) - gate_up.address(gates.start);
        let ahead = asks.then_some(bytes);
        let product = Product { bias, first_row: rows.start, ahead, ..Product::new(gate_up, read, out, 2 * columns) };
        let first_output = blocks.start * BLOCK;
        Product { first_output, next, ..product }.run(isa, rows.clone(), gates);
        // Side by side with the gates.
        let (first_output, next) = (first_output + width - columns, next.map(|next| next + bytes));
        Product { first_output, next, ..product }.run(isa, rows.clone(), ups);
        isa.run(Gate { values, columns, activation, rows, first_block: blocks.start, gated });
    }

    /// The tiles of blocks of columns, from this tile on.
    fn tiles(&self, blocks: Range<usize>, first: usize) -> Range<usize> {
        first + blocks.start * BLOCK_TILES..first + blocks.end * BLOCK_TILES
    }
}

thread_local! {
    /// `[gate | up]` of a piece.
    static PIECE_VALUES: RefCell<Box<[f32; PIECE]>> = RefCell::new(Box::new([0.0; PIECE]));
}
