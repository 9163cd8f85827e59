//! When a request that comes now will have its first token.
//!
//! The scheduler says after every step what there is to do and how fast it has been done lately ([`Load`]); from a copy
//! of that anybody can tell ([`Load::forecast`]), without asking the engine. It is a forecast: it takes users to have
//! their turns one by one, those who wait and are not being served before whoever comes, and finds as much of their
//! prompts in the cache as it found lately. Half-read prompts share the steps with those of users who were served less,
//! and the step under way ends when it should. Those who run free their places when they have all that they may generate,
//! or before that as often as answers ended lately; later places become free as fast as they did lately, and until as
//! many have ended as may run, as fast as those who run let expect. Before the first step there is a guess; so there is
//! always an answer.

use super::interface::SchedulerConfig;
use super::pace::Pace;
use crate::request::{Request, RequestId, Time, Wanted};
use crate::stages::prefill::OVERTAKERS_SEEN;
use crate::stages::queue::door::Ahead;
use crate::stages::queue::limits;
use crate::stages::queue::waiting::Unserved;

/// Ends that a mean goes over, if not more may run at a time: of the latest so many, or up to twice as many.
const ENDS: usize = 32;
/// Tokens of prompts that a share goes over, likewise.
const TOKENS: f64 = 1e5;
/// Tokens that an answer has to come at most while none has ended, or as many as the longest has: the default of `max_tokens`,
/// and most that ask for more need no more.
const FIRST_ANSWER: f64 = 256.0;
/// Tokens, and steps, that what ended early and what steps take is a mean over, likewise.
const ANSWER_TOKENS: f64 = 1e5;
/// See [`ANSWER_TOKENS`].
const STEPS: f64 = 32.0;
/// Nobody is told to stay away for longer than a place is to be expected to take and this part of that.
const MOST_SPREAD: f64 = 0.4;
/// Nobody is told to come back sooner, in nanoseconds.
const LEAST_PLACE_NS: u64 = 1_000_000;

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

/// What was learnt of requests' ways: how fast places get free, how much of prompts is found in the cache, and how answers end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Habits {
    /// Nanoseconds during which somebody had to wait, or would have had to, and how many ended.
    turnover: Ratio,
    /// Tokens of prompts that were computed, and all of them.
    computed: Ratio,
    /// Answers that ended before they had to, and tokens that were generated.
    early: Ratio,
    /// Nanoseconds of steps with somebody who decodes, and their number.
    steps: Ratio,
    /// Some answer has ended, so that something is known of them.
    any_answer: bool,
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

    /// A step of `ns` nanoseconds in which `decoding` sequences decoded gave `tokens` tokens.
    pub fn step(&mut self, ns: u64, decoding: usize, tokens: u64) {
        self.early.add(0.0, tokens as f64, ANSWER_TOKENS);
        if decoding > 0 {
            self.steps.add(ns as f64, 1.0, STEPS);
        }
    }

    /// An answer has ended, of its own accord or its caller's before it had all that it might have.
    pub fn answered(&mut self, early: bool) {
        self.early.above += f64::from(u8::from(early));
        self.any_answer = true;
    }

    /// How many answers end early for each token that is generated.
    fn early_ends(&self) -> f64 {
        self.early.mean(1.0).unwrap_or(0.0)
    }
}

/// Answers under way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Answers {
    /// How many.
    pub count: usize,
    /// Tokens that they may still generate, all together and the one with the fewest.
    pub left: usize,
    /// See [`Self::left`].
    pub least_left: usize,
    /// Tokens that the longest has.
    pub longest: usize,
}

impl Answers {
    /// One more, of so many tokens of at most `most`.
    pub fn add(&mut self, generated: usize, most: usize) {
        let left = most.saturating_sub(generated);
        self.least_left = if self.count == 0 { left } else { self.least_left.min(left) };
        self.left = self.left.saturating_add(left);
        self.longest = self.longest.max(generated);
        self.count += 1;
    }
}

/// Requests on their way to the scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unseen {
    /// How many.
    pub requests: usize,
    /// Tokens of their prompts.
    pub prompt_tokens: usize,
    /// Tokens that they may generate.
    pub answer_tokens: usize,
}

impl Unseen {
    /// One request.
    pub fn of(request: &Request, config: &SchedulerConfig) -> Self {
        let answer_tokens = if request.wanted == Wanted::Tokens { limits::most_new_tokens(config, request) } else { 0 };
        Self { requests: 1, prompt_tokens: request.prompt.len(), answer_tokens }
    }

    /// Their answers, as if they were begun. If there are none: one, of whom nothing is known.
    fn answers(&self) -> Answers {
        match self.requests {
            0 => Answers { count: 1, left: FIRST_ANSWER as usize, least_left: FIRST_ANSWER as usize, longest: 0 },
            count => Answers { count, left: self.answer_tokens, least_left: self.answer_tokens / count, longest: 0 },
        }
    }

