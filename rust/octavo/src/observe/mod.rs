//! What every stage cost, and what happened.

pub mod anatomy; // where a request's time and memory went, and its picture
pub mod meter; // adds time up while the request runs
pub mod events; // what happens, for programs around the engine
pub mod readers; // who reads it
pub mod record; // the whole input of the scheduler in a file, and how it is played again
pub mod machine; // what there is to run on

pub use machine::{Machine, machine};
