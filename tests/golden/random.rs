//! What the fixtures cannot have: decoders with any mixture of features. On one backend the chunks of a prompt and the other
//! sequences do not touch a bit; between backends there is only rounding.

use octavo::execute::local::LocalExecutor;
use octavo::model::rope::{Rope, RopeScaling, Yarn};
use octavo::model::spec::{Biases, Experts, LayerSpec, QkNorm};
use octavo::model::weights::{ExpertWeights, LayerWeights, Linear, Mlp};
use octavo::model::{Decoder, DecoderSpec, Weights};
use octavo_kernels::{Activation, Backend, DType, Heads, RopeStyle, Weight};

use crate::oracle::max_abs;
use crate::runner::{self, Outcome};
use crate::tiny::{cpu, reference};

const SEEDS: std::ops::Range<u64> = 0..40;
const STEPS: usize = 6;
/// Around the borders of blocks and of windows.
const PROMPTS: [usize; 4] = [1, 16, 33, 90];

#[test]
fn backends_agree_on_any_decoder_and_chunks_do_not_matter() {
    for seed in SEEDS {
        let mut random = Random(seed);
        let spec = spec(&mut random);
        println!("seed {seed}: {spec:?}");
        spec.check().unwrap();
        let stored = [DType::F32, DType::BF16, DType::Q8_0][random.below(3)];
        let prompts: Vec<Vec<u32>> =
            PROMPTS.iter().map(|&n| (0..n).map(|_| random.below(spec.vocab_size) as u32).collect()).collect();
        let make = Maker { seed, spec: &spec, stored };
        let [wanted, got] = [check(make.decoder(reference()), &prompts), check(make.decoder(cpu(2)), &prompts)];
        // With int8 activations, one that lies between two codes may go to either.
        if stored == DType::Q8_0 {
            continue;
        }
        for (prompt, (wanted, got)) in PROMPTS.iter().zip(wanted.iter().zip(&got)) {
            let size = wanted.logits.iter().fold(1.0f32, |size, logit| size.max(logit.abs()));
            let difference = max_abs(&got.logits, &wanted.logits);
            assert!(difference <= 2e-4 * size, "seed {seed}, prompt of {prompt}: {difference} of {size}");
        }
    }
}

/// Runs the prompts together in whole and in chunks, and one alone.
fn check<B: Backend>(decoder: Decoder<B>, prompts: &[Vec<u32>]) -> Vec<Outcome> {
    let executor = &mut LocalExecutor::new(decoder);
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let whole = runner::run(executor, &prompts, STEPS, 512);
    assert!(whole.iter().all(|outcome| outcome.logits.iter().all(|logit| logit.is_finite())));
    for chunk in [7, 16] {
        assert!(runner::run(executor, &prompts, STEPS, chunk) == whole, "chunks of {chunk}");
    }
    let last = prompts.len() - 1;
    assert!(runner::run(executor, &prompts[last..], STEPS, 5)[0] == whole[last], "alone");
    whole
}

/// Numbers from a seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }
    /// About normal, of this deviation.
    fn normals(&mut self, n: usize, deviation: f32) -> Vec<f32> {
        (0..n).map(|_| deviation * 3f32.sqrt() * ((0..4).map(|_| self.uniform()).sum::<f32>() - 2.0)).collect()
    }
}

fn spec(random: &mut Random) -> DecoderSpec {
    let kv = 1 + random.below(3);
    let heads = Heads { query: kv * (1 + random.below(3)), kv, head_dim: random.of(&[16, 20, 24, 32, 64]) };
    let count = 1 + random.below(9);
    let experts = random.coin().then(|| Experts {
        count,
        per_token: 1 + random.below(count),
        intermediate_size: random.of(&[24, 32, 64]),
        renormalise: random.coin(),
    });
    let layer = |random: &mut Random| LayerSpec {
        window: random.of(&[None, Some(1), Some(5), Some(16), Some(17), Some(40)]),
        rope: random.below(2),
        sparse: experts.is_some() && random.below(3) > 0,
    };
    let (pre_norms, post_norms) = random.of(&[(true, false), (true, true), (false, true)]);
    DecoderSpec {
        vocab_size: 40 + random.below(50),
        hidden_size: random.of(&[32, 64, 96]),
        intermediate_size: random.of(&[32, 56, 96]),
        heads,
        layers: (0..1 + random.below(4)).map(|_| layer(random)).collect(),
        ropes: vec![rope(random, heads.head_dim), rope(random, heads.head_dim)],
        experts,
        max_positions: random.of(&[64, 1024]),
        norm_eps: random.of(&[1e-6, 1e-5]),
        norm_weight_offset: 0.0,
        pre_norms,
        post_norms,
        qk_norm: random.of(&[QkNorm::None, QkNorm::PerHead, QkNorm::WholeRow]),
        biases: Biases { qkv: random.coin(), output: random.coin(), mlp: random.coin() },
        tied_embeddings: random.coin(),
        activation: random.of(&[Activation::Silu, Activation::GeluTanh]),
        embedding_scale: random.of(&[1.0, 8.0]),
        residual_scale: random.of(&[1.0, 0.25]),
        attention_scale: random.of(&[0.125, 0.25]),
        attention_soft_cap: random.of(&[None, Some(4.0)]),
        logits_scale: random.of(&[1.0, 0.5]),
        logits_soft_cap: random.of(&[None, Some(6.0)]),
    }
}

