//! How much of a prompt a step may carry, so that those who are speaking are not held up.
//!
//! What a step takes is learnt from the steps that ran: the time of those that only decode, and what each row of a prompt
//! adds to it. Both follow the latest steps, so they follow the batch, the length of contexts and whatever else the
//! machine does. If one of the two is off, the other makes up for it: together they are what was measured.

/// Share of the newest measurement in a running mean.
const NEWEST: f64 = 0.25;
/// Rows of a prompt beside decoding sequences while nothing is known about their cost.
const FIRST_ROWS: usize = 32;

/// The inter-token target, and what is known about the time of steps, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    target: Option<f64>,
    /// A step that only decodes.
    decoding: Option<f64>,
    /// Rows of prompts in the latest steps, and what they added.
    prompt: Option<Prompt>,
}

/// Running sums, so that a step counts by its rows.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    rows: f64,
    ns: f64,
}

impl Pace {
    /// `None`: prompts may take all of a step.
    pub fn new(target_ns: Option<u64>) -> Self {
        Self { target: target_ns.map(|ns| ns as f64), decoding: None, prompt: None }
    }

    /// Rows of prompts that may join a step of `decoding` sequences. The step then takes about the target; or twice what
    /// it takes anyway, if that is longer. At least one, so that prompts get on.
    pub fn prompt_rows(&self, decoding: usize) -> usize {
        let Some(target) = self.target.filter(|_| decoding > 0) else { return usize::MAX };
        let Some(prompt) = self.prompt else { return FIRST_ROWS };
        let alone = self.decoding.unwrap_or(0.0);
        let left = target.max(2.0 * alone) - alone;
        ((left * prompt.rows / prompt.ns.max(1.0)) as usize).max(1)
    }

    /// What a row of a prompt adds to a step; `None`: no prompt was read yet.
    pub fn prompt_row_ns(&self) -> Option<f64> {
        self.prompt.map(|prompt| prompt.ns / prompt.rows)
    }

    /// How long it takes to read `rows` rows of prompts beside `decoding` sequences, in steps of at most `most` rows. `None`:
    /// nothing was read yet.
    pub fn read_ns(&self, decoding: usize, rows: usize, most: usize) -> Option<f64> {
        let row = self.prompt_row_ns()?;
        let in_a_step = self.prompt_rows(decoding).min(most.saturating_sub(decoding)).max(1);
        let alone = if decoding > 0 { self.decoding.unwrap_or(0.0) } else { 0.0 };
        Some(rows.div_ceil(in_a_step) as f64 * alone + rows as f64 * row)
    }

    /// A step of `decoding` sequences and `prompt_rows` rows of prompts took this long.
    pub fn observe(&mut self, decoding: usize, prompt_rows: usize, ns: u64) {
        let ns = ns as f64;
        if prompt_rows == 0 {
            self.decoding = Some(self.decoding.map_or(ns, |mean| mean + NEWEST * (ns - mean)));
            return;
        }
        let alone = if decoding > 0 { self.decoding.unwrap_or(0.0) } else { 0.0 };
        let (added, before) = ((ns - alone).max(0.1 * ns), self.prompt.unwrap_or(Prompt { rows: 0.0, ns: 0.0 }));
        self.prompt = Some(Prompt {
            rows: (1.0 - NEWEST) * before.rows + prompt_rows as f64,
            ns: (1.0 - NEWEST) * before.ns + added,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_come_to_the_target_whatever_they_cost() {
        for (base, per_row, target) in [(1e6, 1e5, 30e6f64), (25e6, 1e5, 30e6), (5e6, 3e6, 200e6)] {
            let mut pace = Pace::new(Some(target as u64));
            let step = |rows: usize| base + per_row * rows as f64;
            for _ in 0..20 {
                let rows = pace.prompt_rows(4);
                pace.observe(4, rows, step(rows) as u64);
                pace.observe(4, 0, step(0) as u64);
            }
            let reached = step(pace.prompt_rows(4));
            let wanted = target.max(2.0 * base);
            assert!((0.8 * wanted..1.1 * wanted).contains(&reached), "{reached} for {wanted}");
        }
    }

    #[test]
    fn without_decoding_steps_in_between_it_comes_there_too() {
        let mut pace = Pace::new(Some(30_000_000));
        for _ in 0..40 {
            let rows = pace.prompt_rows(30);
            pace.observe(30, rows, 12_000_000 + 300_000 * rows as u64);
        }
        let reached = 12.0 + 0.3 * pace.prompt_rows(30) as f64;
        assert!((25.0..33.0).contains(&reached), "{reached} ms");
    }

    #[test]
    fn it_holds_nobody_up_without_need() {
        let mut pace = Pace::new(Some(1));
        assert_eq!([pace.prompt_rows(0), pace.prompt_rows(1)], [usize::MAX, FIRST_ROWS]);
        pace.observe(1, 100, 1_000_000);
        assert_eq!(pace.prompt_rows(1), 1);
        assert_eq!(Pace::new(None).prompt_rows(7), usize::MAX);
    }
}
