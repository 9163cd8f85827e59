//! When a request that comes now will have its first token.
//!
//! The scheduler says after every step what there is to do and how fast it has been done lately ([`Load`]); from a copy of
//! that anybody can tell ([`Load::forecast`]), without asking the engine. It is a forecast: it takes users to have their turns
//! one by one, finds as much of their prompts in the cache as it found lately, and takes places to become free as fast as they
//! did lately. Until as many have ended as may run, it reckons also with the tokens that those who run may generate, and
//! before the first step with a stated pace; so there is always an answer.

use super::pace::Pace;
use crate::stages::prefill::OVERTAKERS_SEEN;
use crate::stages::queue::door::Ahead;

/// Ends that a mean goes over, if not more may run at a time: of the latest so many, or up to twice as many.
const ENDS: usize = 32;
/// Tokens of prompts that a share goes over, likewise.
const TOKENS: f64 = 1e5;
/// Tokens that somebody may generate of whom nothing is known: the default of `max_tokens`.
const FIRST_ANSWER: f64 = 256.0;
/// Nobody is told to come back sooner, in nanoseconds.
const LEAST_PLACE_NS: f64 = 1e6;

/// Running sums of two things, old ones fading.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ratio {
    above: f64,
    below: f64,
}

impl Ratio {
    fn add(&mut self, above: f64, below: f64, memory: f64) {
        (self.above, self.below) = (self.above + above, self.below + below);
        if self.below > 2.0 * memory {
            (self.above, self.below) = (self.above / 2.0, self.below / 2.0);
        }
    }

    fn mean(&self, least: f64) -> Option<f64> {
        (self.below >= least).then(|| self.above / self.below)
    }
}

/// What was learnt of requests' ways: how fast places get free, how much of prompts is found in the cache, and how much of
/// what they may generate answers take.
#[derive(Clone, Copy, Debug, Default)]
pub struct Habits {
    /// Nanoseconds during which somebody had to wait, or would have had to, and how many ended.
    turnover: Ratio,
    /// Tokens of prompts that were computed, and all of them.
    computed: Ratio,
    /// Tokens of answers that came to their own end, and the most that they might have had.
    generated: Ratio,
}

impl Habits {
    /// A step of `ns` nanoseconds in which somebody waited or all `places` were taken; `ends` requests ended with it.
    pub fn crowded_step(&mut self, ns: u64, ends: usize, places: usize) {
        self.turnover.add(ns as f64, ends as f64, ENDS.max(places) as f64);
    }

    /// Prompts of `tokens` tokens were admitted, `cached` of them found.
    pub fn admitted(&mut self, tokens: usize, cached: u64) {
        self.computed.add(tokens as f64 - cached as f64, tokens as f64, TOKENS);
    }

    /// An answer came to its own end after `tokens` tokens of at most `most`.
    pub fn answered(&mut self, tokens: usize, most: usize) {
        self.generated.add(tokens as f64, most as f64, TOKENS);
    }
}

/// What there is to do, and how fast it is done.
#[derive(Clone, Debug, Default)]
pub struct Load {
    /// Requests that may run at a time.
    pub places: usize,
    /// Rows of a step.
    pub rows: usize,
    /// Requests that run.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Tokens of half-read prompts that are still to be computed.
    pub half_read_tokens: usize,
    /// Tokens of those who wait.
    pub waiting_tokens: usize,
    /// Tokens that those who run may generate, those included that they have.
    pub answer_tokens: usize,
    /// What steps take.
    pub pace: Pace,
    /// The step before took so long, in nanoseconds.
    pub step_ns: u64,
    /// What was learnt.
    pub habits: Habits,
}

/// What a request that comes now can expect, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forecast {
    /// Until its first token.
    pub ttft_ns: u64,
    /// So long it waits at least, whatever becomes of those who run now and however much of any prompt is in the cache: for
    /// the turns of those before it who cannot be passed. A third of what that took lately, and less while few have ended.
    pub least_ns: u64,
}

impl Load {
    /// For a prompt of `tokens` tokens, with these before it; `unseen_tokens` of them are on their way to the scheduler.
    pub fn forecast(&self, tokens: usize, ahead: &Ahead, unseen_tokens: usize) -> Forecast {
        let waiting = ahead.living.saturating_sub(self.running) as f64;
        // Who of them runs is not known here: of each user as large a part as of all.
        let waits = waiting / ahead.living.max(1) as f64;
        let first = waits * (ahead.own + ahead.alike + ahead.above) as f64;
        // One end for everybody beyond the places, and one for itself.
        let ends = (self.running as f64 + first + 1.0 - self.places as f64).max(0.0);
        let computed = self.computed_share();
        let of_waiting = computed * first / waiting.max(1.0) * (self.waiting_tokens + unseen_tokens) as f64;
        let step_under_way = if self.running > 0 { self.step_ns as f64 / 2.0 } else { 0.0 };
        let turns = (ends * self.end_ns()).max(self.read_ns(self.half_read_tokens as f64 + of_waiting));
        let ttft = step_under_way + turns + self.read_ns((computed * tokens as f64).max(1.0));
        Forecast { ttft_ns: ttft as u64, least_ns: self.least_ns(ahead) }
    }

    /// Until one more request can be taken when there is no place.
    pub fn place_ns(&self) -> u64 {
        self.end_ns().max(LEAST_PLACE_NS) as u64
    }

    /// All who run now may end at any moment, all of them may be its own user's, and from so far behind it may overtake; its
    /// user's others must have their turns before, and as many of those who have turns as often.
    fn least_ns(&self, ahead: &Ahead) -> u64 {
        let own = ahead.own.saturating_sub(self.running + OVERTAKERS_SEEN);
        let ends = (own + own.min(ahead.alike)).saturating_sub(self.places);
        // Those who began together end together: before as many have ended as may run, all of them may be about to.
        let Ratio { above, below } = self.habits.turnover;
        (ends as f64 * above / (below + self.places as f64) / 3.0) as u64
    }

    /// How long it takes until a place becomes free, when all are taken: as lately, and as is to be expected for as many ends
    /// as are missing until all who may run have ended once.
    fn end_ns(&self) -> f64 {
        let Ratio { above, below } = self.habits.turnover;
        let missing = (self.places as f64 - below).max(0.0);
        if below < 1.0 { self.first_end_ns() } else { (above + missing * self.first_end_ns()) / (below + missing) }
    }

    /// The same before any became free: those who run share the steps, and the next one's prompt is like others'.
    fn first_end_ns(&self) -> f64 {
        let per = |sum: usize, count: usize| sum as f64 / count.max(1) as f64;
        let answer = if self.running > 0 { per(self.answer_tokens, self.running) } else { FIRST_ANSWER };
        let share = self.habits.generated.mean(1.0).unwrap_or(1.0);
        let prompt = self.computed_share() * per(self.waiting_tokens, self.waiting);
        answer * share * self.pace.decoding_ns() / self.places.max(1) as f64 + self.read_ns(prompt)
    }

    fn computed_share(&self) -> f64 {
        self.habits.computed.mean(1.0).unwrap_or(1.0)
    }

    /// How long it takes to read so many tokens of prompts.
    fn read_ns(&self, tokens: f64) -> f64 {
        let decoding = self.running.min(self.places).saturating_sub(usize::from(self.half_read_tokens > 0));
        self.pace.read_ns(decoding, tokens.ceil() as usize, self.rows)
    }
}
