//! Rotary embedding: the angles of a step's rows, and the pass that norms and rotates a projected row's heads and writes
//! its keys and values into the cache.

use super::{
    cache::{Element, LayerWriter},
    mix::mix,
    norm::normalise_in_place,
    pool::Pool,
    vector::{Kernel, Vector},
};
use crate::{Heads, RopeSpec, RopeStyle};

/// A registered rotary embedding, with the angles of the current step's rows. All layers share them.
#[derive(Debug)]
pub(super) struct RopeTable {
    spec: RopeSpec,
    angles: Vec<f32>, // (rows, [cos | sin])
}

impl RopeTable {
    pub fn new(spec: &RopeSpec, max_rows: usize) -> Self {
        Self { spec: spec.clone(), angles: vec![0.0; max_rows * 2 * spec.inv_freq.len()] }
    }

    /// Computes the angles of rows at `positions`. As in the reference, the angle is rounded to f32 before its cosine is
    /// taken.
    pub fn begin(&mut self, pool: &mut Pool, positions: &[u32]) {
        let pairs = self.spec.inv_freq.len();
        if pairs == 0 {
            return;
        }
        let (spec, rows_per_task) = (&self.spec, (1024 / pairs).max(1));
        let angles = &mut self.angles[..positions.len() * 2 * pairs];
        pool.run_pieces(angles, rows_per_task * 2 * pairs, &|task, angles| {
            let positions = &positions[task * rows_per_task..];
            for (row, &position) in angles.chunks_exact_mut(2 * pairs).zip(positions) {
                let (cos, sin) = row.split_at_mut(pairs);
                for ((cos, sin), inv_freq) in cos.iter_mut().zip(sin).zip(&spec.inv_freq) {
                    let angle = position as f32 * inv_freq;
                    *cos = angle.cos() * spec.scale;
                    *sin = angle.sin() * spec.scale;
                }
            }
        });
    }

    pub fn view(&self) -> RopeView<'_> {
        RopeView { style: self.spec.style, pairs: self.spec.inv_freq.len(), angles: &self.angles }
    }
}

/// The angles of the step's rows, to read.
#[derive(Clone, Copy)]
pub(super) struct RopeView<'a> {
    style: RopeStyle,
    pairs: usize,
    angles: &'a [f32],
}

impl RopeView<'_> {
    #[inline(always)]
    fn rotate(&self, row: usize, head: &mut [f32]) {
        let (cos, sin) = self.angles[row * 2 * self.pairs..][..2 * self.pairs].split_at(self.pairs);
        let head = &mut head[..2 * self.pairs];
        match self.style {
            RopeStyle::Halves => {
                let (left, right) = head.split_at_mut(self.pairs);
                for ((x, y), (cos, sin)) in left.iter_mut().zip(right).zip(cos.iter().zip(sin)) {
                    (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
                }
            }
            RopeStyle::Interleaved => {
                for (pair, (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos.iter().zip(sin)) {
                    let [x, y] = *pair;
                    *pair = [x * cos - y * sin, y * cos + x * sin];
                }
            }
        }
    }
}

/// Norms and rotates the heads of some rows, and writes keys and values into their slots.
pub(super) struct RopeAndCache<'a, E> {
    /// Whole rows of `[query heads | key heads | value heads]`.
    pub qkv: &'a mut [f32],
    pub first_row: usize,
    /// The rows' slots. No other thread has one of them.
    pub slots: &'a [u32],
    pub cache: &'a LayerWriter<'a, E>,
    /// What keys are kept less.
    pub centre: Option<&'a [f32]>,
    pub heads: Heads,
    pub query_norm: Option<&'a [f32]>,
    pub key_norm: Option<&'a [f32]>,
    pub eps: f32,
    pub rope: RopeView<'a>,
}

impl<E: Element> Kernel for RopeAndCache<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Heads { query, kv, head_dim } = self.heads;
        let width = self.heads.qkv_width();
        for (i, qkv) in self.qkv.chunks_exact_mut(width).enumerate() {
            let (row, slot) = (self.first_row + i, self.slots[i] as usize);
            let (queries, keys_values) = qkv.split_at_mut(query * head_dim);
            for head in queries.chunks_exact_mut(head_dim) {
                if let Some(weight) = self.query_norm {
                    normalise_in_place(v, head, weight, self.eps);
                }
                self.rope.rotate(row, head);
                if E::MIXED {
                    mix(v, head);
                }
            }
            for (kv_head, head) in keys_values[..kv * head_dim].chunks_exact_mut(head_dim).enumerate() {
                if let Some(weight) = self.key_norm {
                    normalise_in_place(v, head, weight, self.eps);
                }
                self.rope.rotate(row, head);
                if let Some(centre) = self.centre {
                    let centre = &centre[kv_head * head_dim..];
                    head.iter_mut().zip(centre).for_each(|(x, centre)| *x -= centre);
                }
                if E::MIXED {
                    mix(v, head);
                }
                // SAFETY: no other thread has this row's slot.
                unsafe { self.cache.write_key(v, slot, kv_head, head) };
            }
        }

        let mut rows =
            self.qkv.chunks_exact(width).map(|qkv| &qkv[(query + kv) * head_dim..]).zip(self.slots).peekable();
        while let Some((values, &slot)) = rows.next() {
            let shares_lanes =
                |next: &(&[f32], &u32)| E::VALUE_LANE == 2 && slot.is_multiple_of(2) && *next.1 == slot + 1;
            let second = rows.next_if(shares_lanes);
            for (kv_head, value) in values.chunks_exact(head_dim).enumerate() {
                if let Some((values, _)) = second {
                    let values = [value, &values[kv_head * head_dim..][..head_dim]];
                    // SAFETY: no other thread has these rows' slots.
                    unsafe { self.cache.write_values(v, slot as usize, kv_head, values) };
                } else {
                    // SAFETY: no other thread has this row's slot.
                    unsafe { self.cache.write_value(v, slot as usize, kv_head, value) };
                }
            }
        }
    }
}
