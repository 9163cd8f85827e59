//! Mixture of experts: rows to their experts' slots, and back as one row.
//!
//! Which experts a row goes to is decided by the reference's own loop: it costs nothing beside the products, and so there
//! is one answer.

use super::vector::{Kernel, Vector};
use crate::routing::Routing;

/// `out = Σ weight · x[slot]` over whole rows, in the order of their choices.
pub(super) struct Combine<'a> {
    pub out: &'a mut [f32],
    pub first_row: usize,
    pub x: &'a [f32],
    pub routing: &'a Routing,
    pub width: usize,
}

impl Kernel for Combine<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, _: V) {
        for (i, out) in self.out.chunks_exact_mut(self.width).enumerate() {
            out.fill(0.0);
            for (choice, slot) in self.routing.of_row(self.first_row + i) {
                let x = &self.x[slot * self.width..][..self.width];
                for (out, x) in out.iter_mut().zip(x) {
                    *out += choice.weight * x;
                }
            }
        }
    }
}
