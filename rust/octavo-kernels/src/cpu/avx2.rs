//! The vector as two 256-bit registers (AVX2, FMA and F16C; AVX-VNNI where there is some).

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::vector::{Kernel, Vector};

/// Proof that this CPU has AVX2, FMA and F16C; and AVX-VNNI if `VNNI`.
#[derive(Clone, Copy, Debug)]
pub struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    /// The token, if this CPU has all that it stands for.
    pub fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        all.then_some(Self(()))
    }
}

impl Avx2<false> {
    /// Runs `kernel` compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        /// # Safety
        /// The CPU has the features: whoever holds `v` has shown it.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn enter<K: Kernel>(v: Avx2<false>, kernel: K) -> K::Output {
            kernel.run(v)
        }
        // SAFETY: `detect` found every feature, or `self` would not exist.
        unsafe { enter(self, kernel) }
    }
}

impl Avx2<true> {
    /// Runs `kernel` compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        /// # Safety
        /// The CPU has the features: whoever holds `v` has shown it.
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        unsafe fn enter<K: Kernel>(v: Avx2<true>, kernel: K) -> K::Output {
            kernel.run(v)
        }
        // SAFETY: `detect` found every feature, or `self` would not exist.
        unsafe { enter(self, kernel) }
    }
}

/// Sums of products of bytes. With VNNI there are no halves.
#[derive(Clone, Copy)]
pub struct Sums {
    whole: [__m256i; 2],
    /// In 16 bits.
    halves: [__m256i; 2],
}

/// The sum of 16 signed bytes.
#[inline(always)]
pub(super) fn sum_of_bytes(bytes: __m128i) -> i32 {
    // There is a sum of unsigned bytes, eight at a time.
    // SAFETY: every x86-64 has these.
    let of_unsigned = unsafe {
        let sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
        _mm_cvtsi128_si32(_mm_add_epi64(sums, _mm_unpackhi_epi64(sums, sums)))
    };
    of_unsigned - 16 * 128
}

/// An intrinsic, or several.
macro_rules! vector {
    ($($body:tt)*) => {
        // SAFETY: `self` is the proof that this CPU has the instructions; pointers come from references to arrays of exactly
        // the length that is read or written, by instructions that need no alignment.
        unsafe { $($body)* }
    };
}

/// An intrinsic on both registers of its operands.
macro_rules! both {
    ($f:path, $a:expr) => {
        vector!([$f($a[0]), $f($a[1])])
    };
    ($f:path, $a:expr, $b:expr) => {
        vector!([$f($a[0], $b[0]), $f($a[1], $b[1])])
    };
    ($f:path, $a:expr, $b:expr, $c:expr) => {
        vector!([$f($a[0], $b[0], $c[0]), $f($a[1], $b[1], $c[1])])
    };
}

impl<const VNNI: bool> Vector for Avx2<VNNI> {
    type F32 = [__m256; 2];
    type I32 = [__m256i; 2];
    type Bytes = [__m256i; 2];
    type Sums = Sums;

