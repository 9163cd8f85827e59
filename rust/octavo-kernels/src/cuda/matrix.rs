//! Weights on the device, as they are stored: rows one after another, decoded by the kernels.

use super::device::{Device, Memory};
use super::driver::Address;
use crate::{BackendError, DType, Result, Weight, convert};

/// A matrix of outputs by inputs.
pub struct Matrix {
    memory: Memory,
    /// As they were handed over.
    parts: Vec<Part>,
    /// Neighbouring parts of one type, as one.
    runs: Vec<Part>,
    outputs: usize,
    inputs: usize,
}

/// Some of a matrix's outputs, of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// What they are.
    pub dtype: DType,
    /// How many.
    pub outputs: usize,
    /// The number of the first among all of the matrix.
    pub first_output: usize,
    /// The byte at which they begin.
    pub first_byte: usize,
    /// How many bytes they are.
    pub bytes: usize,
}

/// Parts of another type than the one before begin at multiples of this.
const ALIGNMENT: usize = 256;
/// How many bytes are converted at a time.
const PIECE_BYTES: usize = 16 << 20;

impl Matrix {
    /// Takes `weights`, whose outputs follow one another.
    pub fn upload(device: &Device, weights: &[Weight<'_>]) -> Result<Self> {
        let parts = lay_out(weights)?;
        let (Some(last), Some(inputs)) = (parts.last(), weights.first().map(|weight| weight.cols)) else {
            return Err(BackendError::BadWeight("a matrix without outputs".into()));
        };
        // Kernels read 16 bytes at a time, to the end.
        let memory = device.take("a matrix", (last.first_byte + last.bytes).next_multiple_of(16))?;
        for (number, (weight, part)) in weights.iter().zip(&parts).enumerate() {
            upload_part(device, memory.offset(part.first_byte), number, weight)?;
        }
        Ok(Self { memory, runs: join(&parts), outputs: last.first_output + last.outputs, inputs, parts })
    }

    /// Outputs.
    pub fn outputs(&self) -> usize {
        self.outputs
    }
    /// Inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }
    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }
    /// Outputs of one type each, in order.
    pub fn runs(&self) -> &[Part] {
        &self.runs
    }
    /// Where a part or a run begins.
    pub fn at(&self, part: &Part) -> Address {
        self.memory.offset(part.first_byte)
    }

    /// The matrix as those of `experts`, one after another: what one of them is made of, and from each to the next how many
    /// bytes. `None` where they are not all alike.
    pub fn of_experts(&self, experts: usize) -> Option<(Vec<Part>, usize)> {
        let each = self.parts.len() / experts;
        let first = &self.parts[..each];
        let stride = self.parts.get(each).map_or(0, |part| part.first_byte);
        let outputs = self.outputs / experts;
        let alike = self.parts.chunks(each).enumerate().all(|(expert, parts)| {
            parts.iter().zip(first).all(|(part, first)| {
                let (first_output, first_byte) = (expert * outputs, expert * stride);
                let moved = Part {
                    first_output: first.first_output + first_output,
                    first_byte: first.first_byte + first_byte,
                    ..*first
                };
                *part == moved
            })
        });
        alike.then(|| (join(first), stride))
    }

    /// What expert number `expert` of `experts` is made of; outputs count from its own first.
    pub fn of_expert(&self, expert: usize, experts: usize) -> Vec<Part> {
        let each = self.parts.len() / experts;
        let mut parts = self.parts[expert * each..][..each].to_vec();
        parts.iter_mut().for_each(|part| part.first_output -= expert * (self.outputs / experts));
        join(&parts)
    }
}

fn lay_out(weights: &[Weight<'_>]) -> Result<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::with_capacity(weights.len());
    for weight in weights {
        convert::check(weight)?;
        if weight.cols != weights[0].cols {
            let (one, other) = (weights[0].cols, weight.cols);
            return Err(BackendError::BadWeight(format!("parts of one matrix have {one} and {other} inputs")));
        }
        let (dtype, outputs) = (weight.run_as, weight.rows);
        let bytes = dtype.row_bytes(weight.cols).and_then(|bytes| bytes.checked_mul(outputs));
        let bytes = bytes.ok_or(BackendError::OutOfMemory { what: "a matrix", bytes: usize::MAX })?;
        let (first_output, first_byte) = match parts.last() {
            None => (0, 0),
            Some(last) => {
                let end = last.first_byte + last.bytes;
                let aligned = if last.dtype == dtype { end } else { end.next_multiple_of(ALIGNMENT) };
                (last.first_output + last.outputs, aligned)
            }
        };
        parts.push(Part { dtype, outputs, first_output, first_byte, bytes });
    }
    Ok(parts)
}

/// Neighbours of one type as one.
fn join(parts: &[Part]) -> Vec<Part> {
    let mut runs: Vec<Part> = Vec::new();
    for part in parts {
        match runs.last_mut() {
            Some(run) if run.dtype == part.dtype && run.first_byte + run.bytes == part.first_byte => {
                run.outputs += part.outputs;
                run.bytes += part.bytes;
            }
            _ => runs.push(*part),
        }
    }
    runs
}

/// Uploads a weight as the type that it is run as, a piece at a time where it has to be converted.
fn upload_part(device: &Device, to: Address, number: usize, weight: &Weight<'_>) -> Result<()> {
    if weight.dtype == weight.run_as {
        return device.driver().upload(to, weight.bytes);
    }
    let row_bytes = weight.run_as.row_bytes(weight.cols).expect("checked: whole blocks");
    let rows = (PIECE_BYTES / row_bytes).max(1);
    for first in (0..weight.rows).step_by(rows) {
        let piece = convert::rows_to_run(weight, first, rows).map_err(|row| BackendError::OutOfRange {
            part: number,
            row,
            run_as: weight.run_as,
        })?;
        device.driver().upload(to + (first * row_bytes) as Address, &piece)?;
    }
    Ok(())
}
