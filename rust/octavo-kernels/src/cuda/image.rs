//! The compiled kernels that this build carries.

/// The driver wants images to begin at an aligned address.
#[repr(C, align(64))]
#[allow(dead_code)] // without nvcc there are no images
struct Aligned<const N: usize>([u8; N]);

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The version of CUDA that compiled them.
pub(super) fn toolkit() -> Option<(u32, u32)> {
    TOOLKIT
}
