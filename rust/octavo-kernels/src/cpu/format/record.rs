//! Codes and their scales side by side. A product reads a record after the other, and a core sees one stream: two would be
//! fetched from memory one tenth slower.

use super::{Codes, Scales};
use crate::cpu::memory::Plain;

/// Neighbouring blocks of 16 outputs with their scales, in whole lines of the cache.
pub(crate) trait Record<C: 'static, S: 'static>: Plain {
    /// Blocks in it.
    const BLOCKS: usize;
    /// Scales, and the codes of the blocks that they cover.
    fn units(&self) -> impl Iterator<Item = (&S, &[C])>;
    /// The same, to write.
    fn units_mut(&mut self) -> impl Iterator<Item = (&mut S, &mut [C])>;
}

/// `UNITS` times scales that cover `BLOCKS` blocks.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Side<C, S, const BLOCKS: usize, const UNITS: usize> {
    codes: [[C; BLOCKS]; UNITS],
    scales: [S; UNITS],
}

/// How many of them make whole lines.
pub(super) const fn units<S>() -> usize {
    if size_of::<S>().is_multiple_of(64) { 1 } else { 2 }
}

impl<C: Codes, S: Scales, const BLOCKS: usize, const UNITS: usize> Side<C, S, BLOCKS, UNITS> {
    const IS_WHOLE_LINES: () =
        assert!(size_of::<Self>() == UNITS * (BLOCKS * size_of::<C>() + size_of::<S>()) && BLOCKS == S::BLOCKS);
}

// SAFETY: all of its fields are, and together they fill it, which is asserted where it is used.
unsafe impl<C: Codes, S: Scales, const BLOCKS: usize, const UNITS: usize> Plain for Side<C, S, BLOCKS, UNITS> {}

impl<C: Codes, S: Scales, const BLOCKS: usize, const UNITS: usize> Record<C, S> for Side<C, S, BLOCKS, UNITS> {
    const BLOCKS: usize = BLOCKS * UNITS;

    #[inline(always)]
    fn units(&self) -> impl Iterator<Item = (&S, &[C])> {
        const { Self::IS_WHOLE_LINES }
        self.scales.iter().zip(&self.codes).map(|(scales, codes)| (scales, codes.as_slice()))
    }

    fn units_mut(&mut self) -> impl Iterator<Item = (&mut S, &mut [C])> {
        const { Self::IS_WHOLE_LINES }
        self.scales.iter_mut().zip(&mut self.codes).map(|(scales, codes)| (scales, codes.as_mut_slice()))
    }
}
