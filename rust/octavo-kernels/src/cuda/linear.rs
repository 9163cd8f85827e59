//! Which kernel makes a product, and how it is launched. The choice between forms that differ in their bits hangs on the
//! weight alone, never on the rows: see `cu/README.md`.

use super::device::{Device, Memory};
use super::driver::Address;
use super::matrix::Matrix;
use crate::{DType, Result};

/// Inputs that the two-byte forms sum before they add to the rest: `SLICE` in `cu/linear16.cu`.
const SLICE: usize = 256;
/// Shared memory that slices' sums may take; beyond, the slices are gone through in order.
const MOST_SHARED: usize = 96 << 10;

/// A kernel for a product and its launch; its parameters are the same in all forms.
pub struct Form {
    /// Its name. That of experts has another prefix.
    pub kernel: String,
    /// The kernel that rounds or quantises the activations first, if any.
    pub rounds: Option<&'static str>,
    /// Rows of a block, and outputs.
    pub tile: [usize; 2],
    /// Threads of a block.
    pub threads: usize,
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
}

impl Form {
    /// For about `rows` rows and weights of `dtype` with so many inputs. Up to 16 rows it is for no more than those.
    pub fn of(dtype: DType, rows: usize, inputs: usize) -> Self {
        let rounds = rounds(dtype, inputs);
        let dtype_name = dtype.name();
        match rounds {
            Some("quantise_rows") => Self::of_bytes(dtype, rows),
            Some(_) => Self { rounds, ..Self::of_halves(dtype_name, rows, inputs) },
            None => {
                let kernel = format!("linear_{dtype_name}");
                Self { kernel, rounds: None, tile: [8, 32], threads: 256, shared_bytes: 0 }
            }
        }
    }

    fn of_halves(dtype: &str, rows: usize, inputs: usize) -> Self {
        let few = rows.next_multiple_of(8);
        let few_bytes = inputs.div_ceil(SLICE) * 4 * 16 * few;
        if rows <= 16 && few_bytes <= MOST_SHARED {
            let kernel = format!("linear_{few}_{dtype}");
            return Self { kernel, rounds: None, tile: [few, 16], threads: 128, shared_bytes: few_bytes };
        }
        let (form, tile, threads) = if rows <= 64 { ("64", [32, 64], 128) } else { ("many", [128, 128], 256) };
        let shared_bytes = 4 * 64 * (tile[0] + tile[1]);
        Self { kernel: format!("linear_{form}_{dtype}"), rounds: None, tile, threads, shared_bytes }
    }

    fn of_bytes(dtype: DType, rows: usize) -> Self {
        let (form, tile, threads, stages) = match rows {
            0..=8 => ("", [8, 8], 64, 0),
            9..=64 => ("64_", [32, 32], 64, 6),
            _ => ("many_", [128, 64], 128, 2),
        };
        let [rows, outputs] = tile;
        // In order: weights as they are stored, a run for two stages; codes of one stage; codes of rows; scales and minimums.
        let run_bytes = 16 * ((256 / dtype.block_len() * dtype.block_bytes() + 29) / 16 + 1);
        let weights_bytes = stages / 2 * outputs * run_bytes + 128 * outputs + 16 * 3 * outputs;
        let shared_bytes = if stages == 0 { 0 } else { weights_bytes + stages * rows * (128 + 2 * 16) };
        let kernel = format!("linear8_{form}{}", dtype.name());
        Self { kernel, rounds: Some("quantise_rows"), tile, threads, shared_bytes }
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

/// Activations as [`Form::rounds`] leaves them: room for the most rows of the widest matrix.
pub struct Rounded {
    memory: Option<Memory>,
    rows: usize,
    inputs: usize,
}

impl Rounded {
    /// For steps of up to `rows` rows, as soon as there is a matrix.
    pub fn new(rows: usize) -> Self {
        Self { memory: None, rows, inputs: 0 }
    }

    /// Makes room for rows of `matrix`'s inputs.
    pub fn make_room_for(&mut self, device: &Device, matrix: &Matrix) -> Result<()> {
        let rounds = matrix.runs().iter().any(|run| rounds(run.dtype, matrix.inputs()).is_some());
        let inputs = if rounds { matrix.inputs().max(self.inputs) } else { self.inputs };
        self.make_room(device, self.rows, inputs)
    }

    /// Makes room for as many rows.
    pub fn make_room_for_rows(&mut self, device: &Device, rows: usize) -> Result<()> {
        self.make_room(device, rows.max(self.rows), self.inputs)
    }

    fn make_room(&mut self, device: &Device, rows: usize, inputs: usize) -> Result<()> {
        if (rows, inputs) != (self.rows, self.inputs) {
            (self.rows, self.inputs) = (rows, inputs);
            // The old room first: the two need not fit together.
            self.memory = None;
        }
        if self.memory.is_none() && inputs > 0 {
            // Two bytes each; codes with their scales are less.
            self.memory = Some(device.take_array("rounded activations", 2, &[rows, inputs])?);
        }
        Ok(())
    }

    /// Where they are.
    pub fn at(&self) -> Address {
        self.memory.as_ref().map_or(0, Memory::at)
    }
}
