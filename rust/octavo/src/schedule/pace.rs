//! How much of a prompt a step may carry, so that those who are speaking are not held up.
//!
//! What a step takes is learnt from the steps that ran: the time of those that only decode, and what each row of a prompt
//! adds to it. Both follow the latest steps, so they follow the batch, the length of contexts and whatever else the
//! machine does. If one of the two is off, the other makes up for it: together they are what was measured.
//!
//! A row costs more the more tokens come before it. So that is learnt apart for every doubling of their number: a short
//! prompt that is read beside a long one says little about the long one's rows.

/// Share of the newest measurement in a running mean.
const NEWEST: f64 = 0.25;
/// Rows of a prompt beside decoding sequences while nothing is known about their cost.
const FIRST_ROWS: usize = 32;
/// After so many steps that carry prompts and come near the target there is one that carries none, so that what decoding
/// takes is known however busy it is: a sixty-fourth of the time, for such a step takes half of the others at most.
const MOST_MIXED: u32 = 32;
/// What a step that only decodes takes, and what a row of a prompt adds, while none was measured, in nanoseconds: what a
/// model of a billion weights takes on a few cores. Told to callers, and never used to plan a step.
const FIRST_STEP_NS: f64 = 20e6;
/// See [`FIRST_STEP_NS`].
const FIRST_ROW_NS: f64 = 1e6;
/// Steps whose time is not what was expected are planned with room for so many mean deviations: of times that scatter as
/// measurements do, one in a hundred is longer.
const DEVIATIONS: f64 = 3.0;
/// But no more than this part of the target is kept free, or little would be read on a machine that others disturb.
const MOST_FREE: f64 = 0.4;
/// Up to so many tokens before it, a row costs about the same.
const SHALLOW: usize = 512;
/// Doublings of [`SHALLOW`] that are told apart.
const DEPTHS: usize = 16;

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

/// The inter-token target, and what is known about the time of steps, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    target: Option<f64>,
    /// A step that only decodes.
    decoding: Option<f64>,
    /// Steps near the target since the last of those.
    mixed: u32,
    /// What a row adds at each depth.
    row: [Option<f64>; DEPTHS],
    /// By what part of what was expected steps near the target differ from it, in the mean.
    deviation: f64,
    /// Rows of prompts in the latest steps, and what they added: running sums, so that a step counts by its rows.
    latest_rows: f64,
    latest_ns: f64,
}

impl Pace {
    /// `None`: prompts may take all of a step.
    pub fn new(target_ns: Option<u64>) -> Self {
        Self { target: target_ns.map(|ns| ns as f64), ..Self::default() }
    }

    /// What prompts may add to a step of `decoding` sequences: nothing when it is to be seen what they take alone.
    pub fn prompt_ns(&self, decoding: usize) -> f64 {
        let is_unknown = self.decoding.is_none() || self.mixed >= MOST_MIXED;
        if self.target.is_some() && decoding > 0 && is_unknown { 0.0 } else { self.room_ns(decoding) }
    }

    /// What prompts may add to most steps of `decoding` sequences. A step then takes about the target, less what
    /// steps scatter by; or twice what it takes anyway, if that is longer.
    fn room_ns(&self, decoding: usize) -> f64 {
        let Some(target) = self.target.filter(|_| decoding > 0) else { return f64::INFINITY };
        if self.prompt_row_ns().is_none() {
            return FIRST_ROWS as f64 * UNKNOWN_ROW_NS;
        }
        let alone = self.decoding.unwrap_or(0.0);
        let free = (DEVIATIONS * self.deviation).min(MOST_FREE);
        (((1.0 - free) * target).max(2.0 * alone) - alone).max(UNKNOWN_ROW_NS)
    }

    /// What a row of the latest prompts added to a step; `None`: no prompt was read yet.
    pub fn prompt_row_ns(&self) -> Option<f64> {
        (self.latest_rows > 0.0).then(|| self.latest_ns / self.latest_rows)
    }

    /// The same for a row with `context` tokens before it: as at that depth, or as near to it as anything is known, at fewer
    /// tokens first.
    pub fn row_ns(&self, context: usize) -> f64 {
        self.row_ns_at(depth(context)).unwrap_or(UNKNOWN_ROW_NS).max(UNKNOWN_ROW_NS)
    }

