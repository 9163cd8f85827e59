//! Token ids → text, while they are generated.
//!
//! Always true: what was given out is valid UTF-8 and is never taken back; all of it together is what
//! [`Tokenizer::decode`](super::tokenize::Tokenizer::decode) makes of all ids, cut at the first stop string; no part of a
//! stop string leaks. A token costs the same however long the text has become.

mod detokenize; // ids → settled text
mod stop; // looks for stop strings
mod text; // both, for one request

pub use text::{StreamParams, TextStream};
