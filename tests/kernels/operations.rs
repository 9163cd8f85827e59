//! Embedding, norms, products, gates, gather, soft-cap.

use half::bf16;
use octavo_kernels::{
    Activation, Backend, DType, DrawnRow, RowDraw, Weight,
    cpu::CpuBackend,
    reference::{
        dequantise::dequantise,
        linear::{Int8Row, dot_int8},
    },
};

use crate::harness::*;

const ROWS: [usize; 6] = [1, 2, 15, 16, 17, 33];
const WIDTHS: [usize; 8] = [1, 8, 15, 16, 17, 31, 576, 1000];

/// An operation and the widths that matter to it.
#[derive(Clone, Debug)]
enum Op {
    Embed { dtype: DType, scale: f32 },
    RmsNorm,
    RmsNormColumns { first: usize, len: usize },
    ResidualNorm { post: bool, next: bool, scale: f32 },
    Linear { parts: Vec<(DType, usize)>, bias: bool },
    Gated(Activation),
    Gather,
    ScaleAndCap { scale: f32, cap: Option<f32> },
}

/// `op` on `(rows, width)`.
#[derive(Clone, Debug)]
struct Shaped {
    op: Op,
    rows: usize,
    width: usize,
}

impl Case for Shaped {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &mut B) -> Vec<f32> {
        let Self { ref op, rows, width } = *self;
        let random = &mut Random::new((rows * 10_007 + width) as u64);
        let x = random.normals(rows * width);
        let mut out = b.buffer(rows, width).unwrap();
        match *op {
            Op::Embed { dtype, scale } => {
                let vocabulary = 37;
                let bytes = weight_bytes(random, dtype, vocabulary, width);
                let table = b
                    .matrix(&[Weight { dtype, rows: vocabulary, cols: width, bytes: &bytes, run_as: dtype.native() }])
                    .unwrap();
                begin(b, &(0..rows).map(|_| random.below(vocabulary) as u32).collect::<Vec<_>>());
                b.embed(&mut out, &table, scale);
            }
            Op::RmsNorm => {
                let (x, weight) = (upload(b, &x, width), b.vector(&random.normals(width)).unwrap());
                b.rms_norm(&mut out, &x, &weight, 1e-5, rows);
            }
            Op::RmsNormColumns { first, len } => {
                out = upload(b, &x, width);
                let weight = b.vector(&random.normals(len)).unwrap();
                b.rms_norm_columns(&mut out, width, first, &weight, 1e-5, rows);
            }
            Op::ResidualNorm { post, next, scale } => {
                let mut residual = upload(b, &x, width);
                let delta = upload(b, &random.normals(rows * width), width);
                let [post, next] = [post, next].map(|is| is.then(|| b.vector(&random.normals(width)).unwrap()));
                b.residual_norm(&mut residual, &delta, post.as_ref(), scale, &mut out, next.as_ref(), 1e-6, rows);
                let mut both = b.read(&residual, rows, width).to_vec();
                both.extend(b.read(&out, rows, width));
                return both;
            }
            Op::Linear { ref parts, bias } => {
                let x = upload(b, &rounded_for(parts.iter().map(|part| part.0), x), width);
                let bytes: Vec<_> = parts.iter().map(|&(dtype, n)| weight_bytes(random, dtype, n, width)).collect();
                let weights: Vec<_> = std::iter::zip(parts, &bytes)
                    .map(|(&(dtype, rows), bytes)| Weight { dtype, rows, cols: width, bytes, run_as: dtype.native() })
                    .collect();
                let matrix = b.matrix(&weights).unwrap();
                let outputs = parts.iter().map(|part| part.1).sum();
                let bias = bias.then(|| b.vector(&random.normals(outputs)).unwrap());
                let mut out = b.buffer(rows, outputs).unwrap();
                b.linear(&mut out, &x, &matrix, bias.as_ref(), rows);
                return b.read(&out, rows, outputs).to_vec();
            }
            Op::Gated(activation) => {
                let gate_up: Vec<f32> = random.normals(2 * rows * width).iter().map(|x| 6.0 * x).collect();
                let gate_up = upload(b, &gate_up, 2 * width);
                b.gated(&mut out, &gate_up, activation, width, rows);
            }
            Op::Gather => {
                let x = upload(b, &x, width);
                let wanted: Vec<u32> = (0..rows).map(|_| random.below(rows) as u32).collect();
                b.gather(&mut out, &x, &wanted);
                let neighbours: Vec<u32> = (rows as u32 / 2..rows as u32).collect();
                b.gather(&mut out, &x, &neighbours);
            }
            Op::ScaleAndCap { scale, cap } => {
                out = upload(b, &x, width);
                b.scale_and_cap(&mut out, scale, cap, width, rows);
            }
        }
        b.read(&out, rows, width).to_vec()
    }
}