fn rope(random: &mut Random, head_dim: usize) -> Rope {
    let rotary_dim = random.of(&[head_dim, head_dim / 4 * 2, 4]);
    let divisors = |random: &mut Random| -> Vec<f32> { (0..rotary_dim / 2).map(|_| 1.0 + random.uniform()).collect() };
    let original_positions = 64;
    let yarn = Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_positions,
        attention_factor: 1.1,
        truncate: random.coin(),
    };
    let (short, long) = (divisors(random), divisors(random));
    let scaling = random.of(&[
        RopeScaling::Default,
        RopeScaling::Linear { factor: 2.0 },
        RopeScaling::Dynamic { factor: 2.0, original_positions },
        RopeScaling::Yarn(yarn),
        RopeScaling::PerPair(short.clone()),
        RopeScaling::LongRope { short, long, original_positions, attention_factor: 1.2 },
    ]);
    Rope { style: random.of(&[RopeStyle::Halves, RopeStyle::Interleaved]), theta: 10_000.0, rotary_dim, scaling }
}

/// Makes the same decoder on any backend.
struct Maker<'a> {
    seed: u64,
    spec: &'a DecoderSpec,
    stored: DType,
}

impl Maker<'_> {
    fn decoder<B: Backend>(&self, mut backend: B) -> Decoder<B> {
        let spec = self.spec;
        let mut parts = Parts { random: Random(!self.seed), backend: &mut backend, stored: self.stored };
        let embedding = parts.matrix(spec.vocab_size, spec.hidden_size);
        let head = (!spec.tied_embeddings).then(|| parts.matrix(spec.vocab_size, spec.hidden_size));
        let weights = Weights {
            embedding,
            head,
            final_norm: parts.norm(spec.hidden_size),
            layers: spec.layers.iter().map(|layer| parts.layer(spec, layer.sparse)).collect(),
            matrix_bytes: 0,
        };
        runner::assemble(backend, spec.clone(), weights)
    }
}

struct Parts<'a, B> {
    random: Random,
    backend: &'a mut B,
    stored: DType,
}

impl<B: Backend> Parts<'_, B> {
    fn layer(&mut self, spec: &DecoderSpec, sparse: bool) -> LayerWeights<B::Matrix, B::Vector> {
        let (hidden, heads, biases) = (spec.hidden_size, spec.heads, spec.biases);
        let kv = heads.kv * heads.head_dim;
        let qk_norms = match spec.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some([heads.head_dim; 2]),
            QkNorm::WholeRow => Some([heads.query_width(), kv]),
        };
        LayerWeights {
            attention_norm: spec.pre_norms.then(|| self.norm(hidden)),
            qkv: self.linear(heads.qkv_width(), hidden, biases.qkv),
            key_bias: None,
            query_norm: qk_norms.map(|[query, _]| self.norm(query)),
            key_norm: qk_norms.map(|[_, key]| self.norm(key)),
            output: self.linear(hidden, heads.query_width(), biases.output),
            post_attention_norm: spec.post_norms.then(|| self.norm(hidden)),
            mlp_norm: spec.pre_norms.then(|| self.norm(hidden)),
            mlp: match spec.experts.filter(|_| sparse) {
                None => Mlp::Dense {
                    gate_up: self.linear(2 * spec.intermediate_size, hidden, biases.mlp),
                    down: self.linear(hidden, spec.intermediate_size, biases.mlp),
                },
                Some(experts) => Mlp::Sparse(ExpertWeights {
                    router: self.matrix(experts.count, hidden),
                    gate_up: self.parts(2 * experts.count, experts.intermediate_size, hidden),
                    down: self.parts(experts.count, hidden, experts.intermediate_size),
                }),
            },
            post_mlp_norm: spec.post_norms.then(|| self.norm(hidden)),
        }
    }

    fn linear(&mut self, rows: usize, cols: usize, bias: bool) -> Linear<B::Matrix, B::Vector> {
        let matrix = self.matrix(rows, cols);
        let bias = bias.then(|| self.random.normals(rows, 0.5));
        Linear { matrix, bias: bias.map(|bias| self.backend.vector(&bias).unwrap()) }
    }

    fn matrix(&mut self, rows: usize, cols: usize) -> B::Matrix {
        self.parts(1, rows, cols)
    }

    /// One matrix of so many parts.
    fn parts(&mut self, count: usize, rows: usize, cols: usize) -> B::Matrix {
        let dtype = if cols.is_multiple_of(self.stored.block_len()) { self.stored } else { DType::BF16 };
        let bytes: Vec<Vec<u8>> = (0..count).map(|_| self.bytes(dtype, rows, cols)).collect();
        let parts: Vec<Weight<'_>> =
            bytes.iter().map(|bytes| Weight { dtype, rows, cols, bytes, run_as: dtype }).collect();
        self.backend.matrix(&parts).unwrap()
    }

    fn bytes(&mut self, dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
        let values = self.random.normals(rows * cols, (cols as f32).powf(-0.5));
        match dtype {
            DType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::BF16 => values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
            // A scale of 2⁻⁸ before 32 codes.
            _ => {
                let block = |block: &[f32]| {
                    let codes = block.iter().map(|x| (256.0 * x).clamp(-127.0, 127.0) as i8 as u8);
                    [0x00, 0x1c].into_iter().chain(codes).collect::<Vec<u8>>()
                };
                values.chunks_exact(32).flat_map(block).collect()
            }
        }
    }

    fn norm(&mut self, len: usize) -> B::Vector {
        let values: Vec<f32> = self.random.normals(len, 0.2).iter().map(|x| 1.0 + x).collect();
        self.backend.vector(&values).unwrap()
    }
}
