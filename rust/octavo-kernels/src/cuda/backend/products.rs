//! The launches of products.

use super::{Buffer, CudaBackend, Routing, Vector};
use crate::cuda::device::columns;
use crate::cuda::driver::Address;
use crate::cuda::linear::Form;
use crate::cuda::matrix::{Matrix, Part};

/// Which rows are multiplied, and where the result goes.
#[derive(Clone, Copy)]
struct Rows {
    out: Address,
    /// Outputs from one row to the next.
    stride: usize,
    x: Address,
    inputs: usize,
    rows: usize,
}

impl CudaBackend {
    /// [`Backend::linear`]: one launch for every run of outputs of one type, after what has to be done to `x` for it.
    pub(super) fn products(&self, out: &Buffer, x: &Buffer, matrix: &Matrix, bias: Option<&Vector>, rows: usize) {
        let (stride, inputs) = (matrix.outputs(), matrix.inputs());
        let all = Rows { out: out.rows(rows, stride), stride, x: x.rows(rows, inputs), inputs, rows };
        let mut ready = None;
        for run in matrix.runs() {
            let form = Form::of(run.dtype, rows, inputs);
            let x = self.rounded(&all, &form, &mut ready);
            let first_byte = 4 * run.first_output as Address;
            let [tile_rows, tile_outputs] = form.tile;
            self.device
                .launch(form.kernel, [rows.div_ceil(tile_rows), run.outputs.div_ceil(tile_outputs)], form.threads)
                .shared(form.shared_bytes)
                .pointer(all.out + first_byte)
                .int(stride)
                .pointer(x)
                .pointer(matrix.at(run))
                .pointer_if(bias.map(|bias| bias.memory.at() + first_byte))
                .int(rows)
                .int(run.outputs)
                .int(inputs)
                .go();
        }
    }

    /// [`Backend::expert_linear`]: a launch for every run of outputs of one type, for all experts where they are alike.
    pub(super) fn products_of_experts(&self, out: &Buffer, x: &Buffer, matrix: &Matrix, routing: &Routing) {
        let (experts, slots) = (routing.experts, routing.rows * routing.per_row);
        let (stride, inputs) = (matrix.outputs() / experts, matrix.inputs());
        let all = Rows { out: out.rows(slots, stride), stride, x: x.rows(slots, inputs), inputs, rows: slots };
        let mut ready = None;
        match matrix.of_experts(experts) {
            Some((runs, expert_bytes)) => {
                for run in &runs {
                    self.expert_products(&all, matrix, run, expert_bytes, (0, experts), routing, &mut ready);
                }
            }
            None => {
                for expert in 0..experts {
                    for run in &matrix.of_expert(expert, experts) {
                        self.expert_products(&all, matrix, run, 0, (expert, 1), routing, &mut ready);
                    }
                }
            }
        }
    }

    /// One launch for one run of the weights of `experts` experts from `first` on, `expert_bytes` from one to the next.
    #[allow(clippy::too_many_arguments)]
    fn expert_products(
        &self,
        all: &Rows,
        matrix: &Matrix,
        run: &Part,
        expert_bytes: usize,
        (first, experts): (usize, usize),
        routing: &Routing,
        ready: &mut Option<&'static str>,
    ) {
        // An expert gets a row once at most; beyond that, what it gets on average chooses among forms of the same bits.
        let of_expert = if routing.rows <= 16 { routing.rows } else { (all.rows / routing.experts).max(17) };
        let form = Form::of(run.dtype, of_expert, all.inputs);
        let x = self.rounded(all, &form, ready);
        let [tile_rows, tile_outputs] = form.tile;
        let most_tiles = all.rows / tile_rows + experts.min(all.rows);
        // Kernels want the weights at a multiple of 16.
        let (weights, skip) = (matrix.at(run) & !15, matrix.at(run) as usize & 15);
        self.device
            .launch(format!("expert_{}", form.kernel), [most_tiles, run.outputs.div_ceil(tile_outputs)], form.threads)
            .shared(form.shared_bytes)
            .pointer(all.out + 4 * run.first_output as Address)
            .int(all.stride)
            .pointer(x)
            .int(all.rows)
            .pointer(weights)
            .int(skip)
            .int(expert_bytes)
            .pointer(routing.first_slots.at())
            .int(first)
            .int(experts)
            .int(run.outputs)
            .int(all.inputs)
            .go();
    }

    /// The rows as `form` takes them. `ready`: the kernel that has made them so before.
    fn rounded(&self, all: &Rows, form: &Form, ready: &mut Option<&'static str>) -> Address {
        let Some(kernel) = form.rounds else { return all.x };
        if *ready != form.rounds {
            let (threads, blocks) = columns(all.inputs);
            let launch = self.device.launch(kernel, [all.rows, blocks], threads);
            launch.pointer(self.rounded.at()).pointer(all.x).int(all.rows).int(all.inputs).go();
            *ready = form.rounds;
        }
        self.rounded.at()
    }
}
