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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{isa::Isa, vector::Kernel};
    use crate::reference::int8;

    struct Mix<'a>(&'a mut [f32]);

    impl Kernel for Mix<'_> {
        type Output = ();
        #[inline(always)]
        fn run<V: Vector>(self, v: V) {
            mix(v, self.0);
        }
    }

    #[test]
    fn it_is_the_plain_one_and_its_own_inverse() {
        for len in [16, 32, 48, 64, 80, 96, 128, 192, 512] {
            let x: Vec<f32> =
                (0..len).map(|i| ((i * i) as f32 * 0.37).sin() * if i == 5 { 90.0 } else { 1.0 }).collect();
            let mut want = x.clone();
            int8::mix(&mut want);
            for isa in Isa::available() {
                let mut got = x.clone();
                isa.run(Mix(&mut got));
                let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4);
                assert!(near(&got, &want), "{len} on {}: {got:?}, not {want:?}", isa.describe());
                isa.run(Mix(&mut got));
                assert!(near(&got, &x), "{len} on {}", isa.describe());
            }
        }
    }
}
