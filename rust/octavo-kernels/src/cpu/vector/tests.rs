//! Every instruction set gives the same bits as plain arrays, and `exp` is as near as it says.

use super::*;
use crate::cpu::isa::Isa;

/// Everything a vector can do to two rows of floats and some bytes, as bits.
struct Everything<'a> {
    a: &'a [f32; 16],
    b: &'a [f32; 16],
    bytes: &'a [u8; 64],
    pairs: &'a [bf16; 32],
}

impl Kernel for Everything<'_> {
    type Output = Vec<u32>;

    #[inline(always)]
    fn run<V: Vector>(self, v: V) -> Vec<u32> {
        let (a, b) = (v.load(self.a), v.load(self.b));
        let codes = v.load_bytes(self.bytes);
        let small = v.and(codes, v.splat_byte(63));
        let quad = v.splat_quad([-127, 127, 5, -1]);
        let halves = self.a.map(f16::from_f32);
        let brains = self.a.map(bf16::from_f32);
        let sixteen: &[u8; 16] = self.bytes[..16].try_into().unwrap();
        let rounded = v.round(a);
        let (pairs, pair) = (v.load_pairs(self.pairs), [brains[0], brains[1]]);
        let mut rounded_a = [bf16::ZERO; 16];
        v.store_bf16(a, &mut rounded_a);
        let none = v.sums(v.splat_i32(0));
        let unbias = v.sums(v.splat_i32(-V::BIAS_LEFT * 4)); // the quad sums to 4
        let biased = v.total(v.dot_biased(unbias, codes, quad));
        let words = v.load_words(&std::array::from_fn(|i| self.bytes[i] as i8));
        let mut stored = [0; 16];
        v.store_i16(v.load_i8(&sixteen.map(|x| x as i8)), &mut stored);
        let stored = v.splat_words([stored[3], stored[7] * 255]);
        let other = v.and(v.or(v.shl_pairs(codes, 3), v.shr_pairs(codes, 2)), v.splat_byte(63));
        let floats = [
            v.add(a, b),
            v.sub(a, b),
            v.mul(a, b),
            v.div(a, b),
            v.fma(a, b, a),
            v.max(a, b),
            v.min(a, b),
            v.abs(a),
            v.select_less(a, b, v.splat(1.0), v.splat(-0.0)),
            v.load_f16(&halves),
            v.load_bf16(&brains),
            v.load_bf16(&rounded_a),
            v.dot_pairs(b, pairs, pairs),
            v.dot_pairs(b, pairs, v.splat_pair(pair)),
            v.exp2_of_negative(v.min(a, v.splat(0.0))),
            v.load_partial(&self.a[..5], 7.0),
            v.load_partial(self.a, 7.0),
            v.to_f32(rounded),
            v.power_of_two(rounded),
            v.to_f32(v.shl_i32(rounded, 5)),
            v.to_f32(v.load_u8(sixteen)),
            v.to_f32(v.load_i8(&sixteen.map(|x| x as i8))),
            v.to_f32(v.total(v.dot(none, small, quad))),
            v.to_f32(v.total(v.dot(v.dot(none, small, quad), other, quad))),
            v.to_f32(biased),
            v.to_f32(v.dot_words(v.dot_words(v.splat_i32(7), words, stored), words, words)),
            v.exp(a),
            v.sigmoid(a),
            v.tanh(b),
            v.splat(v.sum(a)),
            v.splat(v.max_lane(a)),
            v.splat(v.sum_i32(rounded) as f32),
        ];
        let mut bits = Vec::new();
        for x in floats {
            let mut lanes = [0.0; 16];
            v.store(x, &mut lanes);
            let (mut part, mut all) = ([0.0; 3], [0.0; 16]);
            v.store_partial(x, &mut part);
            v.store_partial(x, &mut all);
            bits.extend(lanes.iter().chain(&part).chain(&all).map(|x| x.to_bits()));
        }
        let mut bytes = [0; 16];
        v.store_i8(rounded, &mut bytes);
        bits.extend(bytes.map(|x| x as u32));
        bits
    }
}

