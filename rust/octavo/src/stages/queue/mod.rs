//! Waiting for room: bounded, ordered, fair, cancellable.

pub mod limits; // what can run here at all
pub mod waiting; // who is next
