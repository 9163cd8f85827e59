//! The vector as plain arrays: every CPU runs it, and it says what the others must give.

use half::{bf16, f16};

use super::vector::Vector;

/// 16 lanes as arrays. Anyone may have one.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

/// `f` on each lane.
#[inline(always)]
fn each<A: Copy, const N: usize, B: Copy + Default>(a: [A; N], f: impl Fn(A) -> B) -> [B; N] {
    let mut out = [B::default(); N];
    for i in 0..N {
        out[i] = f(a[i]);
    }
    out
}

/// `f` on each pair of lanes.
#[inline(always)]
fn zip<A: Copy, const N: usize, B: Copy + Default>(a: [A; N], b: [A; N], f: impl Fn(A, A) -> B) -> [B; N] {
    let mut out = [B::default(); N];
    for i in 0..N {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// Folds the upper half onto the lower until one lane is left.
#[inline(always)]
fn fold<A: Copy>(mut lanes: [A; 16], f: impl Fn(A, A) -> A) -> A {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

/// `f` on each pair of bytes, read as one little-endian number.
#[inline(always)]
fn pairs(x: [u8; 64], f: impl Fn(u16) -> u16) -> [u8; 64] {
    let mut out = [0; 64];
    for i in (0..64).step_by(2) {
        let pair = f(u16::from_le_bytes([x[i], x[i + 1]]));
        out[i..i + 2].copy_from_slice(&pair.to_le_bytes());
    }
    out
}

impl Vector for Portable {
    type F32 = [f32; 16];
    type I32 = [i32; 16];
    type Bytes = [u8; 64];
    type Sums = [i32; 16];

    const NAME: &'static str = "portable";
    const ROWS: usize = 4;
    const BIAS_LEFT: i32 = 128;
    const MOST_SUM: i32 = i32::MAX;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 16] {
        [x; 16]
    }
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> [f32; 16] {
        *from
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; 16]) -> [f32; 16] {
        each(*from, f16::to_f32)
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; 16]) -> [f32; 16] {
        each(*from, |x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }
    #[inline(always)]
    fn store(self, x: [f32; 16], to: &mut [f32; 16]) {
        *to = x;
    }
    #[inline(always)]
    fn store_bf16(self, x: [f32; 16], to: &mut [bf16; 16]) {
        *to = each(x, bf16::from_f32);
    }

    #[inline(always)]
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        let mut out = c;
        for i in 0..16 {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
    #[inline(always)]
    fn max(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, x: [f32; 16]) -> [f32; 16] {
        each(x, f32::abs)
    }
    #[inline(always)]
    fn select_less(self, a: [f32; 16], b: [f32; 16], yes: [f32; 16], no: [f32; 16]) -> [f32; 16] {
        let mut out = no;
        for i in 0..16 {
            if a[i] < b[i] {
                out[i] = yes[i];
            }
        }
        out
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> [i32; 16] {
        [x; 16]
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; 16]) -> [i32; 16] {
        each(*from, i32::from)
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; 16]) -> [i32; 16] {
        each(*from, i32::from)
    }
    #[inline(always)]
    fn store_i8(self, x: [i32; 16], to: &mut [i8; 16]) -> i32 {
        *to = each(x, |x| x as i8);
        to.iter().map(|&x| i32::from(x)).sum()
    }
    #[inline(always)]
    fn add_i32(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        zip(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn shl_i32(self, x: [i32; 16], bits: u32) -> [i32; 16] {
        each(x, |x| x << bits)
    }
    #[inline(always)]
    fn round(self, x: [f32; 16]) -> [i32; 16] {
        each(x, |x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    fn to_f32(self, x: [i32; 16]) -> [f32; 16] {
        each(x, |x| x as f32)
    }
    #[inline(always)]
    fn power_of_two(self, n: [i32; 16]) -> [f32; 16] {
        each(n, |n| f32::from_bits((n.wrapping_add(127) << 23) as u32))
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; 64]) -> [u8; 64] {
        *from
    }
    #[inline(always)]
    fn splat_quad(self, quad: [i8; 4]) -> [u8; 64] {
        let mut out = [0; 64];
        for (i, out) in out.iter_mut().enumerate() {
            *out = quad[i % 4] as u8;
        }
        out
    }
    #[inline(always)]
    fn splat_byte(self, x: u8) -> [u8; 64] {
        [x; 64]
    }
    #[inline(always)]
    fn and(self, a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        let mut out = a;
        for i in 0..64 {
            out[i] &= b[i];
        }
        out
    }
    #[inline(always)]
    fn or(self, a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        let mut out = a;
        for i in 0..64 {
            out[i] |= b[i];
        }
        out
    }
    #[inline(always)]
    fn shl_pairs(self, x: [u8; 64], bits: u32) -> [u8; 64] {
        pairs(x, |pair| pair << bits)
    }
    #[inline(always)]
    fn shr_pairs(self, x: [u8; 64], bits: u32) -> [u8; 64] {
        pairs(x, |pair| pair >> bits)
    }
    #[inline(always)]
    fn sums(self, start: [i32; 16]) -> [i32; 16] {
        start
    }
    #[inline(always)]
    fn dot(self, acc: [i32; 16], codes: [u8; 64], activations: [u8; 64]) -> [i32; 16] {
        let mut out = acc;
        for (i, out) in out.iter_mut().enumerate() {
            for j in 4 * i..4 * i + 4 {
                *out += i32::from(codes[j]) * i32::from(activations[j] as i8);
            }
        }
        out
    }
    #[inline(always)]
    fn dot_biased(self, acc: [i32; 16], codes: [u8; 64], activations: [u8; 64]) -> [i32; 16] {
        self.dot(acc, codes, activations)
    }
    #[inline(always)]
    fn total(self, sums: [i32; 16]) -> [i32; 16] {
        sums
    }

    #[inline(always)]
    fn load_pairs(self, from: &[bf16; 32]) -> [u8; 64] {
        let mut out = [0; 64];
        for (out, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(from) {
            *out = x.to_le_bytes();
        }
        out
    }
    #[inline(always)]
    fn splat_pair(self, pair: [bf16; 2]) -> [u8; 64] {
        let mut all = [pair[0]; 32];
        all.as_chunks_mut::<2>().0.fill(pair);
        self.load_pairs(&all)
    }
    #[inline(always)]
    fn dot_pairs(self, acc: [f32; 16], a: [u8; 64], b: [u8; 64]) -> [f32; 16] {
        let float = |x: &[u8; 64], i: usize| bf16::from_le_bytes([x[2 * i], x[2 * i + 1]]).to_f32();
        let mut out = acc;
        for (i, out) in out.iter_mut().enumerate() {
            for j in [2 * i + 1, 2 * i] {
                *out = float(&a, j).mul_add(float(&b, j), *out);
            }
        }
        out
    }

    #[inline(always)]
    fn load_words(self, from: &[i8; 32]) -> [u8; 64] {
        let mut out = [0; 64];
        for (out, &x) in out.as_chunks_mut::<2>().0.iter_mut().zip(from) {
            *out = i16::from(x).to_le_bytes();
        }
        out
    }
    #[inline(always)]
    fn splat_words(self, pair: [i16; 2]) -> [u8; 64] {
        let mut out = [0; 64];
        for (out, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(pair.into_iter().cycle()) {
            *out = x.to_le_bytes();
        }
        out
    }
    #[inline(always)]
    fn store_i16(self, x: [i32; 16], to: &mut [i16; 16]) {
        *to = each(x, |x| x as i16);
    }
    #[inline(always)]
    fn dot_words(self, acc: [i32; 16], a: [u8; 64], b: [u8; 64]) -> [i32; 16] {
        let word = |x: &[u8; 64], i: usize| i32::from(i16::from_le_bytes([x[2 * i], x[2 * i + 1]]));
        let mut out = acc;
        for (i, out) in out.iter_mut().enumerate() {
            *out += word(&a, 2 * i) * word(&b, 2 * i) + word(&a, 2 * i + 1) * word(&b, 2 * i + 1);
        }
        out
    }

    #[inline(always)]
    fn sum(self, x: [f32; 16]) -> f32 {
        fold(x, |a, b| a + b)
    }
    #[inline(always)]
    fn max_lane(self, x: [f32; 16]) -> f32 {
        fold(x, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn sum_i32(self, x: [i32; 16]) -> i32 {
        fold(x, i32::wrapping_add)
    }
}
