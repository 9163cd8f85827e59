//! How blocks come back, and so which remembered block is forgotten first: the one whose wait is worth least.
//!
//! What the room is worth that a waiting block takes is the chance of its use, for each tick that it waits until then: over
//! the time ahead for which that is best, since a pause that is nearly over is worth waiting out (the index of Gittins). The
//! chances are learnt, from what was forgotten too: a table of lives, as of people, by class and age. Ages are counted in
//! epochs, and blocks that began to wait in the same one are a cohort; old cohorts are merged, so that there are few. Where
//! a class has shown little, it is taken for what its traits say one by one, and those for what is usual at the age; at the
//! very beginning that is least recently used.
//!
//! All is measured on the pool's own clock, which counts blocks taken and shared: no time enters, and only sums, products and
//! quotients do, so that the same history forgets the same blocks everywhere.

use super::past::{CLASSES, KINDS, LEVELS, Past, levels};

/// A pool's worth of ticks has so many epochs, if they are not shorter than the shortest.
const EPOCHS: u64 = 32;
const SHORTEST: u64 = 64;
/// Ages: the first epochs one by one, then four to an octave.
const AGES: usize = 44;
const PER_OCTAVE: usize = 4;
/// Traits count for each of these spans of age apart: up to half a pool's worth of ticks, up to all of it, and longer.
const SPANS: usize = 3;
/// Cohorts are merged when they are together shorter than this part of their age.
const FINENESS: u64 = 6;
/// More cohorts there never are.
pub const MOST_COHORTS: usize = 96;
/// As many uses as these must be seen of an age, a trait or a class to count as much as what was supposed before.
/// Chosen by trial on traces and their halves, like the ages; twice or half as many change little.
const USUAL: f64 = 4.0;
const TRAIT: f64 = 32.0;
const CLASS: f64 = 32.0;
/// The chance supposed at first of a use while a block gets older by as much as its age.
const AT_FIRST: f64 = 0.2;

type Table = Vec<[f64; AGES]>;

/// Blocks that began to wait at about the same time.
#[derive(Clone, Debug)]
struct Cohort {
    start: u64,
    epochs: u64,
    /// How many of each class still wait, remembered or not.
    waiting: Vec<u32>,
    /// Its number among the cohorts that there are.
    slot: usize,
}

/// What happens to cohorts when an epoch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The slots of two that become one: the older, which stays, and the newer, which is the new cohort's now. `None`: that
    /// has a slot more than there were.
    pub merged: Option<(usize, usize)>,
}

/// A table of lives.
#[derive(Clone, Debug)]
pub struct Habit {
    /// Ticks of an epoch, and of a pool's worth.
    epoch: u64,
    pool: u64,
    /// Oldest first.
    cohorts: Vec<Cohort>,
    /// Uses at an age, and ticks waited at it.
    uses: Table,
    waits: Table,
    /// How much likelier a use is at a level of a trait than usual.
    factors: [[[f64; SPANS]; LEVELS[0]]; LEVELS.len()],
    /// What a wait is worth.
    worth: Table,
    is_fitted: bool,
}

impl Habit {
    /// For a pool of `blocks`.
    pub fn new(blocks: usize) -> Self {
        let table = vec![[0.0; AGES]; CLASSES];
        Self {
            epoch: (blocks as u64 / EPOCHS).max(SHORTEST),
            pool: blocks as u64,
            cohorts: vec![Cohort { start: 0, epochs: 1, waiting: vec![0; CLASSES], slot: 0 }],
            uses: table.clone(),
            waits: table.clone(),
            factors: [[[1.0; SPANS]; LEVELS[0]]; LEVELS.len()],
            worth: table,
            is_fitted: false,
        }
    }

    /// A block begins to wait, in the newest cohort.
    pub fn rest(&mut self, class: usize) {
        let newest = self.cohorts.len() - 1;
        self.cohorts[newest].waiting[class] += 1;
    }

    /// The newest cohort's slot.
    pub fn newest(&self) -> usize {
        self.cohorts[self.cohorts.len() - 1].slot
    }

    /// A block that has waited is used again.
    pub fn wake(&mut self, past: Past, now: u64) {
        let class = past.class();
        self.uses[class][age(now / self.epoch - past.touched / self.epoch)] += 1.0;
        let cohort = self.cohort(past.touched);
        let waiting = &mut self.cohorts[cohort].waiting[class];
        // A block of two names, forgotten, may come back twice.
        *waiting = waiting.saturating_sub(1);
    }