    fn row_ns_at(&self, depth: usize) -> Option<f64> {
        let (shallower, deeper) = self.row.split_at(depth + 1);
        shallower.iter().rev().chain(deeper).find_map(|ns| *ns)
    }

    /// How long a step takes that only decodes; a guess while none was seen.
    pub fn decoding_ns(&self) -> f64 {
        self.decoding.unwrap_or(FIRST_STEP_NS)
    }

    /// How long it takes to read `rows` rows of prompts beside `decoding` sequences, in steps of at most `most` rows; a guess
    /// while nothing was read.
    pub fn read_ns(&self, decoding: usize, rows: usize, most: usize) -> f64 {
        let row = self.prompt_row_ns().unwrap_or(FIRST_ROW_NS);
        let within_target = (self.room_ns(decoding) / row.max(UNKNOWN_ROW_NS)) as usize;
        let in_a_step = within_target.min(most.saturating_sub(decoding)).max(1);
        let alone = if decoding > 0 { self.decoding.unwrap_or(0.0) } else { 0.0 };
        rows.div_ceil(in_a_step) as f64 * alone + rows as f64 * row
    }

    /// A step of `decoding` sequences and these rows of prompts took this long.
    pub fn observe(&mut self, decoding: usize, prompt: &PromptRows, ns: u64) {
        let (ns, rows) = (ns as f64, prompt.total());
        if rows == 0 {
            self.decoding = Some(self.decoding.map_or(ns, |mean| mean + NEWEST * (ns - mean)));
            self.mixed = 0;
            return;
        }
        // Far from the target it matters little.
        let is_close = self.target.is_some_and(|target| ns > target / 2.0);
        self.mixed = self.mixed.saturating_add(u32::from(decoding > 0 && is_close));
        let alone = if decoding > 0 { self.decoding.unwrap_or(0.0) } else { 0.0 };
        let added = (ns - alone).max(0.1 * ns);
        let forget = 1.0 - NEWEST;
        (self.latest_rows, self.latest_ns) = (forget * self.latest_rows + rows as f64, forget * self.latest_ns + added);
        // What was not expected is answered for by the parts of the step, the largest first: normalised least mean squares,
        // where each part may be off by as much as it is. A depth that was never measured answers for all of it.
        let cost = |depth: usize| self.row_ns_at(depth).unwrap_or(added / rows as f64).max(UNKNOWN_ROW_NS);
        let parts: [f64; DEPTHS] = std::array::from_fn(|depth| prompt.0[depth] as f64 * cost(depth));
        let is_new = |depth: usize| prompt.0[depth] > 0 && self.row[depth].is_none();
        let any_new = (0..DEPTHS).any(is_new);
        let answers: Vec<usize> =
            (0..DEPTHS).filter(|&depth| prompt.0[depth] > 0 && (is_new(depth) || !any_new)).collect();
        let (share, most) = if any_new { (1.0, 16.0) } else { (NEWEST, 2.0) };
        let error = added - parts.iter().sum::<f64>();
        if decoding > 0 && is_close && !any_new {
            self.deviation += NEWEST / 4.0 * (error.abs() / (ns - error) - self.deviation);
        }
        let squares: f64 = answers.iter().map(|&depth| parts[depth] * parts[depth]).sum();
        for depth in answers {
            let part = parts[depth];
            let corrected = (part + share * error * part * part / squares).clamp(part / most, part * most);
            self.row[depth] = Some(corrected / prompt.0[depth] as f64);
        }
    }
}

