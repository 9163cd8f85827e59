//! The gate's non-linearity, and soft-capping.

use crate::Activation;

/// `activation(x)`.
pub fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            const SQRT_2_OVER_PI: f32 = 0.797_884_6;
            0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)).tanh())
        }
    }
}

/// `out = activation(gate) · up`, one row of `[gate | up]`.
pub fn gated(out: &mut [f32], gate_up: &[f32], activation: Activation) {
    let (gate, up) = gate_up.split_at(out.len());
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = activate(activation, gate) * up;
    }
}

/// `cap · tanh(x / cap)` where there is a cap.
pub fn soft_cap(x: f32, cap: Option<f32>) -> f32 {
    cap.map_or(x, |cap| cap * (x / cap).tanh())
}