/// Integers from a seed, the same everywhere.
fn noise(seed: u32) -> impl FnMut() -> u32 {
    let mut state = u64::from(seed) + 1;
    move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u32
    }
}

#[test]
fn every_instruction_set_gives_the_bits_of_the_portable_one() {
    for seed in 0..200 {
        let mut next = noise(seed);
        let a: [f32; 16] = std::array::from_fn(|_| (next() as f32 / 2f32.powi(31) - 0.5) * 250.0);
        let b: [f32; 16] = std::array::from_fn(|_| (next() as f32 / 2f32.powi(31) - 0.5) * 10.0);
        let bytes: [u8; 64] = std::array::from_fn(|_| next() as u8);
        let pairs = std::array::from_fn(|_| bf16::from_f32(next() as f32 / 2f32.powi(31) - 0.5));
        let want = Isa::named("portable").unwrap().run(Everything { a: &a, b: &b, bytes: &bytes, pairs: &pairs });
        for isa in Isa::available() {
            let got = isa.run(Everything { a: &a, b: &b, bytes: &bytes, pairs: &pairs });
            assert_eq!(got, want, "{} differs, seed {seed}", isa.describe());
        }
    }
}

#[test]
fn a_biased_product_is_the_signed_product_at_both_extremes() {
    struct Extremes;
    impl Kernel for Extremes {
        type Output = [f32; 2];
        #[inline(always)]
        fn run<V: Vector>(self, v: V) -> [f32; 2] {
            [0u8, 255].map(|code| {
                let unbias = v.sums(v.splat_i32(-V::BIAS_LEFT * 508));
                let dot = v.total(v.dot_biased(unbias, v.splat_byte(code), v.splat_quad([127; 4])));
                v.max_lane(v.to_f32(dot))
            })
        }
    }
    for isa in Isa::available() {
        assert_eq!(isa.run(Extremes), [-128.0 * 508.0, 127.0 * 508.0], "{}", isa.describe());
    }
}

#[test]
fn sums_hold_as_many_products_as_they_say() {
    struct Fullest {
        bits: u32,
        activation: i8,
    }
    impl Kernel for Fullest {
        type Output = (f32, usize);
        #[inline(always)]
        fn run<V: Vector>(self, v: V) -> (f32, usize) {
            let code = (1u8 << self.bits) - 1;
            let run = V::most_groups(code.into()).min(8);
            let dot = |sums, _| v.dot(sums, v.splat_byte(code), v.splat_quad([self.activation; 4]));
            (-v.max_lane(v.to_f32(v.total((0..run).fold(v.sums(v.splat_i32(0)), dot)))), run)
        }
    }
    for isa in Isa::available() {
        for (bits, activation) in [2, 3, 4, 5, 6].into_iter().flat_map(|bits| [(bits, 127), (bits, -127)]) {
            let (got, run) = isa.run(Fullest { bits, activation });
            let want = -(run as f32) * 4.0 * ((1 << bits) - 1) as f32 * f32::from(activation);
            assert!(run >= 2 && got == want, "{}: {run} of {bits} bits: {got}, not {want}", isa.describe());
        }
    }
}

/// One function on 16 values.
enum Function {
    Exp,
    Tanh,
    Sigmoid,
}

struct Apply<'a>(&'a Function, &'a [f32; 16]);

impl Kernel for Apply<'_> {
    type Output = [f32; 16];
    #[inline(always)]
    fn run<V: Vector>(self, v: V) -> [f32; 16] {
        let x = v.load(self.1);
        let y = match self.0 {
            Function::Exp => v.exp(x),
            Function::Tanh => v.tanh(x),
            Function::Sigmoid => v.sigmoid(x),
        };
        let mut out = [0.0; 16];
        v.store(y, &mut out);
        out
    }
}

