//! Everybody who speaks keeps speaking: one row for each decoding sequence, every step.

use super::preempt;
use crate::schedule::Step;
use crate::sequence::Phase;

/// Plans one row for every decoding sequence, in order. Where blocks run out, the last in order goes back to the queue.
/// The first never does, so it gets to its end, and then the next is first: no livelock. Counts those whose prompts are
/// being read.
pub fn advance(step: &mut Step<'_>) {
    let mut index = 0;
    while index < step.running.len() {
        match step.running[index].phase() {
            Phase::Decode => give_row(step, index),
            Phase::Prefill => step.note_reader(index),
        }
        index += 1;
    }
}

fn give_row(step: &mut Step<'_>, index: usize) {
    while !step.plan(index, 1) {
        let last = step.running.len() - 1;
        assert!(last > 0, "a sequence that was accepted fits the whole cache");
        preempt(step, last);
        if index == last {
            return;
        }
    }
}
