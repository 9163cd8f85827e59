//! Products against the plain loops, bit for bit, over types, shapes, instruction sets, row counts and threads.

use half::{bf16, f16};

use super::*;
use crate::cpu::memory::Arena;
use crate::reference::dequantise::dequantise;
use crate::reference::linear::{Int8Row, dot, dot_int8};
use crate::{BackendError, DType, Weight};

fn pack(pool: &mut Pool, parts: &[Weight<'_>]) -> crate::Result<Matrix> {
    Matrix::pack(pool, &mut Arena::default(), parts)
}

const ROW_COUNTS: [usize; 12] = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64];
const MOST_ROWS: usize = 64;

/// Numbers from a seed, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }

    /// In ±1.
    fn float(&mut self) -> f32 {
        self.next() as f32 / 2f32.powi(30) - 1.0
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// A weight of any type: any codes, scales of a sane size and either sign.
    fn weight(&mut self, dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..rows * cols / dtype.block_len() {
            match dtype {
                DType::F32 => bytes.extend(self.float().to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(self.float()).to_le_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f32(self.float()).to_le_bytes()),
                _ => {
                    let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| self.next() as u8).collect();
                    let scales_at: &[usize] = match dtype {
                        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
                        DType::Q2_K => &[80, 82],
                        DType::Q3_K => &[108],
                        DType::Q6_K => &[208],
                        DType::Q8_16 => &[],
                        _ => &[0, 2],
                    };
                    for &at in scales_at {
                        block[at..at + 2].copy_from_slice(&f16::from_f32(self.float() / 8.0).to_le_bytes());
                    }
                    if dtype == DType::Q8_16 {
                        block[..4].copy_from_slice(&(self.float() / 1024.0).to_le_bytes());
                        // No code is -128: it is in no type that Q8_16 is made of.
                        block[20..].iter_mut().for_each(|code| *code = (*code as i8).max(-127) as u8);
                    }
                    bytes.extend(block);
                }
            }
        }
        bytes
    }

    /// Activations with blocks of very different sizes, some of them zero.
    fn activations(&mut self, rows: usize, inputs: usize) -> Vec<f32> {
        let mut x = self.floats(rows * inputs);
        for block in x.chunks_mut(32) {
            let scale = [0.0, 1e-3, 1.0, 1.0, 50.0][self.next() as usize % 5];
            block.iter_mut().for_each(|x| *x *= scale);
        }
        x
    }
}

/// A matrix's parts as they lie in a file.
struct Stored {
    cols: usize,
    parts: Vec<(DType, usize, Vec<u8>)>,
}

impl Stored {
    fn random(random: &mut Random, cols: usize, parts: &[(DType, usize)]) -> Self {
        let parts = parts.iter().map(|&(dtype, rows)| (dtype, rows, random.weight(dtype, rows, cols))).collect();
        Self { cols, parts }
    }

    fn weights(&self) -> Vec<Weight<'_>> {
        self.parts
            .iter()
            .map(|(dtype, rows, bytes)| Weight { dtype: *dtype, rows: *rows, cols: self.cols, bytes, run_as: *dtype })
            .collect()
    }

    /// Every output's stored row.
    fn rows(&self) -> impl Iterator<Item = (DType, &[u8])> {
        self.parts
            .iter()
            .flat_map(|(dtype, rows, bytes)| bytes.chunks(bytes.len() / rows).map(move |row| (*dtype, row)))
    }

    /// What the plain loops give.
    fn product(&self, x: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let mut out = Vec::new();
        for x in x.chunks(self.cols) {
            let int8 = self.cols.is_multiple_of(32).then(|| Int8Row::quantise(x));
            for (output, (dtype, row)) in self.rows().enumerate() {
                let sum = if dtype.is_dense() {
                    let mut weights = vec![0.0; self.cols];
                    dequantise(dtype, row, &mut weights);
                    dot(&weights, x)
                } else {
                    dot_int8(dtype, row, int8.as_ref().expect("blocks of 32"))
                };
                out.push(bias.map_or(sum, |bias| sum + bias[output]));
            }
        }
        out
    }
}

