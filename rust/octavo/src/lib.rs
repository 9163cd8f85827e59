//! octavo's engine: language models run inside a process, through a paged KV cache, a batch scheduler and a decode loop.
//!
//! A request goes through **tokenize → (queue) → prefill → decode → stream**. These are different work with different
//! limits, and the crate is laid out along them. Read the modules in the order they are declared.
//!
//! This crate has no `unsafe`, no Python and needs no GPU. Everything in [`stages`], [`schedule`], [`kv`] and [`sample`] is
//! pure: no clock, thread, file, device or global randomness; time and coins are arguments.

#![forbid(unsafe_code)]

pub mod request; // what a caller asks for, and how a request can end
pub mod error; // what can go wrong before a request runs
pub mod stages; // the path of a request: tokenize, queue, prefill, decode, stream
pub mod sequence; // a request being worked on: counters and blocks
pub mod kv; // who owns which block of the KV cache
pub mod schedule; // conducts queue → prefill → decode, one batch per step
pub mod sample; // from logits to a token
pub mod grammar; // what an answer is held to: schemas, regexes, grammars, choices
pub mod model; // one decoder, many families
pub mod load; // the only reader of model files
pub mod execute; // runs a batch
pub mod engine; // the only thread
pub mod observe; // what every stage cost
