//! A request being worked on.
//!
//! ```text
//! known tokens:  [ prompt ............................ | generated ....... ]
//!                [0, computed)                           keys and values are in the block table
//!                             [computed, + planned)      in the step under way
//!                                        [.., known)     not run yet; prefill and decode close this gap
//! ```
//! What a sequence is doing follows from these counters; it is never stored, so it cannot disagree with them.

use std::sync::Arc;

use octavo_kernels::prefetch::{prefetch, prefetch_counts, prefetch_end};

use crate::execute::Draw;
use crate::kv::{BlockId, BlockTable, KvCache, Pin, PinFate, PrefixChain, PrefixKey, Sessions};
use crate::observe::anatomy::{Preemption, RequestRecord};
use crate::observe::meter::{Activity, Meter, QueueClock};
use crate::request::{Finish, Request, SessionId, Time, Wanted};
use crate::sample::TokenHistory;
use crate::stages::queue::users::{self, UserId, Work};

/// What a sequence needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Several known tokens are to be run, or the prompt's last: a chunk of any length.
    Prefill,
    /// Only the token that was generated last is to be run: one row.
    Decode,
}

/// A request with its tokens, counters and blocks.
#[derive(Debug)]
pub struct Sequence {
    /// What was asked.
    pub request: Box<Request>,
    /// Whose it is.
    pub user: UserId,
    /// Requests that came before.
    pub arrival: u64,
    /// Sequences that were admitted before it was for the first time: its place among those who run, for life.
    pub admitted: Option<u64>,
    /// Tokens generated so far.
    pub generated: Vec<u32>,
    /// Most tokens to generate.
    pub most_new_tokens: usize,
    /// Known tokens whose keys and values are in the cache.
    pub computed: usize,
    /// Rows in the step under way; 0 outside.
    pub planned: usize,
    /// How it will end once the step under way is over.
    pub ending: Option<Finish>,
    /// Rows of the prompt whose log-probabilities or logits were given out, or are not wanted: none is given twice,
    /// whatever is computed twice.
    pub rows_given: usize,
    /// How many of its first blocks came from the cache or were offered to be remembered.
    pub published: usize,
    /// Up to which of its blocks it has said that it would publish them.
    pub announced: usize,
    /// What it would share or copy, as soon as whoever announced it publishes it.
    pub waits_for: Option<PrefixKey>,
    /// It has announced the block in which its prompt ends.
    tail_announced: bool,
    /// Blocks that the step under way copies.
    pub borrowed: Vec<(BlockId, u64)>,
    /// The block in which what its session kept ends: it goes on writing there, behind what others may know.
    pub inherited: Option<usize>,
    /// How often others overtook it while it was the queue's head.
    pub overtaken: u32,
    /// Blocks of the KV cache.
    pub table: BlockTable,
    /// What it used so far.
    pub record: RequestRecord,
    /// Where its time goes.
    pub meter: Meter,
    /// The most tokens that were ever computed; below it, work is done again.
    furthest: usize,
    /// When it lost its blocks, while it has not made up for that.
    lost: Option<Time>,
    keys: PrefixChain,
    history: Option<Arc<TokenHistory>>,
    // What every step asks, so that it need not look into the request and its parameters.
    /// Something is wanted of every row of the prompt.
    asks_rows: bool,
    min_tokens: usize,
    /// Tokens that end it.
    ends: Arc<[u32]>,
}

impl Sequence {
    /// For a request that enters the queue now.
    pub fn new(
        request: Box<Request>,
        (user, arrival): (UserId, u64),
        most_new_tokens: usize,
        table: BlockTable,
        now: Time,
        clock: &QueueClock,
    ) -> Self {
        let submitted = request.arrived.min(now);
        let params = &request.params;
        Self {
            user,
            arrival,
            admitted: None,
            generated: Vec::new(),
            most_new_tokens,
            computed: 0,
            planned: 0,
            ending: None,
            // Token `from` is scored by the row before it.
            rows_given: if let Wanted::Scores { from } = request.wanted { from - 1 } else { 0 },
            published: 0,
            announced: 0,
            waits_for: None,
            tail_announced: false,
            borrowed: Vec::new(),
            inherited: None,
            overtaken: 0,
            table,
            record: RequestRecord { prompt_tokens: request.prompt.len(), submitted, ..Default::default() },
            meter: Meter::queued(submitted, now, clock),
            furthest: 0,
            lost: None,
            keys: PrefixChain::default(),
            history: params.needs_history().then(|| Arc::new(TokenHistory::new(&request.prompt))),
            asks_rows: params.prompt_logprobs.is_some() || request.wanted == Wanted::AllLogits,
            min_tokens: params.min_tokens,
            ends: request.ends(),
            request,
        }
    }

