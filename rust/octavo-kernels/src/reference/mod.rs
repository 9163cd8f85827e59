//! Plain loops that define each operation. Never made fast: every other backend is tested against them.
//!
//! The functions here work on slices, one row (or one head) at a time; [`ReferenceBackend`] puts them behind the trait
//! [`Backend`](crate::Backend). All arithmetic is f32 in the order it is written, the order every fast version is judged
//! against: accumulating in f64 would be closer to the truth, but would hide how much of a difference is mere rounding
//! in f32, and no backend could be expected to agree bit for bit.

pub mod attention; // softmax over a row's visible positions
mod backend; // the trait over Vec<f32>
pub(crate) mod codebooks; // block types whose codes number the entries of a table
pub mod e4m3; // what a cache of eight-bit floats keeps
pub mod dequantise; // every block type's bytes → f32
pub mod experts; // which experts a row goes to, and their sum
pub mod gated; // silu, gelu, soft-cap
pub mod int8; // what a cache of integers keeps, and how heads are mixed for it
pub mod linear; // f32 products, and the definition of int8 products
pub mod norm; // rms_norm and the residual step
pub mod rope; // rotary embedding

pub use backend::{Activations, Buffer, Cache, Matrix, ReferenceBackend, Vector};
