//! Every operation of every backend against the plain loops of `octavo_kernels::reference`, on one sweep of shapes, and
//! the loops themselves against candle.

mod harness; // upload, compare, and the one `check_op`

mod attention; // paged attention: ragged batches, and the same bits in any weather
mod experts; // mixtures of experts
mod operations; // everything else
mod oracle; // a second opinion
mod seam; // what is refused, and how
mod shim; // the GPU that is not one
