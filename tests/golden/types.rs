//! Types of weights, from a file to logits: every type that a GGUF file may have, and every type that weights can be run as.

use std::fs;
use std::path::{Path, PathBuf};

use octavo::execute::local::LocalExecutor;
use octavo::load::{ModelFiles, WeightDtype};
use octavo::model::{Model, Weights, weights};
use octavo_kernels::convert::convert_row;
use octavo_kernels::cpu::backend::Vector;
use octavo_kernels::cpu::pack::Matrix;
use octavo_kernels::cpu::{CpuBackend, CpuConfig};
use octavo_kernels::reference::{Activations, ReferenceBackend};
use octavo_kernels::types::decode_dense;
use octavo_kernels::{Backend, DType};

use crate::files::Scratch;
use crate::oracle::{self, max_abs};
use crate::runner::{self, LIMITS, Outcome};

/// As in every comparison of float arithmetic; see `tiny`.
const TOLERANCE: f32 = 1e-4;

fn cpu() -> CpuBackend {
    CpuBackend::open(CpuConfig { threads: Some(2), ..CpuConfig::default() }, LIMITS).unwrap()
}

fn reference() -> ReferenceBackend {
    ReferenceBackend::new(LIMITS, Activations::F32)
}

fn run<B: Backend>(path: &Path, dtype: WeightDtype, backend: B, prompts: &[&[u32]]) -> Vec<Outcome> {
    let files = ModelFiles::open(path).unwrap().run_as(dtype);
    runner::run(&mut LocalExecutor::new(runner::decoder_of(files, backend)), prompts, 8, 61)
}

// ---- every type of a GGUF file ------------------------------------------------------------------------------------

const WIDTH: usize = 256;
const VOCABULARY: usize = 48;
/// Name, and outputs.
const MATRICES: [(&str, usize); 9] = [
    ("token_embd", VOCABULARY),
    ("blk.0.attn_q", WIDTH),
    ("blk.0.attn_k", WIDTH / 2),
    ("blk.0.attn_v", WIDTH / 2),
    ("blk.0.attn_output", WIDTH),
    ("blk.0.ffn_gate", WIDTH),
    ("blk.0.ffn_up", WIDTH),
    ("blk.0.ffn_down", WIDTH),
    ("output", VOCABULARY),
];
const PROMPT: [u32; 12] = [1, 5, 40, 7, 7, 23, 0, 47, 11, 30, 2, 19];

/// A llama of one layer whose matrices are of type `id`, with these bytes in each row, over and over.
fn gguf(path: &Path, id: u32, row_bytes: usize, bytes: &[u8]) {
    const NORMS: [&str; 3] = ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"];
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend(((MATRICES.len() + NORMS.len()) as u64).to_le_bytes());
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.bytes());
    };
    let sizes = [
        ("embedding_length", WIDTH),
        ("feed_forward_length", WIDTH),
        ("block_count", 1),
        ("context_length", 512),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ];
    out.extend((1 + sizes.len() as u64).to_le_bytes());
    text(&mut out, "general.architecture");
    out.extend(8u32.to_le_bytes());
    text(&mut out, "llama");
    for (key, size) in sizes {
        text(&mut out, &format!("llama.{key}"));
        out.extend(4u32.to_le_bytes());
        out.extend((size as u32).to_le_bytes());
    }

    let (mut infos, mut data) = (Vec::new(), Vec::new());
    let mut tensor = |name: &str, sizes: &[usize], id: u32, bytes: &mut dyn Iterator<Item = u8>| {
        text(&mut infos, &format!("{name}.weight"));
        infos.extend((sizes.len() as u32).to_le_bytes());
        sizes.iter().for_each(|&size| infos.extend((size as u64).to_le_bytes()));
        infos.extend(id.to_le_bytes());
        infos.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    };
    for norm in NORMS {
        tensor(norm, &[WIDTH], 0, &mut [1f32; WIDTH].iter().flat_map(|x| x.to_le_bytes()));
    }
    for (name, rows) in MATRICES {
        tensor(name, &[WIDTH, rows], id, &mut bytes.iter().copied().cycle().take(rows * row_bytes));
    }
    out.extend(infos);
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend(data);
    fs::write(path, out).unwrap();
}

