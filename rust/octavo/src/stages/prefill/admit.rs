//! From the queue into the step: what is remembered of the prompt is shared, room for the rest is made sure of.
//!
//! A prompt that begins like one that is being computed waits until that can be shared: a burst of requests with one long
//! prefix, or the choices of one call, compute it once: whole blocks are shared, and the block in which a prompt ends is
//! copied, for each goes on writing in it. Others may pass it meanwhile.
//!
//! Blocks are taken as they are written, but nobody is admitted into blocks that a half-read prompt will need: each is
//! promised enough to be read to its end. So two half-read prompts can never hold what the other one needs.

use octavo_kernels::BlockCopy;

use crate::kv::{BlockId, PinFate};
use crate::observe::events::EngineEvent;
use crate::observe::meter::QueueReason;
use crate::request::{RequestId, SessionId};
use crate::schedule::{Event, Step};
use crate::sequence::{Phase, Sequence};
use crate::stages::queue::users::Work;

use super::{read, readers};

/// Whom to admit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Prompts that the rest of this step can read whole. They may overtake a long one at the queue's head.
    Whole,
    /// Those that may begin beside the prompts that are being read, with what is left: much shorter ones, and those of users
    /// who have been served no more, and have none among them.
    Beside,
    /// Any, in order; a long one begins with what is left.
    Part,
}

/// How far behind the head to look for short prompts.
pub const OVERTAKERS_SEEN: usize = 64;
/// How many of them to try.
const OVERTAKERS_TRIED: usize = 8;
/// How often the head may be overtaken. After that everybody waits until it has gone.
const MOST_OVERTAKEN: u32 = 64;

/// Admits from the queue until something runs out, and says what. `None`: the queue is empty.
pub fn admit(step: &mut Step<'_>, rule: Rule) -> Option<QueueReason> {
    loop {
        if step.queue.is_empty() {
            return None;
        }
        if step.running.len() >= step.max_num_seqs {
            return Some(QueueReason::Sequences);
        }
        if step.fitting(0) == 0 {
            return Some(QueueReason::Budget);
        }
        let head = step.queue.head(step.now)?;
        if rule == Rule::Beside && !may_begin_beside(step, head) {
            return Some(QueueReason::Budget);
        }
        match try_admit(step, head, rule) {
            Ok(()) => {}
            Err(reason @ (QueueReason::Budget | QueueReason::Prefix)) => {
                if !overtake(step, head, rule) {
                    return Some(reason);
                }
            }
            Err(reason) => return Some(reason),
        }
    }
}

/// Of every prompt that is being read more than twice as much is left, or its user has been served no less, and is another.
fn may_begin_beside(step: &Step<'_>, id: RequestId) -> bool {
    let Some(head) = step.queue.get(id) else { return false };
    let served = step.queue.users.served(head.user);
    let readers = readers(step);
    let gives_way = |&(least, index): &(Work, usize)| {
        let reader = &step.running[index];
        2 * head.known() <= reader.unread() || (reader.user != head.user && served <= least)
    };
    !readers.is_empty() && readers.iter().all(gives_way)
}

/// Lets a short prompt pass a head that is too long for this step, or waits for its prefix, if the head cannot begin yet
/// because another long one is being read.
fn overtake(step: &mut Step<'_>, head: RequestId, rule: Rule) -> bool {
    if step.half_read == 0 {
        return false;
    }
    let Some(first) = step.queue.get(head).filter(|first| first.overtaken < MOST_OVERTAKEN) else { return false };
    let priority = first.request.priority;
    let is_short = |next: &&Sequence| next.request.priority == priority && next.known() <= step.fitting(0);
    let behind = step.queue.iter().filter(|next| next.request.id != head).take(OVERTAKERS_SEEN).filter(is_short);
    let ready = behind.filter(|next| !next.waits(step.kv)).take(OVERTAKERS_TRIED);
    let short: Vec<RequestId> = ready.map(|next| next.request.id).collect();
    let passes = short.into_iter().any(|id| try_admit(step, id, rule).is_ok());
    if let Some(head) = step.queue.get_mut(head).filter(|_| passes) {
        head.overtaken += 1;
    }
    passes
}

/// Why a sequence cannot be admitted, and for want of how many blocks.
type Refusal = (QueueReason, usize);

/// Admits one sequence, which begins at once. What is kept for other conversations goes where it lets this one in.
fn try_admit(step: &mut Step<'_>, id: RequestId, rule: Rule) -> Result<(), QueueReason> {
    let session = step.queue.get(id).and_then(|sequence| sequence.request.session);
    loop {
        let resumed = session.filter(|&session| goes_on(step, id, session));
        let (available, spoken_for) = (step.kv.pool().available(), step.promised + watermark(step));
        let spare = available.saturating_sub(spoken_for);
        let admitted = match resumed {
            Some(session) => resume(step, id, session, rule, spare),
            None => begin(step, id, rule, spare),
        };
        let Err((reason, missing)) = admitted else { return Ok(()) };
        let missing = missing.saturating_add(spoken_for.saturating_sub(available));
        let helps = reason == QueueReason::Blocks && missing <= step.sessions.pinned_but(session);
        if !helps || !step.sessions.evict_oldest(session, step.kv, step.now) {
            return Err(reason);
        }
    }
}

