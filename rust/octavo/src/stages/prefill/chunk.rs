//! How much of a prompt this step.

use crate::schedule::Step;
use crate::sequence::{Phase, Sequence};

fn half_read(sequence: &Sequence) -> bool {
    sequence.phase() == Phase::Prefill
}

/// The first half-read prompt gets its share: everything when nobody waits, else half.
pub fn read_oldest(step: &mut Step<'_>) {
    if let Some(oldest) = step.running.iter().position(half_read) {
        let share = if step.somebody_may_join() { step.rows_left.div_ceil(2) } else { step.rows_left };
        read(step, oldest, share);
    }
}

/// All half-read prompts get what is left, in order.
pub fn read_on(step: &mut Step<'_>) {
    let mut index = 0;
    while index < step.running.len() && step.rows_left > 0 {
        if half_read(&step.running[index]) {
            read(step, index, step.rows_left);
        }
        index += 1;
    }
}

/// Plans up to `most` more rows of a half-read prompt, as far as there are blocks. It may find none when decoding
/// sequences have grown into what was promised to it. Then it waits: they end, or they preempt it. Without them the
/// promises hold (see [`super::admit`]), so prompts never wait for each other.
pub fn read(step: &mut Step<'_>, index: usize, most: usize) {
    let sequence = &step.running[index];
    let end = sequence.computed + sequence.planned;
    let wanted = (sequence.readable() - sequence.planned).min(most).min(step.rows_left);
    let rows = wanted.min(step.room(index, end + wanted) - end);
    if rows > 0 {
        assert!(step.plan(index, rows), "the room was measured");
    }
}
