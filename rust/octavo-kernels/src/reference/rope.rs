//! Rotary position embedding.

use crate::{RopeSpec, RopeStyle};

/// Cosine and sine of every rotated pair at `position`, times the spec's scale. The angle is rounded to f32 before the
/// cosine is taken, as Hugging Face's models do: at position 100 000 that matters more than any rounding after it.
pub fn angles(spec: &RopeSpec, position: u32) -> (Vec<f32>, Vec<f32>) {
    let angle = |inv_freq: &f32| position as f32 * inv_freq;
    let cos = spec.inv_freq.iter().map(|f| angle(f).cos() * spec.scale).collect();
    let sin = spec.inv_freq.iter().map(|f| angle(f).sin() * spec.scale).collect();
    (cos, sin)
}

/// Rotates one head in place. What lies beyond the rotated pairs stays as it is.
pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], style: RopeStyle) {
    let pairs = cos.len();
    assert!(sin.len() == pairs && 2 * pairs <= head.len());
    for i in 0..pairs {
        let (a, b) = match style {
            RopeStyle::Halves => (i, i + pairs),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let (x, y) = (head[a], head[b]);
        head[a] = x * cos[i] - y * sin[i];
        head[b] = y * cos[i] + x * sin[i];
    }
}