#[test]
fn exp_tanh_and_sigmoid_are_near() {
    let isa = Isa::best();
    for i in 0..20_000 {
        let x: [f32; 16] = std::array::from_fn(|lane| -86.5 + (i * 16 + lane) as f32 * (175.2 / 320_000.0));
        let exp = isa.run(Apply(&Function::Exp, &x));
        let tanh = isa.run(Apply(&Function::Tanh, &x));
        let sigmoid = isa.run(Apply(&Function::Sigmoid, &x));
        for lane in 0..16 {
            let exact = f64::from(x[lane]);
            let relative = (f64::from(exp[lane]) / exact.exp() - 1.0).abs();
            assert!(relative < 2.4e-7, "exp({exact}) is off by {relative:e}");
            assert!((f64::from(tanh[lane]) - exact.tanh()).abs() < 3e-7, "tanh({exact})");
            assert!((f64::from(sigmoid[lane]) - 1.0 / (1.0 + (-exact).exp())).abs() < 3e-7, "sigmoid({exact})");
        }
    }
}

#[test]
fn powers_of_two_are_near_and_end_in_zero() {
    struct Powers<'a>(&'a [f32; 16]);
    impl Kernel for Powers<'_> {
        type Output = [f32; 16];
        #[inline(always)]
        fn run<V: Vector>(self, v: V) -> [f32; 16] {
            let mut out = [0.0; 16];
            v.store(v.exp2_of_negative(v.load(self.0)), &mut out);
            out
        }
    }
    let isa = Isa::best();
    for i in 0..20_000 {
        let x: [f32; 16] = std::array::from_fn(|lane| -126.4 + (i * 16 + lane) as f32 * (126.4 / 320_000.0));
        for (x, y) in x.into_iter().zip(isa.run(Powers(&x))) {
            let relative = (f64::from(y) / f64::from(x).exp2() - 1.0).abs();
            assert!(relative < 3.1e-6, "2^{x} is off by {relative:e}");
        }
    }
    for isa in Isa::available() {
        let mut ends = [0.0; 16];
        ends[..6].copy_from_slice(&[f32::NEG_INFINITY, -1e30, -126.6, -0.0, f32::NAN, -1.0]);
        let got = isa.run(Powers(&ends));
        assert_eq!(got[..4], [0.0, 0.0, 0.0, 1.0], "{}", isa.describe());
        assert!(got[4].is_nan() && got[5] == 0.5);
    }
}

/// Rounding to bfloat16: ties go to even, what is no number stays none, and overflow is infinite.
#[test]
fn bfloat16_is_rounded_as_everywhere() {
    struct Round<'a>(&'a [f32; 16]);
    impl Kernel for Round<'_> {
        type Output = [bf16; 16];
        #[inline(always)]
        fn run<V: Vector>(self, v: V) -> [bf16; 16] {
            let mut out = [bf16::ZERO; 16];
            v.store_bf16(v.load(self.0), &mut out);
            out
        }
    }
    let bits = [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0xbf80_7fff, 0x7f7f_ffff, 0xff80_0000, 0x8000_0000, 0x0080_0000];
    let not_numbers = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0x7fc0_0000];
    let mut x = [1.0; 16];
    for (x, bits) in x.iter_mut().zip(bits.into_iter().chain(not_numbers)) {
        *x = f32::from_bits(bits);
    }
    for isa in Isa::available() {
        let got = isa.run(Round(&x));
        for i in 0..8 {
            assert_eq!(got[i].to_bits(), bf16::from_f32(x[i]).to_bits(), "{:x} on {}", bits[i], isa.describe());
        }
        assert!(got[8..12].iter().all(|x| x.is_nan()), "{got:?} on {}", isa.describe());
    }
}

#[test]
fn exp_at_the_ends() {
    let nan = f32::NAN;
    let x = [
        f32::NEG_INFINITY,
        -1e30,
        -104.0,
        -87.0,
        0.0,
        -0.0,
        88.7,
        88.8,
        1e30,
        f32::INFINITY,
        nan,
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ];
    for isa in Isa::available() {
        let y = isa.run(Apply(&Function::Exp, &x));
        assert_eq!(y[..6], [0.0, 0.0, 0.0, 0.0, 1.0, 1.0], "{}", isa.describe());
        assert!(y[6].is_finite() && y[6] > 3.3e38);
        assert_eq!(y[7..10], [f32::INFINITY; 3]);
        assert!(y[10].is_nan());
    }
}
