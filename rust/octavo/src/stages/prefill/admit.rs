//! From the queue into the step: what is remembered of the prompt is shared, room for the rest is made sure of.
//!
//! A prompt that begins like one that is being computed waits until that can be shared: a burst of requests with one long
//! prefix, or the choices of one call, compute it once: whole blocks are shared, and the block in which a prompt ends is
//! copied, for each goes on writing in it. Others may pass it meanwhile.
//!
//! Blocks are taken as they are written, but nobody is admitted into blocks that a half-read prompt will need: each is
//! promised enough to be read to its end. So two half-read prompts can never hold what the other one needs.

use octavo_kernels::BlockCopy;

use crate::kv::BlockId;
use crate::observe::events::EngineEvent;
use crate::observe::meter::QueueReason;
use crate::request::SessionId;
use crate::schedule::Step;
use crate::sequence::{Phase, Sequence};
use crate::stages::queue::waiting::Order;

use super::read;

/// Whom to admit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Prompts that the rest of this step can read whole. They may overtake a long one at the queue's head.
    Whole,
    /// Any, in order; a long one begins with what is left.
    Part,
}

/// How far behind the head to look for short prompts.
const OVERTAKERS_SEEN: usize = 64;
/// How many of them to try.
const OVERTAKERS_TRIED: usize = 8;
/// How often the head may be overtaken. After that everybody waits until it has gone.
const MOST_OVERTAKEN: u32 = 64;

/// Admits from the queue until something runs out, and says what. `None`: the queue is empty.
pub fn admit(step: &mut Step<'_>, rule: Rule) -> Option<QueueReason> {
    let mut promised = promised(step);
    loop {
        let head = step.queue.head()?.order;
        if step.running.len() >= step.max_num_seqs {
            return Some(QueueReason::Sequences);
        }
        if step.rows_left == 0 {
            return Some(QueueReason::Budget);
        }
        match try_admit(step, head, rule, promised) {
            Ok(more) => promised += more,
            Err(reason @ (QueueReason::Budget | QueueReason::Prefix)) => match overtake(step, head, rule, promised) {
                Some(more) => promised += more,
                None => return Some(reason),
            },
            Err(reason) => return Some(reason),
        }
    }
}

/// Lets a short prompt pass a head that is too long for this step, or waits for its prefix, if the head cannot begin yet
/// because another long one is being read.
fn overtake(step: &mut Step<'_>, head: Order, rule: Rule, promised: usize) -> Option<usize> {
    let goes_on = |sequence: &Sequence| sequence.phase() == Phase::Prefill && sequence.planned < sequence.unread();
    if step.queue.head()?.overtaken >= MOST_OVERTAKEN || !step.running.iter().any(goes_on) {
        return None;
    }
    let waits = |next: &Sequence| next.waits(step.kv);
    let is_short = |next: &&Sequence| next.order.priority == head.priority && next.known() <= step.rows_left;
    let behind = step.queue.iter().skip(1).take(OVERTAKERS_SEEN).filter(is_short).filter(|next| !waits(next));
    let short: Vec<Order> = behind.take(OVERTAKERS_TRIED).map(|next| next.order).collect();
    let more = short.into_iter().find_map(|order| try_admit(step, order, rule, promised).ok())?;
    step.queue.get_mut(head)?.overtaken += 1;
    Some(more)
}

/// Why a sequence cannot be admitted, and for want of how many blocks.
type Refusal = (QueueReason, usize);

/// Admits one sequence. `promised` blocks are spoken for; the answer is how many more are then. What is kept for other
/// conversations goes where it lets this one in.
fn try_admit(step: &mut Step<'_>, order: Order, rule: Rule, promised: usize) -> Result<usize, QueueReason> {
    let session = step.queue.get_mut(order).and_then(|sequence| sequence.request.session);
    loop {
        let resumed = session.filter(|&id| goes_on(step, order, id));
        let (available, spoken_for) = (step.kv.pool().available(), promised + watermark(step));
        let spare = available.saturating_sub(spoken_for);
        let admitted = match resumed {
            Some(id) => resume(step, order, id, rule, spare),
            None => begin(step, order, rule, spare),
        };
        let Err((reason, missing)) = admitted else { return admitted.map_err(|(reason, _)| reason) };
        let missing = missing.saturating_add(spoken_for.saturating_sub(available));
        let helps = reason == QueueReason::Blocks && missing <= step.sessions.pinned_but(session);
        if !helps || !step.sessions.evict_oldest(session, step.kv, step.now) {
            return Err(reason);
        }
    }
}

/// Whether a turn can go on from what its session kept. If it cannot, that is kept no longer.
fn goes_on(step: &mut Step<'_>, order: Order, id: SessionId) -> bool {
    let Some((sequence, pin)) = step.queue.get_mut(order).zip(step.sessions.pin(id)) else { return false };
    let (common, goes_on) = sequence.goes_on_from(pin);
    if !goes_on {
        step.sessions.diverge(id, common, step.kv, step.now);
    }
    goes_on
}