/// The product on this instruction set with that many threads.
fn fast(isa: Isa, pool: &mut Pool, matrix: &Matrix, x: &[f32], bias: Option<&[f32]>, rows: usize) -> Vec<f32> {
    let mut activations = Activations::default();
    activations.reserve(rows, matrix.inputs()).unwrap();
    let mut out = vec![f32::NAN; rows * matrix.outputs()];
    linear(isa, pool, &mut activations, &mut out, &x[..rows * matrix.inputs()], matrix, bias, rows);
    out
}

#[track_caller]
fn assert_bits(got: &[f32], want: &[f32], outputs: usize, what: std::fmt::Arguments<'_>) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let (row, output) = (i / outputs, i % outputs);
        assert_eq!(got.to_bits(), want.to_bits(), "{what}: row {row}, output {output}: {got} for {want}");
    }
}

/// All row counts and instruction sets for one matrix.
fn check(pools: &mut [Pool], seed: u64, cols: usize, parts: &[(DType, usize)]) {
    let random = &mut Random(seed);
    let stored = Stored::random(random, cols, parts);
    let x = random.activations(MOST_ROWS, cols);
    let outputs: usize = parts.iter().map(|part| part.1).sum();
    let bias = seed.is_multiple_of(2).then(|| random.floats(outputs));
    let want = stored.product(&x, bias.as_deref());
    let matrix = pack(&mut pools[seed as usize % 2], &stored.weights()).unwrap();
    for isa in Isa::available() {
        for (i, rows) in ROW_COUNTS.into_iter().enumerate() {
            let pool = &mut pools[(i + seed as usize) % 3];
            let got = fast(isa, pool, &matrix, &x, bias.as_deref(), rows);
            let (threads, isa) = (pool.threads(), isa.describe());
            assert_bits(&got, &want, outputs, format_args!("{isa} {parts:?} × {cols}, {rows} rows, {threads} threads"));
        }
    }
}

fn pools() -> [Pool; 3] {
    [1, 2, 3].map(|threads| Pool::new(Some(threads)).unwrap())
}

#[test]
fn every_block_type_gives_the_bits_of_the_plain_loop() {
    let pools = &mut pools();
    let mut seed = 0;
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_native() && !dtype.is_dense()) {
        for blocks in [1, 2, 3, 9] {
            for outputs in [1, 15, 16, 17, 48, 100] {
                seed += 1;
                check(pools, seed, blocks * dtype.block_len(), &[(dtype, outputs)]);
            }
        }
    }
}

#[test]
fn every_dense_type_gives_the_bits_of_the_plain_loop() {
    let pools = &mut pools();
    let mut seed = 1000;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for cols in [1, 31, 32, 257] {
            for outputs in [1, 15, 16, 17, 64, 100] {
                seed += 1;
                check(pools, seed, cols, &[(dtype, outputs)]);
            }
        }
    }
}

#[test]
fn parts_of_different_types_stand_side_by_side() {
    use DType::*;
    let pools = &mut pools();
    check(pools, 2000, 256, &[(Q4_K, 40), (Q6_K, 16), (F16, 17)]);
    check(pools, 2001, 288, &[(Q4_0, 1), (Q8_0, 1), (Q5_1, 1), (F32, 1)]);
    check(pools, 2002, 512, &[(BF16, 33), (Q5_K, 33)]);
}

#[test]
fn many_blocks_of_rows_are_the_rows_alone() {
    // Wide enough that 64 rows fall into several blocks of rows.
    let cols = 8192;
    let random = &mut Random(3000);
    let stored = Stored::random(random, cols, &[(DType::Q4_1, 20), (DType::F16, 20)]);
    let x = random.activations(MOST_ROWS, cols);
    let [pool, other, _] = &mut pools();
    let matrix = pack(pool, &stored.weights()).unwrap();
    let together = fast(Isa::best(), other, &matrix, &x, None, MOST_ROWS);
    for (row, want) in together.chunks(40).enumerate() {
        let alone = fast(Isa::best(), pool, &matrix, &x[row * cols..], None, 1);
        assert_bits(&alone, want, 40, format_args!("row {row} alone"));
    }
}

