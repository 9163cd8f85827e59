//! How much of a prompt a step may carry, so that those who are speaking are not held up.
//!
//! What a step takes is learnt from the steps that ran: the time of those that only decode, and what each row of a prompt
//! adds to it. Both follow the latest steps, so they follow the batch, the length of contexts and whatever else the
//! machine does. If one of the two is off, the other makes up for it: together they are what was measured. What was never
//! measured is taken to cost as much as it can: so the first chunk is small, and later ones grow.
//!
//! A row costs more the more tokens come before it. So that is learnt apart for every doubling of their number: a short
//! prompt that is read beside a long one says little about the long one's rows.
//!
//! Steps do not take what is expected. How much room is left for that follows from how often it was too little: a step that
//! prompts made longer than the target takes a tenth from what the next ones are planned to take, and one that kept to it
//! gives a little back. The two balance where one step in 211 is too long, however their times scatter: in the long run it
//! cannot be more, for what is planned would shrink. Steps without prompts scatter alike, and say before the first prompt comes
//! how much room it needs. (Robbins and Monro, "A Stochastic Approximation Method", 1951;
//! Gibbs and Candès, "Adaptive Conformal Inference Under Distribution Shift", 2021.)

/// Share of the newest measurement in a running mean.
const NEWEST: f64 = 0.25;
/// After so many steps that are full of prompts there is one that carries none, so that what decoding takes is known however
/// busy it is: a sixty-fourth of the time, for such a step takes half of the others at most.
const MOST_MIXED: u32 = 32;
/// What a step that only decodes takes while none was measured, in nanoseconds, if nobody knows better: what a model of a
/// billion weights takes on a few cores. Told to callers, and never used to plan a step.
const FIRST_STEP_NS: f64 = 20e6;
/// The part of that which a row of a prompt adds.
const FIRST_ROW: f64 = 0.05;
/// The part of the target that steps are planned to take at first, and at least.
const FIRST_PART: f64 = 0.8;
/// See [`FIRST_PART`]. Times that scatter more than this hold no target.
const LEAST_PART: f64 = 1.0 / 3.0;
/// What becomes of that part when a step was too long.
const TIGHTER: f64 = 0.9;
/// And when it was not. So many of these make up for one of the others: ln 0.9 / ln 1.0005.
const LOOSER: f64 = 1.0005;
/// In steps of one call alone its own prompts take at most so many targets, or of what decoding takes: whoever comes meanwhile
/// waits for the step under way.
const LONGEST_OWN: f64 = 3.0;
/// However little the target leaves, prompts get this part of what decoding takes: a ninth of the time.
const LEAST_SHARE: f64 = 0.125;
/// Up to so many tokens before it, a row costs about the same.
const SHALLOW: usize = 512;
/// Doublings of [`SHALLOW`] that are told apart.
const DEPTHS: usize = 16;
/// What a row counts at least.
const LEAST_ROW_NS: f64 = 1.0;

/// How deep a row with so many tokens before it lies.
fn depth(context: usize) -> usize {
    (context / SHALLOW).checked_ilog2().map_or(0, |doublings| (doublings as usize + 1).min(DEPTHS - 1))
}

/// Rows of prompts in a step, by how deep they lie.
#[derive(Clone, Copy, Debug, Default)]
pub struct PromptRows([usize; DEPTHS]);

impl PromptRows {
    /// `rows` more, after `context` tokens.
    pub fn add(&mut self, context: usize, rows: usize) {
        self.0[depth(context)] += rows;
    }

    /// All of them.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
}

/// What a step of so many sequences takes that only decodes.
#[derive(Clone, Copy, Debug)]
struct Decoding {
    sequences: usize,
    ns: f64,
}

impl Decoding {
    /// Whether it tells what a step of so many takes: not of half as many more, nor of half as many less.
    fn is_like(&self, sequences: usize) -> bool {
        let [less, more] = [self.sequences.min(sequences), self.sequences.max(sequences)];
        2 * more <= 3 * less
    }
}