/// Admits a turn with the blocks that its session kept.
fn resume(step: &mut Step<'_>, order: Order, id: SessionId, rule: Rule, spare: usize) -> Result<usize, Refusal> {
    let layout = step.kv.layout();
    let block_size = layout.block_size;
    let (sequence, pin) = (step.queue.get_mut(order), step.sessions.pin(id));
    let (sequence, pin) = sequence.zip(pin).ok_or(NOBODY)?;
    let (room, kept) = (layout.blocks_for(sequence.room_wanted()), pin.tokens.len());
    let needed = room.saturating_sub(pin.table.held());
    if needed > spare {
        return Err((QueueReason::Blocks, needed - spare));
    }
    if rule == Rule::Whole && sequence.known() - kept > step.rows_left {
        return Err((QueueReason::Budget, 0));
    }
    let (sequence, pin) = (step.queue.remove(order), step.sessions.resume(id, step.kv, step.now));
    let (mut sequence, pin) = sequence.zip(pin).ok_or(NOBODY)?;
    sequence.inherit(pin, block_size);
    let index = enter(step, sequence, kept);
    Ok(room.saturating_sub(step.running[index].table.held()))
}

/// Admits a sequence with what is remembered of its prompt.
fn begin(step: &mut Step<'_>, order: Order, rule: Rule, spare: usize) -> Result<usize, Refusal> {
    let block_size = step.kv.layout().block_size;
    let sequence = step.queue.get_mut(order).ok_or(NOBODY)?;
    if spare + step.sessions.pinned() == 0 {
        return Err((QueueReason::Blocks, 1));
    }
    if sequence.waits(step.kv) {
        return Err((QueueReason::Prefix, 0));
    }
    let shareable = sequence.shareable();
    let found = step.kv.find_prefix(shareable / block_size, |i| sequence.prefix_key(i, block_size));
    let at_tail = found.len == shareable / block_size;
    sequence.waits_for = match at_tail {
        true if shareable == sequence.stem() => sequence.tail_key(block_size),
        true => None,
        false => Some(sequence.prefix_key(found.len, block_size)),
    };
    if sequence.waits(step.kv) {
        return Err((QueueReason::Prefix, 0));
    }
    let mut tail = sequence.waits_for.filter(|_| at_tail).and_then(|key| step.kv.find_tail(key)).unwrap_or_default();
    let room = step.kv.layout().blocks_for(sequence.room_wanted());
    let mut needed = room.saturating_sub(found.blocks().count()) + step.kv.idle_among(found.blocks());
    let to_copy = step.kv.idle_among(tail.iter().copied());
    if needed + to_copy > spare {
        // What is copied is held besides, for a step. Whoever needs the whole pool does without.
        tail.clear();
    } else {
        needed += to_copy;
    }
    let cached = if tail.is_empty() { found.len * block_size } else { shareable };
    if needed.max(1) > spare {
        return Err((QueueReason::Blocks, needed.max(1) - spare));
    }
    if rule == Rule::Whole && sequence.known() - cached > step.rows_left {
        return Err((QueueReason::Budget, 0));
    }
    let mut sequence = step.queue.remove(order).ok_or(NOBODY)?;
    step.kv.share(&mut sequence.table, &found, step.now);
    sequence.borrowed = step.kv.borrow(&tail, step.now);
    sequence.record.block_ns += step.kv.give_back_outside(&mut sequence.table, cached, step.now);
    let index = enter(step, sequence, cached);
    let sequence = &step.running[index];
    let copy =
        |(group, from): (usize, &BlockId)| BlockCopy { from: from.0, to: sequence.table.blocks(group)[found.len].0 };
    step.copies.extend(tail.iter().enumerate().map(copy));
    Ok(room.saturating_sub(sequence.table.held()))
}

/// Among the running ones, with `cached` tokens in its table. It begins at once. Says where it is.
fn enter(step: &mut Step<'_>, mut sequence: Sequence, cached: usize) -> usize {
    if sequence.record.preemptions == 0 {
        sequence.record.kept = sequence.request.session.and_then(|id| step.sessions.fate(id));
    }
    sequence.admit(cached, step.kv.layout().block_size, step.now, &step.queue.clock);
    if sequence.shares() {
        sequence.announce(step.kv);
    }
    step.tokens_cached += cached as u64;
    step.notes.push(|| EngineEvent::Admitted { id: sequence.request.id, cached_tokens: cached });
    let index = step.running.partition_point(|running| running.order < sequence.order);
    step.running.insert(index, sequence);
    read(step, index, step.rows_left);
    assert!(step.running[index].planned > 0, "whoever is admitted begins at once");
    index
}

/// It is not in the queue.
const NOBODY: Refusal = (QueueReason::Blocks, usize::MAX);

/// Blocks that the half-read prompts will still take.
fn promised(step: &Step<'_>) -> usize {
    let half_read = step.running.iter().filter(|sequence| sequence.phase() == Phase::Prefill);
    let more = |sequence: &Sequence| step.kv.layout().blocks_for(sequence.room_wanted());
    half_read.map(|sequence| more(sequence).saturating_sub(sequence.table.held())).sum()
}

/// Blocks to leave for the running sequences to grow into, one each in every group, so that hardly any is preempted soon
/// after. At most a sixteenth of the pool; none when nobody runs, so that whoever fits at all gets in.
fn watermark(step: &Step<'_>) -> usize {
    (step.running.len() * step.kv.layout().groups()).min(step.kv.pool().len() / 16)
}
