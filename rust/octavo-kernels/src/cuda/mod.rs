//! Operations on an NVIDIA GPU. The kernels are CUDA C++ in `cu/`, compiled by nvcc when the crate is built and embedded;
//! the driver is opened at run time. Without either, everything else works and opening a device says what is missing.
//!
//! The same sources and the same launches also run on the CPU ([`shim`], for tests): whatever holds there about values,
//! bounds and barriers holds on a GPU.
//!
//! Not here: a global context. Everything that belongs to a device is owned by the backend that was opened for it.

pub mod driver; // the driver's calls, as a trait
pub mod device; // memory that gives itself back, launches
#[cfg(feature = "cuda-shim")]
pub mod shim; // the calls on the CPU
pub mod null; // the calls, counted
pub mod backend; // trait Backend: one launch per operation

mod changes; // what is new of a step
mod draws; // tokens drawn on the device
mod graphs; // decode steps, recorded
mod image; // compiled kernels
mod linear; // which kernel makes a product
mod matrix; // weights on the device
mod nvidia; // the calls of a GPU
mod places; // where block tables lie
mod step; // a step's input on the device

pub use backend::CudaBackend;
pub use device::Device;
pub use driver::DeviceInfo;
pub use nvidia::devices;

/// Whether this build carries kernels for GPUs.
pub fn has_kernels() -> bool {
    !image::IMAGES.is_empty()
}
