//! The one place that knows how a case is run on a backend and compared.

use std::sync::Once;

use octavo_kernels::{
    Backend, CacheShape, DType, Segment, StepInput, StepLimits, Weight,
    cpu::{CpuBackend, CpuConfig, Isa},
    cuda::{self, CudaBackend},
    reference::{Activations, ReferenceBackend},
};

/// Enough for every case here.
pub const LIMITS: StepLimits = StepLimits { rows: 4096, segments: 64, groups: 2, table_entries: 256 };

/// A case: inputs that it makes itself, from its fields alone, run on any backend.
pub trait Case {
    /// For messages.
    fn name(&self) -> String;
    /// What the operation writes.
    fn run<B: Backend>(&self, backend: &mut B) -> Vec<f32>;
}

/// How far a fast version may be from the reference, per value: `absolute + relative · |reference|`.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    pub absolute: f32,
    pub relative: f32,
}

impl Tolerance {
    pub const EXACT: Self = Self { absolute: 0.0, relative: 0.0 };
    /// Sums in another order, and exponentials of another library.
    pub const ROUNDING: Self = Self { absolute: 2e-6, relative: 1e-5 };
}

/// Every CPU backend that this machine can be: its instruction sets, on one thread and on several.
pub fn cpu_backends() -> Vec<CpuBackend> {
    let all = Isa::available().into_iter().flat_map(|isa| [1, 2, 3].map(|threads| (isa, threads)));
    all.map(|(isa, threads)| cpu(isa, threads)).collect()
}

pub fn cpu(isa: Isa, threads: usize) -> CpuBackend {
    CpuBackend::open(CpuConfig { threads: Some(threads), isa: Some(isa), ..Default::default() }, LIMITS).unwrap()
}

/// The CUDA backend, on the CPU and on the first GPU if there is one. What only one of them does is wrong.
pub fn cuda_backends() -> Vec<CudaBackend> {
    // Loading the kernels takes a GPU longer than most cases do, so once for each test, which is a thread.
    thread_local! {
        static GPU: Option<cuda::Device> = {
            static SAID: Once = Once::new();
            let gpu = cuda::Device::gpu(0);
            gpu.inspect_err(|why| SAID.call_once(|| eprintln!("skipped: kernels on a GPU ({why})"))).ok()
        };
    }
    let (shim, gpu) = (cuda::Device::shim().unwrap(), GPU.with(|gpu| gpu.as_ref().map(cuda::Device::afresh)));
    [Some(shim), gpu].into_iter().flatten().map(|device| CudaBackend::open(device, LIMITS).unwrap()).collect()
}

pub fn reference(activations: Activations) -> ReferenceBackend {
    ReferenceBackend::new(LIMITS, activations)
}

/// [`check_op`], with a tolerance of its own for CUDA kernels that round their inputs to two bytes for tensor cores.
pub fn check_op_apart(case: &impl Case, tolerance: Tolerance, on_cuda: Tolerance) {
    check_on_cpu(case, tolerance);
    check_on_cuda(case, Activations::F32, on_cuda);
}

/// Runs `case` on the reference and on every backend. All must agree within `tolerance`, and the CPU's instruction
/// sets and numbers of threads must agree with each other to the bit. CUDA kernels
/// take activations as they are.
pub fn check_op(case: &impl Case, tolerance: Tolerance) {
    check_op_apart(case, tolerance, tolerance);
}

pub fn check_on_cpu(case: &impl Case, tolerance: Tolerance) {
    let want = case.run(&mut reference(Activations::Int8));
    assert!(!want.is_empty() && want.iter().all(|x| x.is_finite()), "{}: {want:?}", case.name());
    let mut first: Option<Vec<f32>> = None;
    for mut backend in cpu_backends() {
        let got = case.run(&mut backend);
        let name = format!("{} on {}", case.name(), backend.describe());
        assert_near(&name, &got, &want, tolerance);
        match &first {
            None => first = Some(got),
            Some(first) => assert_bits(&name, &got, first),
        }
    }
}

/// The part of [`check_op`] that concerns the CUDA backend.
pub fn check_on_cuda(case: &impl Case, activations: Activations, tolerance: Tolerance) {
    let want = case.run(&mut reference(activations));
    for mut backend in cuda_backends() {
        let got = case.run(&mut backend);
        assert_eq!(backend.failure(), None, "{}", case.name());
        assert_near(&format!("{} on {}", case.name(), backend.describe()), &got, &want, tolerance);
    }
}

/// How the CUDA backend multiplies weights of these types: what it sees of the activations, and how near to the reference
/// it is. Sums with tensor cores are in another order; the quantised types that matter most have int8 activations; the
/// others have activations as they are.
pub fn products_on_cuda(mut dtypes: impl Iterator<Item = DType> + Clone) -> (Activations, Tolerance) {
    use DType::*;
    let bytes = |dtype: DType| matches!(dtype.native(), Q4_0 | Q4_1 | Q5_0 | Q8_0 | Q4_K | Q6_K);
    let tolerance = match dtypes.clone().any(has_tensor_core_form) {
        true => Tolerance { absolute: 5e-5, relative: 1e-5 },
        false => Tolerance::EXACT,
    };
    (if dtypes.any(bytes) { Activations::Int8 } else { Activations::F32 }, tolerance)
}

