//! Waiting for room: bounded, ordered, cancellable.

pub mod limits; // what can run here at all
pub mod waiting; // who is next
