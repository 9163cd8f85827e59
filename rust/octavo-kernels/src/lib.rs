//! Every loop over floats, and every `unsafe`, of octavo. This crate knows arrays and devices; it has never heard of a
//! request, a sequence's owner or a sampler's policy.
//!
//! Read in this order: [`types`] (what a weight's bytes mean), [`ops`] (the fused operations of a decoder, as the trait
//! [`Backend`]), [`reference`] (the plain loops that define each operation) and [`cpu`] (the fast versions).

pub mod types; // element and block types, and how their bytes decode to f32
pub mod ops; // trait Backend: the operations, shapes in each doc
pub mod draw; // what a draw of a token is told, and what it says
pub mod reference; // plain loops that define each operation; never made fast
pub mod convert; // rows of one type as rows of another, at load
pub mod cpu; // packed weights, vector kernels, the worker pool
pub mod cuda; // the same operations on an NVIDIA GPU
pub mod routing; // where rows go in a mixture of experts
pub mod file; // a read-only mapped file
pub mod prefetch; // asks for memory before it is needed

mod step; // a backend's copy of a step's input

pub use draw::{DrawnRow, RowDraw, RowStatistics};
pub use ops::{
    Activation, Backend, BlockCopy, CacheDtype, CacheLayer, CacheShape, Heads, KV_SPLIT, Mask, Projection, RopeSpec,
    RopeStyle, Segment, StepInput, StepLimits, Weight,
};
pub use types::DType;

/// What can go wrong when a backend is opened or takes memory. Operations themselves cannot fail on a CPU; on a device
/// they report here.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The memory for `what` could not be had.
    #[error("no memory for {what}: {bytes} bytes were asked for")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// How much was asked for.
        bytes: usize,
    },
    /// A setting that this machine or build cannot honour.
    #[error("{0}")]
    Unsupported(String),
    /// A weight's shape, type or byte count does not fit what the operation needs.
    #[error("{0}")]
    BadWeight(String),
    /// A value of a weight is beyond the range of the type that it should be run as.
    #[error("row {row} of weight {part} holds a value that {} cannot", run_as.name())]
    OutOfRange {
        /// Which of the weights that were handed over together.
        part: usize,
        /// Which of its rows.
        row: usize,
        /// The type it should be run as.
        run_as: DType,
    },
    /// The device failed while computing.
    #[error("device failure: {0}")]
    Device(String),
}

/// The result of anything here that can fail.
pub type Result<T, E = BackendError> = std::result::Result<T, E>;