/// The inter-token target, and what is known about the time of steps, in nanoseconds.
#[derive(Clone, Debug)]
pub struct Pace {
    target: Option<f64>,
    decoding: Option<Decoding>,
    /// Steps full of prompts since the last that only decoded.
    mixed: u32,
    /// What a row adds at each depth.
    row: [Option<f64>; DEPTHS],
    /// The part of the target that steps are planned to take.
    part: f64,
    /// What a step takes while none was measured. Told, and never used to plan a step.
    guess_ns: f64,
    /// Rows of prompts in the latest steps, and what they added: running sums, so that a step counts by its rows.
    latest_rows: f64,
    latest_ns: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self::new(None)
    }
}

impl Pace {
    /// `None`: prompts may take all of a step.
    pub fn new(target_ns: Option<u64>) -> Self {
        Self {
            target: target_ns.map(|ns| ns as f64),
            decoding: None,
            mixed: 0,
            row: [None; DEPTHS],
            part: FIRST_PART,
            guess_ns: FIRST_STEP_NS,
            latest_rows: 0.0,
            latest_ns: 0.0,
        }
    }

    /// As it was made.
    pub fn forgotten(&self) -> Self {
        Self { guess_ns: self.guess_ns, target: self.target, ..Self::default() }
    }

    /// A step takes about as long, as far as can be told before one has run.
    pub fn guess(&mut self, step_ns: f64) {
        self.guess_ns = step_ns;
    }

    /// What prompts may add to a step of `decoding` sequences: nothing when it is to be seen what they take alone.
    pub fn prompt_ns(&self, decoding: usize) -> f64 {
        let is_known = self.knows(decoding) && self.mixed < MOST_MIXED;
        if self.target.is_some() && decoding > 0 && !is_known { 0.0 } else { self.room_ns(decoding) }
    }

    /// What the prompts of a call may add to a step of `decoding` others of it, while nobody else is there.
    pub fn own_prompt_ns(&self, decoding: usize) -> f64 {
        let Some(target) = self.target else { return f64::INFINITY };
        LONGEST_OWN * target.max(self.alone_ns(decoding))
    }

    /// Whether it was measured what so many take that decode.
    fn knows(&self, decoding: usize) -> bool {
        self.decoding.is_some_and(|alone| alone.is_like(decoding))
    }

    /// What prompts may add to most steps of `decoding` sequences.
    fn room_ns(&self, decoding: usize) -> f64 {
        let Some(target) = self.target.filter(|_| decoding > 0) else { return f64::INFINITY };
        (self.part * target - self.alone_ns(decoding)).max(self.least_room_ns(target, decoding))
    }

    /// What they may add whatever it does to the target. The further decoding itself is from the target, the less use there is
    /// in holding prompts back.
    fn least_room_ns(&self, target: f64, decoding: usize) -> f64 {
        let alone = self.alone_ns(decoding);
        (alone - target).max(LEAST_SHARE * alone).max(LEAST_ROW_NS)
    }

    /// What a step of `decoding` sequences takes without prompts, as far as is known.
    fn alone_ns(&self, decoding: usize) -> f64 {
        self.decoding.filter(|_| decoding > 0).map_or(0.0, |alone| alone.ns)
    }

    /// What a row of the latest prompts added to a step; `None`: no prompt was read yet.
    pub fn prompt_row_ns(&self) -> Option<f64> {
        (self.latest_rows > 0.0).then(|| self.latest_ns / self.latest_rows)
    }

    /// The same for a row with `context` tokens before it, as at that depth. While nothing is known of that, the most that it
    /// can be.
    pub fn row_ns(&self, context: usize) -> f64 {
        self.row_ns_at(depth(context)).unwrap_or(LEAST_ROW_NS).max(LEAST_ROW_NS)
    }

