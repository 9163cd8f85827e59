//! The scheduler over a simulated executor: whole histories in no time, every invariant checked after every step.

mod absurd;
mod blocks; // the KV cache's books against plain lists
mod cache; // which blocks are kept, beside the ideal and the floor
mod explain; // what the cache says about a prompt
mod fair; // turns, shares and how long anyone waits
mod forecast; // what a request is told at the door
mod histories; // thousands of random days
mod laws; // named cases
mod outlook; // the same, in hours like those of an engine
mod pace; // a long prompt beside those who are being answered
mod record; // the flight recorder
mod sessions; // what conversations keep
mod scale; // a step's cost
mod world; // the harness

#[path = "../../benches/instructions.rs"]
mod instructions; // of a piece of work, counted
#[path = "../../benches/policies.rs"]
mod policies; // what of a trace is found, by whom
#[path = "../../benches/steady.rs"]
mod steady; // the scheduler under a load that is the same in every step