/// All combinations of [`ROWS`] and `widths`.
fn sweep(op: &Op, widths: &[usize], tolerance: Tolerance) {
    for rows in ROWS {
        for &width in widths {
            check_op(&Shaped { op: op.clone(), rows, width }, tolerance);
        }
    }
}

#[test]
fn embed() {
    for dtype in DType::ALL {
        let widths = [dtype.block_len().max(8), 3 * dtype.block_len().max(3)];
        for scale in [1.0, 24.0] {
            sweep(&Op::Embed { dtype, scale }, &widths, Tolerance::EXACT);
        }
    }
}

#[test]
fn rms_norm() {
    sweep(&Op::RmsNorm, &WIDTHS, Tolerance::ROUNDING);
}

#[test]
fn rms_norm_columns() {
    for (first, len, width) in [(0, 1, 1), (0, 16, 48), (17, 31, 64), (576, 192, 960)] {
        sweep(&Op::RmsNormColumns { first, len }, &[width], Tolerance::ROUNDING);
    }
}

#[test]
fn residual_norm() {
    for (post, next) in [(false, false), (false, true), (true, false), (true, true)] {
        for scale in [1.0, 0.22] {
            sweep(&Op::ResidualNorm { post, next, scale }, &[8, 17, 576], Tolerance::ROUNDING);
        }
    }
}

/// Products of block types are sums of integers with one order of roundings, and of dense types one chain of fused
/// multiply-adds: both have one right answer.
#[test]
fn linear_of_every_type() {
    for dtype in DType::ALL {
        for outputs in [1, 15, 16, 33] {
            let op = Op::Linear { parts: vec![(dtype, outputs)], bias: outputs == 33 };
            let unit = dtype.block_len().max(8);
            sweep_linear(&op, &[unit, 3 * unit]);
            if dtype.block_len() == 32 {
                sweep_linear(&op, &[1024 + 32]);
            }
            if has_tensor_core_form(dtype) && unit == 8 {
                sweep_linear(&op, &[7, 256, 264, 776]);
            }
        }
    }
}

/// [`sweep`] of products.
fn sweep_linear(op: &Op, widths: &[usize]) {
    let Op::Linear { parts, .. } = op else { panic!("a product") };
    let (activations, on_cuda) = products_on_cuda(parts.iter().map(|part| part.0));
    for rows in ROWS {
        for &width in widths {
            let case = Shaped { op: op.clone(), rows, width };
            check_on_cpu(&case, Tolerance::EXACT);
            check_on_cuda(&case, activations, on_cuda);
        }
    }
}

/// A row's product on the CUDA backend is the same bits in whatever company, though other kernels make it: up to 8 rows,
/// 16, 64 and more. And it is that of the row rounded to the weights' type, or that which the reference defines.
#[test]
fn products_on_cuda_do_not_depend_on_the_number_of_rows() {
    const ALL: usize = 130;
    for (dtype, width) in [
        (DType::BF16, 776),
        (DType::F16, 512),
        (DType::BF16, 17),
        (DType::F32, 264),
        (DType::Q4_K, 1280),
        (DType::Q6_K, 256),
        (DType::Q8_0, 1056),
        (DType::Q5_0, 288),
        (DType::Q4_1, 32),
        (DType::Q4_0, 160),
    ] {
        let (random, outputs) = (&mut Random::new(9), 147);
        let (x, bytes) = (random.normals(ALL * width), weight_bytes(random, dtype, outputs, width));
        for mut b in cuda_backends() {
            let matrix =
                b.matrix(&[Weight { dtype, rows: outputs, cols: width, bytes: &bytes, run_as: dtype }]).unwrap();
            let mut product = |x: &[f32], rows: usize| {
                let x = upload(&mut b, x, width);
                let mut out = b.buffer(rows, outputs).unwrap();
                b.linear(&mut out, &x, &matrix, None, rows);
                b.read(&out, rows, outputs).to_vec()
            };
            let want = product(&x, ALL);
            for rows in [1, 8, 9, 16, 17, 64, 65] {
                for first in [0, ALL - rows] {
                    let got = product(&x[first * width..][..rows * width], rows);
                    let name = format!("{dtype:?} × {width}: {rows} rows from {first} on");
                    assert_bits(&name, &got, &want[first * outputs..][..rows * outputs]);
                }
            }
            if dtype == DType::BF16 && width % 8 == 0 {
                let rounded: Vec<f32> = x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
                assert_bits("rounded", &product(&rounded, ALL), &want);
            } else if !dtype.is_dense() {
                for (row, x) in x.chunks(width).enumerate() {
                    let x = Int8Row::quantise(x);
                    let defined = bytes.chunks(bytes.len() / outputs).map(|weight| dot_int8(dtype, weight, &x));
                    let name = format!("{dtype:?} × {width}: row {row}");
                    assert_bits(&name, &want[row * outputs..][..outputs], &defined.collect::<Vec<_>>());
                }
            }
        }
    }
}