/// What a row counts while nothing is known, and at least.
const UNKNOWN_ROW_NS: f64 = 1.0;

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows after `context` tokens that prompts may add to a step of `decoding` sequences.
    fn fitting(pace: &Pace, decoding: usize, context: usize) -> usize {
        (pace.prompt_ns(decoding) / pace.row_ns(context)) as usize
    }

    fn rows(each: &[(usize, usize)]) -> PromptRows {
        let mut rows = PromptRows::default();
        each.iter().for_each(|&(context, count)| rows.add(context, count));
        rows
    }

    #[test]
    fn steps_come_to_the_target_whatever_they_cost() {
        for (base, per_row, target) in [(1e6, 1e5, 30e6f64), (25e6, 1e5, 30e6), (5e6, 3e6, 200e6), (12e6, 3e5, 30e6)] {
            let mut pace = Pace::new(Some(target as u64));
            let step = |rows: usize| base + per_row * rows as f64;
            let (mut most, mut prompt_rows, steps) = (0.0, 0, 200);
            for i in 0..steps {
                let count = fitting(&pace, 4, 0);
                pace.observe(4, &rows(&[(0, count)]), step(count) as u64);
                if i >= 20 {
                    most = step(count).max(most);
                }
                prompt_rows += count;
            }
            let wanted = target.max(2.0 * base);
            assert!((0.9 * wanted..1.05 * wanted).contains(&most), "{most} for {wanted}");
            let possible = ((wanted - base) / per_row) as usize;
            assert!(prompt_rows > steps * possible * 9 / 10, "{prompt_rows} rows in {steps} steps of {possible}");
        }
    }

    #[test]
    fn steps_that_scatter_are_seldom_longer_than_the_target() {
        let (target, mut pace, mut over, mut prompt_rows) = (30e6, Pace::new(Some(30_000_000)), 0, 0);
        for i in 0..1000u64 {
            // Up to a fifth longer or shorter than it should be.
            let scatter = 0.8 + 0.4 * (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / (1u64 << 24) as f64;
            let count = fitting(&pace, 4, 0);
            let ns = (5e6 + 1e5 * count as f64) * scatter;
            pace.observe(4, &rows(&[(0, count)]), ns as u64);
            over += u32::from(i >= 50 && ns > target);
            prompt_rows += count;
        }
        assert!(over <= 30, "{over} of 950 steps");
        assert!(prompt_rows > 1000 * 100, "{prompt_rows} rows: much of the target is left");
    }

    #[test]
    fn it_holds_nobody_up_without_need() {
        let mut pace = Pace::new(Some(1));
        assert_eq!([fitting(&pace, 0, 0), fitting(&pace, 1, 0)], [usize::MAX, 0], "decoding alone comes first");
        pace.observe(1, &rows(&[]), 1_000);
        assert_eq!(fitting(&pace, 1, 0), FIRST_ROWS);
        pace.observe(1, &rows(&[(0, 100)]), 1_000_000);
        assert_eq!(fitting(&pace, 1, 0), 0);
        assert_eq!(fitting(&Pace::new(None), 7, 0), usize::MAX);
        // Where even decoding takes no time that can be measured, there is room for something.
        let mut pace = Pace::new(Some(0));
        pace.observe(1, &rows(&[]), 0);
        pace.observe(1, &rows(&[(0, 1)]), 0);
        assert!(pace.prompt_ns(1) > 0.0);
    }

    #[test]
    fn what_short_prompts_cost_says_little_about_long_ones() {
        // Deep rows cost eight times as much. They come alone, and from the twentieth step on beside shallow ones.
        let mut pace = Pace::new(Some(30_000_000));
        let ns = |deep: usize, shallow: usize| (2_000_000 + 800_000 * deep + 100_000 * shallow) as u64;
        for step in 0..300 {
            let left = pace.prompt_ns(4);
            let shallow = if step > 20 && step % 3 == 0 { 100.min((left / 2.0 / pace.row_ns(0)) as usize) } else { 0 };
            let deep = ((left - shallow as f64 * pace.row_ns(0)) / pace.row_ns(20_000)) as usize;
            let took = ns(deep, shallow);
            assert!(took < 31_000_000, "step {step}: {took} ns");
            assert!(step < 40 || left == 0.0 || took > 27_000_000, "step {step}: {took} ns");
            pace.observe(4, &rows(&[(20_000, deep), (0, shallow)]), took);
        }
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
            pace.observe(3, &rows(&[]), ns);
            pace.observe(3, &rows(&[(0, 5), (usize::MAX, 1)]), ns);
            assert!(
                pace.row_ns(0).is_finite() && pace.row_ns(0) >= UNKNOWN_ROW_NS && pace.prompt_ns(3) >= 0.0,
                "{pace:?}"
            );
        }
    }
}