    fn row_ns_at(&self, depth: usize) -> Option<f64> {
        let (shallower, deeper) = self.row.split_at(depth + 1);
        let doubled = |ns: f64, times: usize| ns * (1u64 << times) as f64;
        let below = shallower.iter().rev().enumerate().find_map(|(times, ns)| Some(doubled((*ns)?, times)));
        let above = || deeper.iter().find_map(|ns| *ns);
        // Whoever decodes has a row, too.
        let decoding = || self.decoding.map(|alone| doubled(alone.ns / alone.sequences as f64, depth));
        below.or_else(above).or_else(decoding)
    }

    /// How long a step takes that only decodes; a guess while none was seen.
    pub fn decoding_ns(&self) -> f64 {
        self.decoding.map_or(self.guess_ns, |alone| alone.ns)
    }

    fn usual_row_ns(&self) -> f64 {
        self.prompt_row_ns().unwrap_or(FIRST_ROW * self.guess_ns)
    }

    /// How long a step of `decoding` sequences and these rows of prompts should take.
    pub fn expected_ns(&self, decoding: usize, prompt: &PromptRows) -> f64 {
        let rows = |(count, row): (&usize, &Option<f64>)| match count {
            0 => 0.0,
            count => *count as f64 * row.unwrap_or_else(|| self.usual_row_ns()),
        };
        let alone = if decoding > 0 { self.decoding_ns() } else { 0.0 };
        alone + prompt.0.iter().zip(&self.row).map(rows).sum::<f64>()
    }

    /// Rows of prompts in a step of at most `most` rows beside `decoding` sequences, which keeps to the target unless it is
    /// `free`.
    pub fn chunk(&self, decoding: usize, most: usize, free: bool) -> usize {
        let room = if free { self.own_prompt_ns(decoding) } else { self.room_ns(decoding) };
        let within_target = (room / self.usual_row_ns().max(LEAST_ROW_NS)) as usize;
        within_target.min(most.saturating_sub(decoding)).max(1)
    }

    /// How long it takes to read `rows` rows of prompts beside `decoding` sequences, in steps of at most `most` rows, which keep
    /// to the target unless they are `free`; a guess while nothing was read.
    pub fn read_ns(&self, decoding: usize, rows: usize, most: usize, free: bool) -> f64 {
        let steps = rows.div_ceil(self.chunk(decoding, most, free));
        steps as f64 * self.alone_ns(decoding) + rows as f64 * self.usual_row_ns()
    }

    /// With a step of `decoding` sequences and these rows of prompts, tokens came so long after those before. `paced`: it was
    /// planned to keep to the target.
    pub fn observe(&mut self, decoding: usize, prompt: &PromptRows, paced: bool, ns: u64) {
        let ns = ns as f64;
        // Prompts make no step shorter.
        self.guess_ns = self.guess_ns.min(ns);
        if prompt.total() == 0 {
            return self.observe_decoding(decoding, ns);
        }
        if !paced && decoding > 0 && !self.knows(decoding) {
            return; // nobody can tell what prompts have added
        }
        let (alone, rows) = (self.alone_ns(decoding), prompt.total() as f64);
        let cost = |depth: usize| self.row_ns_at(depth).unwrap_or((ns - alone) / rows).max(LEAST_ROW_NS);
        let parts: [f64; DEPTHS] = std::array::from_fn(|depth| prompt.0[depth] as f64 * cost(depth));
        let expected: f64 = parts.iter().sum();
        // A step that was shorter than it should have been says little about a few rows in it.
        let added = (ns - alone).max(expected / 4.0);
        let forget = 1.0 - NEWEST;
        (self.latest_rows, self.latest_ns) = (forget * self.latest_rows + rows, forget * self.latest_ns + added);
        if paced && expected > self.room_ns(decoding) / 2.0 {
            self.mixed = self.mixed.saturating_add(u32::from(decoding > 0));
            self.keep_promise(decoding, alone + expected, ns);
        }
        // What is taken to be the most that it can be is soon known better, and what is far from what it should be at once.
        let is_new = (0..DEPTHS).any(|depth| prompt.0[depth] > 0 && self.row[depth].is_none());
        let too_much = if is_new || alone + expected > 2.0 * ns { expected / added / 2.0 } else { 1.0 };
        self.learn(prompt, parts.map(|part| part / too_much.max(1.0)), added);
    }