/// Blocks of a type and the values that they mean, of the fixtures. Those of dense types hold every kind of number, which
/// is no weight: theirs are another type's, rounded.
fn blocks(dtype: DType) -> (Vec<u8>, Vec<u8>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/dequant");
    let read = |dtype: DType, what| fs::read(folder.join(format!("{}.{what}", dtype.name()))).unwrap();
    if !dtype.is_dense() {
        return (read(dtype, "raw"), read(dtype, "f32"));
    }
    let floats = read(DType::Q8_0, "f32");
    let count = floats.len() / 4;
    let (mut raw, mut values) = (vec![0; count * dtype.block_bytes()], vec![0.0; count]);
    convert_row(DType::F32, &floats, dtype, &mut raw, count).unwrap();
    decode_dense(dtype, &raw, &mut values);
    (raw, values.iter().flat_map(|x| x.to_le_bytes()).collect())
}

/// A file of the type, and one of the values as F32.
fn twins(folder: &Scratch, dtype: DType) -> [PathBuf; 2] {
    let id = (0..64).find(|&id| octavo::load::ggml_type::dtype(id) == Some(dtype)).unwrap();
    let (raw, values) = blocks(dtype);
    let [one, other] = ["blocks", "values"].map(|name| folder.0.join(format!("{}-{name}.gguf", dtype.name())));
    gguf(&one, id, dtype.row_bytes(WIDTH).unwrap(), &raw);
    gguf(&other, 0, 4 * WIDTH, &values);
    [one, other]
}

fn in_files() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| !matches!(dtype, DType::F32 | DType::Q8_16))
}

/// Embeddings, layers and head of every type give the bits that their values give.
#[test]
fn every_type_is_its_values() {
    let folder = Scratch::new("every-type");
    for dtype in in_files() {
        let [blocks, values] = twins(&folder, dtype);
        let got = run(&blocks, WeightDtype::Auto, reference(), &[&PROMPT]);
        let wanted = run(&values, WeightDtype::Auto, reference(), &[&PROMPT]);
        assert!(wanted[0].logits.iter().all(|x| x.is_finite()));
        assert!(got == wanted, "{}", dtype.name());
        // Decoded at load, every type is as exact on the CPU as its values.
        let [got, wanted] = [&blocks, &values].map(|path| run(path, WeightDtype::F32, cpu(), &[&PROMPT]));
        assert!(got == wanted, "{} as f32", dtype.name());
    }
}

/// With int8 activations, logits stray by some percent of their size, whatever the type.
#[test]
fn every_type_runs_on_the_cpu() {
    let folder = Scratch::new("every-type-cpu");
    for dtype in in_files() {
        let [blocks, values] = twins(&folder, dtype);
        let got = run(&blocks, WeightDtype::Auto, cpu(), &[&PROMPT]);
        let wanted = run(&values, WeightDtype::Auto, cpu(), &[&PROMPT]);
        let size = |logits: &mut dyn Iterator<Item = f32>| logits.map(|x| x * x).sum::<f32>().sqrt();
        let (got, wanted) = (&got[0].logits, &wanted[0].logits);
        let error = size(&mut got.iter().zip(wanted).map(|(a, b)| a - b)) / size(&mut wanted.iter().copied());
        println!("{}: {error:.5}", dtype.name());
        assert!(error < if dtype.native().is_dense() { 1e-5 } else { 0.05 }, "{}: {error}", dtype.name());
    }
}

// ---- what weights can be run as -----------------------------------------------------------------------------------

