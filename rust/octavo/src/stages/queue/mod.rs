//! Waiting for room: bounded, ordered, cancellable, and fair.

pub mod limits; // what can run here at all
pub mod users; // who has been served how much
pub mod waiting; // who is next
