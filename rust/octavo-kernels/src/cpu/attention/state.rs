//! What is known of an item's positions so far, and how splits come together.

use super::{Item, Job};
use crate::cpu::{
    cache::{Element, sixteen, sixteen_mut},
    vector::Vector,
};

/// Queries in an item, at most.
pub(super) const ITEM_QUERIES: usize = 32;

/// What softmax needs to know of the positions so far, for each query of an item: the largest score, the sum of the weights
/// relative to it, and the values with those weights.
pub(super) struct State<'a> {
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub acc: &'a mut [f32], // (ITEM_QUERIES, vectors · 16); see `component`
    pub stride: usize,
}

/// The head component at which vector `i` of an output begins. If the head is no multiple of 16, the last vector
/// overlaps the one before; both hold the same values there.
#[inline(always)]
pub(super) fn component(i: usize, head_dim: usize) -> usize {
    (16 * i).min(head_dim - 16)
}

impl<'a> State<'a> {
    /// Floats that a state takes.
    pub fn len(head_dim: usize) -> usize {
        ITEM_QUERIES * (2 + head_dim.next_multiple_of(16))
    }

    /// A state in `memory`.
    #[inline(always)]
    pub fn over(memory: &'a mut [f32], head_dim: usize) -> Self {
        let (max, rest) = memory.split_at_mut(ITEM_QUERIES);
        let (sum, acc) = rest.split_at_mut(ITEM_QUERIES);
        Self { max, sum, acc, stride: head_dim.next_multiple_of(16) }
    }

    /// Becomes what `first` is.
    #[inline(always)]
    pub fn copy(&mut self, first: &State<'_>, queries: usize) {
        self.max[..queries].copy_from_slice(&first.max[..queries]);
        self.sum[..queries].copy_from_slice(&first.sum[..queries]);
        self.acc[..queries * self.stride].copy_from_slice(&first.acc[..queries * self.stride]);
    }

    /// Adds the positions of `next`, which come after its own.
    #[inline(always)]
    pub fn merge<V: Vector, E: Element>(&mut self, v: V, next: &State<'_>, queries: usize) {
        let mut scales = [[0.0; ITEM_QUERIES]; 2];
        for q in (0..queries).step_by(16) {
            let maxima = [v.load(sixteen(self.max, q)), v.load(sixteen(next.max, q))];
            let max = v.max(maxima[0], maxima[1]);
            v.store(max, sixteen_mut(self.max, q));
            // Where a query has seen nothing, infinities have no difference.
            let shift = v.select_less(v.splat(f32::NEG_INFINITY), max, max, v.splat(0.0));
            for (scales, max) in scales.iter_mut().zip(maxima) {
                v.store(E::powers(v, v.sub(max, shift)), sixteen_mut(scales, q));
            }
        }
        for q in (0..queries).filter(|&q| next.max[q] != f32::NEG_INFINITY) {
            let [scale, next_scale] = scales.map(|scales| scales[q]);
            self.sum[q] = self.sum[q] * scale + next.sum[q] * next_scale;
            let (scale, next_scale) = (v.splat(scale), v.splat(next_scale));
            let row = q * self.stride..(q + 1) * self.stride;
            let (acc, _) = self.acc[row.clone()].as_chunks_mut::<16>();
            for (acc, next) in acc.iter_mut().zip(next.acc[row].as_chunks::<16>().0) {
                let scaled = v.mul(v.load(acc), scale);
                v.store(v.fma(v.load(next), next_scale, scaled), acc);
            }
        }
    }
}

/// Divides by the sums and writes the output of an item's queries.
#[inline(always)]
pub(super) fn write_out<V: Vector, E>(v: V, job: &Job<'_, E>, item: &Item, state: &State<'_>) {
    let (head_dim, width) = (job.heads.head_dim, job.heads.query_width());
    for (q, (row, head)) in job.rows_and_heads(item).enumerate() {
        // SAFETY: a query is in one item, and an item is written by one task.
        let out = unsafe { job.out.slice(row * width + head * head_dim, head_dim) };
        let sum = v.splat(state.sum[q]);
        for i in 0..state.stride / 16 {
            let acc = v.load(sixteen(state.acc, q * state.stride + 16 * i));
            v.store(v.div(acc, sum), sixteen_mut(out, component(i, head_dim)));
        }
    }
}
