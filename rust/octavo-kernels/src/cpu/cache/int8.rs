//! Elements that are integers; see [`crate::reference::int8`] for what they mean.
//!
//! Queries become bytes too, and a score is a sum of products of bytes times two scales. A weight is multiplied with its
//! value's scale and becomes an integer of 16 bits, relative to the largest of a split. Sums are exact, so a weight of 0 adds
//! nothing, whatever lies there.

// `for m in 0..M` over several arrays of registers reads better than the zips that would replace it.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{
    Half, chunk_unchecked,
    element::{Element, Scale, Unit},
    sixteen, sixteen_mut,
};
use crate::KV_SPLIT;
use crate::cpu::{memory::Plain, vector::Vector};

/// An integer in ±127; of keys, and 128 more, because one of two bytes that are multiplied has no sign.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(transparent)]
pub(in crate::cpu) struct Int8(u8);

// SAFETY: a number around a u8.
unsafe impl Plain for Int8 {}

/// `largest` as so many units.
#[inline(always)]
fn unit(largest: f32, units: f32) -> Scale {
    let scale = largest / units;
    Scale { scale, inverse: if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale } }
}

/// Stores sixteen components as integers; gives their sum.
#[inline(always)]
fn store<V: Vector>(v: V, x: V::F32, scale: Scale, to: &mut [i8; 16]) -> i32 {
    // What is no number becomes -127; a largest one is rounded to 127.
    v.store_i8(v.round(v.max(v.mul(x, v.splat(scale.inverse)), v.splat(-127.0))), to)
}

impl Element for Int8 {
    const ZERO: Self = Self(0);
    const KEY_LANE: usize = 4;
    const VALUE_LANE: usize = 2;
    const SCALE: usize = size_of::<f32>();
    const MIXED: bool = true;
    type Query = [i8; 4];
    type Weight = [i16; 2];
    type Lanes<V: Vector> = V::Bytes;
    type Score<V: Vector> = V::I32;
    type Output<V: Vector> = V::I32;

    #[inline(always)]
    fn scale<V: Vector>(v: V, row: &[f32]) -> Scale {
        let (zero, mut largest, mut none) = (v.splat(0.0), v.splat(0.0), v.splat(0.0));
        for x in row.as_chunks::<16>().0 {
            let x = v.load(x);
            (largest, none) = (v.max(v.abs(x), largest), v.fma(x, zero, none));
        }
        // Bytes are always numbers: what is none, or infinite, is told by the scale.
        let Scale { scale, inverse } = unit(v.max_lane(largest), 127.0);
        Scale { scale: scale + v.sum(none), inverse }
    }
    #[inline(always)]
    fn store<V: Vector>(v: V, x: V::F32, scale: Scale, half: Half, to: &mut [Self; 16]) {
        let mut bytes = [0; 16];
        store(v, x, scale, &mut bytes);
        let bias = match half {
            Half::Keys => 128,
            Half::Values => 0,
        };
        for (to, byte) in to.iter_mut().zip(bytes) {
            *to = Self(byte as u8 ^ bias);
        }
    }
    #[inline(always)]
    unsafe fn load_keys<V: Vector>(v: V, from: &[Self], at: usize) -> V::Bytes {
        // SAFETY: the caller's promise.
        let keys: &[Self; 64] = unsafe { chunk_unchecked(from, at) };
        // SAFETY: each is a `u8`.
        v.load_bytes(unsafe { &*std::ptr::from_ref(keys).cast() })
    }
    #[inline(always)]
    unsafe fn load_values<V: Vector>(v: V, from: &[Self], at: usize) -> V::Bytes {
        // SAFETY: the caller's promise.
        let values: &[Self; 32] = unsafe { chunk_unchecked(from, at) };
        // SAFETY: each has the bits of an `i8`.
        v.load_words(unsafe { &*std::ptr::from_ref(values).cast() })
    }