/// Whether a turn can go on from what its session kept. If it cannot, that is kept no longer.
fn goes_on(step: &mut Step<'_>, id: RequestId, session: SessionId) -> bool {
    let Some((sequence, pin)) = step.queue.get(id).zip(step.sessions.pin(session)) else { return false };
    let (fate, common) = sequence.goes_on_from(pin);
    if fate != PinFate::Resumed {
        step.sessions.part(session, fate, common, step.kv, step.now);
    }
    fate == PinFate::Resumed
}

/// Admits a turn with the blocks that its session kept.
fn resume(step: &mut Step<'_>, id: RequestId, session: SessionId, rule: Rule, spare: usize) -> Result<(), Refusal> {
    let layout = step.kv.layout();
    let block_size = layout.block_size;
    let (sequence, pin) = step.queue.get(id).zip(step.sessions.pin(session)).ok_or(NOBODY)?;
    let (room, kept) = (layout.blocks_for(sequence.room_wanted()), pin.tokens.len());
    let needed = room.saturating_sub(pin.table.held());
    if needed > spare {
        return Err((QueueReason::Blocks, needed - spare));
    }
    if !fits(step, rule, kept, sequence.known()) {
        return Err((QueueReason::Budget, 0));
    }
    let (sequence, pin) = (step.queue.admit(id, step.now), step.sessions.resume(session, step.kv, step.now));
    let (mut sequence, pin) = sequence.zip(pin).ok_or(NOBODY)?;
    sequence.inherit(pin, block_size);
    enter(step, sequence, kept);
    Ok(())
}

/// Admits a sequence with what is remembered of its prompt.
fn begin(step: &mut Step<'_>, id: RequestId, rule: Rule, spare: usize) -> Result<(), Refusal> {
    let block_size = step.kv.layout().block_size;
    let sequence = step.queue.get_mut(id).ok_or(NOBODY)?;
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
    let known = sequence.known();
    if !fits(step, rule, cached, known) {
        return Err((QueueReason::Budget, 0));
    }
    let mut sequence = step.queue.admit(id, step.now).ok_or(NOBODY)?;
    step.kv.share(&mut sequence.table, &found, step.now);
    sequence.borrowed = step.kv.borrow(&tail, step.now);
    sequence.record.block_ns += step.kv.give_back_outside(&mut sequence.table, cached, step.now);
    let index = enter(step, sequence, cached);
    let sequence = &step.running[index];
    let copy =
        |(group, from): (usize, &BlockId)| BlockCopy { from: from.0, to: sequence.table.blocks(group)[found.len].0 };
    step.copies.extend(tail.iter().enumerate().map(copy));
    Ok(())
}

/// Whether a sequence of `known` tokens can begin in what is left of the step, `cached` of them in its table.
fn fits(step: &Step<'_>, rule: Rule, cached: usize, known: usize) -> bool {
    step.fitting(cached) >= if rule == Rule::Whole { known - cached } else { 1 }
}

/// Among the running ones, with `cached` tokens in its table. It begins at once. Says where it is.
fn enter(step: &mut Step<'_>, mut sequence: Box<Sequence>, cached: usize) -> usize {
    if sequence.record.preemptions == 0 {
        sequence.record.kept = sequence.request.session.and_then(|id| step.sessions.fate(id));
        step.events.push_back(Event::Begun { id: sequence.request.id });
    }
    sequence.admit(cached, step.kv.layout().block_size, step.now, &step.queue.clock);
    if sequence.shares() {
        sequence.announce(step.kv);
    }
    step.tokens_admitted += sequence.known();
    step.tokens_cached += cached as u64;
    step.notes.push(|| EngineEvent::Admitted { id: sequence.request.id, cached_tokens: cached });
    let reads = sequence.phase() == Phase::Prefill;
    let index = step.running.insert(sequence);
    if reads {
        step.note_reader(index);
    }
    read(step, index, usize::MAX);
    assert!(step.running[index].planned > 0, "whoever is admitted begins at once");
    index
}

/// It is not in the queue.
const NOBODY: Refusal = (QueueReason::Blocks, usize::MAX);

/// Blocks to leave for the running sequences to grow into, one each in every group, so that hardly any is preempted soon
/// after. At most a sixteenth of the pool; none when nobody runs, so that whoever fits at all gets in.
fn watermark(step: &Step<'_>) -> usize {
    (step.running.len() * step.kv.layout().groups()).min(step.kv.pool().len() / 16)
}
