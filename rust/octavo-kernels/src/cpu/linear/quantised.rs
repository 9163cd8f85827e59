//! Products of byte codes: 4 inputs of 16 outputs in one instruction.
//!
//! For each block of 32 inputs of 16 outputs: the codes are unpacked into registers once; each of several rows multiplies
//! them with its own codes in integers, exactly, and adds the product, times both scales, to its sum.

use std::ops::Range;

use super::Product;
use crate::cpu::format::{BLOCK, Codes, Format, Record, Scales, with_format};
use crate::cpu::isa::Isa;
use crate::cpu::memory::prefetch_bytes;
use crate::cpu::pack::Part;
use crate::cpu::quantise::{Block, GROUP};
use crate::cpu::vector::{Kernel, Vector};

/// How many bytes ahead of their use weights are asked for. With several rows, the work on one block fills the window in
/// which the core looks ahead by itself, and what waits for memory is added to what is computed. Measured: a step of one row
/// of a small model takes 2.04 ms at 2 KiB, 1.74 at 8, 1.76 at 12 and 2.03 at 24, of eight rows 4.25, 3.66 and 3.72 at the
/// first three; a model of a gigabyte is read at 65 GB/s (all there is) at 8 KiB, 59 at 16, 55 at 24.
const AHEAD: usize = 8 << 10;

/// The outputs of `tiles` of a part of a block type, for `rows`.
pub(super) fn run(isa: Isa, product: &Product<'_>, part: &Part, rows: Range<usize>, tiles: Range<usize>) {
    with_format!(part.dtype, F => isa.run(Tiles::<F> { product, part, rows, tiles, format: std::marker::PhantomData }));
}

struct Tiles<'a, F> {
    product: &'a Product<'a>,
    part: &'a Part,
    rows: Range<usize>,
    tiles: Range<usize>,
    format: std::marker::PhantomData<F>,
}

impl<F: Format> Kernel for Tiles<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let (begin, end) = self.product.matrix.addresses(self.part, self.tiles.clone());
        let mut stream = Stream { at: begin, end, next: self.product.next.unwrap_or(end) };
        for tile in self.tiles.clone() {
            let mut row = self.rows.start;
            while row < self.rows.end {
                // Memory is asked for by the first rows; the others find it there.
                let stream = if row == self.rows.start { Some(&mut stream) } else { None };
                // As many rows as fit the registers and are left in the group; a few more than are left in all, rather than
                // another walk.
                let in_group = 1 << (GROUP - row % GROUP).ilog2();
                row += match V::ROWS.min((self.rows.end - row).next_power_of_two()).min(in_group) {
                    8 => self.rows_of_tile::<V, 8>(v, tile, row, stream),
                    4 => self.rows_of_tile::<V, 4>(v, tile, row, stream),
                    2 => self.rows_of_tile::<V, 2>(v, tile, row, stream),
                    _ => self.rows_of_tile::<V, 1>(v, tile, row, stream),
                };
            }
        }
    }
}

impl<F: Format> Tiles<'_, F> {
    /// `R` rows of a tile. Returns `R`.
    #[inline(always)]
    fn rows_of_tile<V: Vector, const R: usize>(
        &self,
        v: V,
        tile: usize,
        row: usize,
        stream: Option<&mut Stream>,
    ) -> usize {
        let records = self.product.matrix.records::<F>(self.part, tile);
        // SAFETY: products are a region's second stage, its first quantises.
        let blocks = unsafe { self.product.activations.group(row / GROUP) };
        let sums = multiply::<V, F, R>(v, records, blocks, row % GROUP, stream);
        for (row, sum) in (row..self.rows.end).zip(sums) {
            self.product.store(v, self.part, tile, row, sum);
        }
        R
    }
}

/// What a task reads, byte after byte, and where the thread likely reads on.
struct Stream {
    at: usize,
    end: usize,
    next: usize,
}

