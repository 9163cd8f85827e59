//! Mixture of experts: routing, the products of experts, and their sum.

use octavo_kernels::{
    Backend, DType, Weight,
    cpu::Isa,
    reference::{Activations, experts::route},
    routing::Choice,
};

use crate::harness::*;

const ROWS: [usize; 6] = [1, 2, 7, 16, 17, 65];
/// Experts, and how many of them a row goes to.
const EXPERTS: [(usize, usize); 5] = [(1, 1), (4, 2), (8, 3), (9, 9), (128, 8)];

/// Rows that go to experts and come back as sums of what the experts made of them.
#[derive(Clone, Debug)]
struct Mixture {
    /// Types and outputs of an expert's parts; none: what was sent is what comes back.
    parts: Vec<(DType, usize)>,
    experts: usize,
    per_row: usize,
    renormalise: bool,
    rows: usize,
    width: usize,
}

struct Inputs {
    logits: Vec<f32>,
    x: Vec<f32>,
    /// Of every expert, of every part.
    weights: Vec<Vec<u8>>,
}

impl Mixture {
    fn inputs(&self) -> Inputs {
        let random = &mut Random::new((self.rows * 1009 + self.experts * 31 + self.width) as u64);
        // Of few values, so that some are equal.
        let logits = (0..self.rows * self.experts).map(|_| random.below(9) as f32 / 2.0 - 2.0).collect();
        let x = rounded_for(self.parts.iter().map(|part| part.0), random.normals(self.rows * self.width));
        let parts = self.parts.iter().cycle().take(self.parts.len() * self.experts);
        let weights = parts.map(|&(dtype, outputs)| weight_bytes(random, dtype, outputs, self.width)).collect();
        Inputs { logits, x, weights }
    }

    fn weights<'a>(&self, bytes: &'a [Vec<u8>]) -> Vec<Weight<'a>> {
        let parts = bytes.iter().zip(self.parts.iter().cycle());
        parts
            .map(|(bytes, &(dtype, rows))| Weight { dtype, rows, cols: self.width, bytes, run_as: dtype.native() })
            .collect()
    }

    fn outputs(&self) -> usize {
        if self.parts.is_empty() { self.width } else { self.parts.iter().map(|part| part.1).sum() }
    }

    fn run_on<B: Backend>(&self, b: &mut B, logits: &[f32], x: &[f32], weights: &[Weight<'_>]) -> Vec<f32> {
        let (width, outputs) = (self.width, self.outputs());
        let rows = x.len() / width;
        let slots = rows * self.per_row;
        let (logits, x) = (upload(b, logits, self.experts), upload(b, x, width));
        let mut routing = b.routing(self.experts, self.per_row, rows).unwrap();
        let (mut sent, mut out) = (b.buffer(slots, width).unwrap(), b.buffer(rows, outputs).unwrap());
        b.route(&mut routing, &logits, self.renormalise, rows);
        b.dispatch(&mut sent, &x, &routing);
        if !weights.is_empty() {
            let matrix = b.matrix(weights).unwrap();
            let mut made = b.buffer(slots, outputs).unwrap();
            b.expert_linear(&mut made, &sent, &matrix, &routing);
            sent = made;
        }
        b.combine(&mut out, &sent, &routing);
        b.read(&out, rows, outputs).to_vec()
    }
}

impl Case for Mixture {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &mut B) -> Vec<f32> {
        let Inputs { logits, x, weights } = self.inputs();
        self.run_on(b, &logits, &x, &self.weights(&weights))
    }
}

#[test]
fn routing_there_and_back() {
    for (experts, per_row) in EXPERTS {
        for rows in ROWS {
            for (width, renormalise) in [(1, true), (17, false), (576, true)] {
                let case = Mixture { parts: vec![], experts, per_row, renormalise, rows, width };
                check_op(&case, Tolerance::EXACT);
            }
        }
    }
}

/// [`check_op`] for products.
fn check_products(case: &Mixture) {
    let (activations, on_cuda) = products_on_cuda(case.parts.iter().map(|part| part.0));
    check_on_cpu(case, Tolerance::EXACT);
    check_on_cuda(case, activations, on_cuda);
}

#[test]
fn products_of_every_type() {
    for dtype in DType::ALL {
        let width = 2 * dtype.block_len().max(16);
        for (experts, per_row) in [(4, 2), (9, 4)] {
            for rows in ROWS {
                let parts = vec![(dtype, 17), (dtype, 15)];
                let case = Mixture { parts, experts, per_row, renormalise: true, rows, width };
                check_products(&case);
            }
        }
    }
}

/// Tiles of up to 128 rows of one expert, of which some have none.
#[test]
fn products_of_many_rows_on_cuda() {
    use DType::*;
    for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K] {
        let width = 2 * dtype.block_len().max(48);
        for (experts, per_row, rows) in [(1, 1, 131), (3, 1, 257), (40, 1, 20)] {
            let parts = vec![(dtype, 65), (dtype, 3)];
            let case = Mixture { parts, experts, per_row, renormalise: false, rows, width };
            let (activations, on_cuda) = products_on_cuda(case.parts.iter().map(|part| part.0));
            check_on_cuda(&case, activations, on_cuda);
        }
    }
}

