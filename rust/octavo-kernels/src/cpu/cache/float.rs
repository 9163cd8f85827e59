//! Elements that are floats.

// `for m in 0..M` over several arrays of registers reads better than the zips that would replace it.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use half::{bf16, f16};

use super::{
    Half, chunk_unchecked,
    element::{Element, Scale, Unit},
    sixteen, sixteen_mut,
};
use crate::KV_SPLIT;
use crate::cpu::{memory::Plain, vector::Vector};

/// An element that is a number by itself. It is multiplied as it is: a sum of products is the score, or the output.
pub(in crate::cpu) trait Float: Plain {
    /// 0.
    const ZERO: Self;
    /// Elements in a lane: 1, or a pair.
    const LANE: usize;
    /// What a lane is multiplied with: `LANE` components of a query, or the weights of `LANE` positions. 32 bits.
    type Factor: Plain;
    /// Sixteen lanes in registers.
    type Lanes<V: Vector>: Copy;

    /// Stores sixteen elements.
    fn store<V: Vector>(v: V, x: V::F32, to: &mut [Self; 16]);

    /// Stores sixteen numbers as the first `16 / LANE` of `to`.
    fn store_factors<V: Vector>(v: V, x: V::F32, to: &mut [Self::Factor; 16]);

    /// Adds the numbers of each factor to its lane of `sum`.
    fn add<V: Vector>(v: V, sum: V::F32, factors: &[Self::Factor; 16]) -> V::F32;

    /// Loads the sixteen lanes that begin with element `at`.
    ///
    /// # Safety
    /// There are `16 · LANE` elements from there on.
    unsafe fn load<V: Vector>(v: V, from: &[Self], at: usize) -> Self::Lanes<V>;

    /// `lanes` with 0 for those elements of each that are not in `kept`, whatever they held.
    fn keep<V: Vector>(v: V, lanes: Self::Lanes<V>, kept: Range<usize>) -> Self::Lanes<V>;

    /// `sum + factor · lanes`.
    fn multiply<V: Vector>(v: V, factor: Self::Factor, lanes: Self::Lanes<V>, sum: V::F32) -> V::F32;

    /// What scores are multiplied with beforehand, so that [`Float::powers`] is quick.
    const SCORE_UNIT: f32;

    /// `exp(x / SCORE_UNIT)` of what is no larger than 0, as near as a factor needs it.
    fn powers<V: Vector>(v: V, x: V::F32) -> V::F32;
}

/// What elements have in common that are one to a lane and widened.
macro_rules! one_to_a_lane {
    ($load:ident) => {
        const LANE: usize = 1;
        type Factor = f32;
        type Lanes<V: Vector> = V::F32;

        #[inline(always)]
        fn store_factors<V: Vector>(v: V, x: V::F32, to: &mut [f32; 16]) {
            v.store(x, to);
        }
        #[inline(always)]
        fn add<V: Vector>(v: V, sum: V::F32, factors: &[f32; 16]) -> V::F32 {
            v.add(sum, v.load(factors))
        }
        #[inline(always)]
        unsafe fn load<V: Vector>(v: V, from: &[Self], at: usize) -> V::F32 {
            // SAFETY: the caller's promise.
            v.$load(unsafe { chunk_unchecked(from, at) })
        }
        #[inline(always)]
        fn keep<V: Vector>(_: V, lanes: V::F32, _: Range<usize>) -> V::F32 {
            lanes
        }
        #[inline(always)]
        fn multiply<V: Vector>(v: V, factor: f32, lanes: V::F32, sum: V::F32) -> V::F32 {
            v.fma(v.splat(factor), lanes, sum)
        }
        const SCORE_UNIT: f32 = 1.0;
        #[inline(always)]
        fn powers<V: Vector>(v: V, x: V::F32) -> V::F32 {
            v.exp(x)
        }
    };
}

impl Float for f32 {
    const ZERO: f32 = 0.0;
    one_to_a_lane!(load);
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F32, to: &mut [f32; 16]) {
        v.store(x, to);
    }
}

impl Float for f16 {
    const ZERO: f16 = f16::ZERO;
    one_to_a_lane!(load_f16);
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F32, to: &mut [f16; 16]) {
        let mut lanes = [0.0; 16];
        v.store(x, &mut lanes);
        *to = lanes.map(f16::from_f32);
    }
}