    /// These, too.
    pub fn add(&mut self, more: Self) {
        self.requests += more.requests;
        self.prompt_tokens = self.prompt_tokens.saturating_add(more.prompt_tokens);
        self.answer_tokens = self.answer_tokens.saturating_add(more.answer_tokens);
    }

    /// These have arrived.
    pub fn remove(&mut self, seen: Self) {
        self.requests = self.requests.saturating_sub(seen.requests);
        self.prompt_tokens = self.prompt_tokens.saturating_sub(seen.prompt_tokens);
        self.answer_tokens = self.answer_tokens.saturating_sub(seen.answer_tokens);
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
    /// Of these, of users who have been served as much as whoever comes now and of whom others are here: they give way.
    pub yielding_tokens: usize,
    /// Tokens of those who wait.
    pub waiting_tokens: usize,
    /// Users who wait and of whom nobody runs.
    pub unserved: Unserved,
    /// Users who are here.
    pub users: usize,
    /// Tokens that those who run may generate, those included that they have.
    pub answer_tokens: usize,
    /// The call that all are of; `None`: of several, or there is nobody.
    pub call: Option<RequestId>,
    /// It is asked for one more of that call, so that prompts are held to no target.
    pub free: bool,
    /// Of those who decode; while nobody does, of those whose prompts are read.
    pub answers: Answers,
    /// What steps take.
    pub pace: Pace,
    /// When the step under way began, and how many nanoseconds it should take.
    pub step: Option<(Time, f64)>,
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

/// Requests whose turns come before another's, and the tokens of their prompts.
struct Turns {
    count: f64,
    tokens: f64,
}

impl Load {
    /// As one sees it who is of `call`; `None`: of one that nobody else is of.
    pub fn seen_by(self, call: Option<RequestId>) -> Self {
        Self { free: call.is_some() && self.call == call, ..self }
    }

    /// For a prompt of `tokens` tokens that comes `now`, with these before it, of whom some are on their way to the scheduler.
    pub fn forecast(&self, tokens: usize, ahead: &Ahead, unseen: &Unseen, now: Time) -> Forecast {
        let turns = self.turns(ahead, unseen);
        // One end for everybody beyond the places, and one for itself.
        let ends = (self.running as f64 + turns.count + 1.0 - self.places as f64).max(0.0);
        // They give way to other users, and to nobody of their own.
        let yielding = if ahead.own > 0 { 0 } else { self.yielding_tokens };
        let computed = self.computed_share();
        let before = (self.half_read_tokens - yielding) as f64 + computed * turns.tokens;
        let after = computed * (self.waiting_tokens as f64 - turns.tokens).max(0.0);
        let own = (computed * tokens as f64).max(1.0);
        let (elapsed, left) = self.step_under_way(now);
        let ttft = if ends > 0.0 {
            let turn = (self.ends_ns(ends, unseen) - elapsed).max(left + self.read_ns(before));
            turn + self.read_beside_ns(own, yielding as f64, 0.0)
        } else {
            left + self.read_beside_ns(before + own, yielding as f64, after)
        };
        Forecast { ttft_ns: ttft as u64, least_ns: self.least_ns(ahead) }
    }

    /// Turns before that of somebody who comes now: of users who have turns as often, and one of every user who waits and is
    /// not being served. Those who are have more behind them when it is their turn again.
    fn turns(&self, ahead: &Ahead, unseen: &Unseen) -> Turns {
        let waiting = ahead.living.saturating_sub(self.running) as f64;
        // Who of them runs is not known at the door: of each user as large a part as of all.
        let waits = waiting / ahead.living.max(1) as f64;
        let alike = waits * (ahead.own + ahead.alike + ahead.above) as f64;
        // Some users are on their way to the scheduler.
        let new = ahead.others.saturating_sub(self.users).min(unseen.requests);
        let unserved = (self.unserved.users + new).min(ahead.others) as f64;
        let mean = |tokens: usize, count: usize| (tokens + unseen.prompt_tokens) as f64 / count.max(1) as f64;
        let tokens = alike * mean(self.waiting_tokens, waiting as usize)
            + unserved * mean(self.unserved.tokens, self.unserved.users + unseen.requests);
        Turns { count: alike + unserved, tokens }
    }

    /// Until `ends` more requests can be taken when there is no place: most who come back then find one.
    pub fn place_ns(&self, ends: usize, unseen: &Unseen, now: Time) -> u64 {
        let (elapsed, left) = self.step_under_way(now);
        let expected = (self.ends_ns(ends as f64, unseen) - elapsed).max(left);
        ((expected * (1.0 + self.spread(ends as f64))) as u64).max(LEAST_PLACE_NS)
    }

    /// For how many nanoseconds the step under way has run, and will run.
    fn step_under_way(&self, now: Time) -> (f64, f64) {
        let Some((since, ns)) = self.step else { return (0.0, 0.0) };
        let elapsed = now.since(since) as f64;
        (elapsed.min(ns), (ns - elapsed).max(0.0))
    }

    /// How far the time until so many ends scatters, as a part of it: as of ends at random moments. Before any answer has ended
    /// what is expected is a bound, and does not scatter.
    fn spread(&self, ends: f64) -> f64 {
        if self.habits.any_answer { (1.0 / ends.max(1.0).sqrt()).min(MOST_SPREAD) } else { 0.0 }
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

    /// How long it takes until so many have ended: first those who run, by how far they are, and then others.
    fn ends_ns(&self, ends: f64, unseen: &Unseen) -> f64 {
        if ends <= 0.0 {
            return 0.0;
        }
        let (answers, unread) = match self.answers {
            Answers { count: 0, .. } => (unseen.answers(), unseen.prompt_tokens),
            answers => (answers, self.half_read_tokens),
        };
        let soon = ends.min(answers.count as f64);
        let reading = if answers.longest == 0 { self.read_ns(unread as f64) } else { 0.0 };
        let (step, turn) = (self.step_ns(), self.turn_ns());
        let until = |soon: f64| self.steps_until(soon, &answers) * step + (ends - soon) * turn;
        // Others who begin meanwhile may end before the last of these.
        reading + until(soon).min(until(soon.min(1.0)))
    }

    /// Steps until so many answers have ended. The one that has the fewest tokens left ends first if nothing ends early, and
    /// the others come as evenly as their mean says.
    fn steps_until(&self, ends: f64, answers: &Answers) -> f64 {
        let (count, least) = (answers.count as f64, answers.least_left as f64);
        let to_spread = 2.0 * (answers.left as f64 / count - least).max(0.0);
        let last = least + to_spread * (ends - 1.0).max(0.0) / (count - 1.0).max(1.0);
        self.shortened(last, answers.longest, count / ends)
    }

    /// Steps in which a token of `answers` answers each is generated, up to `most`: fewer where answers end early.
    fn shortened(&self, most: f64, longest: usize, answers: f64) -> f64 {
        let unknown = if self.habits.any_answer { f64::INFINITY } else { FIRST_ANSWER.max(longest as f64) };
        let most = most.min(unknown);
        most / (1.0 + most * answers * self.habits.early_ends())
    }

    /// How long it takes until a place becomes free, when all are taken: as lately, and as is to be expected for as many ends
    /// as are missing until all who may run have ended once.
    fn turn_ns(&self) -> f64 {
        let Ratio { above, below } = self.habits.turnover;
        let missing = (self.places as f64 - below).max(0.0);
        if below < 1.0 { self.first_turn_ns() } else { (above + missing * self.first_turn_ns()) / (below + missing) }
    }

    /// The same before any became free: those who run share the steps, and the next one's prompt is like others'.
    fn first_turn_ns(&self) -> f64 {
        let per = |sum: usize, count: usize| sum as f64 / count.max(1) as f64;
        let most = if self.running > 0 { per(self.answer_tokens, self.running) } else { FIRST_ANSWER };
        let prompt = self.computed_share() * per(self.waiting_tokens, self.waiting);
        self.shortened(most, self.answers.longest, 1.0) * self.step_ns() / self.places.max(1) as f64
            + self.read_ns(prompt)
    }

    /// How long it takes until everybody who decodes has one more token.
    fn step_ns(&self) -> f64 {
        self.habits.steps.mean(1.0).unwrap_or_else(|| self.pace.decoding_ns())
    }

    /// How long it takes to read so many tokens beside `yielding` ones, of which the oldest prompt has half of each step until
    /// it is read. The rest of the last step is filled with these, and with those who come `after`.
    fn read_beside_ns(&self, tokens: f64, yielding: f64, after: f64) -> f64 {
        let chunk = self.pace.chunk(self.decoding(), self.rows, self.free) as f64;
        let steps = ((tokens + yielding.min(tokens)) / chunk).ceil();
        self.read_ns((steps * chunk).min(tokens + yielding + after))
    }

    fn computed_share(&self) -> f64 {
        self.habits.computed.mean(1.0).unwrap_or(1.0)
    }

    /// How many decode while prompts are read.
    fn decoding(&self) -> usize {
        self.running.min(self.places).saturating_sub(usize::from(self.half_read_tokens > 0))
    }

    /// Steps until all who decode have ended. Of ends at random moments the last of many comes as much later than one of them.
    fn steps_until_all(&self) -> f64 {
        let Answers { count, left, least_left, longest } = self.answers;
        let most = 2.0 * left as f64 / count.max(1) as f64 - least_left as f64;
        self.shortened(most.max(least_left as f64), longest, 1.0 / ((count.max(1) as f64).ln() + 1.0))
    }

    /// How long it takes to read so many tokens of prompts: beside those who decode now, as long as there are any. The more of
    /// them end before the next have begun, the more room prompts have.
    fn read_ns(&self, tokens: f64) -> f64 {
        let read = |decoding| self.pace.read_ns(decoding, tokens.ceil() as usize, self.rows, self.free);
        let beside = read(self.decoding());
        if self.decoding() == 0 || self.answers.longest == 0 {
            return beside;
        }
        let left = self.steps_until_all() * self.step_ns();
        if beside <= left { beside } else { left + (1.0 - left / beside) * read(0) }
    }
}
