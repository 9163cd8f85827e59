//! The gate's non-linearity, and soft-capping.

use std::ops::Range;

use super::format::BLOCK;
use super::quantise::{Quantisation, quantise_block};
use super::vector::{Kernel, Vector};
use crate::Activation;

/// `out = activation(gate) · up` over whole rows of `[gate | up]`.
pub(super) struct Gated<'a> {
    pub out: &'a mut [f32],
    pub gate_up: &'a [f32],
    pub activation: Activation,
    pub width: usize,
}

impl Kernel for Gated<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let rows = self.out.chunks_exact_mut(self.width).zip(self.gate_up.chunks_exact(2 * self.width));
        for (out, gate_up) in rows {
            let (gate, up) = gate_up.split_at(self.width);
            let (outs, out_tail) = out.as_chunks_mut::<16>();
            let ((gates, gate_tail), (ups, up_tail)) = (gate.as_chunks::<16>(), up.as_chunks::<16>());
            for ((out, gate), up) in outs.iter_mut().zip(gates).zip(ups) {
                let y = activate(v, self.activation, v.load(gate));
                v.store(v.mul(y, v.load(up)), out);
            }
            if !out_tail.is_empty() {
                let y = activate(v, self.activation, v.load_partial(gate_tail, 0.0));
                v.store_partial(v.mul(y, v.load_partial(up_tail, 0.0)), out_tail);
            }
        }
    }
}

/// `activation(gate) · up` of some columns of some rows, in int8.
pub(super) struct Gate<'a> {
    /// `[gate | up]` for each row, `columns` of each.
    pub values: &'a [f32],
    /// Whole blocks.
    pub columns: usize,
    pub activation: Activation,
    pub rows: Range<usize>,
    /// The first of the columns, in blocks.
    pub first_block: usize,
    pub gated: Quantisation<'a>,
}

impl Kernel for Gate<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        for (row, values) in self.rows.zip(self.values.chunks_exact(2 * self.columns)) {
            let (gates, ups) = values.split_at(self.columns);
            let blocks = gates.as_chunks::<BLOCK>().0.iter().zip(ups.as_chunks::<BLOCK>().0);
            for (i, (gates, ups)) in blocks.enumerate() {
                let mut gated = [0.0; BLOCK];
                let inputs = gates.as_chunks::<16>().0.iter().zip(ups.as_chunks::<16>().0);
                for ((gate, up), gated) in inputs.zip(gated.as_chunks_mut::<16>().0) {
                    v.store(v.mul(activate(v, self.activation, v.load(gate)), v.load(up)), gated);
                }
                // SAFETY: whoever runs this has these rows and columns to itself.
                unsafe { self.gated.put(row, self.first_block + i, quantise_block(v, &gated)) };
            }
        }
    }
}

#[inline(always)]
fn activate<V: Vector>(v: V, activation: Activation, x: V::F32) -> V::F32 {
    match activation {
        Activation::Silu => v.mul(x, v.sigmoid(x)),
        Activation::GeluTanh => {
            // (1 + tanh u) / 2 is sigmoid(2u), which keeps its digits where tanh comes near -1.
            const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769;
            let cubed = v.mul(v.mul(x, x), x);
            let u = v.mul(v.splat(TWICE_SQRT_2_OVER_PI), v.fma(v.splat(0.044715), cubed, x));
            v.mul(x, v.sigmoid(u))
        }
    }
}

/// `x = soft_cap(x · scale)`, in place.
pub(super) struct ScaleAndCap<'a> {
    pub x: &'a mut [f32],
    pub scale: f32,
    pub cap: Option<f32>,
}

impl Kernel for ScaleAndCap<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let (chunks, tail) = self.x.as_chunks_mut::<16>();
        for x in chunks {
            let y = soft_cap(v, v.mul(v.load(x), v.splat(self.scale)), self.cap);
            v.store(y, x);
        }
        if !tail.is_empty() {
            let y = soft_cap(v, v.mul(v.load_partial(tail, 0.0), v.splat(self.scale)), self.cap);
            v.store_partial(y, tail);
        }
    }
}

/// `cap · tanh(x / cap)` where there is a cap.
#[inline(always)]
pub(super) fn soft_cap<V: Vector>(v: V, x: V::F32, cap: Option<f32>) -> V::F32 {
    match cap {
        None => x,
        Some(cap) => v.mul(v.splat(cap), v.tanh(v.div(x, v.splat(cap)))),
    }
}
