//! Products of f32, f16 and bf16 weights with f32 activations: widened in registers, a fused multiply-add per input.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::Product;
use crate::DType;
use crate::cpu::format::LANES;
use crate::cpu::isa::Isa;
use crate::cpu::memory::{Plain, prefetch_bytes};
use crate::cpu::pack::Part;
use crate::cpu::vector::{Kernel, Vector};

/// How far ahead of its use a weight is asked for; see `quantised`.
const AHEAD: usize = 4096;

/// The outputs of `tiles` of a part of a dense type, for `rows`.
pub(super) fn run(isa: Isa, product: &Product<'_>, part: &Part, rows: Range<usize>, tiles: Range<usize>) {
    match part.dtype {
        DType::F32 => isa.run(Tiles::<f32> { product, part, rows, tiles, element: PhantomData }),
        DType::F16 => isa.run(Tiles::<f16> { product, part, rows, tiles, element: PhantomData }),
        _ => isa.run(Tiles::<bf16> { product, part, rows, tiles, element: PhantomData }),
    }
}

/// A stored weight.
trait Element: Plain {
    fn load<V: Vector>(v: V, from: &[Self; LANES]) -> V::F32;
}

impl Element for f32 {
    #[inline(always)]
    fn load<V: Vector>(v: V, from: &[Self; LANES]) -> V::F32 {
        v.load(from)
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<V: Vector>(v: V, from: &[Self; LANES]) -> V::F32 {
        v.load_f16(from)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<V: Vector>(v: V, from: &[Self; LANES]) -> V::F32 {
        v.load_bf16(from)
    }
}

struct Tiles<'a, E> {
    product: &'a Product<'a>,
    part: &'a Part,
    rows: Range<usize>,
    tiles: Range<usize>,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Tiles<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let rows = self.rows.end - self.rows.start;
        // A sum waits for the one before it, so there must be several: of tiles, where rows are few.
        let at_once = match rows {
            1 => 4,
            2..8 => 2,
            _ => 1,
        };
        let mut tile = self.tiles.start;
        while tile < self.tiles.end {
            if at_once == 4 && tile + 4 <= self.tiles.end {
                self.rows_of_tiles::<V, 4, 1>(v, tile, self.rows.start);
                tile += 4;
            } else if at_once == 2 && tile + 2 <= self.tiles.end {
                self.walk_rows::<V, 2>(v, tile);
                tile += 2;
            } else {
                self.walk_rows::<V, 1>(v, tile);
                tile += 1;
            }
        }
    }
}

impl<E: Element> Tiles<'_, E> {
    /// All rows of `T` tiles, as many rows at a time as fit the registers.
    #[inline(always)]
    fn walk_rows<V: Vector, const T: usize>(&self, v: V, tile: usize) {
        let mut row = self.rows.start;
        while row < self.rows.end {
            let left = self.rows.end - row;
            let taken = if T == 1 && left >= 8 && V::ROWS >= 8 {
                self.rows_of_tiles::<V, T, 8>(v, tile, row)
            } else if left >= 4 && T * 4 <= V::ROWS {
                self.rows_of_tiles::<V, T, 4>(v, tile, row)
            } else if left >= 2 {
                self.rows_of_tiles::<V, T, 2>(v, tile, row)
            } else {
                self.rows_of_tiles::<V, T, 1>(v, tile, row)
            };
            row += taken;
        }
    }

    /// `R` rows of `T` tiles. Returns `R`.
    #[inline(always)]
    fn rows_of_tiles<V: Vector, const T: usize, const R: usize>(&self, v: V, tile: usize, row: usize) -> usize {
        let Product { matrix, x, .. } = self.product;
        let inputs = matrix.inputs();
        let mut weights: [&[[E; LANES]]; T] = [&[]; T];
        for (t, weights) in weights.iter_mut().enumerate() {
            *weights = matrix.dense(self.part, tile + t);
        }
        let mut rows: [&[f32]; R] = [&[]; R];
        for (r, rows) in rows.iter_mut().enumerate() {
            *rows = &x[(row + r) * inputs..][..inputs];
        }
        let sums = multiply(v, weights, rows);
        for (t, sums) in sums.into_iter().enumerate() {
            for (r, sum) in sums.into_iter().enumerate() {
                self.product.store(v, self.part, tile + t, row + r, sum);
            }
        }
        R
    }
}

/// 16 outputs of each of `T` tiles, for `R` rows.
#[inline(always)]
fn multiply<V: Vector, E: Element, const T: usize, const R: usize>(
    v: V,
    weights: [&[[E; LANES]]; T],
    rows: [&[f32]; R],
) -> [[V::F32; R]; T] {
    let inputs = rows[0].len();
    assert!(weights.iter().all(|w| w.len() == inputs) && rows.iter().all(|x| x.len() == inputs));
    let mut sums = [[v.splat(0.0); R]; T];
    for k in 0..inputs {
        let mut w = [v.splat(0.0); T];
        for t in 0..T {
            prefetch_bytes(std::ptr::from_ref(&weights[t][k]).addr() + AHEAD, size_of::<[E; LANES]>());
            w[t] = E::load(v, &weights[t][k]);
        }
        for r in 0..R {
            let x = v.splat(rows[r][k]);
            for t in 0..T {
                sums[t][r] = v.fma(w[t], x, sums[t][r]);
            }
        }
    }
    sums
}