    /// The clock goes on to `now`.
    pub fn tick(&mut self, now: u64) -> Option<Turn> {
        now.is_multiple_of(self.epoch).then(|| self.end_epoch(now))
    }

    fn cohort(&self, touched: u64) -> usize {
        self.cohorts.partition_point(|cohort| cohort.start <= touched) - 1
    }

    /// How old a cohort is on the average at the end of an epoch.
    fn age(&self, cohort: &Cohort, end: u64) -> usize {
        age((2 * (end - cohort.start) / self.epoch).saturating_sub(cohort.epochs + 1) / 2)
    }

    fn end_epoch(&mut self, end: u64) -> Turn {
        for (later, cohort) in self.cohorts.iter().rev().enumerate() {
            // Those of the epoch that ends began in the midst of it.
            let waited = self.epoch as f64 * if later == 0 { 0.5 } else { 1.0 };
            let age = self.age(cohort, end);
            for (waits, &waiting) in self.waits.iter_mut().zip(&cohort.waiting) {
                waits[age] += waited * f64::from(waiting);
            }
        }
        if (end / self.epoch).is_multiple_of(EPOCHS) {
            let tables = self.uses.iter_mut().chain(&mut self.waits);
            tables.flatten().for_each(|sum| *sum *= 1.0 - 1.0 / EPOCHS as f64);
        }
        let merged = self.merge(end);
        let slot = merged.map_or(self.cohorts.len(), |(_, newer)| newer);
        self.cohorts.push(Cohort { start: end, epochs: 1, waiting: vec![0; CLASSES], slot });
        self.is_fitted = false;
        Turn { merged }
    }

    /// Makes one of two cohorts that are old enough, or of the oldest if there are too many.
    fn merge(&mut self, end: u64) -> Option<(usize, usize)> {
        let near = |pair: &[Cohort]| {
            let [older, newer] = pair else { unreachable!("a window of two") };
            let since = (end - newer.start) / self.epoch - newer.epochs;
            (older.epochs + newer.epochs) * FINENESS <= since
        };
        let is_full = self.cohorts.len() == MOST_COHORTS;
        let index = self.cohorts.windows(2).rposition(near).or(is_full.then_some(0))?;
        let newer = self.cohorts.remove(index + 1);
        let older = &mut self.cohorts[index];
        older.epochs += newer.epochs;
        older.waiting.iter_mut().zip(&newer.waiting).for_each(|(older, newer)| *older += newer);
        Some((older.slot, newer.slot))
    }

    /// What it is worth to let a block wait on, and when its cohort began: the least goes first.
    pub fn worth(&mut self, past: Past) -> (f64, u64) {
        self.fit();
        let cohort = &self.cohorts[self.cohort(past.touched)];
        (self.worth[past.class()][self.age(cohort, self.now())], cohort.start)
    }

    /// The same for every cohort, the oldest first: its slot, and for every class the worth of a wait.
    pub fn cohorts(&mut self) -> impl Iterator<Item = (usize, impl Iterator<Item = f64>)> {
        self.fit();
        let habit = &*self;
        habit.cohorts.iter().map(move |cohort| {
            let age = habit.age(cohort, habit.now());
            (cohort.slot, habit.worth.iter().map(move |worth| worth[age]))
        })
    }

    /// When the epoch began.
    fn now(&self) -> u64 {
        self.cohorts[self.cohorts.len() - 1].start
    }

    /// Works out what waits are worth, once an epoch if anybody asks.
    fn fit(&mut self) {
        if std::mem::replace(&mut self.is_fitted, true) {
            return;
        }
        let usual = self.usual();
        self.fit_factors(&usual);
        let spans: [usize; AGES] = std::array::from_fn(|age| self.span(age));
        for class in 0..CLASSES {
            let factors: [f64; SPANS] = std::array::from_fn(|span| self.factor(class, span, None));
            let rate = |age: usize| {
                let supposed = usual[age] * factors[spans[age]];
                (self.uses[class][age] + CLASS) / (self.waits[class][age] + CLASS / supposed)
            };
            let mut worth = worth(rate, self.epoch as f64);
            // What more was used, all prefixes of it were: it is worth no less, and so a prefix loses its end first.
            if let Some(less) = class.checked_sub(KINDS) {
                worth.iter_mut().zip(&self.worth[less]).for_each(|(worth, less)| *worth = worth.max(*less));
            }
            self.worth[class] = worth;
        }
    }

