//! What every stage cost.

pub mod anatomy; // where a request's time and memory went, and its picture
pub mod meter; // adds time up while the request runs
pub mod machine; // what there is to run on

pub use machine::{Machine, machine};