    /// Asks the memory for what it points to and a step touches; `depth` 0 is what it points to itself, 1 what that does.
    pub fn prefetch(&self, depth: usize) {
        if depth == 0 {
            prefetch(&*self.request);
            prefetch_end(&self.generated);
            prefetch_end(&self.record.token_ns);
            prefetch(&*self.ends);
            self.table.prefetch_groups();
        } else {
            prefetch_counts(&self.request.params);
            self.table.prefetch_blocks();
        }
    }

    /// How many tokens are known: the prompt and what was generated.
    pub fn known(&self) -> usize {
        self.record.prompt_tokens + self.generated.len()
    }

    /// Known tokens that were not run.
    pub fn unread(&self) -> usize {
        self.known() - self.computed
    }

    /// What is next.
    pub fn phase(&self) -> Phase {
        if self.unread() == 1 && !self.generated.is_empty() { Phase::Decode } else { Phase::Prefill }
    }

    /// What it costs its user to have `rows` more rows in the step under way. What was lost and is computed again costs
    /// nothing.
    pub fn work(&self, rows: usize) -> Work {
        let before = self.computed + self.planned;
        let fresh = (before + rows).saturating_sub(self.furthest.max(before));
        let generates = self.phase() == Phase::Decode;
        let blocks = if self.planned == 0 { self.table.held() } else { 0 };
        users::work(if generates { 0 } else { fresh }, generates, blocks)
    }

    /// The known token at a position.
    pub fn token(&self, position: usize) -> u32 {
        token(&self.request.prompt, &self.generated, position)
    }

    /// Something is wanted of every row of the prompt, and not all of it was given.
    fn wants_rows(&self) -> bool {
        self.asks_rows && self.rows_given < self.request.prompt.len()
    }

    /// Whether the rows from `computed` on are to be given out.
    pub fn gives_rows(&self) -> bool {
        self.wants_rows() && self.computed >= self.rows_given
    }

    /// The most rows of one chunk. A chunk is either before the rows that are still to be given out, or in them.
    pub fn readable(&self) -> usize {
        if self.wants_rows() && !self.gives_rows() { self.rows_given - self.computed } else { self.unread() }
    }

    /// How many of the first tokens may come from the cache: all but the rows that are wanted, and at least the last is
    /// always run, since its logits choose the next token.
    pub fn shareable(&self) -> usize {
        if self.shares() { self.resumable() } else { 0 }
    }

    /// How many of the first tokens need not be run, if somebody has done it.
    fn resumable(&self) -> usize {
        let last = self.known() - 1;
        if self.wants_rows() { last.min(self.rows_given) } else { last }
    }

    /// What becomes of what a session keeps if this is its next turn: it goes on from there, or has other tokens, or asks for
    /// what has to be computed again. And how many of the kept tokens it begins with.
    pub fn goes_on_from(&self, pin: &Pin) -> (PinFate, usize) {
        let common = match pin.cache_salt == self.request.cache_salt {
            true => pin.common((0..self.known() - 1).map(|position| self.token(position))),
            false => 0,
        };
        let fate = match common == pin.tokens.len() {
            true if common <= self.resumable() => PinFate::Resumed,
            true => PinFate::Recomputed,
            false => PinFate::Diverged,
        };
        (fate, common)
    }

    /// The most tokens that its answer may have.
    pub fn longest_answer(&self) -> usize {
        if self.request.wanted == Wanted::Tokens { self.most_new_tokens } else { 0 }
    }

    /// Takes over what its session kept.
    pub fn inherit(&mut self, pin: Pin, block_size: usize) {
        let kept = pin.tokens.len();
        self.table = pin.table;
        self.inherited = (!kept.is_multiple_of(block_size)).then_some(kept / block_size);
    }

    /// Leaves its blocks to its session instead of giving them back.
    pub fn leave_to(&mut self, session: SessionId, sessions: &mut Sessions, kv: &mut KvCache, now: Time) {
        self.record.block_ns += kv.settle(&mut self.table, now);
        let tokens = (0..self.computed).map(|position| self.token(position)).collect();
        let mut table = std::mem::replace(&mut self.table, kv.table());
        sessions.keep((session, self.user), &mut table, tokens, self.request.cache_salt.clone(), kv, now);
        self.table = table;
    }

