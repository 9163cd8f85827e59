//! Give the blocks back, come again later.

use crate::observe::events::EngineEvent;
use crate::schedule::Step;

/// Sends a running sequence back to its place in the queue. It keeps its tokens; their keys and values are computed
/// again, as if they had all been prompt, unless they are still found in the cache.
pub fn preempt(step: &mut Step<'_>, index: usize) {
    let mut sequence = step.running.remove(index);
    assert_eq!(sequence.planned, 0, "blocks that this step writes cannot be given back");
    step.notes.push(|| EngineEvent::Preempted { id: sequence.request.id, computed_tokens: sequence.computed });
    sequence.lose(step.now);
    sequence.release(step.kv, step.now);
    sequence.meter.enter(sequence.activity(false), step.now);
    step.preemptions += 1;
    step.queue.push(sequence, step.now);
}
