//! Waiting for room: bounded, ordered, cancellable, and fair.

pub mod door; // who may come in
pub mod limits; // what can run here at all
pub mod users; // who has been served how much
pub mod waiting; // who is next
