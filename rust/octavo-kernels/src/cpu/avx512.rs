//! The vector as one 512-bit register (AVX-512 F, BW, DQ, VL and VNNI; BF16 where there is some).

use std::arch::x86_64::*;
use std::mem::transmute;

use half::{bf16, f16};

use super::avx2::sum_of_bytes;
use super::vector::{Kernel, Vector};

/// Proof that this CPU has AVX-512 with VNNI; and dot products of bfloat16 pairs if `BF16`.
#[derive(Clone, Copy, Debug)]
pub struct Avx512<const BF16: bool>(());

impl<const BF16: bool> Avx512<BF16> {
    /// The token, if this CPU has all that it stands for.
    pub fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!BF16 || is_x86_feature_detected!("avx512bf16"));
        all.then_some(Self(()))
    }
}

impl Avx512<false> {
    /// Runs `kernel` compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        /// # Safety
        /// The CPU has the features: whoever holds `v` has shown it.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        unsafe fn enter<K: Kernel>(v: Avx512<false>, kernel: K) -> K::Output {
            kernel.run(v)
        }
        // SAFETY: `detect` found every feature, or `self` would not exist.
        unsafe { enter(self, kernel) }
    }
}

impl Avx512<true> {
    /// Runs `kernel` compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        /// # Safety
        /// The CPU has the features: whoever holds `v` has shown it.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
        unsafe fn enter<K: Kernel>(v: Avx512<true>, kernel: K) -> K::Output {
            kernel.run(v)
        }
        // SAFETY: `detect` found every feature, or `self` would not exist.
        unsafe { enter(self, kernel) }
    }
}

/// An intrinsic, or several.
macro_rules! vector {
    ($($body:tt)*) => {
        // SAFETY: `self` is the proof that this CPU has the instructions; pointers come from references to arrays of exactly
        // the length that is read or written, by instructions that need no alignment.
        unsafe { $($body)* }
    };
}

impl<const BF16: bool> Vector for Avx512<BF16> {
    type F32 = __m512;
    type I32 = __m512i;
    type Bytes = __m512i;
    type Sums = __m512i;

    const NAME: &'static str = if BF16 { "avx512-bf16" } else { "avx512" };
    const ROWS: usize = 8;
    const BIAS_LEFT: i32 = 128;
    const MOST_SUM: i32 = i32::MAX;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        vector!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> __m512 {
        vector!(_mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; 16]) -> __m512 {
        vector!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; 16]) -> __m512 {
        vector!({
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        })
    }
    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32; 16]) {
        vector!(_mm512_storeu_ps(to.as_mut_ptr(), x))
    }
    #[inline(always)]
    fn store_bf16(self, x: __m512, to: &mut [bf16; 16]) {
        vector!({
            let rounded = if BF16 {
                transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))
            } else {
                let bits = _mm512_castps_si512(x);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
                // What is no number stays none: adding could carry it over into zero.
                let no_number = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
                let rounded = _mm512_mask_or_epi32(rounded, no_number, bits, _mm512_set1_epi32(0x40_0000));
                _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
            };
            _mm256_storeu_si256(to.as_mut_ptr().cast(), rounded);
        })
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        vector!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        vector!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        vector!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        vector!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        vector!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        vector!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        vector!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        vector!(_mm512_abs_ps(x))
    }
    #[inline(always)]
    fn select_less(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        vector!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes))
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> __m512i {
        vector!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; 16]) -> __m512i {
        vector!(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; 16]) -> __m512i {
        vector!(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn store_i8(self, x: __m512i, to: &mut [i8; 16]) -> i32 {
        vector!({
            let bytes = _mm512_cvtepi32_epi8(x);
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
            sum_of_bytes(bytes)
        })
    }
    #[inline(always)]
    fn add_i32(self, a: __m512i, b: __m512i) -> __m512i {
        vector!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn shl_i32(self, x: __m512i, bits: u32) -> __m512i {
        vector!(_mm512_sll_epi32(x, _mm_cvtsi32_si128(bits as i32)))
    }
    #[inline(always)]
    fn round(self, x: __m512) -> __m512i {
        vector!(_mm512_cvt_roundps_epi32::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }
    #[inline(always)]
    fn to_f32(self, x: __m512i) -> __m512 {
        vector!(_mm512_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn power_of_two(self, n: __m512i) -> __m512 {
        vector!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(n, _mm512_set1_epi32(127)))))
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; 64]) -> __m512i {
        vector!(_mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn splat_quad(self, quad: [i8; 4]) -> __m512i {
        vector!(_mm512_set1_epi32(i32::from_le_bytes(quad.map(|x| x as u8))))
    }
    #[inline(always)]
    fn splat_byte(self, x: u8) -> __m512i {
        vector!(_mm512_set1_epi8(x as i8))
    }
    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        vector!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        vector!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn shl_pairs(self, x: __m512i, bits: u32) -> __m512i {
        vector!(_mm512_sll_epi16(x, _mm_cvtsi32_si128(bits as i32)))
    }
    #[inline(always)]
    fn shr_pairs(self, x: __m512i, bits: u32) -> __m512i {
        vector!(_mm512_srl_epi16(x, _mm_cvtsi32_si128(bits as i32)))
    }
    #[inline(always)]
    fn sums(self, start: __m512i) -> __m512i {
        start
    }
    #[inline(always)]
    fn dot(self, acc: __m512i, codes: __m512i, activations: __m512i) -> __m512i {
        vector!(_mm512_dpbusd_epi32(acc, codes, activations))
    }
    #[inline(always)]
    fn dot_biased(self, acc: __m512i, codes: __m512i, activations: __m512i) -> __m512i {
        vector!(_mm512_dpbusd_epi32(acc, codes, activations))
    }
    #[inline(always)]
    fn total(self, sums: __m512i) -> __m512i {
        sums
    }

    #[inline(always)]
    fn load_pairs(self, from: &[bf16; 32]) -> __m512i {
        vector!(_mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn splat_pair(self, [low, high]: [bf16; 2]) -> __m512i {
        let bits = u32::from(high.to_bits()) << 16 | u32::from(low.to_bits());
        vector!(_mm512_set1_epi32(bits as i32))
    }
    #[inline(always)]
    fn dot_pairs(self, acc: __m512, a: __m512i, b: __m512i) -> __m512 {
        vector!({
            if BF16 {
                let (a, b) = (transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(b));
                return _mm512_dpbf16_ps(acc, a, b);
            }
            // The instruction's own order: the upper halves come first.
            let low = |x| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x));
            let high = |x| _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(!0xffff)));
            _mm512_fmadd_ps(low(a), low(b), _mm512_fmadd_ps(high(a), high(b), acc))
        })
    }

    #[inline(always)]
    fn load_words(self, from: &[i8; 32]) -> __m512i {
        vector!(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn splat_words(self, [low, high]: [i16; 2]) -> __m512i {
        vector!(_mm512_set1_epi32(i32::from(high) << 16 | i32::from(low as u16)))
    }
    #[inline(always)]
    fn store_i16(self, x: __m512i, to: &mut [i16; 16]) {
        vector!(_mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(x)))
    }
    #[inline(always)]
    fn dot_words(self, acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        vector!(_mm512_dpwssd_epi32(acc, a, b))
    }

    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        vector!({
            let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn max_lane(self, x: __m512) -> f32 {
        vector!({
            let x = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        })
    }
    #[inline(always)]
    fn sum_i32(self, x: __m512i) -> i32 {
        vector!(_mm512_reduce_add_epi32(x))
    }
}