/// Widened, bf16 weights lose nothing.
#[test]
fn f32_of_bf16_is_exact() {
    for name in ["llama-untied-sharded", "gemma3"] {
        let expected = oracle::expected(&oracle::path(&format!("tiny/{name}/expected.json")), "bf16");
        let prompts: Vec<&[u32]> = expected.prompts.iter().map(|prompt| prompt.ids.as_slice()).collect();
        let path = oracle::path(&format!("tiny/{name}/bf16"));
        for got in [
            run(&path, WeightDtype::F32, cpu(), &prompts),
            run(&path, WeightDtype::F32, reference(), &prompts),
            run(&path, WeightDtype::Auto, cpu(), &prompts),
        ] {
            for (got, prompt) in got.iter().zip(&expected.prompts) {
                let difference = max_abs(&got.logits, &prompt.logits);
                assert!(difference <= TOLERANCE, "{name} {}: {difference}", prompt.id);
            }
        }
    }
}

/// The expected values of `bf16/` are those of the weights of `f32/`, rounded by an independent implementation.
#[test]
fn bf16_of_f32_is_what_others_round_to() {
    for name in ["llama-tied-rope3", "gemma3"] {
        let expected = oracle::expected(&oracle::path(&format!("tiny/{name}/expected.json")), "bf16");
        let prompts: Vec<&[u32]> = expected.prompts.iter().map(|prompt| prompt.ids.as_slice()).collect();
        // Norms stay as they are stored, and in `bf16/` they are rounded too: so the matrices are compared, as they run.
        let [rounded, stored] = [("f32", WeightDtype::Bf16), ("bf16", WeightDtype::Auto)].map(|(folder, dtype)| {
            let path = oracle::path(&format!("tiny/{name}/{folder}"));
            (matrices(&path, dtype), run(&path, dtype, cpu(), &prompts))
        });
        assert!(rounded.0 == stored.0, "{name}: matrices differ");
        let apart = |(got, wanted): (&Outcome, &Outcome)| max_abs(&got.logits, &wanted.logits);
        let difference = rounded.1.iter().zip(&stored.1).map(apart).fold(0.0, f32::max);
        println!("{name}: rounding the norms too moves logits by {difference}");
        assert!(difference < 0.2, "{name}: {difference}");
    }
}

fn load(path: &Path, dtype: WeightDtype) -> Weights<Matrix, Vector> {
    let files = ModelFiles::open(path).unwrap().run_as(dtype);
    let model = Model::of(&files).unwrap();
    Weights::load(&files, &model, &mut cpu(), &mut |_, _| true).unwrap()
}

/// The values that the CPU has of a matrix.
fn rows(matrix: &Matrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.inputs() * matrix.outputs()];
    values.chunks_exact_mut(matrix.inputs()).enumerate().for_each(|(output, row)| matrix.row(output, row));
    values
}

/// Those of some matrices, the last with rows of 112 in the model called `qwen3`.
fn matrices(path: &Path, dtype: WeightDtype) -> Vec<f32> {
    let weights = load(path, dtype);
    let some = [&weights.embedding, &weights.layers[0].qkv.matrix, &weights.layers[1].down.matrix];
    some.into_iter().flat_map(rows).collect()
}

/// Quantised at load or by a converter: the same bits, of every matrix that both quantise.
#[test]
fn q8_0_of_f32_is_the_q8_0_file() {
    let quantised = |path: &str, dtype| {
        let mut weights = load(&oracle::path(path), dtype);
        let mut all = rows(&weights.embedding);
        for layer in weights.layers.drain(..) {
            all.extend([layer.qkv, layer.output, layer.gate_up].iter().flat_map(|linear| rows(&linear.matrix)));
        }
        all
    };
    let got = quantised("tiny/qwen3/f32", WeightDtype::Q8_0);
    let wanted = quantised("gguf/qwen3-q8_0.gguf", WeightDtype::Auto);
    assert!(got == wanted, "the values differ");
}