#[test]
fn linear_of_parts_with_different_types() {
    use DType::*;
    let mixtures: [&[(DType, usize)]; 3] =
        [&[(Q4_K, 32), (Q4_K, 16), (Q6_K, 16)], &[(Q8_0, 17), (F32, 5), (BF16, 33)], &[(Q4_1, 3), (Q5_0, 1)]];
    for parts in mixtures {
        for bias in [false, true] {
            sweep_linear(&Op::Linear { parts: parts.to_vec(), bias }, &[256, 768]);
        }
    }
}

/// What eight bits per activation may cost: each activation is off by at most half a step of its block, and a step is
/// `max |x| / 127`, so an output is off by at most `Σ blocks of 32: max |x| / 254 · Σ |w|`; and the sums round.
#[test]
fn quantised_products_err_by_no_more_than_their_activations() {
    for dtype in DType::ALL {
        for (seed, cols) in [(1, 256), (2, 512), (3, 2304)] {
            let (random, rows, outputs) = (&mut Random::new(seed), 5, 19);
            let x: Vec<f32> = (0..rows * cols).map(|i| random.normal() * [0.01, 1.0, 30.0][i / 32 % 3]).collect();
            let bytes = weight_bytes(random, dtype, outputs, cols);
            let mut weights = vec![0.0; outputs * cols];
            dequantise(dtype, &bytes, &mut weights);
            for mut backend in cpu_backends() {
                let name = backend.describe();
                let buffer = upload(&mut backend, &x, cols);
                let weight = Weight { dtype, rows: outputs, cols, bytes: &bytes, run_as: dtype.native() };
                let matrix = backend.matrix(&[weight]).unwrap();
                let mut out = backend.buffer(rows, outputs).unwrap();
                backend.linear(&mut out, &buffer, &matrix, None, rows);
                let got = backend.read(&out, rows, outputs);
                for (i, &got) in got.iter().enumerate() {
                    let (x, w) = (&x[i / outputs * cols..][..cols], &weights[i % outputs * cols..][..cols]);
                    let (exact, allowed) = exact_and_allowed(w, x, dtype.native().is_dense());
                    let error = (f64::from(got) - exact).abs();
                    assert!(
                        error <= allowed,
                        "{dtype:?} × {cols}, {name}, seed {seed}, output {i}: {error:e} > {allowed:e}"
                    );
                }
            }
        }
    }
}

/// The exact product, and how far from it a backend may be.
fn exact_and_allowed(w: &[f32], x: &[f32], dense: bool) -> (f64, f64) {
    let (mut exact, mut size, mut activations) = (0.0, 0.0, 0.0);
    for (w, x) in w.chunks(32).zip(x.chunks(32)) {
        let half_step = x.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 254.0;
        for (&w, &x) in w.iter().zip(x) {
            exact += f64::from(w) * f64::from(x);
            size += (f64::from(w) * f64::from(x)).abs();
            activations += f64::from(w.abs()) * f64::from(half_step);
        }
    }
    // Every addition rounds, and no partial sum is larger than the whole of the magnitudes; types with minimums add more.
    let rounding = 2.0 * w.len() as f64 * f64::from(f32::EPSILON) * (size + activations);
    (exact, if dense { rounding } else { rounding + activations })
}

#[test]
fn gated() {
    for activation in [Activation::Silu, Activation::GeluTanh] {
        sweep(&Op::Gated(activation), &WIDTHS, Tolerance { absolute: 1e-5, relative: 2e-6 });
    }
}

