//! Weights as the products want them: tiles of 16 outputs, packed once at load.
//!
//! ```text
//! matrix  one piece of memory: [part][tile]
//! tile    of a block type: [record of some blocks of 32 inputs: their codes, their scales], see `format`
//!         of a dense type: [input][16 outputs] in the stored type
//! ```
//! A product walks a tile from its start to its end. The last tile of a part is padded with zeroes. Nothing is rounded
//! beyond what [`Weight::run_as`] asks for: every value of that type can be had back, which is how [`Matrix::row`] serves an
//! embedding from the same memory. Types are converted tile by tile, so that a weight is never held twice.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};

use super::format::{BLOCK, Codes, Format, LANES, Record, Scales, with_format};
use super::memory::{Arena, Memory, Plain, cast, cast_mut};
use super::pool::Pool;
use crate::{BackendError, DType, Result, Weight, convert};

/// A packed weight, or several with equal inputs one after another.
pub struct Matrix {
    memory: Memory,
    pub(crate) parts: Vec<Part>,
    inputs: usize,
    outputs: usize,
    /// What was read after it when it was last used.
    pub(crate) successor: Arc<Successor>,
}

/// Where a matrix lies that is read after another one. A guess from the last time, and only ever asked for in advance.
#[derive(Debug, Default)]
pub(crate) struct Successor {
    start: AtomicUsize,
    /// Of one thread's share.
    share_bytes: AtomicUsize,
}

impl Successor {
    /// Notes that `matrix` is read, each thread's share beginning so many bytes after the one before.
    pub fn set(&self, matrix: &Matrix, share_bytes: usize) {
        self.start.store(matrix.address(0), Ordering::Relaxed);
        self.share_bytes.store(share_bytes, Ordering::Relaxed);
    }

    /// Where a thread's share of it begins; `None` while nothing was read after.
    pub fn share(&self, thread: usize) -> Option<usize> {
        let start = self.start.load(Ordering::Relaxed);
        (start != 0).then(|| start.wrapping_add(thread.wrapping_mul(self.share_bytes.load(Ordering::Relaxed))))
    }
}

/// Where one weight of a matrix lies.
pub(crate) struct Part {
    pub dtype: DType,
    pub outputs: usize,
    /// The matrix's output that is this part's first.
    pub first_output: usize,
    pub tiles: usize,
    /// The matrix's tile that is this part's first.
    pub first_tile: usize,
    start: usize,
    tile_bytes: usize,
}

impl Matrix {
    /// Packs `parts` one after another, on all threads.
    pub fn pack(pool: &mut Pool, arena: &mut Arena, parts: &[Weight<'_>]) -> Result<Self> {
        let inputs = parts.first().map_or(0, |part| part.cols);
        let mut places = Vec::new();
        let (mut bytes, mut first_output, mut first_tile) = (0, 0, 0);
        for weight in parts {
            check(weight, inputs)?;
            let tiles = weight.rows.div_ceil(LANES);
            let tile_bytes = tile_bytes(weight.run_as, inputs);
            let (dtype, outputs) = (weight.run_as, weight.rows);
            places.push(Part { dtype, outputs, first_output, tiles, first_tile, start: bytes, tile_bytes });
            bytes += tiles * tile_bytes;
            first_output += outputs;
            first_tile += tiles;
        }
        let mut memory = arena.take("weights", bytes)?;
        for (number, (part, weight)) in places.iter().zip(parts).enumerate() {
            let bytes = &mut memory.bytes_mut()[part.start..][..part.tiles * part.tile_bytes];
            // The first row that cannot be converted; none: past the end.
            let bad_row = AtomicUsize::new(weight.rows);
            pool.run_pieces(bytes, part.tile_bytes, &|tile, bytes| {
                if let Err(row) = pack_tile(weight, tile, bytes) {
                    bad_row.fetch_min(row, Ordering::Relaxed);
                }
            });
            let row = bad_row.into_inner();
            if row < weight.rows {
                return Err(BackendError::OutOfRange { part: number, row, run_as: weight.run_as });
            }
        }
        Ok(Self { memory, parts: places, inputs, outputs: first_output, successor: Arc::default() })
    }

    /// Inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Outputs of all parts together.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Tiles of all parts together.
    pub fn tiles(&self) -> usize {
        self.parts.last().map_or(0, |part| part.first_tile + part.tiles)
    }

    /// Bytes that it occupies.
    pub fn bytes(&self) -> usize {
        self.memory.bytes().len()
    }

    /// Whether its product needs activations in int8.
    pub fn has_blocks(&self) -> bool {
        self.parts.iter().any(|part| !part.dtype.is_dense())
    }

    /// Whether that is all that it needs.
    pub(crate) fn is_all_blocks(&self) -> bool {
        self.parts.iter().all(|part| !part.dtype.is_dense())
    }

    /// A tile of a part of a block type. The last record may be for more inputs than there are.
    #[inline(always)]
    pub(crate) fn records<F: Format>(&self, part: &Part, tile: usize) -> &[F::Record] {
        cast(self.tile(part, tile))
    }

    /// A tile of a part of a dense type.
    #[inline(always)]
    pub(crate) fn dense<T: Plain>(&self, part: &Part, tile: usize) -> &[[T; LANES]] {
        cast(&self.tile(part, tile)[..self.inputs * LANES * size_of::<T>()])
    }

    /// Where tiles of a part begin and end.
    #[inline(always)]
    pub(crate) fn addresses(&self, part: &Part, tiles: Range<usize>) -> (usize, usize) {
        let start = self.memory.bytes().as_ptr().addr() + part.start;
        (start + tiles.start * part.tile_bytes, start + tiles.end * part.tile_bytes)
    }

    /// Where one of the matrix's tiles begins.
    pub(crate) fn address(&self, tile: usize) -> usize {
        let part = self.parts.iter().rev().find(|part| part.first_tile <= tile);
        part.map_or(0, |part| self.addresses(part, tile - part.first_tile..tile).0)
    }

    #[inline(always)]
    fn tile(&self, part: &Part, tile: usize) -> &[u8] {
        &self.memory.bytes()[part.start + tile * part.tile_bytes..][..part.tile_bytes]
    }

    /// Output `row`'s weights as f32, the very values that the file's bytes mean.
    ///
    /// # Panics
    /// When there is no such output, or `out` is not one value for each input.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.inputs);
        let part = self.parts.iter().find(|part| row - part.first_output < part.outputs);
        let part = part.unwrap_or_else(|| panic!("row {row} of {}", self.outputs));
        let (tile, lane) = ((row - part.first_output) / LANES, (row - part.first_output) % LANES);
        match part.dtype {
            DType::F32 => pick(self.dense(part, tile), lane, out, |x: f32| x),
            DType::F16 => pick(self.dense(part, tile), lane, out, f16::to_f32),
            DType::BF16 => pick(self.dense(part, tile), lane, out, bf16::to_f32),
            dtype => with_format!(dtype, F => self.block_row::<F>(part, tile, lane, out)),
        }
    }