    /// The rate of uses at each age, whatever the class: what was seen, and where that is little, falling as ages grow.
    fn usual(&self) -> [f64; AGES] {
        let sum = |table: &Table, age: usize| table.iter().map(|ages| ages[age]).sum::<f64>();
        let ticks = |age: usize| (first(age) as f64 + 1.7) * self.epoch as f64;
        let mut usual = [0.0; AGES];
        for age in 0..AGES {
            let supposed = age.checked_sub(1).map_or(AT_FIRST, |younger| usual[younger] * ticks(younger)) / ticks(age);
            usual[age] = (sum(&self.uses, age) + USUAL) / (sum(&self.waits, age) + USUAL / supposed);
        }
        usual
    }

    fn span(&self, age: usize) -> usize {
        let ticks = first(age) * self.epoch;
        usize::from(2 * ticks >= self.pool) + usize::from(ticks >= self.pool)
    }

    /// How much likelier than usual a use of a class is by its traits, or by all but one.
    fn factor(&self, class: usize, span: usize, but: Option<usize>) -> f64 {
        let levels = levels(class).into_iter().enumerate().filter(|(index, _)| Some(*index) != but);
        levels.map(|(index, level)| self.factors[index][level][span]).product()
    }

    /// One trait after the other is adjusted to what the others leave. Of an older span the younger one's is supposed.
    fn fit_factors(&mut self, usual: &[f64; AGES]) {
        let mut seen = [[[0.0; 2]; SPANS]; CLASSES];
        for (class, spans) in seen.iter_mut().enumerate() {
            for (age, usual) in usual.iter().enumerate() {
                let [uses, expected] = &mut spans[self.span(age)];
                *uses += self.uses[class][age];
                *expected += usual * self.waits[class][age];
            }
        }
        for index in 0..LEVELS.len() {
            let mut sums = [[[0.0; 2]; SPANS]; LEVELS[0]];
            for (class, spans) in seen.iter().enumerate() {
                for (span, [uses, expected]) in spans.iter().enumerate().filter(|(_, [_, expected])| *expected > 0.0) {
                    let sum = &mut sums[levels(class)[index]][span];
                    sum[0] += uses;
                    sum[1] += expected * self.factor(class, span, Some(index));
                }
            }
            for (factors, spans) in self.factors[index].iter_mut().zip(sums) {
                let mut supposed = 1.0;
                for (factor, [uses, expected]) in factors.iter_mut().zip(spans) {
                    *factor = (uses + TRAIT * supposed) / (expected + TRAIT);
                    supposed = *factor;
                }
            }
        }
    }
}

/// What a wait is worth at each age, when uses come at these rates: uses for each tick waited, over the time ahead for which
/// that is most. From the oldest age on, a younger one takes what comes after it along as long as that is better.
fn worth(rate: impl Fn(usize) -> f64, epoch: f64) -> [f64; AGES] {
    let mut worth = [0.0; AGES];
    // Uses, ticks and how many still wait after each stretch of ages; the next stretch is last.
    let (mut stretches, mut count) = ([[0.0; 3]; AGES], 0);
    for age in (0..AGES).rev() {
        let rate = rate(age);
        let [mut uses, mut ticks, mut left] = if age == AGES - 1 {
            [1.0, 1.0 / rate, 0.0]
        } else {
            let width = (first(age + 1) - first(age)) as f64 * epoch;
            let ticks = width / (1.0 + rate * width);
            [rate * ticks, ticks, 1.0 - rate * ticks]
        };
        while let Some([more_uses, more_ticks, more_left]) = stretches[..count].last()
            && more_uses * ticks > uses * more_ticks
        {
            (uses, ticks, left) = (uses + left * more_uses, ticks + left * more_ticks, left * more_left);
            count -= 1;
        }
        stretches[count] = [uses, ticks, left];
        count += 1;
        worth[age] = uses / ticks;
    }
    worth
}

