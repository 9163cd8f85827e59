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
pub mod memory; // zeroed, aligned, in huge pages
pub mod pack; // weights in tiles of 16 outputs, packed once
pub mod quantise; // activations in int8
pub mod linear; // weights times activations
pub mod embed; // rows of a packed matrix
pub mod limits; // what this machine can do at most
pub mod cache; // the paged keys and values
pub mod backend; // the trait over all of it

mod array; // typed zeroed memory
mod norm; // rms_norm and the residual step
mod mix; // heads, for a cache of integers
mod rope; // angles; rotating heads and filling the cache
mod attention; // paged, in splits that merge in order
mod gated; // silu, gelu, soft-cap
mod experts; // rows to their experts and back

mod format; // how a block type lies in a tile
mod portable; // the vector as plain arrays
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

pub use backend::{CpuBackend, CpuConfig};
pub use isa::Isa;
