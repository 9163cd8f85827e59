//! What a KV cache of integers keeps, and how heads are mixed for it.
//!
//! A key or value of a head is kept as integers in ±127 and one scale, `max |x| / 127`. Keys have a few components that are
//! much larger than the others, in every position the same ones, and would leave the others a few steps of such a scale. So
//! what all keys of a head have in common is taken off, where it is known: that changes all scores of a query alike, so no
//! weight (Zhang et al., "SageAttention", 2024). Then keys are mixed: multiplied with a Hadamard matrix over its root, which
//! makes equals of their components. It is orthogonal: as queries are mixed too, their products stay what they were (Ashkboos
//! et al., "QuaRot", 2024). Queries are rounded as keys are.

use crate::CacheLayer;

/// What the keys of a cache's layers have in common, `(kv heads, head_dim)`.
#[derive(Clone, Debug, Default)]
pub struct Centres(Vec<(CacheLayer, Vec<f32>)>);

impl Centres {
    /// Sets that of a layer.
    pub fn set(&mut self, place: CacheLayer, centre: Vec<f32>) {
        self.0.push((place, centre));
    }

    /// That of a layer, if it was set.
    pub fn get(&self, place: CacheLayer) -> Option<&[f32]> {
        self.0.iter().find(|layer| layer.0 == place).map(|layer| layer.1.as_slice())
    }
}

/// `x` becomes `H x / √n`, with Sylvester's `H` of order `n`, the largest power of two that divides the number of components;
/// `n` at a time.
pub fn mix(x: &mut [f32]) {
    let n = block(x.len());
    for x in x.chunks_exact_mut(n) {
        for half in (0..n.trailing_zeros()).map(|bit| 1 << bit) {
            for x in x.chunks_exact_mut(2 * half) {
                let (left, right) = x.split_at_mut(half);
                for (a, b) in left.iter_mut().zip(right) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
        }
        x.iter_mut().for_each(|x| *x *= (n as f32).sqrt().recip());
    }
}

/// How many components of a head are mixed with each other.
pub fn block(head_dim: usize) -> usize {
    1 << head_dim.trailing_zeros()
}

/// What is kept of a key or value of one head: nothing that is a number, if a component is none or infinite.
pub fn round(x: &mut [f32]) {
    let scale = x.iter().fold(0f32, |max, x| max.max(x.abs())) / 127.0;
    let inverse = if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale };
    // 0, or no number where a component is none or infinite: integers cannot say so.
    let none: f32 = x.iter().map(|x| x * 0.0).sum();
    x.iter_mut().for_each(|x| *x = (*x * inverse).max(-127.0).round_ties_even() * (scale + none));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How far rounding takes a head off.
    fn error(x: &[f32]) -> f32 {
        let mut kept = x.to_vec();
        round(&mut kept);
        kept.iter().zip(x).map(|(kept, x)| (kept - x).powi(2)).sum::<f32>().sqrt()
    }

    #[test]
    fn of_a_head_that_was_mixed_more_is_kept() {
        for len in [48, 64, 128] {
            let x: Vec<f32> = (0..len).map(|i| if i == 5 { 90.0 } else { (i as f32 * 1.7).sin() }).collect();
            let mut mixed = x.clone();
            mix(&mut mixed);
            let length = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>().sqrt();
            assert!((length(&mixed) / length(&x) - 1.0).abs() < 1e-5, "of {len}: mixing is a rotation");
            assert!(error(&mixed) < 0.5 * error(&x), "of {len}: {} and {} off", error(&mixed), error(&x));
        }
    }
}
