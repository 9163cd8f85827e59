//! Root-mean-square norm, and the residual step between two sub-layers.

/// `out = x / √(mean(x²) + eps) · weight`, one row.
pub fn rms_norm(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    assert!(out.len() == x.len() && x.len() == weight.len());
    let scale = inverse_rms(x, eps);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

/// [`rms_norm`] of one head, in place.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len());
    let scale = inverse_rms(x, eps);
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = *x * scale * weight;
    }
}

fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mean_square = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    (mean_square + eps).sqrt().recip()
}

/// `residual += scale · (post ? rms_norm(delta, post) : delta)`, then `out = next ? rms_norm(residual, next) : residual`;
/// one row.
pub fn residual_norm(
    residual: &mut [f32],
    delta: &[f32],
    post: Option<&[f32]>,
    scale: f32,
    out: &mut [f32],
    next: Option<&[f32]>,
    eps: f32,
) {
    match post {
        Some(post) => rms_norm(out, delta, post, eps),
        None => out.copy_from_slice(delta),
    }
    for (residual, delta) in residual.iter_mut().zip(&*out) {
        *residual += scale * delta;
    }
    match next {
        Some(next) => rms_norm(out, residual, next, eps),
        None => out.copy_from_slice(residual),
    }
}