impl Stream {
    /// Asks for the `bytes` that lie [`AHEAD`] of the next ones.
    #[inline(always)]
    fn ask(&mut self, bytes: usize) {
        let ahead = self.at + AHEAD;
        prefetch_bytes(if ahead < self.end { ahead } else { self.next + (ahead - self.end) }, bytes);
        self.at += bytes;
    }
}

/// 16 outputs of `R` rows of a group, from its row `first`.
#[inline(always)]
fn multiply<V: Vector, F: Format, const R: usize>(
    v: V,
    records: &[F::Record],
    rows: &[[Block; GROUP]],
    first: usize,
    mut stream: Option<&mut Stream>,
) -> [V::F32; R] {
    assert!(first + R <= GROUP);
    let mut sums = [v.splat(0.0); R];
    for (record, rows) in records.iter().zip(rows.chunks(F::Record::BLOCKS)) {
        for ((scales, codes), rows) in record.units().zip(rows.chunks_exact(F::Scales::BLOCKS)) {
            if let Some(stream) = &mut stream {
                stream.ask(size_of::<F::Scales>());
            }
            let head = scales.head(v);
            for (i, (codes, rows)) in codes.iter().zip(rows).enumerate() {
                if let Some(stream) = &mut stream {
                    stream.ask(size_of::<F::Codes>());
                }
                let rows = rows[first..].first_chunk().expect("so many rows in a group");
                add_block::<V, F, R>(v, &mut sums, codes, scales.block(v, head, i), rows);
            }
        }
    }
    sums
}

/// Adds to the rows' sums their products with one block of weights.
#[inline(always)]
fn add_block<V: Vector, F: Format, const R: usize>(
    v: V,
    sums: &mut [V::F32; R],
    codes: &F::Codes,
    scales: [[V::F32; 2]; 2],
    rows: &[Block; R],
) {
    if V::ROWS == 8 {
        row_by_row::<V, F, R>(v, sums, codes, scales, rows);
    } else if F::Scales::HALVES {
        let first = group_by_group::<V, F, R, 0, 4>(v, codes, rows);
        add_halves::<V, F, R>(v, sums, first, scales, 0, rows);
        let second = group_by_group::<V, F, R, 4, 4>(v, codes, rows);
        add_halves::<V, F, R>(v, sums, second, scales, 1, rows);
    } else {
        let dots = group_by_group::<V, F, R, 0, 8>(v, codes, rows);
        for ((sum, dot), x) in sums.iter_mut().zip(dots).zip(rows) {
            *sum = add_whole::<V, F>(v, *sum, dot, scales, x);
        }
    }
}

/// [`add_half`] for all rows.
#[inline(always)]
fn add_halves<V: Vector, F: Format, const R: usize>(
    v: V,
    sums: &mut [V::F32; R],
    dots: [V::I32; R],
    scales: [[V::F32; 2]; 2],
    half: usize,
    rows: &[Block; R],
) {
    for ((sum, dot), x) in sums.iter_mut().zip(dots).zip(rows) {
        *sum = add_half::<V, F>(v, *sum, dot, scales, half, x);
    }
}

/// Where all codes of a block fit the registers.
#[inline(always)]
fn row_by_row<V: Vector, F: Format, const R: usize>(
    v: V,
    sums: &mut [V::F32; R],
    codes: &F::Codes,
    scales: [[V::F32; 2]; 2],
    rows: &[Block; R],
) {
    const { assert!(V::ROWS < 8 || V::MOST_SUM == i32::MAX) } // a sum holds them all
    let mut unpacked = [v.splat_byte(0); 8];
    for (g, unpacked) in unpacked.iter_mut().enumerate() {
        *unpacked = codes.group(v, g);
    }
    for (sum, x) in sums.iter_mut().zip(rows) {
        // Two chains of products, for the two halves of the block.
        let mut dots = [v.sums(start::<V, F>(v, x.minus_sums[0])), v.sums(start::<V, F>(v, x.minus_sums[1]))];
        for g in 0..4 {
            for (half, dots) in dots.iter_mut().enumerate() {
                *dots = dot::<V, F>(v, *dots, unpacked[4 * half + g], v.splat_quad(x.codes[4 * half + g]));
            }
        }
        let dots = [v.total(dots[0]), v.total(dots[1])];
        if F::Scales::HALVES {
            *sum = add_half::<V, F>(v, *sum, dots[0], scales, 0, x);
            *sum = add_half::<V, F>(v, *sum, dots[1], scales, 1, x);
        } else {
            *sum = add_whole::<V, F>(v, *sum, v.add_i32(dots[0], dots[1]), scales, x);
        }
    }
}

