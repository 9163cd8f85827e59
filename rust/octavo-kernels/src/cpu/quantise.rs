//! Activations in int8: 32 neighbours of a row share a scale.
//!
//! Laid out for the products: rows in groups of 8, and within a group block after block, each with all 8 rows side by
//! side. So a product that walks the inputs with a group of rows reads one stream.

use super::format::BLOCK;
use super::isa::Isa;
use super::pool::SharedSlice;
use super::vector::{Kernel, Vector};
use crate::{BackendError, Result};

/// Rows that lie side by side.
pub(crate) const GROUP: usize = 8;

/// 32 neighbours of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Block {
    /// Within ±127, 4 to a group, as [`Vector::splat_quad`] takes them.
    pub codes: [[i8; 4]; 8],
    /// `max |x| / 127`.
    pub scale: f32,
    /// `scale · Σ codes`: what a weight's minimum is multiplied with.
    pub scaled_sum: f32,
    /// `-Σ codes` of each half: what a weight's zero point is multiplied with.
    pub minus_sums: [i32; 2],
}

/// Scratch for the quantised activations of one product, taken once for the largest.
#[derive(Default)]
pub struct Activations {
    blocks: Vec<[Block; GROUP]>,
}

/// How many blocks of a group of rows make a task of about a microsecond.
const BLOCKS_PER_TASK: usize = 8;

impl Activations {
    /// Makes room for `(rows, inputs)`, if there is not enough.
    pub fn reserve(&mut self, rows: usize, inputs: usize) -> Result<()> {
        let want = rows.div_ceil(GROUP) * (inputs / BLOCK);
        let more = want.saturating_sub(self.blocks.len());
        let bytes = want.saturating_mul(size_of::<[Block; GROUP]>());
        self.blocks.try_reserve_exact(more).map_err(|_| BackendError::OutOfMemory { what: "activations", bytes })?;
        self.blocks.resize(self.blocks.len() + more, [Block::default(); GROUP]);
        Ok(())
    }

    /// Room for `x`, whole rows of `inputs`, and what is to be done so that it is there.
    ///
    /// # Panics
    /// When there is no room.
    pub(crate) fn quantisation<'a>(&'a mut self, isa: Isa, x: &'a [f32], inputs: usize) -> Quantisation<'a> {
        Quantisation { x, ..self.room(isa, x.len() / inputs.max(1), inputs) }
    }

    /// Room for whole rows of `inputs` that are put there block by block.
    ///
    /// # Panics
    /// When there is no room.
    pub(crate) fn room(&mut self, isa: Isa, rows: usize, inputs: usize) -> Quantisation<'_> {
        let row_blocks = inputs / BLOCK;
        let blocks = SharedSlice::new(&mut self.blocks[..rows.div_ceil(GROUP) * row_blocks]);
        Quantisation { isa, x: &[], blocks, rows, row_blocks }
    }
}

/// The activations of one product, before and after they are quantised.
#[derive(Clone, Copy)]
pub(crate) struct Quantisation<'a> {
    isa: Isa,
    x: &'a [f32],
    blocks: SharedSlice<'a, [Block; GROUP]>,
    rows: usize,
    row_blocks: usize,
}

impl<'a> Quantisation<'a> {
    /// How many tasks there are.
    pub fn tasks(&self) -> usize {
        self.rows.div_ceil(GROUP) * self.chunks()
    }

    /// Of each group of rows.
    fn chunks(&self) -> usize {
        self.row_blocks.div_ceil(BLOCKS_PER_TASK)
    }

    /// Quantises a part. Rows that fill up the last group are left as they were.
    pub fn run(&self, task: usize) {
        let Self { isa, x, blocks, rows, row_blocks } = *self;
        let (group, begin) = (task / self.chunks(), task % self.chunks() * BLOCKS_PER_TASK);
        let len = BLOCKS_PER_TASK.min(row_blocks - begin);
        // SAFETY: tasks have different groups, or chunks that do not overlap.
        let blocks = unsafe { blocks.slice(group * row_blocks + begin, len) };
        for (in_group, row) in (group * GROUP..rows.min((group + 1) * GROUP)).enumerate() {
            let x = &x[(row * row_blocks + begin) * BLOCK..][..len * BLOCK];
            isa.run(Quantise { x, blocks, in_group });
        }
    }

    /// Puts a block of a row where the products read it.
    ///
    /// # Safety
    /// Nobody else writes this block of the row's group at the same time.
    #[inline(always)]
    pub unsafe fn put(&self, row: usize, number: usize, block: Block) {
        assert!(row < self.rows && number < self.row_blocks);
        // SAFETY: nobody writes it, as promised, and nobody reads it before all is written.
        let group = unsafe { self.blocks.slice(row / GROUP * self.row_blocks + number, 1) };
        group[0][row % GROUP] = block;
    }