/// In one region or by steps, a gated layer is the same bits: over one row, pieces of rows, and blocks of rows; gate and up in
/// one weight or two; more threads than there are columns for.
#[test]
fn a_gated_layer_is_its_three_operations() {
    use DType::*;
    // Gate and up, down, inputs, width, outputs.
    let layers: [(&[DType], DType, usize, usize, usize); 6] = [
        (&[Q4_1, Q4_1], Q4_1, 64, 32, 20),
        (&[Q8_0], Q5_0, 96, 160, 64),
        (&[Q4_K, Q6_K], Q6_K, 512, 256, 48),
        (&[Q4_0, Q4_0], Q4_K, 576, 768, 33),
        (&[Q4_0, Q4_0], F16, 64, 64, 16),
        (&[BF16, Q8_0], Q8_0, 32, 64, 16),
    ];
    for (first, second, inputs, width, outputs) in layers {
        for (rows, activation, bias) in [(1, Activation::Silu, false), (9, Activation::GeluTanh, true)]
            .into_iter()
            .chain([63, 64, 65, 300].map(|rows| (rows, Activation::Silu, rows % 2 == 0)))
        {
            for mut backend in cpu_backends() {
                let (b, random) = (&mut backend, &mut Random::new(rows as u64));
                let mut matrix = |b: &mut CpuBackend, dtypes: &[DType], outputs: usize, cols: usize| {
                    let rows = outputs / dtypes.len();
                    let bytes: Vec<_> = dtypes.iter().map(|&dtype| weight_bytes(random, dtype, rows, cols)).collect();
                    let weights: Vec<_> = std::iter::zip(dtypes, &bytes)
                        .map(|(&dtype, bytes)| Weight { dtype, rows, cols, bytes, run_as: dtype })
                        .collect();
                    b.matrix(&weights).unwrap()
                };
                let (gate_up, down) = (matrix(b, first, 2 * width, inputs), matrix(b, &[second], outputs, width));
                let x = upload(b, &random.normals(rows * inputs), inputs);
                let biases = [2 * width, outputs].map(|len| bias.then(|| b.vector(&random.normals(len)).unwrap()));
                let [mut between, mut gated, mut out, mut by_steps] =
                    [2 * width, width, outputs, outputs].map(|width| b.buffer(rows, width).unwrap());
                b.linear(&mut between, &x, &gate_up, biases[0].as_ref(), rows);
                b.gated(&mut gated, &between, activation, width, rows);
                b.linear(&mut by_steps, &gated, &down, biases[1].as_ref(), rows);
                let (first, second) = ((&gate_up, biases[0].as_ref()), (&down, biases[1].as_ref()));
                let between = (&mut between, &mut gated);
                b.gated_mlp(&mut out, &x, first, activation, second, between, width, rows);
                let name = format!("{rows} rows of {inputs}, {width} and {outputs} on {}", b.describe());
                let by_steps = b.read(&by_steps, rows, outputs).to_vec();
                assert_bits(&name, b.read(&out, rows, outputs), &by_steps);
            }
        }
    }
}

#[test]
fn gather() {
    sweep(&Op::Gather, &[1, 16, 577], Tolerance::EXACT);
}

#[test]
fn scale_and_cap() {
    for scale in [1.0, 0.125, 8.0] {
        sweep(&Op::ScaleAndCap { scale, cap: None }, &[1, 17, 576], Tolerance::EXACT);
        for cap in [0.5, 30.0] {
            sweep(
                &Op::ScaleAndCap { scale, cap: Some(cap) },
                &[1, 17, 576],
                Tolerance { absolute: 2e-5, relative: 1e-6 },
            );
        }
    }
}

/// Ties, both zeros, what is no logit and rows without any, at every place of a row. Everything else about draws is held
/// against the sampler that defines them, in `tests/sample`.
#[test]
fn a_draw_of_the_largest_finds_it() {
    let random = &mut Random::new(11);
    for width in [1, 31, 32, 33, 511, 512, 513, 1023, 1024, 1025, 20_000] {
        let rows = 9;
        let mut x: Vec<f32> = (0..rows * width).map(|_| random.below(1 + width / 2) as f32 - width as f32).collect();
        let places: Vec<usize> = (0..rows).map(|row| row * width + random.below(width)).collect();
        (x[places[1]], x[places[2]]) = (-0.0, 0.0);
        x[(places[2] + 1).min(3 * width - 1)] = -0.0;
        (x[places[3]], x[places[4]], x[places[5]]) = (f32::NAN, f32::INFINITY, -f32::NAN);
        x[6 * width..7 * width].fill(f32::NEG_INFINITY);
        x[7 * width..8 * width].fill(f32::NEG_INFINITY);
        x[places[7]] = f32::MIN;
        let wanted: Vec<Option<u32>> = x
            .chunks(width)
            .map(|row| {
                let most = row.iter().fold(f32::NEG_INFINITY, |most, &value| most.max(value));
                let none = row.iter().any(|value| value.is_nan()) || most.is_infinite();
                (!none).then(|| row.iter().position(|&value| value == most).unwrap() as u32)
            })
            .collect();
        assert_eq!(wanted.iter().filter(|token| token.is_none()).count(), 4);
        for mut backend in cuda_backends() {
            let values = upload(&mut backend, &x, width);
            assert!(backend.draws(width, rows).unwrap());
            backend.set_draws(&vec![RowDraw::LARGEST; rows]);
            backend.draw(&values, 0, rows);
            backend.send_drawn(rows);
            let token = |drawn: &DrawnRow| if let DrawnRow::Token(token, _) = drawn { Some(*token) } else { None };
            let got: Vec<_> = backend.drawn().iter().map(token).collect();
            assert_eq!(got, wanted, "width {width}");
            assert_eq!(backend.failure(), None);
        }
    }
}
