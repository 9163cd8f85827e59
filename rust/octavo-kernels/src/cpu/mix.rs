//! Mixing the components of heads, for caches whose elements are integers; see [`crate::reference::int8`].

use super::vector::Vector;
use crate::reference::int8::block;

/// Sylvester's Hadamard matrix.
const HADAMARD: [[f32; 16]; 16] = {
    let mut matrix = [[1.0; 16]; 16];
    let mut at = 0usize;
    while at < 256 {
        let (row, column) = (at / 16, at % 16);
        if (row & column).count_ones() % 2 == 1 {
            matrix[row][column] = -1.0;
        }
        at += 1;
    }
    matrix
};

/// Mixes a head. Its components are a multiple of 16.
#[inline(always)]
pub(super) fn mix<V: Vector>(v: V, head: &mut [f32]) {
    let block = block(head.len());
    let scale = v.splat((block as f32).sqrt().recip());
    for block in head.chunks_exact_mut(block) {
        let (vectors, _) = block.as_chunks_mut::<16>();
        for vector in vectors.iter_mut() {
            let mut sum = v.splat(0.0);
            for (x, row) in vector.iter().zip(&HADAMARD) {
                sum = v.fma(v.splat(*x), v.load(row), sum);
            }
            v.store(v.mul(sum, scale), vector);
        }
        let mut half = 1;
        while half < vectors.len() {
            for vectors in vectors.chunks_exact_mut(2 * half) {
                let (left, right) = vectors.split_at_mut(half);
                for (left, right) in left.iter_mut().zip(right) {
                    let (a, b) = (v.load(left), v.load(right));
                    v.store(v.add(a, b), left);
                    v.store(v.sub(a, b), right);
                }
            }
            half *= 2;
        }
    }
}
