//! What a cache is made of, and how it is multiplied.

use std::ops::Range;

use super::Half;
use crate::KV_SPLIT;
use crate::cpu::{memory::Plain, vector::Vector};

/// An element of the cache. Elements are multiplied sixteen lanes at a time, a lane being a few that are multiplied with as many
/// numbers and added up.
pub(in crate::cpu) trait Element: Plain {
    /// 0.
    const ZERO: Self;
    /// Components of a key in a lane: 1, 2 or 4.
    const KEY_LANE: usize;
    /// Positions of values in a lane: 1 or 2.
    const VALUE_LANE: usize;
    /// Elements that the scale of a key or value takes, if it has one.
    const SCALE: usize = 0;
    /// Whether heads are mixed before they are stored.
    const MIXED: bool = false;
    /// What a lane of keys is multiplied with: components of a query. 32 bits.
    type Query: Plain;
    /// What a lane of values is multiplied with: the weights of their positions. 32 bits.
    type Weight: Plain;
    /// Sixteen lanes in registers.
    type Lanes<V: Vector>: Copy;
    /// Scores of sixteen positions under way.
    type Score<V: Vector>: Copy;
    /// Sixteen components of an output under way.
    type Output<V: Vector>: Copy;

    /// How a row becomes elements.
    fn scale<V: Vector>(v: V, row: &[f32]) -> Scale;

    /// Stores sixteen components of a row, a key or value.
    fn store<V: Vector>(v: V, x: V::F32, scale: Scale, half: Half, to: &mut [Self; 16]);

    /// Loads the sixteen lanes of keys that begin with element `at`.
    ///
    /// # Safety
    /// There are `16 · KEY_LANE` elements from there on.
    unsafe fn load_keys<V: Vector>(v: V, from: &[Self], at: usize) -> Self::Lanes<V>;

    /// Loads the sixteen lanes of values that begin with element `at`.
    ///
    /// # Safety
    /// There are `16 · VALUE_LANE` elements from there on.
    unsafe fn load_values<V: Vector>(v: V, from: &[Self], at: usize) -> Self::Lanes<V>;

    /// Writes `query · by` to where it is read, up to fifteen components more than it has.
    fn stage<V: Vector>(v: V, query: &[f32], by: f32, to: &mut [Self::Query]) -> Unit;

    /// Scores of a query before the first product.
    fn begin_score<V: Vector>(v: V, query: Unit) -> Self::Score<V>;

    /// Adds the products of some components of the query with lanes of keys.
    fn add_to_score<V: Vector>(v: V, score: Self::Score<V>, query: Self::Query, keys: Self::Lanes<V>)
    -> Self::Score<V>;

    /// Scores after the last product, with keys of these scales.
    fn end_score<V: Vector>(v: V, score: Self::Score<V>, query: Unit, scales: V::F32) -> V::F32;

    /// What scores are multiplied with beforehand, so that [`Element::powers`] is quick.
    const SCORE_UNIT: f32;

    /// `exp(x / SCORE_UNIT)` of what is no larger than 0, as near as a weight needs it.
    fn powers<V: Vector>(v: V, x: V::F32) -> V::F32;

    /// Positions whose weights are summed together.
    const POSITIONS: usize;

    /// Turns the scores of the positions `all`, a multiple of [`Element::POSITIONS`], into weights relative to `shifts`, for
    /// values of these `scales`. Gives the weights' sums. Queries go side by side: one alone would wait for itself.
    fn weights<V: Vector, const M: usize>(
        v: V,
        scores: &mut [[f32; KV_SPLIT]; M],
        shifts: &[f32; M],
        scales: &[f32; KV_SPLIT],
        all: Range<usize>,
        weights: &mut [[Self::Weight; KV_SPLIT]; M],
    ) -> [(f32, Unit); M];

    /// Whether a weight of 0 adds nothing, whatever its value is.
    const ZERO_IS_NOTHING: bool = false;

    /// `lanes` with 0 for those elements of each that are not in `kept`, whatever they held.
    fn keep<V: Vector>(v: V, lanes: Self::Lanes<V>, kept: Range<usize>) -> Self::Lanes<V>;

    /// An output to which products are to be added.
    fn begin_output<V: Vector>(v: V, is: V::F32) -> Self::Output<V>;

    /// Adds the products of weights with lanes of values.
    fn add_to_output<V: Vector>(
        v: V,
        output: Self::Output<V>,
        weights: Self::Weight,
        values: Self::Lanes<V>,
    ) -> Self::Output<V>;

    /// The output after the last product.
    fn end_output<V: Vector>(v: V, output: Self::Output<V>, weights: Unit) -> V::F32;
}

/// How a row becomes elements.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cpu) struct Scale {
    /// What elements are multiplied with to be what they were.
    pub scale: f32,
    /// What components are multiplied with to become elements.
    pub inverse: f32,
}

/// What a query, or weights, are in units of, where they are integers.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cpu) struct Unit {
    pub scale: f32,
    /// Where sums of a query's products begin, so that what keys are biased by is taken off.
    pub start: i32,
}