/// The age after so many epochs.
fn age(epochs: u64) -> usize {
    let Some(octave) = epochs.checked_ilog2().filter(|&octave| octave >= 2) else { return epochs as usize };
    let part = (epochs >> (octave - 2)) as usize - PER_OCTAVE;
    ((octave as usize - 1) * PER_OCTAVE + part).min(AGES - 1)
}

/// After how many epochs an age begins.
fn first(age: usize) -> u64 {
    let (octave, part) = (age / PER_OCTAVE, age % PER_OCTAVE);
    if octave == 0 { part as u64 } else { ((PER_OCTAVE + part) as u64) << (octave - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::past::Mark;

    #[test]
    fn ages_are_whole_and_in_order() {
        for age in 1..AGES {
            assert!(first(age) > first(age - 1));
            assert_eq!((super::age(first(age)), super::age(first(age) - 1)), (age, age - 1));
        }
        assert_eq!(super::age(u64::MAX), AGES - 1);
    }

    #[test]
    fn a_wait_is_worth_most_shortly_before_a_use_is_due() {
        // One in two comes back after 16 epochs, the others never do.
        let worth = worth(|age| if first(age) == 16 { 0.07 } else { 1e-6 }, 10.0);
        let due = super::age(16);
        assert!(worth[..=due].is_sorted() && worth[due] > 10.0 * worth[0], "{worth:?}");
        assert!(worth[due + 1..].iter().all(|&late| late < worth[0] / 10.0), "{worth:?}");
        // Where uses get less likely with age, it is their rate.
        let falling = |age: usize| 0.01 / (1.0 + age as f64);
        let worth = super::worth(falling, 1e-6);
        assert!((0..AGES).all(|age| (worth[age] / falling(age) - 1.0).abs() < 1e-3), "{worth:?}");
    }

    /// Blocks of two kinds in a pool of 1,000: one comes back after a time, the other never does.
    fn watch(pause: u64, ticks: u64) -> (Habit, [Mark; 2]) {
        let marks = [Mark::new(false, 0, 1), Mark::new(false, 0, 1_000)];
        let mut habit = Habit::new(1_000);
        for now in 1..=ticks {
            habit.tick(now);
            for (kind, mark) in marks.into_iter().enumerate() {
                habit.rest(Past { uses: 1, touched: now, mark }.class());
                if kind == 0 && now > pause {
                    habit.wake(Past { uses: 1, touched: now - pause, mark }, now);
                }
            }
        }
        (habit, marks)
    }

    #[test]
    fn at_first_the_least_recently_used_goes_first() {
        let mut habit = Habit::new(10_000);
        (1..50_000).for_each(|now| _ = habit.tick(now));
        let mut worth = |uses, touched| habit.worth(Past { uses, touched, mark: Mark::default() });
        assert!(worth(100, 10_000) < worth(1, 20_000) && worth(1, 20_000) < worth(1, 49_999));
    }

    #[test]
    fn what_comes_back_is_kept_as_long_as_it_comes_back() {
        let (mut habit, [again, never]) = watch(1_500, 20_000);
        let mut worth = |mark, age: u64| habit.worth(Past { uses: 1, touched: 20_000 - age, mark }).0;
        assert!(
            worth(again, 1_300) > 10.0 * worth(never, 0),
            "it waits longer than it would as the least recently used"
        );
        assert!(worth(again, 3_000) < worth(again, 1_000) / 2.0, "but not for ever");
        assert!(worth(never, 1_000) <= worth(never, 0));
    }

    #[test]
    fn cohorts_are_few_and_lose_nobody() {
        let (habit, _) = watch(1_500, 200_000);
        assert!(habit.cohorts.len() < MOST_COHORTS, "{}", habit.cohorts.len());
        let waiting = habit.cohorts.iter().flat_map(|cohort| &cohort.waiting);
        assert_eq!(waiting.map(|&count| u64::from(count)).sum::<u64>(), 200_000 + 1_500);
        let mut slots: Vec<usize> = habit.cohorts.iter().map(|cohort| cohort.slot).collect();
        slots.sort_unstable();
        assert!(slots.into_iter().eq(0..habit.cohorts.len()), "every slot is one cohort's");
        assert!(habit.cohorts.is_sorted_by(|older, newer| older.start + older.epochs * habit.epoch == newer.start));
    }
}
