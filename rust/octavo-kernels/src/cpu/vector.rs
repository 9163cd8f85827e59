//! Sixteen lanes on every instruction set.
//!
//! A kernel is written once, generic over [`Vector`], and entered through [`Isa::run`](super::isa::Isa::run), which
//! compiles it for each instruction set. All operations give the same bits on all of them: lanes are always 16, products
//! are fused where they say so, and the sums across lanes have one order.
//!
//! A `Vector` is a token without size. Holding one means that this CPU has its instructions (only
//! [`Isa`](super::isa::Isa) makes them), and that is what makes its methods safe.

use half::{bf16, f16};

/// A function that [`Isa::run`](super::isa::Isa::run) compiles for every instruction set.
///
/// Its arguments are the fields. `run`, and every function it calls in a hot loop, must be `#[inline(always)]`, and must
/// be a function rather than a closure: only then does it become part of the function that has the instructions.
pub trait Kernel {
    /// What it returns.
    type Output;
    /// The kernel's body.
    fn run<V: Vector>(self, v: V) -> Self::Output;
}

/// Operations on 16 lanes.
pub trait Vector: Copy + Send + Sync + 'static {
    /// 16 × f32.
    type F32: Copy;
    /// 16 × i32.
    type I32: Copy;
    /// 64 bytes: for each of the 16 lanes, 4 bytes.
    type Bytes: Copy;
    /// Sums of products of bytes: for each of the 16 lanes one, or one and two halves beside it.
    type Sums: Copy;

    /// The name that `OCTAVO_CPU_ISA` knows it by.
    const NAME: &'static str;
    /// How many activation rows a product keeps in registers: 1, 2, 4 or 8.
    const ROWS: usize;
    /// What [`Vector::dot_biased`] leaves in the sum for each unit of activation: 128, or 0 where the instruction takes the
    /// bias off by itself.
    const BIAS_LEFT: i32;
    /// How large [`Vector::Sums`] may become. In 16 bits they cost half, but hold the products of a few groups only.
    const MOST_SUM: i32;

    // Loads, stores and constants.

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F32;
    /// Loads 16 values.
    fn load(self, from: &[f32; 16]) -> Self::F32;
    /// Widens 16 half-precision values.
    fn load_f16(self, from: &[f16; 16]) -> Self::F32;
    /// Widens 16 bfloat16 values.
    fn load_bf16(self, from: &[bf16; 16]) -> Self::F32;
    /// Stores 16 values.
    fn store(self, x: Self::F32, to: &mut [f32; 16]);
    /// Stores 16 values as bfloat16, rounded to the nearest, ties to even.
    fn store_bf16(self, x: Self::F32, to: &mut [bf16; 16]);

    // Arithmetic on f32.

    /// `a + b`.
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a - b`.
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a · b`.
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a / b`.
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a · b + c`, rounded once.
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `a > b ? a : b`, so `b` where either is not a number.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a < b ? a : b`, so `b` where either is not a number.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `|x|`.
    fn abs(self, x: Self::F32) -> Self::F32;
    /// `a < b ? yes : no`.
    fn select_less(self, a: Self::F32, b: Self::F32, yes: Self::F32, no: Self::F32) -> Self::F32;

    // Integers.

    /// All lanes `x`.
    fn splat_i32(self, x: i32) -> Self::I32;
    /// Widens 16 bytes.
    fn load_u8(self, from: &[u8; 16]) -> Self::I32;
    /// Widens 16 signed bytes.
    fn load_i8(self, from: &[i8; 16]) -> Self::I32;
    /// Stores 16 values that fit a signed byte; gives their sum.
    fn store_i8(self, x: Self::I32, to: &mut [i8; 16]) -> i32;
    /// `a + b`.
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `x << bits`.
    fn shl_i32(self, x: Self::I32, bits: u32) -> Self::I32;
    /// The nearest integer, ties to even. Meaningless outside of i32.
    fn round(self, x: Self::F32) -> Self::I32;
    /// As f32.
    fn to_f32(self, x: Self::I32) -> Self::F32;
    /// `2ⁿ`, for n in -126..=127; 0 for -127.
    fn power_of_two(self, n: Self::I32) -> Self::F32;

    // Bytes.

    /// Loads 64 bytes.
    fn load_bytes(self, from: &[u8; 64]) -> Self::Bytes;
    /// The same 4 bytes for every lane.
    fn splat_quad(self, quad: [i8; 4]) -> Self::Bytes;
    /// Every byte of the 64 `x`.
    fn splat_byte(self, x: u8) -> Self::Bytes;
    /// `a & b`.
    fn and(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a | b`.
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Shifts pairs of bytes to the left; mask off what crosses over.
    fn shl_pairs(self, x: Self::Bytes, bits: u32) -> Self::Bytes;
    /// Shifts pairs of bytes to the right; mask off what crosses over.
    fn shr_pairs(self, x: Self::Bytes, bits: u32) -> Self::Bytes;
    /// What products are added to.
    fn sums(self, start: Self::I32) -> Self::Sums;
    /// `acc + Σ₄ codes · activations`, for codes up to 63 and activations in ±127, at most [`Vector::most_groups`] times.
    fn dot(self, acc: Self::Sums, codes: Self::Bytes, activations: Self::Bytes) -> Self::Sums;
    /// The same for codes that are a signed value + 128; see [`Vector::BIAS_LEFT`].
    fn dot_biased(self, acc: Self::Sums, codes: Self::Bytes, activations: Self::Bytes) -> Self::Sums;
    /// Each lane's sum.
    fn total(self, sums: Self::Sums) -> Self::I32;

    // Pairs of bfloat16.

    /// Loads 16 pairs.
    fn load_pairs(self, from: &[bf16; 32]) -> Self::Bytes;
    /// The same pair for every lane.
    fn splat_pair(self, pair: [bf16; 2]) -> Self::Bytes;
    /// `acc + a₁ · b₁`, rounded, then `+ a₀ · b₀`, rounded. Some CPUs take numbers below 2⁻¹²⁶ for 0.
    fn dot_pairs(self, acc: Self::F32, a: Self::Bytes, b: Self::Bytes) -> Self::F32;

    // Pairs of 16 bits.

    /// Widens 32 signed bytes to 16 pairs.
    fn load_words(self, from: &[i8; 32]) -> Self::Bytes;
    /// The same pair for every lane.
    fn splat_words(self, pair: [i16; 2]) -> Self::Bytes;
    /// Stores 16 values that fit 16 bits.
    fn store_i16(self, x: Self::I32, to: &mut [i16; 16]);
    /// `acc + a₀ · b₀ + a₁ · b₁`.
    fn dot_words(self, acc: Self::I32, a: Self::Bytes, b: Self::Bytes) -> Self::I32;

    // Across lanes: one order of additions, lanes i and i+8 first, then i and i+4, i+2, i+1.

    /// The sum of all lanes.
    fn sum(self, x: Self::F32) -> f32;
    /// The largest lane.
    fn max_lane(self, x: Self::F32) -> f32;
    /// The sum of all lanes.
    fn sum_i32(self, x: Self::I32) -> i32;

    // Built on the above.

    /// How many groups of codes up to `most` a sum has room for: each adds two products to either half of it.
    #[inline(always)]
    fn most_groups(most: i32) -> usize {
        (Self::MOST_SUM / (2 * 127 * most)) as usize
    }

    /// Loads up to 16 values; the other lanes are `fill`.
    #[inline(always)]
    fn load_partial(self, from: &[f32], fill: f32) -> Self::F32 {
        if let Ok(all) = from.try_into() {
            return self.load(all);
        }
        let mut lanes = [fill; 16];
        lanes[..from.len()].copy_from_slice(from);
        self.load(&lanes)
    }

    /// Stores the first `to.len()` lanes.
    #[inline(always)]
    fn store_partial(self, x: Self::F32, to: &mut [f32]) {
        if let Ok(all) = to.try_into() {
            return self.store(x, all);
        }
        let mut lanes = [0.0; 16];
        self.store(x, &mut lanes);
        to.copy_from_slice(&lanes[..to.len()]);
    }

    /// `eˣ`, within 2 ulp; 0 below -86.6 and infinite above 88.7.
    #[inline(always)]
    fn exp(self, x: Self::F32) -> Self::F32 {
        // x = n ln 2 + r with |r| ≤ ln 2 / 2; ln 2 in two parts, so that n times the first is exact.
        const LOWEST: f32 = -86.6;
        const HIGHEST: f32 = 88.722_84;
        let clamped = self.min(self.splat(HIGHEST), self.max(self.splat(LOWEST), x));
        let n = self.round(self.mul(clamped, self.splat(std::f32::consts::LOG2_E)));
        let n_f32 = self.to_f32(n);
        let r = self.fma(n_f32, self.splat(-0.693_359_4), clamped);
        let r = self.fma(n_f32, self.splat(2.121_944_4e-4), r);
        // A minimax polynomial for (eʳ - 1 - r) / r².
        let mut p = self.splat(1.987_569_1e-4);
        for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = self.fma(p, r, self.splat(c));
        }
        let e = self.add(self.fma(p, self.mul(r, r), r), self.splat(1.0));
        // 2ⁿ in two steps, because n = 128 is needed and has no f32.
        let half = self.mul(e, self.power_of_two(self.add_i32(n, self.splat_i32(-1))));
        let y = self.add(half, half);
        let y = self.select_less(x, self.splat(LOWEST), self.splat(0.0), y);
        self.select_less(self.splat(HIGHEST), x, self.splat(f32::INFINITY), y)
    }

    /// `2ˣ` for x up to 0, within 3e-6 and exact at 0; 0 below -126.5. Half of the work of [`Vector::exp`].
    #[inline(always)]
    fn exp2_of_negative(self, x: Self::F32) -> Self::F32 {
        // x = n + r with |r| ≤ 1/2. A power of -127 is 0.
        let clamped = self.max(self.splat(-127.0), x);
        let n = self.round(clamped);
        let r = self.sub(clamped, self.to_f32(n));
        // A minimax polynomial for 2ʳ that is 1 at 0.
        let mut p = self.splat(9.582_853e-3);
        for c in [5.590_642_6e-2, 2.402_409_9e-1, 6.931_242e-1, 1.0] {
            p = self.fma(p, r, self.splat(c));
        }
        self.mul(p, self.power_of_two(n))
    }

    /// `1 / (1 + e⁻ˣ)`: absolute error about 1e-7. Where it would be below 2⁻¹²⁶ it is that.
    #[inline(always)]
    fn sigmoid(self, x: Self::F32) -> Self::F32 {
        // e⁻ˣ = 2ⁿ 2ʳ with |r| ≤ 1/2. Numbers that are none stay none.
        let t = self.mul(x, self.splat(-std::f32::consts::LOG2_E));
        let t = self.min(self.splat(126.0), self.max(self.splat(-126.0), t));
        let n = self.round(t);
        let r = self.sub(t, self.to_f32(n));
        // A minimax polynomial for 2ʳ.
        let mut p = self.splat(1.327_647_1e-3);
        for c in [9.675_541e-3, 5.550_713e-2, 2.402_212e-1, 6.931_469_4e-1, 1.0] {
            p = self.fma(p, r, self.splat(c));
        }
        let one = self.splat(1.0);
        self.div(one, self.fma(p, self.power_of_two(n), one))
    }

    /// `tanh x` as `1 - 2 / (e²ˣ + 1)`: exact at both ends, absolute error about 1e-7 between.
    #[inline(always)]
    fn tanh(self, x: Self::F32) -> Self::F32 {
        let one = self.splat(1.0);
        let e = self.exp(self.add(x, x));
        self.sub(one, self.div(self.splat(2.0), self.add(e, one)))
    }
}

#[cfg(test)]
mod tests;
