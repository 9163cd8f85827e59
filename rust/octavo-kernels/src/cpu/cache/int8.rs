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
        let mut largest = v.splat(0.0);
        for x in row.as_chunks::<16>().0 {
            largest = v.max(v.abs(v.load(x)), largest);
        }
        unit(v.max_lane(largest), 127.0)
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
                sums[m] = v.add(sums[m], weight);
                // What is not seen may have anything as a scale.
                let weight = v.select_less(zero, weight, v.mul(weight, scales), zero);
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
    fn begin_output<V: Vector>(v: V, _: V::F32, weights: Unit) -> V::I32 {
        v.splat_i32(weights.start)
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