/// Whether activations are rounded to two bytes for such weights.
pub fn has_tensor_core_form(dtype: DType) -> bool {
    matches!(dtype.native(), DType::F16 | DType::BF16)
}

/// `x`, rounded where `dtypes` have a tensor core form, so that only the order of additions is left.
pub fn rounded_for(mut dtypes: impl Iterator<Item = DType>, x: Vec<f32>) -> Vec<f32> {
    let rounds = dtypes.any(has_tensor_core_form);
    if rounds { x.into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect() } else { x }
}

pub fn assert_near(name: &str, got: &[f32], want: &[f32], tolerance: Tolerance) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let allowed = tolerance.absolute + tolerance.relative * want.abs();
        let near = (got - want).abs() <= allowed || got.to_bits() == want.to_bits();
        assert!(near, "{name}: value {i} is {got}, wanted {want} within {allowed:e}");
    }
}

pub fn assert_bits(name: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "{name}: value {i} is {got:e}, elsewhere {want:e}");
    }
}

/// A buffer that holds `values`, `(rows, width)`. The trait has no upload, so they come as the rows of an embedding.
pub fn upload<B: Backend>(backend: &mut B, values: &[f32], width: usize) -> B::Buffer {
    let rows = values.len() / width;
    let table = dense(backend, values, width);
    begin(backend, &(0..rows as u32).collect::<Vec<_>>());
    let mut buffer = backend.buffer(rows, width).unwrap();
    backend.embed(&mut buffer, &table, 1.0);
    buffer
}

/// An F32 matrix.
pub fn dense<B: Backend>(backend: &mut B, values: &[f32], cols: usize) -> B::Matrix {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    backend
        .matrix(&[Weight { dtype: DType::F32, rows: values.len() / cols, cols, bytes: &bytes, run_as: DType::F32 }])
        .unwrap()
}

/// Begins a step of rows `ids` for operations that do not look at positions.
pub fn begin<B: Backend>(backend: &mut B, ids: &[u32]) {
    let rows = ids.len();
    let positions: Vec<u32> = (0..rows as u32).collect();
    let segment = Segment { first_row: 0, rows, context: rows, first_table_entry: 0 };
    backend.begin(&StepInput {
        ids,
        positions: &positions,
        slots: &positions,
        segments: &[segment],
        block_tables: &[],
    });
}

/// Bytes of a weight of `rows` by `cols`, with scales of a size that weights have.
pub fn weight_bytes(random: &mut Random, dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / dtype.block_len() {
        let x = random.normal();
        match dtype {
            DType::F32 => bytes.extend(x.to_le_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
            DType::BF16 => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
            _ => {
                let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.next() as u8).collect();
                let scale = |random: &mut Random| half::f16::from_f32(0.01 * random.normal()).to_le_bytes();
                let halves: &[usize] = match dtype {
                    DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
                    DType::Q2_K => &[80, 82],
                    DType::Q3_K => &[108],
                    DType::Q6_K => &[208],
                    DType::TQ1_0 => &[52],
                    DType::TQ2_0 => &[64],
                    DType::Q8_16 | DType::IQ1_M | DType::MXFP4 => &[],
                    _ => &[0],
                };
                for &at in halves {
                    block[at..at + 2].copy_from_slice(&scale(random));
                }
                match dtype {
                    DType::Q8_16 => block[..4].copy_from_slice(&(1e-4 * random.normal()).to_le_bytes()),
                    // The scale is spread over the top nibbles of four words.
                    DType::IQ1_M => {
                        let [low, high] = scale(random);
                        for (at, nibble) in [(49, low), (51, low >> 4), (53, high), (55, high >> 4)] {
                            block[at] = block[at] & 15 | nibble << 4;
                        }
                    }
                    DType::MXFP4 => block[0] = 118 + block[0] % 8,
                    _ => {}
                }
                bytes.extend(block);
            }
        }
    }
    bytes
}

/// A pool of `blocks` blocks of 16.
pub fn cache_shape(blocks: usize, kv_heads: usize, head_dim: usize) -> CacheShape {
    CacheShape { layers: 2, blocks, block_size: 16, kv_heads, head_dim, dtype: Default::default() }
}

/// Numbers from a seed, the same everywhere (splitmix64).
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// In `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    /// In `[0, 1)`.
    pub fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }
    /// About normal: four uniforms, scaled to unit variance.
    pub fn normal(&mut self) -> f32 {
        ((0..4).map(|_| self.uniform()).sum::<f32>() - 2.0) * 3f32.sqrt()
    }
    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            values.swap(i, self.below(i + 1));
        }
    }
}