#[test]
fn products_of_parts_with_different_types() {
    let parts = vec![(DType::Q4_K, 16), (DType::Q6_K, 5), (DType::F16, 32)];
    check_products(&Mixture { parts, experts: 6, per_row: 2, renormalise: false, rows: 33, width: 512 });
}

/// Those of one expert then begin anywhere in memory.
#[test]
fn products_of_experts_that_are_not_alike() {
    let case = Mixture {
        parts: vec![(DType::Q8_0, 17), (DType::Q4_K, 3)],
        experts: 5,
        per_row: 2,
        renormalise: true,
        rows: 20,
        width: 256,
    };
    let Inputs { logits, x, weights: bytes } = case.inputs();
    let mut weights = case.weights(&bytes);
    // One is Q6_K where its fellows are Q4_K.
    let other = weight_bytes(&mut Random::new(5), DType::Q6_K, 3, case.width);
    weights[5] = Weight { dtype: DType::Q6_K, run_as: DType::Q6_K, bytes: &other, ..weights[5] };
    let want = case.run_on(&mut reference(Activations::Int8), &logits, &x, &weights);
    for mut backend in cuda_backends() {
        let got = case.run_on(&mut backend, &logits, &x, &weights);
        assert_eq!(backend.failure(), None);
        assert_bits("experts of two kinds", &got, &want);
    }
}

/// The definition, said with the products of single matrices.
#[test]
fn a_mixture_is_the_weighted_sum_of_its_experts() {
    for dtype in [DType::F32, DType::Q8_0] {
        let case = Mixture { parts: vec![(dtype, 24)], experts: 5, per_row: 3, renormalise: true, rows: 9, width: 64 };
        let Inputs { logits, x, weights } = case.inputs();
        let got = case.run(&mut reference(Activations::Int8));
        let b = &mut reference(Activations::Int8);
        for (row, (logits, x)) in logits.chunks(case.experts).zip(x.chunks(case.width)).enumerate() {
            let mut choices = vec![Choice::default(); case.per_row];
            route(&mut choices, logits, case.renormalise);
            let mut want = vec![0.0; case.outputs()];
            for Choice { expert, weight } in choices {
                let matrix = b.matrix(&case.weights(&weights)[expert as usize..][..1]).unwrap();
                let (x, mut made) = (upload(b, x, case.width), b.buffer(1, case.outputs()).unwrap());
                b.linear(&mut made, &x, &matrix, None, 1);
                want.iter_mut().zip(b.read(&made, 1, case.outputs())).for_each(|(want, made)| *want += weight * made);
            }
            assert_bits(&format!("{dtype:?} row {row}"), &got[row * case.outputs()..][..case.outputs()], &want);
        }
    }
}

/// Who else is in the step does not touch a bit.
#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    for dtype in [DType::F32, DType::BF16, DType::Q4_0, DType::Q6_K] {
        let case = Mixture {
            parts: vec![(dtype, 40), (dtype, 40)],
            experts: 8,
            per_row: 3,
            renormalise: false,
            rows: 53,
            width: 256,
        };
        let Inputs { logits, x, weights } = case.inputs();
        let weights = case.weights(&weights);
        for isa in Isa::available() {
            let together = case.run_on(&mut cpu(isa, 3), &logits, &x, &weights);
            for row in [0, 1, 8, 30, 52] {
                let logits = &logits[row * case.experts..][..case.experts];
                let x = &x[row * case.width..][..case.width];
                let alone = case.run_on(&mut cpu(isa, 1), logits, x, &weights);
                assert_bits(&format!("{dtype:?} row {row}"), &alone, &together[row * 80..][..80]);
            }
        }
        for mut cuda in cuda_backends() {
            let together = case.run_on(&mut cuda, &logits, &x, &weights);
            for row in [0, 1, 8, 30, 52] {
                let logits = &logits[row * case.experts..][..case.experts];
                let alone = case.run_on(&mut cuda, logits, &x[row * case.width..][..case.width], &weights);
                assert_bits(&format!("{dtype:?} row {row} on CUDA"), &alone, &together[row * 80..][..80]);
            }
        }
    }
}

#[test]
fn routing_beyond_reason_is_refused() {
    fn check<B: Backend>(b: &mut B) {
        for (experts, per_row, rows) in [(4, 5, 1), (4, 0, 1), (1 << 16, 1 << 16, usize::MAX)] {
            assert!(b.routing(experts, per_row, rows).is_err(), "{per_row} of {experts}, {rows} rows");
        }
    }
    check(&mut reference(Activations::F32));
    check(&mut cpu(Isa::best(), 1));
    cuda_backends().iter_mut().for_each(check);
}