    fn observe_decoding(&mut self, sequences: usize, ns: f64) {
        let before = self.decoding.filter(|before| before.is_like(sequences));
        if let Some((before, target)) = before.zip(self.target) {
            // A step full of prompts would have been longer by at least as much. One that is too long as it is says nothing.
            if ns <= target {
                self.note(ns - before.ns > (1.0 - self.part) * target, self.part.max(FIRST_PART));
            }
        }
        let ns = before.map_or(ns, |before| before.ns + NEWEST * (ns - before.ns));
        self.decoding = Some(Decoding { sequences: sequences.max(1), ns });
        self.mixed = 0;
    }

    /// A step full of prompts took `ns` where `expected` was expected.
    fn keep_promise(&mut self, decoding: usize, expected: f64, ns: f64) {
        let Some(target) = self.target.filter(|_| decoding > 0) else { return };
        let alone = self.alone_ns(decoding);
        // Without prompts it would have been too long as well; or there is nothing more to take from them.
        let in_vain =
            ns * alone > target * expected || self.part * target - alone < self.least_room_ns(target, decoding);
        if ns <= target || !in_vain {
            self.note(ns > target, 1.0);
        }
    }

    /// A step was too long or not; then there may be less room to spare, as long as what is planned is at most this part.
    fn note(&mut self, too_long: bool, most: f64) {
        self.part = if too_long { (self.part * TIGHTER).max(LEAST_PART) } else { (self.part * LOOSER).min(most) };
    }