    #[inline(always)]
    fn stage<V: Vector>(v: V, query: &[f32], by: f32, to: &mut [[i8; 4]]) -> Unit {
        let (scale, mut sum) = (Self::scale(v, query), 0);
        for (x, to) in query.as_chunks::<16>().0.iter().zip(to.as_chunks_mut::<4>().0) {
            sum += store(v, v.load(x), scale, to.as_flattened_mut().try_into().expect("four times four are sixteen"));
        }
        Unit { scale: scale.scale * by, start: -V::BIAS_LEFT * sum }
    }
    #[inline(always)]
    fn begin_score<V: Vector>(v: V, query: Unit) -> V::I32 {
        v.splat_i32(query.start)
    }
    #[inline(always)]
    fn add_to_score<V: Vector>(v: V, score: V::I32, query: [i8; 4], keys: V::Bytes) -> V::I32 {
        v.total(v.dot_biased(v.sums(score), keys, v.splat_quad(query)))
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
    const POSITIONS: usize = 32;
    #[inline(always)]
    fn weights<V: Vector, const M: usize>(
        v: V,
        scores: &mut [[f32; KV_SPLIT]; M],
        shifts: &[f32; M],
        scales: &[f32; KV_SPLIT],
        all: Range<usize>,
        weights: &mut [[[i16; 2]; KV_SPLIT]; M],
    ) -> [(f32, Unit); M] {
        let (zero, mut sums, mut largest) = (v.splat(0.0), [v.splat(0.0); M], [v.splat(0.0); M]);
        for at in all.clone().step_by(16) {
            let scales = v.load(sixteen(scales, at));
            for m in 0..M {
                let weight = Self::powers(v, v.sub(v.load(sixteen(&scores[m], at)), v.splat(shifts[m])));
                // What is not seen may have anything as a scale. What is seen and is no number leaves none.
                let sum = v.add(sums[m], weight);
                let weight = v.select_less(zero, weight, v.mul(weight, scales), zero);
                sums[m] = v.fma(weight, zero, sum);
                largest[m] = v.max(largest[m], weight);
                v.store(weight, sixteen_mut(&mut scores[m], at));
            }
        }
        let (mut found, mut inverse) = ([(0.0, Unit::default()); M], [0.0; M]);
        for m in 0..M {
            let unit = unit(v.max_lane(largest[m]), f32::from(i16::MAX));
            (found[m], inverse[m]) = ((v.sum(sums[m]), Unit { scale: unit.scale, start: 0 }), unit.inverse);
        }
        for at in all.step_by(32) {
            for m in 0..M {
                let words = sixteen_mut(&mut weights[m], at / Self::VALUE_LANE).as_flattened_mut();
                for (i, words) in words.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                    let weight = v.load(sixteen(&scores[m], at + 16 * i));
                    v.store_i16(v.round(v.mul(weight, v.splat(inverse[m]))), words);
                }
            }
        }
        found
    }

    const ZERO_IS_NOTHING: bool = true;
    #[inline(always)]
    fn keep<V: Vector>(_: V, lanes: V::Bytes, _: Range<usize>) -> V::Bytes {
        lanes
    }
    #[inline(always)]
    fn begin_output<V: Vector>(v: V, _: V::F32) -> V::I32 {
        v.splat_i32(0)
    }
    #[inline(always)]
    fn add_to_output<V: Vector>(v: V, output: V::I32, weights: [i16; 2], values: V::Bytes) -> V::I32 {
        v.dot_words(output, values, v.splat_words(weights))
    }
    #[inline(always)]
    fn end_output<V: Vector>(v: V, output: V::I32, weights: Unit) -> V::F32 {
        v.mul(v.to_f32(output), v.splat(weights.scale))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{isa::Isa, vector::Kernel};

    /// The scale of a row, and the sum of two weights for values of which one has that scale.
    struct Kept<'a>(&'a [f32]);

    impl Kernel for Kept<'_> {
        type Output = (f32, f32);
        #[inline(always)]
        fn run<V: Vector>(self, v: V) -> (f32, f32) {
            let Scale { scale, .. } = Int8::scale(v, self.0);
            let (mut scores, mut scales) = ([[f32::NEG_INFINITY; KV_SPLIT]; 1], [f32::NAN; KV_SPLIT]);
            (scores[0][3], scores[0][4], scales[3], scales[4]) = (0.0, 0.0, scale, 1.0);
            let weights = &mut [[[0; 2]; KV_SPLIT]; 1];
            let [(sum, _)] = Int8::weights(v, &mut scores, &[0.0], &scales, 0..32, weights);
            (scale, sum)
        }
    }

    #[test]
    fn what_is_no_number_stays_none() {
        for isa in Isa::available() {
            for at in [0, 5, 17, 47] {
                let mut row: Vec<f32> = (0..48).map(|i| i as f32 - 20.0).collect();
                assert_eq!(isa.run(Kept(&row)), (27.0 / 127.0, 2.0), "{}", isa.describe());
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    row[at] = bad;
                    let (scale, sum) = isa.run(Kept(&row));
                    assert!(scale.is_nan() && sum.is_nan(), "{bad} on {}: {scale}, {sum}", isa.describe());
                }
            }
        }
    }
}
