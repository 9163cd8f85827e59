//! Memory: zeroed, aligned, in huge pages where there are some.

use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};

use crate::{BackendError, Result, prefetch};

/// From this size on, memory begins at a multiple of it, and the system is asked for pages of this size: a product that
/// streams a gigabyte of weights would otherwise look up a page every 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

/// Which pages memory is to be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Huge ones: it is written once and read for ever.
    Huge,
    /// Small ones: it is taken while somebody waits. A virtual machine has often returned what is free in large pieces to its
    /// host, and then waits some milliseconds for every huge page; what is read in pieces as small as these gains nothing by
    /// them.
    Small,
}

/// Zeroed bytes that begin at a multiple of 64 (and much more). Pages are taken when first touched.
pub struct Memory {
    /// Nobody else has a `Memory` that overlaps with this one.
    map: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

impl Memory {
    /// Takes `len` bytes for `what`.
    pub fn new(what: &'static str, len: usize, pages: Pages) -> Result<Self> {
        let slack = if len >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        let map = len.checked_add(slack).and_then(|all| MmapMut::map_anon(all.max(1)).ok());
        let map = map.ok_or(BackendError::OutOfMemory { what, bytes: len })?;
        let start = if slack > 0 { map.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        #[cfg(target_os = "linux")]
        if slack > 0 {
            use memmap2::Advice;
            let advice = if pages == Pages::Huge { Advice::HugePage } else { Advice::NoHugePage };
            // Speed only: a kernel without huge pages says no.
            let _ = map.advise_range(advice, start, len);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = pages; // others choose by themselves
        Ok(Self { map: Arc::new(map.into()), start, len })
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: inside of the map, which lives as long, and whoever writes it has this `Memory` to himself.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.start), self.len) }
    }

    /// All of it, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; nobody else has a part of it.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(self.start), self.len) }
    }

    /// Takes the first `len` bytes off; `None`: there are not so many.
    fn split_off_front(&mut self, len: usize) -> Option<Self> {
        let rest = self.len.checked_sub(len)?;
        let front = Self { map: self.map.clone(), start: self.start, len };
        (self.start, self.len) = (self.start + len, rest);
        Some(front)
    }
}

/// Memory for what is kept as long as each other, side by side: most matrices of a small model are smaller than a huge page.
#[derive(Default)]
pub struct Arena {
    rest: Option<Memory>,
}

/// What an arena takes at once, at least. What nothing is written to costs nothing.
const ARENA: usize = 32 << 20;

impl Arena {
    /// Takes `len` bytes for `what`, which come back when all that was taken is dropped.
    pub fn take(&mut self, what: &'static str, len: usize) -> Result<Memory> {
        let room = len.checked_next_multiple_of(64).ok_or(BackendError::OutOfMemory { what, bytes: len })?;
        let memory = match self.rest.as_mut().and_then(|rest| rest.split_off_front(room)) {
            Some(memory) => memory,
            None if room >= ARENA => Memory::new(what, room, Pages::Huge)?,
            None => {
                let mut more = Memory::new(what, ARENA, Pages::Huge)?;
                let memory = more.split_off_front(room).expect("it is larger");
                self.rest = Some(more);
                memory
            }
        };
        Ok(Memory { len, ..memory })
    }
}

/// Types of which any bytes are a value.
///
/// # Safety
/// No padding, no pointers, no bit pattern that is forbidden.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: a number.
unsafe impl Plain for u8 {}
// SAFETY: a number.
unsafe impl Plain for i8 {}
// SAFETY: a number.
unsafe impl Plain for i16 {}
// SAFETY: a number.
unsafe impl Plain for f32 {}
// SAFETY: a number around a u16.
unsafe impl Plain for half::f16 {}
// SAFETY: a number around a u16.
unsafe impl Plain for half::bf16 {}
// SAFETY: an array has no padding of its own.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// `bytes` as values. Panics unless they are aligned and a whole number of values.
#[inline(always)]
pub(crate) fn cast<T: Plain>(bytes: &[u8]) -> &[T] {
    assert!(bytes.len().is_multiple_of(size_of::<T>()) && bytes.as_ptr().cast::<T>().is_aligned());
    // SAFETY: length and alignment were checked on the line above; any bytes are a `T`.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// `bytes` as values, to write. Panics unless they are aligned and a whole number of values.
pub(crate) fn cast_mut<T: Plain>(bytes: &mut [u8]) -> &mut [T] {
    recast_mut(bytes)
}

/// Values as other values of the same bytes, to write. Panics unless they are aligned and a whole number.
#[inline(always)]
pub(crate) fn recast_mut<S: Plain, T: Plain>(values: &mut [S]) -> &mut [T] {
    let bytes = size_of_val(values);
    assert!(bytes.is_multiple_of(size_of::<T>()) && values.as_ptr().cast::<T>().is_aligned());
    // SAFETY: length and alignment were checked on the line above; any bytes are a `T`, and a `T`'s are an `S`.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), bytes / size_of::<T>()) }
}

/// Asks for the lines of cache from `address` on. A hint: any address will do.
#[inline(always)]
pub(crate) fn prefetch_bytes(address: usize, bytes: usize) {
    for offset in (0..bytes).step_by(64) {
        prefetch::line(std::ptr::without_provenance(address.wrapping_add(offset)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_aligned_and_as_long_as_asked() {
        for len in [0, 1, 64, 4097, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 3 * HUGE_PAGE + 17] {
            for pages in [Pages::Huge, Pages::Small] {
                let mut memory = Memory::new("a test", len, pages).unwrap();
                assert_eq!(memory.bytes().len(), len);
                assert_eq!(memory.bytes().as_ptr().align_offset(64), 0);
                assert!(memory.bytes().iter().all(|&b| b == 0));
                memory.bytes_mut().fill(1);
            }
        }
        assert!(matches!(Memory::new("a test", usize::MAX, Pages::Huge), Err(BackendError::OutOfMemory { .. })));
    }

    #[test]
    fn what_an_arena_gives_does_not_overlap_and_outlives_it() {
        let mut arena = Arena::default();
        let lens = [1, 64, 0, 4097, HUGE_PAGE + 3, ARENA - 64, ARENA, ARENA + 1, 100];
        let mut all: Vec<Memory> = lens.iter().map(|&len| arena.take("a test", len).unwrap()).collect();
        assert!(matches!(arena.take("a test", usize::MAX), Err(BackendError::OutOfMemory { .. })));
        drop(arena);
        for (i, (memory, len)) in all.iter_mut().zip(lens).enumerate() {
            assert_eq!((memory.bytes().len(), memory.bytes().as_ptr().align_offset(64)), (len, 0));
            assert!(memory.bytes().iter().all(|&b| b == 0), "{i} is somebody else's");
            memory.bytes_mut().fill(1 + i as u8);
        }
        assert!(all.iter().enumerate().all(|(i, memory)| memory.bytes().iter().all(|&b| b == 1 + i as u8)));
    }
}