    /// All blocks of a group of rows.
    ///
    /// # Safety
    /// All tasks are done.
    pub unsafe fn group(&self, group: usize) -> &'a [[Block; GROUP]] {
        // SAFETY: nobody writes any more.
        unsafe { self.blocks.part(group * self.row_blocks, self.row_blocks) }
    }
}

struct Quantise<'a> {
    x: &'a [f32],
    blocks: &'a mut [[Block; GROUP]],
    in_group: usize,
}

impl Kernel for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        for (x, blocks) in self.x.as_chunks::<BLOCK>().0.iter().zip(self.blocks) {
            blocks[self.in_group] = quantise_block(v, x);
        }
    }
}

#[inline(always)]
pub(super) fn quantise_block<V: Vector>(v: V, x: &[f32; BLOCK]) -> Block {
    let halves: &[[f32; 16]; 2] = x.as_chunks().0.try_into().expect("32 are twice 16");
    let halves = [v.load(&halves[0]), v.load(&halves[1])];
    let scale = v.max_lane(v.max(v.abs(halves[0]), v.abs(halves[1]))) / 127.0;
    let inverse = v.splat(if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale });
    let mut block = Block { scale, ..Block::default() };
    let codes: &mut [[i8; 16]; 2] =
        block.codes.as_flattened_mut().as_chunks_mut().0.try_into().expect("32 are twice 16");
    for half in 0..2 {
        // What is no number becomes -127; a largest one is rounded to 127.
        let code = v.round(v.max(v.mul(halves[half], inverse), v.splat(-127.0)));
        block.minus_sums[half] = -v.store_i8(code, &mut codes[half]);
    }
    block.scaled_sum = scale * -(block.minus_sums[0] + block.minus_sums[1]) as f32;
    block
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pool::Pool;
    use crate::reference::linear::Int8Row;

    /// Rows whose blocks have this largest magnitude, with everything between, and codes that are halves.
    fn row(seed: usize, inputs: usize) -> Vec<f32> {
        const LARGEST: [f32; 8] = [1.0, 0.0, 1e-45, 1e-43, 3e-38, 1e-30, 127.0, 3.4e38];
        let value = |i: usize| {
            let largest = LARGEST[(i / BLOCK + seed) % LARGEST.len()];
            let halves = ((i * 37 + seed * 11) % 255) as f32 / 2.0 - 63.5;
            if i % BLOCK == seed % BLOCK { -largest } else { halves / 127.0 * largest }
        };
        (0..inputs).map(value).collect()
    }

    #[test]
    fn codes_scales_and_sums_are_those_of_the_plain_loop() {
        let mut activations = Activations::default();
        for isa in Isa::available() {
            for (rows, inputs) in [(1, 32), (1, 4096), (3, 512), (8, 544), (9, 96), (17, 1024)] {
                for threads in [1, 3] {
                    let pool = &mut Pool::new(Some(threads)).unwrap();
                    let x: Vec<f32> = (0..rows).flat_map(|r| row(r, inputs)).collect();
                    activations.reserve(rows, inputs).unwrap();
                    let quantised = activations.quantisation(isa, &x, inputs);
                    pool.run(quantised.tasks(), &|task| quantised.run(task));
                    for (r, x) in x.chunks(inputs).enumerate() {
                        let want = Int8Row::quantise(x);
                        // SAFETY: the region is over.
                        for (b, got) in unsafe { quantised.group(r / GROUP) }.iter().enumerate() {
                            let codes = &want.codes[b * BLOCK..][..BLOCK];
                            let sum = |codes: &[i8]| codes.iter().map(|&code| i32::from(code)).sum::<i32>();
                            let what = format!("{} row {r} block {b} of ({rows}, {inputs})", isa.describe());
                            assert_eq!(got[r % GROUP].codes.as_flattened(), codes, "{what}");
                            assert_eq!(got[r % GROUP].scale, want.scales[b], "{what}");
                            assert_eq!(got[r % GROUP].scaled_sum, want.scales[b] * sum(codes) as f32, "{what}");
                            assert_eq!(got[r % GROUP].minus_sums, [-sum(&codes[..16]), -sum(&codes[16..])], "{what}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn room_is_taken_once_for_the_largest() {
        let mut activations = Activations::default();
        activations.reserve(9, 64).unwrap();
        assert_eq!(activations.blocks.len(), 4);
        activations.reserve(1, 96).unwrap();
        assert_eq!(activations.blocks.len(), 4);
        assert!(matches!(activations.reserve(usize::MAX / 2, 64), Err(BackendError::OutOfMemory { .. })));
    }
}