    /// Whether its blocks may be shared.
    pub fn shares(&self) -> bool {
        self.request.cache_salt.is_some()
    }

    /// Tokens to have room for when it is admitted: all that is known, and the next.
    pub fn room_wanted(&self) -> usize {
        self.known() + usize::from(self.request.wanted == Wanted::Tokens)
    }

    /// The end of what others with the same prompt can go on from: all but its last token, or what comes before the tokens
    /// that are scored.
    pub fn stem(&self) -> usize {
        let end = if let Wanted::Scores { from } = self.request.wanted { from } else { self.request.prompt.len() };
        end - 1
    }

    /// The name of the stem, if it ends inside a block.
    pub fn tail_key(&mut self, block_size: usize) -> Option<PrefixKey> {
        let stem = self.stem();
        let Self { request, keys, .. } = self;
        let salt = request.cache_salt.as_deref().filter(|_| !stem.is_multiple_of(block_size))?;
        let block = |block: usize| request.prompt[block * block_size..(block + 1) * block_size].iter().copied();
        let (blocks, rest) = (stem / block_size, &request.prompt[stem / block_size * block_size..stem]);
        Some(keys.tail(blocks, salt, block, rest.iter().copied()))
    }

    /// The name of a full block of known tokens.
    pub fn prefix_key(&mut self, index: usize, block_size: usize) -> PrefixKey {
        let Self { request, generated, keys, .. } = self;
        keys.key(index, request.cache_salt.as_deref().unwrap_or_default(), |block| {
            (block * block_size..(block + 1) * block_size).map(|position| token(&request.prompt, generated, position))
        })
    }

    /// What its time is spent on, inside a step or between two.
    pub fn activity(&self, computing: bool) -> Activity {
        match (self.generated.is_empty(), self.phase(), computing) {
            (true, _, true) => Activity::PrefillComputing,
            (true, _, false) => Activity::PrefillWaiting,
            (false, Phase::Prefill, _) => Activity::DecodePreempted,
            (false, Phase::Decode, true) => Activity::DecodeComputing,
            (false, Phase::Decode, false) => Activity::DecodeWaiting,
        }
    }

    /// Everything that the next draw depends on. Nothing of it knows the batch.
    pub fn draw(&self) -> Draw {
        let params = self.request.params.clone();
        let banned = if self.generated.len() < self.min_tokens { self.ends.clone() } else { Arc::default() };
        Draw { params, seed: self.request.seed, position: self.known(), history: self.history.clone(), banned }
    }

    /// Whether a token ends it. Before `min_tokens` none of these can be drawn.
    pub fn ends_with(&self, token_id: u32) -> bool {
        self.ends.contains(&token_id)
    }

    /// Leaves the queue with `cached` tokens found in the cache, their blocks already in its table.
    pub fn admit(&mut self, cached: usize, block_size: usize, now: Time, clock: &QueueClock) {
        self.waits_for = None;
        self.computed = cached;
        self.published = cached / block_size;
        self.meter.leave_queue(now, clock);
        if self.record.preemptions == 0 {
            self.record.cached_tokens = cached;
            self.furthest = cached;
        }
    }

    /// Says which blocks it is going to publish: all that its known tokens fill.
    pub fn announce(&mut self, kv: &mut KvCache) {
        let block_size = kv.layout().block_size;
        self.announced = self.published.max(self.known() / block_size);
        for index in self.published..self.announced {
            kv.announce(self.prefix_key(index, block_size));
        }
        if let Some(tail) = self.tail_key(block_size).filter(|_| self.computed < self.stem()) {
            kv.announce(tail);
            self.tail_announced = true;
        }
    }

    /// What it would share is still being computed.
    pub fn waits(&self, kv: &KvCache) -> bool {
        self.waits_for.is_some_and(|key| kv.is_announced(key))
    }

    /// How many names it has announced and not yet published.
    pub fn announcements(&self) -> usize {
        self.announced.saturating_sub(self.published) + usize::from(self.tail_announced)
    }

