//! What can be asked of the scheduler: counts, sessions, what a prompt would find, and what is to be expected.

use super::forecast::Answers;
use super::{Flight, Load, Scheduler, SchedulerConfig, SchedulerStats};
use crate::kv::{CacheExplanation, MissReason, SessionReport};
use crate::request::{SessionId, Time};
use crate::sequence::Phase;

impl Scheduler {
    /// When a session's blocks are due to be given up, if nobody goes on with it.
    pub fn next_expiry(&self) -> Option<Time> {
        self.sessions.next_expiry()
    }

    /// Nobody runs, and who waits does not fill a step: it could do as much for somebody who comes now.
    pub fn could_do_more(&self) -> bool {
        let SchedulerConfig { max_num_seqs, max_num_batched_tokens, .. } = self.config;
        self.running.is_empty()
            && (1..max_num_seqs).contains(&self.queue.len())
            && self.queue.tokens() < max_num_batched_tokens
    }

    /// A session as it stands; `None`: it is closed.
    pub fn session(&mut self, id: SessionId, now: Time) -> Option<SessionReport> {
        let now = self.at(now);
        self.sessions.report(id, &mut self.kv, now)
    }

    /// How much of a prompt would be found in a namespace, or in what a session keeps, and why not more.
    pub fn explain(&self, prompt: &[u32], cache_salt: Option<&str>, session: Option<SessionId>) -> CacheExplanation {
        let last = prompt.len().saturating_sub(1);
        let pin = session.and_then(|id| self.sessions.pin(id)).filter(|pin| {
            pin.cache_salt.as_deref() == cache_salt && pin.common(prompt[..last].iter().copied()) == pin.tokens.len()
        });
        let (cached_tokens, reason) = match (pin, cache_salt) {
            // A turn goes on from what was kept for it, whatever else is remembered; what is new in it, its session has not
            // seen.
            (Some(pin), _) if pin.tokens.len() < last => (pin.tokens.len(), MissReason::NeverSeen),
            (Some(_), _) => (last, MissReason::Complete),
            (None, Some(salt)) => self.kv.explain(prompt, salt),
            (None, None) => (0, MissReason::Disabled),
        };
        let lost = (last - cached_tokens) as f64;
        let lost_ns = self.pace.prompt_row_ns().map(|ns| (lost * ns) as u64);
        CacheExplanation { prompt_tokens: prompt.len(), cached_tokens, reason, lost_ns }
    }

    /// Counts.
    pub fn stats(&self) -> SchedulerStats {
        let pool = self.kv.pool();
        SchedulerStats {
            running: self.running.len(),
            waiting: self.queue.len(),
            blocks: pool.len(),
            blocks_free: pool.free(),
            blocks_remembered: pool.idle(),
            blocks_owned: pool.owned(),
            blocks_pinned: self.sessions.pinned(),
            sessions: self.sessions.len(),
            ..self.totals
        }
    }

    /// What there is to do, and how fast it is done: what a forecast for one more request needs.
    pub fn load(&self) -> Load {
        Load {
            places: self.config.max_num_seqs,
            rows: self.config.max_num_batched_tokens,
            running: self.running.len(),
            waiting: self.queue.len(),
            half_read_tokens: self.half_read_tokens[0],
            yielding_tokens: self.half_read_tokens[1],
            unserved: self.queue.unserved(),
            users: self.queue.users.present(),
            waiting_tokens: self.queue.tokens(),
            answer_tokens: self.running.iter().map(|sequence| sequence.longest_answer()).sum(),
            call: self.calls.keys().next().filter(|_| self.calls.len() == 1).copied(),
            free: false,
            pace: self.pace.clone(),
            answers: self.answers(),
            step: self.in_flight.map(|flight| (flight.since, self.expected_ns(&flight))),
            habits: self.habits,
        }
    }

    /// What a step should take.
    fn expected_ns(&self, flight: &Flight) -> f64 {
        self.pace.expected_ns(flight.decoding, &flight.prompt_rows)
    }

    fn answers(&self) -> Answers {
        let [mut decoding, mut reading] = [Answers::default(); 2];
        for sequence in self.running.iter() {
            let answers = if sequence.phase() == Phase::Decode { &mut decoding } else { &mut reading };
            answers.add(sequence.generated.len(), sequence.longest_answer());
        }
        if decoding.count > 0 { decoding } else { reading }
    }

    /// How much a user who is known has been served, in tokens of a prompt.
    pub fn served(&self, user: &str) -> Option<f64> {
        self.queue.users.served_by_name(user)
    }

    /// Block-nanoseconds that sessions have held blocks between turns.
    pub fn session_block_ns(&mut self, now: Time) -> u128 {
        let now = self.at(now);
        self.sessions.rent_block_ns(&mut self.kv, now)
    }

    /// Block-nanoseconds owned so far: the sum of the rents of all requests and sessions, once all requests have ended.
    pub fn owned_block_ns(&mut self, now: Time) -> u128 {
        let now = self.at(now);
        self.kv.owned_ns(now)
    }
}
