//! Memory of the host that the device copies from and to while the host goes on.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use crate::cuda::driver::Address;

/// Pinned memory that everything goes through on its way to the device, in two halves: one is filled while the other is
/// copied. So a large upload is a pipeline, and a small one costs no wait.
pub(super) struct Staging {
    at: *mut u8,
    /// What the half holds has been copied.
    copied: [sys::CUevent; 2],
    half: usize,
    used: usize,
}

/// Bytes of a half.
pub(super) const HALF_BYTES: usize = 4 << 20;

/// Pinned memory, and the event of the last copy to it.
#[derive(Clone, Copy)]
pub(super) struct HostMemory {
    pub at: *mut u8,
    pub bytes: usize,
    pub copied: sys::CUevent,
}

// SAFETY: plain memory and a handle of the driver, which may be used from any thread.
unsafe impl Send for HostMemory {}

fn event() -> Result<sys::CUevent, DriverError> {
    result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
}

impl HostMemory {
    /// Takes it, of the thread's context.
    pub fn take(bytes: usize) -> Result<Self, DriverError> {
        let copied = event()?;
        // SAFETY: given back by `free` only.
        match unsafe { result::malloc_host(bytes.max(1), 0) } {
            Ok(at) => Ok(Self { at: at.cast(), bytes, copied }),
            Err(error) => {
                // SAFETY: made above, and nobody has it.
                let _ = unsafe { result::event::destroy(copied) };
                Err(error)
            }
        }
    }

    /// Gives it back.
    ///
    /// # Safety
    /// Nothing is being copied to it any more, it is not used again, and the context is the thread's own.
    pub unsafe fn free(self) {
        // SAFETY: taken by `take`; given back once. Errors cannot be told to anybody.
        unsafe {
            let _ = result::free_host(self.at.cast());
            let _ = result::event::destroy(self.copied);
        }
    }
}

impl Staging {
    /// Takes it, of the thread's context.
    pub fn new() -> Result<Self, DriverError> {
        let copied = [event()?, event()?];
        // SAFETY: given back by `free` only.
        let at = unsafe { result::malloc_host(2 * HALF_BYTES, 0) }?;
        Ok(Self { at: at.cast(), copied, half: 0, used: 0 })
    }

    /// Uploads at most a half. `from` may be used again at once.
    pub fn upload(&mut self, to: Address, from: &[u8], stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: the events live until `free`; the stream is the device's own. An event that was never recorded is not
        // waited for.
        unsafe {
            if self.used + from.len() > HALF_BYTES {
                result::event::record(self.copied[self.half], stream)?;
                (self.half, self.used) = (1 - self.half, 0);
                result::event::synchronize(self.copied[self.half])?;
            }
        }
        let first = self.half * HALF_BYTES + self.used;
        self.used += from.len();
        // SAFETY: within the half, no byte of which is written again before its event says that it has been copied. Callers
        // own what is written on the device.
        unsafe {
            let place = std::slice::from_raw_parts_mut(self.at.add(first), from.len());
            place.copy_from_slice(from);
            result::memcpy_htod_async(to, place, stream)
        }
    }

    /// Gives everything back.
    ///
    /// # Safety
    /// Nothing is being copied any more, and the context is the thread's own.
    pub unsafe fn free(self) {
        // SAFETY: taken in `new`; given back once. Errors cannot be told to anybody.
        unsafe {
            let _ = result::free_host(self.at.cast());
            for event in self.copied {
                let _ = result::event::destroy(event);
            }
        }
    }
}
