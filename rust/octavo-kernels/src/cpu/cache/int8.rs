//! Elements that are integers; see [`crate::reference::int8`] for what they mean.
//!
//! Queries become bytes too, and a score is a sum of products of bytes times two scales. A weight is multiplied with its
//! value's scale and becomes an integer of two digits to the base [`DIGIT`], relative to the largest of a split: so what is
//! lost is 1 part in 64 thousand of that. Sums are exact, so a weight of 0 adds nothing, whatever lies there.

// `for m in 0..M` over several arrays of registers reads better than the zips that would replace it.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{
    chunk_unchecked,
    element::{Element, Scale, Unit},
    sixteen, sixteen_mut,
};
use crate::KV_SPLIT;
use crate::cpu::{memory::Plain, vector::Vector};

/// An integer in ±127, and 128 more.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(transparent)]
pub(in crate::cpu) struct Biased(pub u8);

// SAFETY: a number around a u8.
unsafe impl Plain for Biased {}

/// The base of weights: their lower digit is within ±127 then.
const DIGIT: f32 = 254.0;
/// The largest weight.
const MOST: f32 = 127.0 * DIGIT;

/// `largest` as so many units.
#[inline(always)]
fn unit(largest: f32, units: f32) -> Scale {
    let scale = largest / units;
    Scale { scale, inverse: if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale } }
}

/// Where sums of products begin, if factors of this sum are multiplied with what is biased.
#[inline(always)]
fn start<V: Vector>(_: V, sum: i32) -> i32 {
    if V::BIAS_LEFT == 0 { 0 } else { -V::BIAS_LEFT * sum }
}

/// `sum` and the products of 64 biased bytes with a quad of factors.
#[inline(always)]
fn multiply<V: Vector>(v: V, sum: V::I32, factor: [i8; 4], lanes: V::Bytes) -> V::I32 {
    v.total(v.dot_biased(v.sums(sum), lanes, v.splat_quad(factor)))
}

impl Element for Biased {
    const ZERO: Self = Self(128);
    const LANE: usize = 4;
    const SCALE: usize = size_of::<f32>();
    const MIXED: bool = true;
    type Factor = [i8; 4];
    type Lanes<V: Vector> = V::Bytes;
    type Score<V: Vector> = V::I32;
    type Output<V: Vector> = [V::I32; 2];

