//! What every stage cost.

pub mod anatomy; // where a request's time and memory went, and its picture
pub mod meter; // adds time up while the request runs
