//! What all keys of a head have in common: their projection's bias, for caches that would rather not keep it.

use octavo_kernels::{RopeSpec, reference::rope::rotate};

/// Positions over which it is the mean. Components that have turned much in so many have little in common.
const SPAN: f64 = 4096.0;

/// The mean over positions of a bias of keys, `(kv heads, head_dim)`, rotated.
pub fn key_centre(bias: &[f32], head_dim: usize, rope: &RopeSpec) -> Vec<f32> {
    // That of e^(i · angle · position) is in the direction of the middle position; its length is Dirichlet's kernel.
    let mean = |&inv_freq: &f32| {
        let half = f64::from(inv_freq) / 2.0;
        let length = if half.sin() == 0.0 { 1.0 } else { (SPAN * half).sin() / (SPAN * half.sin()) };
        let (sin, cos) = ((SPAN - 1.0) * half).sin_cos();
        let scaled = |x: f64| (x * length * f64::from(rope.scale)) as f32;
        (scaled(cos), scaled(sin))
    };
    let (cos, sin): (Vec<f32>, Vec<f32>) = rope.inv_freq.iter().map(mean).unzip();
    let mut centre = bias.to_vec();
    for head in centre.chunks_exact_mut(head_dim) {
        rotate(head, &cos, &sin, rope.style);
    }
    centre
}

#[cfg(test)]
mod tests {
    use super::*;
    use octavo_kernels::{RopeStyle, reference::rope::angles};

    #[test]
    fn it_is_the_mean_of_rotated_biases() {
        let inv_freq = vec![1.0, 0.1, 1e-3, 2e-4, 1e-6, 0.0];
        for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
            let rope = RopeSpec { style, inv_freq: inv_freq.clone(), scale: 1.3 };
            let bias: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin() * 9.0).collect();
            let mut want = [0f64; 32];
            for position in 0..SPAN as u32 {
                let (cos, sin) = angles(&rope, position);
                let mut rotated = bias.clone();
                rotated.chunks_exact_mut(16).for_each(|head| rotate(head, &cos, &sin, style));
                want.iter_mut().zip(rotated).for_each(|(want, x)| *want += f64::from(x) / SPAN);
            }
            for (i, (got, want)) in key_centre(&bias, 16, &rope).iter().zip(want).enumerate() {
                assert!((f64::from(*got) - want).abs() < 1e-3, "{style:?}, component {i}: {got}, not {want}");
            }
        }
    }
}