    #[inline(always)]
    fn scale<V: Vector>(v: V, row: &[f32]) -> Scale {
        let mut largest = v.splat(0.0);
        for x in row.as_chunks::<16>().0 {
            largest = v.max(v.abs(v.load(x)), largest);
        }
        unit(v.max_lane(largest), 127.0)
    }
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F32, scale: Scale, to: &mut [Self; 16]) {
        // What is no number becomes -127; a largest one is rounded to 127.
        let codes = v.round(v.max(v.mul(x, v.splat(scale.inverse)), v.splat(-127.0)));
        let mut bytes = [0; 16];
        v.store_i8(codes, &mut bytes);
        *to = bytes.map(|byte| Self(byte as u8 ^ 128));
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(v: V, from: &[Self], at: usize) -> V::Bytes {
        // SAFETY: the caller's promise, and a `Biased` is a `u8`.
        v.load_bytes(unsafe { &*std::ptr::from_ref::<[Self; 64]>(chunk_unchecked(from, at)).cast() })
    }

    #[inline(always)]
    fn stage<V: Vector>(v: V, query: &[f32], by: f32, factors: &mut [[i8; 4]]) -> Unit {
        let Scale { scale, inverse } = Self::scale(v, query);
        let mut sum = 0;
        for (x, factors) in query.as_chunks::<16>().0.iter().zip(factors.as_chunks_mut::<4>().0) {
            let codes = v.round(v.max(v.mul(v.load(x), v.splat(inverse)), v.splat(-127.0)));
            sum += v.store_i8(codes, factors.as_flattened_mut().try_into().expect("sixteen are four quads"));
        }
        Unit { scale: scale * by, starts: [start(v, sum), 0] }
    }
    #[inline(always)]
    fn begin_score<V: Vector>(v: V, query: Unit) -> V::I32 {
        v.splat_i32(query.starts[0])
    }
    #[inline(always)]
    fn add_to_score<V: Vector>(v: V, score: V::I32, factor: [i8; 4], keys: V::Bytes) -> V::I32 {
        multiply(v, score, factor, keys)
    }
    #[inline(always)]
    fn end_score<V: Vector>(v: V, score: V::I32, query: Unit, scales: V::F32) -> V::F32 {
        v.mul(v.to_f32(score), v.mul(scales, v.splat(query.scale)))
    }

    // As for pairs of bfloat16.
    const SCORE_UNIT: f32 = std::f32::consts::LOG2_E;
    #[inline(always)]
    fn powers<V: Vector>(v: V, x: V::F32) -> V::F32 {
        v.exp2_of_negative(x)
    }
    const POSITIONS: usize = 16;
    #[inline(always)]
    fn weights<V: Vector, const M: usize>(
        v: V,
        scores: &mut [[f32; KV_SPLIT]; M],
        shifts: &[f32; M],
        scales: &[f32; KV_SPLIT],
        all: Range<usize>,
        weights: &mut [[[i8; 4]; KV_SPLIT]; M],
    ) -> [(f32, Unit); M] {
        let (zero, mut sums, mut largest) = (v.splat(0.0), [v.splat(0.0); M], [v.splat(0.0); M]);
        for at in all.clone().step_by(16) {
            let scales = v.load(sixteen(scales, at));
            for m in 0..M {
                let weight = Self::powers(v, v.sub(v.load(sixteen(&scores[m], at)), v.splat(shifts[m])));
                sums[m] = v.add(sums[m], weight);
                // What is not seen may have anything as a scale.
                let weight = v.select_less(zero, weight, v.mul(weight, scales), zero);
                largest[m] = v.max(largest[m], weight);
                v.store(weight, sixteen_mut(&mut scores[m], at));
            }
        }
        let mut found = [(0.0, Unit::default()); M];
        for m in 0..M {
            let Scale { scale, inverse } = unit(v.max_lane(largest[m]), MOST);
            let mut digit_sums = [0; 2];
            for at in all.clone().step_by(16) {
                let weight = v.mul(v.load(sixteen(&scores[m], at)), v.splat(inverse));
                let high = v.round(v.mul(weight, v.splat(1.0 / DIGIT)));
                let low = v.round(v.fma(v.to_f32(high), v.splat(-DIGIT), weight));
                let mut digits = [[0; 16]; 2];
                digit_sums[0] += v.store_i8(high, &mut digits[0]);
                digit_sums[1] += v.store_i8(low, &mut digits[1]);
                let factors = sixteen_mut(&mut weights[m], at / Self::LANE * Self::PARTS);
                for (i, (high, low)) in digits[0].as_chunks().0.iter().zip(digits[1].as_chunks().0).enumerate() {
                    (factors[2 * i], factors[2 * i + 1]) = (*high, *low);
                }
            }
            found[m] = (v.sum(sums[m]), Unit { scale, starts: digit_sums.map(|sum| start(v, sum)) });
        }
        found
    }

    const PARTS: usize = 2;
    const ZERO_IS_NOTHING: bool = true;
    #[inline(always)]
    fn keep<V: Vector>(_: V, lanes: V::Bytes, _: Range<usize>) -> V::Bytes {
        lanes
    }
    #[inline(always)]
    fn begin_output<V: Vector>(v: V, _: V::F32, weights: Unit) -> [V::I32; 2] {
        weights.starts.map(|start| v.splat_i32(start))
    }
    #[inline(always)]
    fn add_to_output<V: Vector>(
        v: V,
        [high, low]: [V::I32; 2],
        weights: &[[i8; 4]; 16],
        lane: usize,
        values: V::Bytes,
    ) -> [V::I32; 2] {
        [multiply(v, high, weights[2 * lane], values), multiply(v, low, weights[2 * lane + 1], values)]
    }
    #[inline(always)]
    fn end_output<V: Vector>(v: V, [high, low]: [V::I32; 2], weights: Unit) -> V::F32 {
        v.mul(v.fma(v.to_f32(high), v.splat(DIGIT), v.to_f32(low)), v.splat(weights.scale))
    }
}
