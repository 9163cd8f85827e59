//! Which kernel makes a product, and how it is launched. The choice between forms that differ in their bits hangs on the
//! weight alone, never on the rows: see `cu/README.md`.

use super::matrix::Matrix;
use crate::DType;

/// Outputs and rows of a block of the plain form.
pub const LINEAR_TILE: [usize; 2] = [32, 8];
/// Inputs that the two-byte forms sum before they add to the rest: `SLICE` in `cu/linear16.cu`.
const SLICE: usize = 256;
/// Shared memory that slices' sums may take; beyond, the slices are gone through in order.
const MOST_SHARED: usize = 96 << 10;

/// A kernel for a product and its launch; its parameters are the same in all forms.
pub struct Form {
    /// Its name.
    pub kernel: String,
    /// The kernel that rounds or quantises the activations first, if any.
    pub rounds: Option<&'static str>,
    /// Blocks.
    pub blocks: [usize; 2],
    /// Threads of a block.
    pub threads: usize,
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
}

impl Form {
    /// For `rows` rows and weights `(outputs, inputs)` of `dtype`.
    pub fn of(dtype: DType, rows: usize, outputs: usize, inputs: usize) -> Self {
        match rounds(dtype, inputs) {
            Some("quantise_rows") => Self {
                kernel: format!("linear8_{}", dtype.name()),
                rounds: Some("quantise_rows"),
                blocks: [outputs.div_ceil(8), rows.div_ceil(8)],
                threads: 64,
                shared_bytes: 0,
            },
            Some(rounds) => Self::with_tensor_cores(rounds, dtype.name(), rows, outputs, inputs),
            None => {
                let [outputs_of_block, rows_of_block] = LINEAR_TILE;
                Self {
                    kernel: format!("linear_{}", dtype.name()),
                    rounds: None,
                    blocks: [outputs.div_ceil(outputs_of_block), rows.div_ceil(rows_of_block)],
                    threads: outputs_of_block * rows_of_block,
                    shared_bytes: 0,
                }
            }
        }
    }

    fn with_tensor_cores(rounds: &'static str, dtype: &str, rows: usize, outputs: usize, inputs: usize) -> Self {
        let slice_bytes = 4 * 16 * rows.next_multiple_of(8);
        let few_bytes = inputs.div_ceil(SLICE) * slice_bytes;
        if rows <= 16 && few_bytes <= MOST_SHARED {
            let kernel = format!("linear_{}_{dtype}", rows.next_multiple_of(8));
            let blocks = [outputs.div_ceil(16), 1];
            return Self { kernel, rounds: Some(rounds), blocks, threads: 128, shared_bytes: few_bytes };
        }
        let (name, threads, m, n) = if rows <= 64 { ("64", 128, 64, 32) } else { ("many", 256, 128, 128) };
        Self {
            kernel: format!("linear_{name}_{dtype}"),
            rounds: Some(rounds),
            blocks: [rows.div_ceil(n), outputs.div_ceil(m)],
            threads,
            shared_bytes: 4 * 64 * (m + n),
        }
    }
}

/// The kernel that brings activations to what the best form for such weights takes, where there is one.
fn rounds(dtype: DType, inputs: usize) -> Option<&'static str> {
    match dtype {
        DType::F16 if inputs.is_multiple_of(8) => Some("round_F16"),
        DType::BF16 if inputs.is_multiple_of(8) => Some("round_BF16"),
        DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q8_0 | DType::Q4_K | DType::Q6_K => Some("quantise_rows"),
        _ => None,
    }
}

/// What `rows` rounded rows of inputs of `matrix` take.
pub fn rounded_bytes(matrix: &Matrix, rows: usize) -> usize {
    let any = matrix.runs().iter().any(|run| rounds(run.dtype, matrix.inputs()).is_some());
    // Two bytes each; codes with their scales are less.
    if any { 2 * rows * matrix.inputs() } else { 0 }
}