    /// Every block that its rows have filled can be found from now on, and the one in which its stem ends.
    pub fn publish(&mut self, kv: &mut KvCache) {
        let block_size = kv.layout().block_size;
        if self.tail_announced && self.computed >= self.stem() {
            self.tail_announced = false;
            if let Some(tail) = self.tail_key(block_size) {
                kv.publish_tail(&self.table, self.stem() / block_size, tail);
                kv.withdraw(tail);
            }
        }
        while (self.published + 1) * block_size <= self.computed {
            let index = self.published;
            let key = self.prefix_key(index, block_size);
            kv.publish(&self.table, index, key, || self.contents(index, block_size));
            if self.published < self.announced {
                kv.withdraw(key);
            }
            self.published += 1;
        }
    }

    /// The name of what comes before block `index`, which has a name by now, and the block's tokens.
    fn contents(&self, index: usize, block_size: usize) -> (PrefixKey, Arc<[u32]>) {
        let parent = match index.checked_sub(1) {
            Some(before) => self.keys.known(before),
            None => PrefixKey::root(self.request.cache_salt.as_deref().unwrap_or_default()),
        };
        (parent, (index * block_size..(index + 1) * block_size).map(|position| self.token(position)).collect())
    }

    /// Says of its blocks, before it leaves them, what it was like.
    pub fn mark_blocks(&self, kv: &mut KvCache) {
        kv.mark(&self.table, self.request.prompt.len(), self.generated.len());
    }

    /// Gives its blocks back, and takes back what it announced.
    pub fn release(&mut self, kv: &mut KvCache, now: Time) {
        let block_size = kv.layout().block_size;
        for index in self.published..self.announced {
            kv.withdraw(self.prefix_key(index, block_size));
        }
        if std::mem::take(&mut self.tail_announced)
            && let Some(tail) = self.tail_key(block_size)
        {
            kv.withdraw(tail);
        }
        (self.computed, self.published, self.announced, self.inherited) = (0, 0, 0, None);
        self.give_back_borrowed(kv, now);
        self.record.block_ns += kv.release(&mut self.table, now);
    }

    /// Its blocks are going to be taken away.
    pub fn lose(&mut self, now: Time) {
        self.make_up(now);
        self.lost = Some(now);
        self.record.preemptions += 1;
        let at_ns = now.since(self.record.submitted);
        self.record.preempted.push(Preemption { at_ns, lost_tokens: self.computed, ..Preemption::default() });
    }

    /// What it lost is there again, or nobody asks for it any more.
    fn make_up(&mut self, now: Time) {
        if let (Some(since), Some(cost)) = (self.lost.take(), self.record.preempted.last_mut()) {
            cost.lost_ns = now.since(since);
        }
    }

    /// The step that copies blocks is over.
    pub fn give_back_borrowed(&mut self, kv: &mut KvCache, now: Time) {
        for borrowed in self.borrowed.drain(..) {
            self.record.block_ns += kv.give_back(borrowed, now);
        }
    }

    /// The planned rows have been run, in a step of `sequences` sequences.
    pub fn advance(&mut self, sequences: usize, now: Time) {
        let record = &mut self.record;
        record.steps += 1;
        record.chunks += usize::from(self.generated.is_empty());
        record.neighbour_sequences += (sequences - 1) as u64;
        record.computed_tokens += self.planned;
        let computed = self.computed + self.planned;
        let again = computed.min(self.furthest).saturating_sub(self.computed);
        record.recomputed_tokens += again;
        if let Some(cost) = record.preempted.last_mut() {
            cost.recomputed_tokens += again;
        }
        let made_up = computed >= self.furthest;
        self.furthest = self.furthest.max(computed);
        self.computed = computed;
        self.planned = 0;
        if made_up {
            self.make_up(now);
        }
    }

    /// One more token is known.
    pub fn push(&mut self, token_id: u32, now: Time) {
        self.generated.push(token_id);
        self.record.token_ns.push(now.since(self.record.submitted));
        if let Some(history) = &mut self.history {
            Arc::make_mut(history).push(token_id);
        }
    }

    /// The record of a sequence that ends now and has given its blocks back.
    pub fn close(mut self, now: Time, clock: &QueueClock) -> RequestRecord {
        self.make_up(now);
        let mut record = self.record;
        record.completion_tokens = self.generated.len();
        record.finished = now;
        record.stages = self.meter.finish(now, clock);
        assert_eq!(record.stages.total(), record.total_ns(), "{}: the stages are a partition", self.request.id);
        record
    }
}

fn token(prompt: &[u32], generated: &[u32], position: usize) -> u32 {
    match position.checked_sub(prompt.len()) {
        None => prompt[position],
        Some(index) => generated[index],
    }
}
