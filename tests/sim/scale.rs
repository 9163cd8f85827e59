//! A step's cost: it grows with the running sequences, not with the pool or the queue. Counted, not timed: what else the
//! machine does changes nothing.

use crate::instructions;
use crate::steady::{Load, World};

/// Instructions of `schedule` and `commit` in a step of a steady load, if they can be counted.
fn step(running: usize, waiting: usize, blocks: usize) -> Option<f64> {
    let mut world = World::new(Load { running, waiting, blocks, prompt: 16, shared: 0, answer: 16 });
    world.check();
    let counted = instructions::count(|mark| world.step(|| mark.toggle()))?;
    println!("{running:>5} run {waiting:>6} wait {blocks:>8} blocks: {counted:>8} instructions a step");
    Some(counted as f64)
}

#[test]
fn a_step_costs_what_the_running_sequences_do_whatever_the_pool_and_the_queue() {
    let Some(half) = step(16, 0, 10_000) else {
        println!("skipped: instructions cannot be counted on this machine");
        return;
    };
    let [plain, large] = [(32, 0, 10_000), (32, 10_000, 1_000_000)]
        .map(|(running, waiting, blocks)| step(running, waiting, blocks).expect("it could be counted before"));
    assert!(plain <= 2.1 * half, "{half} for 16 sequences, {plain} for 32");
    // Two begin in every step. That they are chosen among fifty users who wait, and not one, is all the difference.
    assert!((0.95..1.08).contains(&(large / plain)), "{large} with a large pool and a long queue, {plain} without");
    // It is the steps that are counted: each of so many sequences takes some instructions.
    assert!(half > 16.0 * 100.0, "{half} instructions are none");
}
