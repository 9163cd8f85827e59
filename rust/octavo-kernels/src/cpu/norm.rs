//! Root-mean-square norm, and the residual step between two sub-layers.
//!
//! Only sums across a row need the vector's fixed order; what is done to each value on its own is a plain loop, which the
//! compiler turns into the instructions of the kernel around it, with the same bits.

use super::vector::{Kernel, Vector};

/// `out = x / rms(x) · weight` over whole rows.
pub(super) struct RmsNorm<'a> {
    pub out: &'a mut [f32],
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub eps: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let width = self.weight.len();
        for (out, x) in self.out.chunks_exact_mut(width).zip(self.x.chunks_exact(width)) {
            normalise(out, x, inverse_rms(v, x, self.eps), self.weight);
        }
    }
}

/// A norm in place over the columns from `first` on of whole rows, as many as `weight` has.
pub(super) struct RmsNormColumns<'a> {
    pub x: &'a mut [f32],
    pub width: usize,
    pub first: usize,
    pub weight: &'a [f32],
    pub eps: f32,
}

impl Kernel for RmsNormColumns<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        for x in self.x.chunks_exact_mut(self.width) {
            normalise_in_place(v, &mut x[self.first..][..self.weight.len()], self.weight, self.eps);
        }
    }
}

/// `residual += scale · (post ? rms_norm(delta, post) : delta)`, `out = next ? rms_norm(residual, next) : residual`, over
/// whole rows.
pub(super) struct ResidualNorm<'a> {
    pub residual: &'a mut [f32],
    pub delta: &'a [f32],
    pub post: Option<&'a [f32]>,
    pub scale: f32,
    pub out: &'a mut [f32],
    pub next: Option<&'a [f32]>,
    pub eps: f32,
    pub width: usize,
}

impl Kernel for ResidualNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let residuals = self.residual.chunks_exact_mut(self.width);
        let rows = residuals.zip(self.delta.chunks_exact(self.width)).zip(self.out.chunks_exact_mut(self.width));
        for ((residual, delta), out) in rows {
            match self.post {
                Some(post) => {
                    normalise(out, delta, inverse_rms(v, delta, self.eps), post);
                    add_scaled(residual, out, self.scale);
                }
                None => add_scaled(residual, delta, self.scale),
            }
            match self.next {
                Some(next) => normalise(out, residual, inverse_rms(v, residual, self.eps), next),
                None => out.copy_from_slice(residual),
            }
        }
    }
}

/// `1 / √(mean(x²) + eps)`.
#[inline(always)]
pub(super) fn inverse_rms<V: Vector>(v: V, x: &[f32], eps: f32) -> f32 {
    let (chunks, tail) = x.as_chunks::<16>();
    let mut sum = v.splat(0.0);
    for chunk in chunks {
        let x = v.load(chunk);
        sum = v.fma(x, x, sum);
    }
    if !tail.is_empty() {
        let x = v.load_partial(tail, 0.0);
        sum = v.fma(x, x, sum);
    }
    (v.sum(sum) / x.len() as f32 + eps).sqrt().recip()
}

#[inline(always)]
fn normalise(out: &mut [f32], x: &[f32], scale: f32, weight: &[f32]) {
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

/// [`RmsNorm`] of one head or row, in place.
#[inline(always)]
pub(super) fn normalise_in_place<V: Vector>(v: V, x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_rms(v, x, eps);
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = *x * scale * weight;
    }
}

#[inline(always)]
fn add_scaled(residual: &mut [f32], delta: &[f32], scale: f32) {
    for (residual, delta) in residual.iter_mut().zip(delta) {
        *residual += scale * delta;
    }
}