/// Every weight is off by at most half a step of its block, `max |w| / 254`, and what rounding the scale to half precision
/// adds; rows that are no multiple of 32 are as they were.
#[test]
fn q8_0_is_within_half_a_step() {
    let path = oracle::path("tiny/qwen3/f32");
    let [got, wanted] = [WeightDtype::Q8_0, WeightDtype::Auto].map(|dtype| matrices(&path, dtype));
    let mut exact = 0;
    for (got, wanted) in got.chunks(32).zip(wanted.chunks(32)) {
        let largest = wanted.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let allowed = largest / 254.0 + largest / 2048.0;
        assert!(max_abs(got, wanted) <= allowed, "{got:?} for {wanted:?}");
        exact += usize::from(got == wanted);
    }
    // The down projection has rows of 112.
    assert_eq!(exact, 64 * 112 / 32);
    let expected = oracle::expected(&oracle::path("tiny/qwen3/expected.json"), "f32");
    let prompts: Vec<&[u32]> = expected.prompts.iter().map(|prompt| prompt.ids.as_slice()).collect();
    let got = run(&path, WeightDtype::Q8_0, reference(), &prompts);
    for (got, prompt) in got.iter().zip(&expected.prompts) {
        // Logits of size 2: weights off by a five-hundredth of the largest, 24 matrices deep.
        let difference = max_abs(&got.logits, &prompt.logits);
        assert!(difference > TOLERANCE && difference < 0.2, "{}: {difference}", prompt.id);
    }
}

/// What the plan counts is what is packed, to the byte.
#[test]
fn packed_bytes_are_known_before() {
    let folder = Scratch::new("packed-bytes");
    let mut paths: Vec<PathBuf> = in_files().map(|dtype| twins(&folder, dtype)[0].clone()).collect();
    paths.extend(["tiny/qwen3/f32", "tiny/gemma3/bf16", "gguf/qwen2-q5_1.gguf"].map(oracle::path));
    for path in paths {
        for (name, dtype) in WeightDtype::NAMES {
            let files = ModelFiles::open(&path).unwrap().run_as(dtype);
            let model = Model::of(&files).unwrap();
            let counted = weights::check(&files, &model).unwrap();
            let packed = Weights::load(&files, &model, &mut cpu(), &mut |_, _| true).unwrap().matrix_bytes;
            assert_eq!(counted.packed, packed, "{} as {name}", path.display());
            let of = |all: fn(&weights::Converted) -> u64| counted.converted.iter().map(all).sum::<u64>();
            assert!(of(|one| one.packed) <= packed && of(|one| one.stored) <= counted.stored);
        }
    }
}

#[test]
fn a_value_out_of_range_names_its_tensor() {
    let folder = Scratch::new("range");
    let path = folder.0.join("model.gguf");
    let mut row = [0.5f32; WIDTH];
    row[3] = 1e5;
    gguf(&path, 0, 4 * WIDTH, &row.map(f32::to_le_bytes).concat());
    let load = |dtype, backend: &mut dyn FnMut(&ModelFiles, &Model) -> Result<(), octavo::error::LoadError>| {
        let files = ModelFiles::open(&path).unwrap().run_as(dtype);
        backend(&files, &Model::of(&files).unwrap()).map_err(|error| error.to_string())
    };
    let on_cpu =
        &mut |files: &ModelFiles, model: &Model| Weights::load(files, model, &mut cpu(), &mut |_, _| true).map(|_| ());
    let on_reference = &mut |files: &ModelFiles, model: &Model| {
        Weights::load(files, model, &mut reference(), &mut |_, _| true).map(|_| ())
    };
    for error in [load(WeightDtype::F16, on_cpu), load(WeightDtype::F16, on_reference)] {
        let error = error.unwrap_err();
        assert!(error.contains("row 0 of tensor `token_embd.weight` holds a value that F16 cannot"), "{error}");
        assert!(error.contains(&*path.to_string_lossy()), "{error}");
    }
    assert_eq!(load(WeightDtype::Bf16, on_cpu), Ok(()));
}
