//! How much of a prompt this step.

use crate::schedule::Step;
use crate::sequence::{Phase, Sequence};
use crate::stages::decode::preempt;
use crate::stages::queue::users::Work;

/// There is more of its prompt to read than this step does.
fn half_read(sequence: &Sequence) -> bool {
    sequence.phase() == Phase::Prefill && sequence.planned < sequence.unread()
}

/// The first half-read prompt gets its share: everything when nobody else reads or waits, else half.
pub fn read_oldest(step: &mut Step<'_>) {
    if step.half_read == 0 {
        return;
    }
    if let Some(oldest) = step.running.iter().position(|sequence| half_read(sequence)) {
        let others = step.half_read > 1 || step.somebody_may_join();
        let fitting = step.fitting(step.running[oldest].computed);
        read(step, oldest, if others { fitting.div_ceil(2) } else { fitting });
    }
}

/// All half-read prompts get what is left: those first whose users have been served least, of one user's the one of which
/// least is left.
pub fn read_on(step: &mut Step<'_>) {
    let mut readers = readers(step);
    readers.sort_by_key(|&(served, index)| (served, step.running[index].unread()));
    for (_, index) in readers {
        read(step, index, usize::MAX);
    }
}

/// When nobody has got a row: prompts hold what the others need. The promises (see [`super::admit`]) keep them from that,
/// but where a sliding window leaves a shared block behind, the block is not free, and another one is needed. The last in
/// order goes back to the queue until somebody gets on.
pub fn unblock(step: &mut Step<'_>) {
    while step.running.len() > 1 && step.running.iter().all(|sequence| sequence.planned == 0) {
        let last = step.running.len() - 1;
        step.forget_reader(last);
        preempt(step, last);
        read_on(step);
    }
}

/// Tokens of half-read prompts that are left for later steps: of all, and of users who have been served as much as whoever
/// comes now, and go on being served, for others of theirs are here.
pub fn unread(step: &mut Step<'_>) -> [usize; 2] {
    let readers = readers(step);
    if readers.is_empty() {
        return [0; 2];
    }
    let newcomers = step.queue.newcomers_served();
    let left = |index: usize| step.running[index].unread() - step.running[index].planned;
    let yields = |work: Work, index: usize| work >= newcomers && step.queue.users.living(step.running[index].user) > 1;
    readers.into_iter().fold([0; 2], |[all, yielding], (work, index)| {
        [all + left(index), yielding + if yields(work, index) { left(index) } else { 0 }]
    })
}

/// The half-read prompts, and how much their users have been served.
pub fn readers(step: &Step<'_>) -> Vec<(Work, usize)> {
    if step.half_read == 0 {
        return Vec::new();
    }
    let running = step.running.iter().enumerate().filter(|(_, sequence)| half_read(sequence));
    running.map(|(index, sequence)| (step.queue.users.served(sequence.user), index)).collect()
}

/// Plans up to `most` more rows of a half-read prompt, as far as there are blocks. It may find none when decoding
/// sequences have grown into what was promised to it. Then it waits: they end, or they preempt it; see [`unblock`].
pub fn read(step: &mut Step<'_>, index: usize, most: usize) {
    let sequence = &step.running[index];
    let end = sequence.computed + sequence.planned;
    let wanted = (sequence.readable() - sequence.planned).min(most).min(step.fitting(end));
    let rows = wanted.min(step.room(index, end + wanted) - end);
    if rows > 0 {
        assert!(step.plan(index, rows), "the room was measured");
    }
}
