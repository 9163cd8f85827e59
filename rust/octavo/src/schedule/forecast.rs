//! When a request that comes now will have its first token.
//!
//! The scheduler says after every step what there is to do and how fast it has been done lately ([`Load`]); from a copy of
//! that anybody can tell ([`Load::forecast`]), without asking the engine. It is a forecast: it takes prompts in the order in
//! which they came, finds as much of them in the cache as it found lately, and takes places to become free as fast as they
//! did lately.

use std::sync::Arc;

use super::pace::Pace;
use crate::stages::prefill::OVERTAKERS_SEEN;

/// Ends that a mean goes over: of the latest so many, or up to twice as many.
const ENDS: f64 = 32.0;
/// Tokens of prompts that a share goes over, likewise.
const TOKENS: f64 = 1e5;

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

/// What was learnt of requests' ways: how fast places get free, and how much of prompts is found in the cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct Habits {
    /// Nanoseconds during which all places were taken, and how many became free.
    turnover: Ratio,
    /// Tokens of prompts that were computed, and all of them.
    computed: Ratio,
}

impl Habits {
    /// A step of `ns` nanoseconds in which all places were taken; `ends` of them are free now.
    pub fn full_step(&mut self, ns: u64, ends: usize) {
        self.turnover.add(ns as f64, ends as f64, ENDS);
    }

    /// Prompts of `tokens` tokens were admitted, `cached` of them found.
    pub fn admitted(&mut self, tokens: usize, cached: u64) {
        self.computed.add(tokens as f64 - cached as f64, tokens as f64, TOKENS);
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
    /// Whose requests wait, if they are all of one user and of one who comes now with a priority of at most this goes last.
    pub last_of: Option<(Arc<str>, i32)>,
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
    pub ttft_ns: Option<u64>,
    /// So long it waits at least, whatever becomes of those who run now and however much of any prompt is in the cache: for
    /// the ends of others who wait and cannot be passed. Half of what that took lately.
    pub least_ns: u64,
    /// Until one more request can be taken when the queue is full.
    pub place_ns: Option<u64>,
}

impl Load {
    /// For a prompt of `tokens` tokens of this user and priority. `unseen` requests, with `unseen_tokens`, are on their way
    /// to the scheduler and come before it.
    pub fn forecast(
        &self,
        tokens: usize,
        user: &str,
        priority: i32,
        (unseen, unseen_tokens): (usize, usize),
    ) -> Forecast {
        let before = self.running + self.waiting + unseen;
        // One end for everybody beyond the places, and one for itself.
        let ends = (before + 1).saturating_sub(self.places);
        let end_ns = self.habits.turnover.mean(1.0);
        let alone = self.running.min(self.places).saturating_sub(usize::from(self.half_read_tokens > 0));
        let read = |tokens: f64| self.pace.read_ns(alone, tokens.ceil() as usize, self.rows);
        let computed = self.habits.computed.mean(1.0).unwrap_or(1.0);
        let ahead = self.half_read_tokens as f64 + computed * (self.waiting_tokens + unseen_tokens) as f64;
        let ttft = || {
            let places = if ends > 0 { ends as f64 * end_ns? } else { 0.0 };
            let step_under_way = if self.running > 0 { self.step_ns as f64 / 2.0 } else { 0.0 };
            Some((step_under_way + places.max(read(ahead)?) + read((computed * tokens as f64).max(1.0))?) as u64)
        };
        // All who run now may end at any moment, and from so far behind it may overtake; the others must run before.
        let certain_ends = (self.running + self.waiting + 1).saturating_sub(2 * self.places + OVERTAKERS_SEEN);
        let is_last = self.last_of.as_ref().is_some_and(|(name, least)| **name == *user && priority <= *least);
        let known = self.habits.turnover.mean(ENDS).filter(|_| is_last).unwrap_or(0.0);
        Forecast {
            ttft_ns: ttft(),
            least_ns: (certain_ends as f64 * known / 2.0) as u64,
            place_ns: end_ns.map(|ns| ns as u64),
        }
    }
}