impl Float for bf16 {
    const ZERO: bf16 = bf16::ZERO;
    const LANE: usize = 2;
    type Factor = [bf16; 2];
    type Lanes<V: Vector> = V::Bytes;

    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F32, to: &mut [bf16; 16]) {
        v.store_bf16(x, to);
    }
    #[inline(always)]
    fn store_factors<V: Vector>(v: V, x: V::F32, to: &mut [[bf16; 2]; 16]) {
        v.store_bf16(x, to.as_flattened_mut().first_chunk_mut().expect("sixteen of thirty-two"));
    }
    #[inline(always)]
    fn add<V: Vector>(v: V, sum: V::F32, factors: &[[bf16; 2]; 16]) -> V::F32 {
        let pairs = v.load_pairs(factors.as_flattened().try_into().expect("thirty-two"));
        v.dot_pairs(sum, v.splat_pair([bf16::ONE; 2]), pairs)
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(v: V, from: &[bf16], at: usize) -> V::Bytes {
        // SAFETY: the caller's promise.
        v.load_pairs(unsafe { chunk_unchecked(from, at) })
    }
    #[inline(always)]
    fn keep<V: Vector>(v: V, lanes: V::Bytes, kept: Range<usize>) -> V::Bytes {
        let bytes = |element| if kept.contains(&element) { -1 } else { 0 };
        v.and(lanes, v.splat_quad([bytes(0), bytes(0), bytes(1), bytes(1)]))
    }
    #[inline(always)]
    fn multiply<V: Vector>(v: V, factor: [bf16; 2], lanes: V::Bytes, sum: V::F32) -> V::F32 {
        v.dot_pairs(sum, v.splat_pair(factor), lanes)
    }
    // To the base 2, which saves half of the work, and exact for the largest score, which has most of the weight.
    const SCORE_UNIT: f32 = std::f32::consts::LOG2_E;
    #[inline(always)]
    fn powers<V: Vector>(v: V, x: V::F32) -> V::F32 {
        v.exp2_of_negative(x)
    }
}

impl<F: Float> Element for F {
    const ZERO: F = F::ZERO;
    const KEY_LANE: usize = F::LANE;
    const VALUE_LANE: usize = F::LANE;
    const POSITIONS: usize = 16 * F::LANE;
    type Query = F::Factor;
    type Weight = F::Factor;
    type Lanes<V: Vector> = F::Lanes<V>;
    type Score<V: Vector> = V::F32;
    type Output<V: Vector> = V::F32;
    const SCORE_UNIT: f32 = F::SCORE_UNIT;

    #[inline(always)]
    fn scale<V: Vector>(_: V, _: &[f32]) -> Scale {
        Scale::default()
    }
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F32, _: Scale, _: Half, to: &mut [F; 16]) {
        F::store(v, x, to);
    }
    #[inline(always)]
    unsafe fn load_keys<V: Vector>(v: V, from: &[F], at: usize) -> F::Lanes<V> {
        // SAFETY: the caller's promise.
        unsafe { F::load(v, from, at) }
    }
    #[inline(always)]
    unsafe fn load_values<V: Vector>(v: V, from: &[F], at: usize) -> F::Lanes<V> {
        // SAFETY: the caller's promise.
        unsafe { F::load(v, from, at) }
    }

    #[inline(always)]
    fn stage<V: Vector>(v: V, query: &[f32], by: f32, to: &mut [F::Factor]) -> Unit {
        for (i, some) in query.chunks(16).enumerate() {
            let scaled = v.mul(v.load_partial(some, 0.0), v.splat(by));
            F::store_factors(v, scaled, sixteen_mut(to, 16 * i / F::LANE));
        }
        Unit::default()
    }
    #[inline(always)]
    fn begin_score<V: Vector>(v: V, _: Unit) -> V::F32 {
        v.splat(0.0)
    }
    #[inline(always)]
    fn add_to_score<V: Vector>(v: V, score: V::F32, query: F::Factor, keys: F::Lanes<V>) -> V::F32 {
        F::multiply(v, query, keys, score)
    }
    #[inline(always)]
    fn end_score<V: Vector>(_: V, score: V::F32, _: Unit, _: V::F32) -> V::F32 {
        score
    }

    #[inline(always)]
    fn powers<V: Vector>(v: V, x: V::F32) -> V::F32 {
        F::powers(v, x)
    }
    #[inline(always)]
    fn weights<V: Vector, const M: usize>(
        v: V,
        scores: &mut [[f32; KV_SPLIT]; M],
        shifts: &[f32; M],
        _: &[f32; KV_SPLIT],
        all: Range<usize>,
        weights: &mut [[F::Factor; KV_SPLIT]; M],
    ) -> [(f32, Unit); M] {
        for at in all.clone().step_by(16) {
            for m in 0..M {
                let weight = F::powers(v, v.sub(v.load(sixteen(&scores[m], at)), v.splat(shifts[m])));
                F::store_factors(v, weight, sixteen_mut(&mut weights[m], at / F::LANE));
            }
        }
        // Summed as they are rounded, so that what they weigh is still an average.
        let mut sums = [v.splat(0.0); M];
        for at in all.step_by(Self::POSITIONS) {
            for m in 0..M {
                sums[m] = F::add(v, sums[m], sixteen(&weights[m], at / F::LANE));
            }
        }
        let mut found = [(0.0, Unit::default()); M];
        for m in 0..M {
            found[m].0 = v.sum(sums[m]);
        }
        found
    }

    #[inline(always)]
    fn keep<V: Vector>(v: V, lanes: F::Lanes<V>, kept: Range<usize>) -> F::Lanes<V> {
        F::keep(v, lanes, kept)
    }
    #[inline(always)]
    fn begin_output<V: Vector>(_: V, is: V::F32) -> V::F32 {
        is
    }
    #[inline(always)]
    fn add_to_output<V: Vector>(v: V, output: V::F32, weights: F::Factor, values: F::Lanes<V>) -> V::F32 {
        F::multiply(v, weights, values, output)
    }
    #[inline(always)]
    fn end_output<V: Vector>(_: V, output: V::F32, _: Unit) -> V::F32 {
        output
    }
}
