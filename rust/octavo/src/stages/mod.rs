//! A request's way through the engine, in order.

pub mod tokenize; // text or messages → token ids
pub mod queue; // wait for room
pub mod prefill; // read the prompt into the KV cache
pub mod decode; // one token at a time
pub mod stream; // token ids → text
