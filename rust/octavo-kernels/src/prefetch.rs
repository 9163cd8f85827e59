//! Asks for memory before it is needed.
//!
//! Between two steps a model has read all of its weights, and nothing of what the engine keeps about requests is in the
//! caches any more. Looked up one by one, every line of it is waited for; asked for beforehand, many come at once.

use std::sync::Arc;

/// Bytes that come together.
const LINE: usize = 64;

/// Asks for all of `value`, but not for what it points to. A hint: it waits for nothing and changes nothing.
#[inline(always)]
pub fn prefetch<T: ?Sized>(value: &T) {
    let start = std::ptr::from_ref(value).cast::<u8>();
    let bytes = size_of_val(value);
    // A plain loop over a constant: all that is left of it is the instructions that ask.
    let mut offset = 0;
    while offset < bytes {
        line(start.wrapping_add(offset));
        offset += LINE;
    }
    if bytes > 0 {
        line(start.wrapping_add(bytes - 1));
    }
}

/// Asks for what cloning it or dropping a clone changes: the counts, which lie before the value.
#[inline(always)]
pub fn prefetch_counts<T: ?Sized>(shared: &Arc<T>) {
    line(Arc::as_ptr(shared).cast::<u8>().wrapping_sub(1));
}

/// Asks for the end of `values`, where the next one will go.
#[inline(always)]
pub fn prefetch_end<T>(values: &[T]) {
    line(values.as_ptr().wrapping_add(values.len()).cast());
}

/// Asks for the line that `address` lies in. A hint: any address will do.
#[inline(always)]
pub(crate) fn line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and it may be given any address: it neither reads nor faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
