//! The CPU backend: packed weights, vector kernels, and a pool of workers.
//!
//! Always true here: an output row's value depends on that row's inputs alone, bit for bit, whatever the number of rows,
//! the number of threads or the instruction set. Three habits keep it so. Every vector has 16 lanes, on every
//! instruction set, so a lane always means the same output. Products and sums are fused everywhere. Every output has one
//! accumulator that walks its inputs in order.
//!
//! Not here: what the operations mean (see [`crate::reference`]).

pub mod isa; // which instruction set this process uses
pub mod vector; // 16 lanes on every instruction set
pub mod pool; // workers that run one parallel region at a time

mod portable; // the vector as plain arrays
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