/// The rows' products with `N` groups of codes from group `FIRST` on, where not even half of a block fits the registers
/// beside the rows' sums: a group is unpacked for all rows.
#[inline(always)]
fn group_by_group<V: Vector, F: Format, const R: usize, const FIRST: usize, const N: usize>(
    v: V,
    codes: &F::Codes,
    rows: &[Block; R],
) -> [V::I32; R] {
    let run = V::most_groups(if F::BYTES { 128 } else { (1 << F::Codes::BITS) - 1 });
    let none = v.sums(v.splat_i32(0));
    let (mut totals, mut sums) = ([v.splat_i32(0); R], [none; R]);
    for g in 0..N {
        let unpacked = codes.group(v, FIRST + g);
        for (sums, x) in sums.iter_mut().zip(rows) {
            *sums = dot::<V, F>(v, *sums, unpacked, v.splat_quad(x.codes[FIRST + g]));
        }
        if (g + 1) % run == 0 || g + 1 == N {
            for (total, sums) in totals.iter_mut().zip(&mut sums) {
                *total = v.add_i32(*total, v.total(std::mem::replace(sums, none)));
            }
        }
    }
    for (total, x) in totals.iter_mut().zip(rows) {
        for half in FIRST / 4..(FIRST + N) / 4 {
            *total = v.add_i32(*total, start::<V, F>(v, x.minus_sums[half]));
        }
    }
    totals
}

/// `sum` plus a block's product in integers, times both scales.
#[inline(always)]
fn add_whole<V: Vector, F: Format>(
    v: V,
    sum: V::F32,
    dot: V::I32,
    [scales, minimums]: [[V::F32; 2]; 2],
    x: &Block,
) -> V::F32 {
    let sum = v.fma(v.to_f32(dot), v.mul(scales[0], v.splat(x.scale)), sum);
    if F::Scales::MINIMUMS { v.fma(minimums[0], v.splat(x.scaled_sum), sum) } else { sum }
}

/// The same for one half of a block.
#[inline(always)]
fn add_half<V: Vector, F: Format>(
    v: V,
    sum: V::F32,
    dot: V::I32,
    [scales, minimums]: [[V::F32; 2]; 2],
    half: usize,
    x: &Block,
) -> V::F32 {
    let sum = v.fma(v.to_f32(dot), v.mul(scales[half], v.splat(x.scale)), sum);
    let scaled_sum = x.scale * -x.minus_sums[half] as f32;
    if F::Scales::MINIMUMS { v.fma(minimums[half], v.splat(scaled_sum), sum) } else { sum }
}

#[inline(always)]
fn dot<V: Vector, F: Format>(v: V, sums: V::Sums, codes: V::Bytes, x: V::Bytes) -> V::Sums {
    if F::BYTES { v.dot_biased(sums, codes, x) } else { v.dot(sums, codes, x) }
}

/// What to add to the product of four groups, so that the zero point is taken off.
#[inline(always)]
fn start<V: Vector, F: Format>(v: V, minus_sum: i32) -> V::I32 {
    match F::ZERO_SHIFT {
        Some(shift) if !F::BYTES || V::BIAS_LEFT != 0 => v.shl_i32(v.splat_i32(minus_sum), shift),
        _ => v.splat_i32(0),
    }
}

const _: () = assert!(BLOCK == 32 && GROUP == 8);