#[test]
fn rows_come_back_as_the_file_has_them_and_take_no_more_room() {
    let [_, pool, _] = &mut pools();
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_native()) {
        let cols = 3 * dtype.block_len().max(32);
        let stored = Stored::random(&mut Random(5000), cols, &[(DType::F32, 5), (dtype, 32)]);
        let matrix = pack(pool, &stored.weights()).unwrap();
        for (row, (dtype, bytes)) in stored.rows().enumerate() {
            let (mut got, mut want) = (vec![f32::NAN; cols], vec![0.0; cols]);
            matrix.row(row, &mut got);
            dequantise(dtype, bytes, &mut want);
            assert_bits(&got, &want, cols, format_args!("{} row {row}", dtype.name()));
        }
        let big = Stored::random(&mut Random(5001), 1024, &[(dtype, 64)]);
        let (packed, file) = (pack(pool, &big.weights()).unwrap().bytes(), big.parts[0].2.len());
        // Only their scales are wider than in the file: nibbles and six bits become bytes.
        let most = if matches!(dtype, DType::Q2_K | DType::Q3_K) { 120 } else { 105 };
        assert!(packed * 100 <= file * most, "{}: {packed} bytes for {file}", dtype.name());
        assert_eq!(Some(packed), crate::cpu::pack::packed_bytes(dtype, 64, 1024));
    }
}

#[test]
fn an_embedding_is_its_row_times_the_scale() {
    let [_, pool, _] = &mut pools();
    let stored = Stored::random(&mut Random(6000), 256, &[(DType::Q6_K, 37)]);
    let matrix = pack(pool, &stored.weights()).unwrap();
    let ids = [36, 0, 15, 16, 36];
    for scale in [1.0, 16.0, 0.3] {
        let mut got = vec![f32::NAN; ids.len() * 256];
        crate::cpu::embed::embed(pool, &mut got, &matrix, &ids, scale);
        for (id, got) in ids.iter().zip(got.chunks(256)) {
            let (_, bytes) = stored.rows().nth(*id as usize).unwrap();
            let mut want = vec![0.0; 256];
            dequantise(DType::Q6_K, bytes, &mut want);
            want.iter_mut().for_each(|x| *x *= scale);
            assert_bits(got, &want, 256, format_args!("id {id} × {scale}"));
        }
    }
}

#[test]
fn a_weight_that_cannot_be_converted_names_its_row() {
    let [_, pool, _] = &mut pools();
    let mut values = vec![1.0f32; 40 * 64];
    (values[37 * 64 + 5], values[20 * 64]) = (1e30, -7e4);
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let weight = Weight { dtype: DType::F32, rows: 40, cols: 64, bytes: &bytes, run_as: DType::F16 };
    let fine = Weight { run_as: DType::BF16, ..weight };
    match pack(pool, &[fine, weight]).map(|matrix| matrix.bytes()) {
        Err(BackendError::OutOfRange { part: 1, row: 20, run_as: DType::F16 }) => {}
        other => panic!("{other:?}"),
    }
    for run_as in [DType::Q4_0, DType::IQ4_NL, DType::Q8_16] {
        let message = pack(pool, &[Weight { run_as, ..weight }]).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(&format!("of F32 cannot be run as {}", run_as.name())), "{message}");
    }
}

#[test]
fn a_weight_that_does_not_fit_is_refused() {
    let [pool, ..] = &mut pools();
    let bytes = vec![0; 18 * 4];
    let refused = |pool: &mut Pool, parts: &[Weight<'_>]| match pack(pool, parts) {
        Err(BackendError::BadWeight(message)) => message,
        other => panic!("{:?}", other.map(|matrix| matrix.bytes())),
    };
    let weight = Weight { dtype: DType::Q4_0, rows: 2, cols: 64, bytes: &bytes, run_as: DType::Q4_0 };
    assert_eq!(pack(pool, &[weight]).unwrap().outputs(), 2);
    assert!(refused(pool, &[Weight { rows: 3, ..weight }]).contains("108 bytes, not 72"));
    assert!(refused(pool, &[Weight { cols: 48, ..weight }]).contains("48 is not a multiple of 32"));
    assert!(refused(pool, &[Weight { rows: usize::MAX, ..weight }]).contains("Q4_0"));
    assert!(refused(pool, &[Weight { rows: 0, bytes: &[], ..weight }]).contains("0 × 64"));
    assert!(refused(pool, &[weight, Weight { rows: 1, cols: 128, ..weight }]).contains("64 and 128 inputs"));
}