    fn block_row<F: Format>(&self, part: &Part, tile: usize, lane: usize, out: &mut [f32]) {
        let units = self.records::<F>(part, tile).iter().flat_map(F::Record::units);
        let blocks =
            units.flat_map(|(scales, codes)| codes.iter().enumerate().map(move |(i, codes)| (scales, i, codes)));
        for ((scales, i, codes), out) in blocks.zip(out.chunks_exact_mut(BLOCK)) {
            let quads = codes.get(lane);
            for (j, out) in out.iter_mut().enumerate() {
                let (scale, minimum) = scales.get(lane, i, j / (BLOCK / 2));
                let code = i32::from(quads[j / 4].to_le_bytes()[j % 4]) - F::zero();
                let value = scale * code as f32;
                *out = if F::Scales::MINIMUMS { value + minimum } else { value };
            }
        }
    }
}

fn check(weight: &Weight<'_>, inputs: usize) -> Result<()> {
    convert::check(weight)?;
    if weight.cols != inputs {
        return Err(BackendError::BadWeight(format!("weights of {inputs} and {} inputs in one matrix", weight.cols)));
    }
    Ok(())
}

/// Bytes that a weight of this shape takes once it is packed, if its size can be said at all.
pub fn packed_bytes(dtype: DType, rows: usize, cols: usize) -> Option<usize> {
    dtype.row_bytes(cols)?;
    rows.div_ceil(LANES).checked_mul(tile_bytes(dtype, cols))
}

fn tile_bytes(dtype: DType, inputs: usize) -> usize {
    let bytes = if dtype.is_dense() {
        inputs * LANES * dtype.block_bytes()
    } else {
        with_format!(dtype, F => {
            type R = <F as Format>::Record;
            (inputs / BLOCK).div_ceil(R::BLOCKS) * size_of::<R>()
        })
    };
    bytes.next_multiple_of(64)
}

/// Packs one tile of `weight` into `bytes`, which are zeroes. The error is the row that cannot be converted.
fn pack_tile(weight: &Weight<'_>, tile: usize, bytes: &mut [u8]) -> Result<(), usize> {
    let first = tile * LANES;
    let converted;
    let rows = if weight.run_as == weight.dtype {
        &weight.bytes[first * (weight.bytes.len() / weight.rows)..]
    } else {
        converted = convert::rows_to_run(weight, first, LANES)?;
        &converted
    };
    let row_bytes = weight.run_as.row_bytes(weight.cols).expect("whole blocks");
    let rows = rows.chunks_exact(row_bytes).take(LANES).enumerate();
    match weight.run_as {
        DType::F32 => rows.for_each(|(lane, row)| spread::<4>(row, lane, bytes)),
        DType::F16 | DType::BF16 => rows.for_each(|(lane, row)| spread::<2>(row, lane, bytes)),
        dtype => with_format!(dtype, F => {
            let records = cast_mut(bytes);
            rows.for_each(|(lane, row)| pack_row::<F>(row, lane, records, dtype.block_bytes()));
        }),
    }
    Ok(())
}

fn pack_row<F: Format>(row: &[u8], lane: usize, records: &mut [F::Record], block_bytes: usize) {
    let units = records.iter_mut().flat_map(F::Record::units_mut);
    for (block, (scales, codes)) in row.chunks_exact(block_bytes).zip(units) {
        scales.put(lane, block);
        for (i, codes) in codes.iter_mut().enumerate() {
            codes.put(lane, F::quads(block, i));
        }
    }
}

/// Writes a row of values of `N` bytes into its lane. Both sides are little-endian memory.
fn spread<const N: usize>(row: &[u8], lane: usize, tile: &mut [u8]) {
    let (values, lanes) = (row.as_chunks::<N>().0, tile.as_chunks_mut::<N>().0);
    for (value, lanes) in values.iter().zip(lanes.as_chunks_mut::<LANES>().0) {
        lanes[lane] = *value;
    }
}

/// Reads a lane back.
fn pick<T: Plain>(tile: &[[T; LANES]], lane: usize, out: &mut [f32], to_f32: impl Fn(T) -> f32) {
    for (out, lanes) in out.iter_mut().zip(tile) {
        *out = to_f32(lanes[lane]);
    }
}

#[cfg(target_endian = "big")]
compile_error!("packed weights are little-endian, as in the files");