    const NAME: &'static str = if VNNI { "avx2-vnni" } else { "avx2" };
    const ROWS: usize = 4;
    const BIAS_LEFT: i32 = if VNNI { 128 } else { 0 };
    const MOST_SUM: i32 = if VNNI { i32::MAX } else { i16::MAX as i32 };

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        vector!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> [__m256; 2] {
        vector!([_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))])
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; 16]) -> [__m256; 2] {
        let p = from.as_ptr().cast::<__m128i>();
        vector!([_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p.add(1)))])
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; 16]) -> [__m256; 2] {
        let p = from.as_ptr().cast::<__m128i>();
        vector!({
            let low = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)));
            let high = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(1))));
            [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)]
        })
    }
    #[inline(always)]
    fn store(self, x: [__m256; 2], to: &mut [f32; 16]) {
        vector!({
            _mm256_storeu_ps(to.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), x[1]);
        })
    }
    #[inline(always)]
    fn store_bf16(self, x: [__m256; 2], to: &mut [bf16; 16]) {
        vector!({
            let round = |x: __m256| {
                let bits = _mm256_castps_si256(x);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
                // What is no number stays none: adding could carry it over into zero.
                let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
                let is_number = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(x, x));
                _mm256_srli_epi32::<16>(_mm256_blendv_epi8(quiet, rounded, is_number))
            };
            // Packing works within 128-bit halves: put the 64-bit pieces back in order.
            let packed = _mm256_packus_epi32(round(x[0]), round(x[1]));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        })
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn abs(self, x: [__m256; 2]) -> [__m256; 2] {
        let sign = vector!([_mm256_set1_ps(-0.0); 2]);
        both!(_mm256_andnot_ps, sign, x)
    }
    #[inline(always)]
    fn select_less(self, a: [__m256; 2], b: [__m256; 2], yes: [__m256; 2], no: [__m256; 2]) -> [__m256; 2] {
        let less = both!(_mm256_cmp_ps::<_CMP_LT_OQ>, a, b);
        both!(_mm256_blendv_ps, no, yes, less)
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> [__m256i; 2] {
        vector!([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; 16]) -> [__m256i; 2] {
        vector!({
            let x = _mm_loadu_si128(from.as_ptr().cast());
            [_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x))]
        })
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; 16]) -> [__m256i; 2] {
        vector!({
            let x = _mm_loadu_si128(from.as_ptr().cast());
            [_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x))]
        })
    }
    #[inline(always)]
    fn store_i8(self, x: [__m256i; 2], to: &mut [i8; 16]) -> i32 {
        vector!({
            // Packing works within 128-bit halves: put the 64-bit pieces back in order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(x[0], x[1]));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
            sum_of_bytes(bytes)
        })
    }
    #[inline(always)]
    fn add_i32(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_add_epi32, a, b)
    }
    #[inline(always)]
    fn shl_i32(self, x: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        let count = vector!([_mm_cvtsi32_si128(bits as i32); 2]);
        both!(_mm256_sll_epi32, x, count)
    }
    #[inline(always)]
    fn round(self, x: [__m256; 2]) -> [__m256i; 2] {
        // The rounding mode of a thread is to nearest, ties to even, unless someone changed it, which Rust forbids.
        both!(_mm256_cvtps_epi32, x)
    }
    #[inline(always)]
    fn to_f32(self, x: [__m256i; 2]) -> [__m256; 2] {
        both!(_mm256_cvtepi32_ps, x)
    }
    #[inline(always)]
    fn power_of_two(self, n: [__m256i; 2]) -> [__m256; 2] {
        let biased = self.shl_i32(self.add_i32(n, self.splat_i32(127)), 23);
        both!(_mm256_castsi256_ps, biased)
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; 64]) -> [__m256i; 2] {
        let p = from.as_ptr().cast::<__m256i>();
        vector!([_mm256_loadu_si256(p), _mm256_loadu_si256(p.add(1))])
    }
    #[inline(always)]
    fn splat_quad(self, quad: [i8; 4]) -> [__m256i; 2] {
        vector!([_mm256_set1_epi32(i32::from_le_bytes(quad.map(|x| x as u8))); 2])
    }
    #[inline(always)]
    fn splat_byte(self, x: u8) -> [__m256i; 2] {
        vector!([_mm256_set1_epi8(x as i8); 2])
    }
    #[inline(always)]
    fn and(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_and_si256, a, b)
    }
    #[inline(always)]
    fn or(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_or_si256, a, b)
    }
    #[inline(always)]
    fn shl_pairs(self, x: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        let count = vector!([_mm_cvtsi32_si128(bits as i32); 2]);
        both!(_mm256_sll_epi16, x, count)
    }
    #[inline(always)]
    fn shr_pairs(self, x: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        let count = vector!([_mm_cvtsi32_si128(bits as i32); 2]);
        both!(_mm256_srl_epi16, x, count)
    }
    #[inline(always)]
    fn sums(self, start: [__m256i; 2]) -> Sums {
        Sums { whole: start, halves: self.splat_i32(0) }
    }
    #[inline(always)]
    fn dot(self, acc: Sums, codes: [__m256i; 2], activations: [__m256i; 2]) -> Sums {
        if VNNI {
            return Sums { whole: both!(_mm256_dpbusd_avx_epi32, acc.whole, codes, activations), ..acc };
        }
        let pairs = both!(_mm256_maddubs_epi16, codes, activations);
        Sums { halves: both!(_mm256_add_epi16, acc.halves, pairs), ..acc }
    }
    #[inline(always)]
    fn dot_biased(self, acc: Sums, codes: [__m256i; 2], activations: [__m256i; 2]) -> Sums {
        if VNNI {
            return self.dot(acc, codes, activations);
        }
        // Take the bias off and move the sign to the activations: two products are then at most 2 · 128 · 127, which fits.
        let bias = self.splat_byte(128);
        let signed = both!(_mm256_xor_si256, codes, bias);
        self.dot(acc, both!(_mm256_abs_epi8, signed), both!(_mm256_sign_epi8, activations, signed))
    }
    #[inline(always)]
    fn total(self, sums: Sums) -> [__m256i; 2] {
        if VNNI {
            return sums.whole;
        }
        let ones = vector!([_mm256_set1_epi16(1); 2]);
        self.add_i32(sums.whole, both!(_mm256_madd_epi16, sums.halves, ones))
    }

    #[inline(always)]
    fn load_pairs(self, from: &[bf16; 32]) -> [__m256i; 2] {
        let p = from.as_ptr().cast::<__m256i>();
        vector!([_mm256_loadu_si256(p), _mm256_loadu_si256(p.add(1))])
    }
    #[inline(always)]
    fn splat_pair(self, [low, high]: [bf16; 2]) -> [__m256i; 2] {
        let bits = u32::from(high.to_bits()) << 16 | u32::from(low.to_bits());
        vector!([_mm256_set1_epi32(bits as i32); 2])
    }
    #[inline(always)]
    fn dot_pairs(self, acc: [__m256; 2], a: [__m256i; 2], b: [__m256i; 2]) -> [__m256; 2] {
        let low = |x| vector!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)));
        let high = |x| vector!(_mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(!0xffff))));
        let acc = self.fma([high(a[0]), high(a[1])], [high(b[0]), high(b[1])], acc);
        self.fma([low(a[0]), low(a[1])], [low(b[0]), low(b[1])], acc)
    }

    #[inline(always)]
    fn load_words(self, from: &[i8; 32]) -> [__m256i; 2] {
        let p = from.as_ptr().cast::<__m128i>();
        vector!([_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), _mm256_cvtepi8_epi16(_mm_loadu_si128(p.add(1)))])
    }
    #[inline(always)]
    fn splat_words(self, [low, high]: [i16; 2]) -> [__m256i; 2] {
        vector!([_mm256_set1_epi32(i32::from(high) << 16 | i32::from(low as u16)); 2])
    }
    #[inline(always)]
    fn store_i16(self, x: [__m256i; 2], to: &mut [i16; 16]) {
        vector!({
            // Packing works within 128-bit halves: put the 64-bit pieces back in order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(x[0], x[1]));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), words);
        })
    }
    #[inline(always)]
    fn dot_words(self, acc: [__m256i; 2], a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        if VNNI {
            return both!(_mm256_dpwssd_avx_epi32, acc, a, b);
        }
        self.add_i32(acc, both!(_mm256_madd_epi16, a, b))
    }

    #[inline(always)]
    fn sum(self, x: [__m256; 2]) -> f32 {
        vector!({
            let x = _mm256_add_ps(x[0], x[1]);
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn max_lane(self, x: [__m256; 2]) -> f32 {
        vector!({
            let x = _mm256_max_ps(x[0], x[1]);
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn sum_i32(self, x: [__m256i; 2]) -> i32 {
        vector!({
            let x = _mm256_add_epi32(x[0], x[1]);
            let x = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_add_epi32(x, _mm_unpackhi_epi64(x, x));
            _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32::<1>(x)))
        })
    }
}