    /// Rows that were expected to add `parts` at each depth added so much together. What was not expected is answered for by
    /// all of them, the largest first: normalised least mean squares, where each may be off by as much as it is.
    fn learn(&mut self, prompt: &PromptRows, parts: [f64; DEPTHS], added: f64) {
        let error = added - parts.iter().sum::<f64>();
        let squares: f64 = parts.iter().map(|part| part * part).sum();
        for (depth, part) in parts.into_iter().enumerate().filter(|(depth, _)| prompt.0[*depth] > 0) {
            let corrected = (part + NEWEST * error * part * part / squares).clamp(part / 2.0, part * 2.0);
            self.row[depth] = Some(corrected / prompt.0[depth] as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows after `context` tokens that prompts may add to a step of `decoding` sequences: one, if any.
    fn fitting(pace: &Pace, decoding: usize, context: usize) -> usize {
        let ns = pace.prompt_ns(decoding);
        ((ns / pace.row_ns(context)) as usize).max(usize::from(ns > 0.0))
    }

    fn rows(each: &[(usize, usize)]) -> PromptRows {
        let mut rows = PromptRows::default();
        each.iter().for_each(|&(context, count)| rows.add(context, count));
        rows
    }

    /// Runs steps of four sequences and as many rows as fit, each of which takes what `cost` says of them; says what they took.
    fn play(pace: &mut Pace, steps: usize, mut cost: impl FnMut(usize) -> f64) -> Vec<f64> {
        let mut step = || {
            let count = fitting(pace, 4, 0);
            let ns = cost(count);
            pace.observe(4, &rows(&[(0, count)]), true, ns as u64);
            ns
        };
        (0..steps).map(|_| step()).collect()
    }

    #[test]
    fn steps_come_to_the_target_and_not_beyond_whatever_they_cost() {
        for (base, per_row, target) in [(1e6, 1e5, 30e6f64), (25e6, 1e5, 30e6), (5e6, 3e6, 200e6), (12e6, 3e5, 30e6)] {
            let took = play(&mut Pace::new(Some(target as u64)), 1000, |rows| base + per_row * rows as f64);
            let over = took.iter().filter(|ns| **ns > target).count();
            assert!(over <= 5, "{over} of 1000 steps");
            let added: f64 = took[500..].iter().map(|ns| ns - base).sum();
            assert!(added > 0.75 * 500.0 * (target - base), "{added} ns of prompts beside {base}");
        }
    }

    #[test]
    fn where_the_target_cannot_be_held_prompts_get_on() {
        // What decoding takes, the target, and what a step may come to: a ninth is for prompts, and half in the end.
        for (base, target, wanted) in [(29.0, 30.0, 32.6), (30.0, 30.0, 33.7), (60.0, 30.0, 90.0), (200.0, 1.0, 399.0)]
        {
            let mut pace = Pace::new(Some((target * 1e6) as u64));
            let took = play(&mut pace, 200, |rows| base * 1e6 + 1e4 * rows as f64);
            let last = took[160..].iter().copied().fold(0.0, f64::max) / 1e6;
            assert!((0.98 * wanted..1.01 * wanted).contains(&last), "{last} ms beside {base} ms, {target} ms wanted");
        }
    }

    #[test]
    fn what_nothing_is_known_about_begins_small_and_grows() {
        for (sequences, context, row_ns) in [(1, 0, 1e5), (16, 0, 3e5), (16, 20_000, 2e6), (2, 4000, 5e3)] {
            let (target, alone) = (30e6, 3e6 + 5e5 * sequences as f64);
            let mut pace = Pace::new(Some(target as u64));
            assert_eq!(fitting(&pace, sequences, context), 0, "it is to be seen what decoding takes");
            pace.observe(sequences, &rows(&[]), true, alone as u64);
            let mut count = 0;
            for _ in 0..30 {
                let before = count.max(1);
                count = fitting(&pace, sequences, context);
                let ns = alone + row_ns * count as f64;
                assert!(ns <= target, "{count} rows after {before}");
                pace.observe(sequences, &rows(&[(context, count)]), true, ns as u64);
            }
            let possible = ((target - alone) / row_ns) as usize;
            assert!(count > possible * 6 / 10, "{count} of {possible} rows");
        }
    }

    #[test]
    fn another_number_that_decodes_is_measured_before_prompts_are_read_beside_it() {
        let mut pace = Pace::new(Some(30_000_000));
        pace.observe(4, &rows(&[]), true, 5_000_000);
        assert_eq!([2, 3, 6, 7].map(|sequences| pace.prompt_ns(sequences) > 0.0), [false, true, true, false]);
        pace.observe(7, &rows(&[]), true, 8_000_000);
        assert!(pace.prompt_ns(7) > 0.0);
        assert_eq!(pace.decoding_ns(), 8e6, "what four take says little about seven");
    }

    #[test]
    fn it_holds_nobody_up_without_need() {
        let mut pace = Pace::new(Some(1));
        assert_eq!([fitting(&pace, 0, 0), fitting(&pace, 1, 0)], [usize::MAX, 0], "decoding alone comes first");
        pace.observe(1, &rows(&[]), true, 1_000);
        assert!(pace.prompt_ns(1) > 900.0, "nothing holds the target");
        assert_eq!(fitting(&Pace::new(None), 7, 0), usize::MAX);
        // Where even decoding takes no time that can be measured, there is room for something.
        let mut pace = Pace::new(Some(0));
        pace.observe(1, &rows(&[]), true, 0);
        pace.observe(1, &rows(&[(0, 1)]), true, 0);
        assert!(pace.prompt_ns(1) > 0.0);
    }

    #[test]
    fn what_short_prompts_cost_says_little_about_long_ones() {
        // Deep rows cost eight times as much. They come alone, and from the twentieth step on beside shallow ones.
        let mut pace = Pace::new(Some(30_000_000));
        let ns = |deep: usize, shallow: usize| (2_000_000 + 800_000 * deep + 100_000 * shallow) as u64;
        for step in 0..1000 {
            let left = pace.prompt_ns(4);
            let shallow = if step > 20 && step % 3 == 0 { 100.min((left / 2.0 / pace.row_ns(0)) as usize) } else { 0 };
            let deep = ((left - shallow as f64 * pace.row_ns(0)) / pace.row_ns(20_000)) as usize;
            let took = ns(deep, shallow);
            assert!(took < 31_000_000, "step {step}: {took} ns");
            assert!(step < 600 || left == 0.0 || took > 25_000_000, "step {step}: {took} ns");
            pace.observe(4, &rows(&[(20_000, deep), (0, shallow)]), true, took);
        }
    }

    #[test]
    fn what_nothing_could_have_kept_to_the_target_does_not_count() {
        let mut pace = Pace::new(Some(30_000_000));
        pace.observe(0, &rows(&[(0, 512)]), false, 102_195_200);
        // Nobody knows yet what decoding takes of this: rows are not blamed for it.
        pace.observe(8, &rows(&[(0, 4)]), false, 5_000_000);
        pace.observe(4, &rows(&[]), true, 4_000_000);
        let planned = fitting(&pace, 4, 0);
        assert_eq!(planned, 100, "of a fifth of a millisecond each, beside 4 ms in 24 ms");
        // Steps that were to be as long as that, and one that was too long without a prompt.
        for _ in 0..50 {
            pace.observe(4, &rows(&[(0, 508)]), false, 105_396_800);
        }
        assert_eq!(fitting(&pace, 4, 0), planned);
        pace.observe(4, &rows(&[]), true, 100_000_000);
        (0..50).for_each(|_| pace.observe(4, &rows(&[]), true, 4_000_000));
        assert_eq!(fitting(&pace, 4, 0), planned);
        pace.observe(4, &rows(&[]), true, 25_000_000);
        (0..50).for_each(|_| pace.observe(4, &rows(&[]), true, 4_000_000));
        assert!(fitting(&pace, 4, 0) < planned, "with prompts, this one would have been too long");
    }

    #[test]
    fn a_call_alone_reads_its_own_prompts_in_steps_that_nobody_waits_long_for() {
        let mut pace = Pace::new(Some(30_000_000));
        assert_eq!(pace.own_prompt_ns(0), 90e6);
        pace.observe(8, &rows(&[]), true, 10_000_000);
        assert_eq!(pace.own_prompt_ns(8), 90e6, "three targets");
        pace.observe(64, &rows(&[]), true, 50_000_000);
        assert_eq!(pace.own_prompt_ns(64), 150e6, "or three times what decoding takes");
        assert_eq!(Pace::new(None).own_prompt_ns(8), f64::INFINITY);
    }

    #[test]
    fn a_context_of_any_length_has_a_depth() {
        let depths = [0, 511, 512, 1023, 1024, 20_000, 1 << 24, usize::MAX].map(depth);
        assert_eq!(depths, [0, 0, 1, 1, 2, 6, DEPTHS - 1, DEPTHS - 1]);
    }

    #[test]
    fn a_measurement_that_says_nothing_does_no_harm() {
        let mut pace = Pace::new(Some(30_000_000));
        for ns in [0, 1, u64::MAX, 5_000_000] {
            pace.observe(3, &rows(&[]), true, ns);
            pace.observe(3, &rows(&[(0, 5), (usize::MAX, 1)]), true, ns);
            assert!(
                pace.row_ns(0).is_finite() && pace.row_ns(0) >= LEAST_ROW_NS && pace.prompt_ns(3) >= 0.0,
                "{pace:?}"
            );
        }
    }
}
