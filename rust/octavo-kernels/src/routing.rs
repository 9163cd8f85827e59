//! Where the rows of a step go in a mixture of experts: each to a few of many, and the choices sorted by expert, so that
//! every expert's weights are read once for all the rows that chose it.

use std::ops::Range;

use crate::{BackendError, Result};

/// One row's choice of one expert.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Choice {
    /// The expert.
    pub expert: u32,
    /// What its output is multiplied with.
    pub weight: f32,
}

/// The choices of a step's rows, best first in every row, and their slots: slots count the choices by expert, then by
/// row. Its memory is taken once, for the largest step.
#[derive(Debug)]
pub struct Routing {
    per_row: usize,
    rows: usize,
    choices: Vec<Choice>,
    /// Slot of every choice.
    slots: Vec<u32>,
    /// Row of every slot.
    slot_rows: Vec<u32>,
    /// First slot of every expert, and the end.
    first_slots: Vec<u32>,
    /// Experts that anyone chose.
    busy: Vec<u32>,
}

impl Routing {
    /// Room for `rows` rows that choose `per_row` of `experts` each.
    pub(crate) fn new(experts: usize, per_row: usize, rows: usize) -> Result<Self> {
        if per_row == 0 || per_row > experts {
            return Err(BackendError::Unsupported(format!("a row cannot go to {per_row} of {experts} experts")));
        }
        let choices = rows.checked_mul(per_row).filter(|&choices| u32::try_from(choices).is_ok());
        let what = "the choices of experts";
        let choices = choices.ok_or(BackendError::OutOfMemory { what, bytes: usize::MAX })?;
        Ok(Self {
            per_row,
            rows: 0,
            choices: vec![Choice::default(); choices],
            slots: vec![0; choices],
            slot_rows: vec![0; choices],
            first_slots: vec![0; experts + 1],
            busy: Vec::with_capacity(experts),
        })
    }

    pub(crate) fn experts(&self) -> usize {
        self.first_slots.len() - 1
    }

    /// Choices of one row.
    pub(crate) fn per_row(&self) -> usize {
        self.per_row
    }

    /// Choices of all rows.
    pub(crate) fn slots(&self) -> usize {
        self.rows * self.per_row
    }

    /// The choices of a new step's `rows` rows, to fill in; then [`Routing::sort`].
    pub(crate) fn begin(&mut self, rows: usize) -> &mut [Choice] {
        self.rows = rows;
        &mut self.choices[..rows * self.per_row]
    }

    /// Gives every choice its slot.
    pub(crate) fn sort(&mut self) {
        let choices = &self.choices[..self.rows * self.per_row];
        self.first_slots.fill(0);
        for choice in choices {
            self.first_slots[choice.expert as usize + 1] += 1;
        }
        self.busy.clear();
        for expert in 0..self.first_slots.len() - 1 {
            if self.first_slots[expert + 1] > 0 {
                self.busy.push(expert as u32);
            }
            self.first_slots[expert + 1] += self.first_slots[expert];
        }
        // While slots are given out, an expert's entry is its next free slot, which ends as the first of the next expert.
        for (i, choice) in choices.iter().enumerate() {
            let next = &mut self.first_slots[choice.expert as usize];
            self.slots[i] = *next;
            self.slot_rows[*next as usize] = (i / self.per_row) as u32;
            *next += 1;
        }
        self.first_slots.rotate_right(1);
        self.first_slots[0] = 0;
    }

    /// Experts that anyone chose, ascending.
    pub(crate) fn busy(&self) -> &[u32] {
        &self.busy
    }

    /// The slots of `expert`.
    pub(crate) fn slots_of(&self, expert: usize) -> Range<usize> {
        self.first_slots[expert] as usize..self.first_slots[expert + 1] as usize
    }

    /// The row of every slot.
    pub(crate) fn slot_rows(&self) -> &[u32] {
        &self.slot_rows[..self.slots()]
    }

    /// A row's choices, best first, each with its slot.
    pub(crate) fn of_row(&self, row: usize) -> impl Iterator<Item = (Choice, usize)> + '_ {
        let of_row = row * self.per_row..(row + 1) * self.per_row;
        let slots = self.slots[of_row.clone()].iter().map(|&slot| slot as usize);
        self.choices[of_row].iter().copied().zip(slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_sorted_by_expert_then_by_row() {
        let mut routing = Routing::new(5, 2, 4).unwrap();
        for rows in [[[4, 1], [1, 0], [4, 3]], [[0, 1], [1, 0], [0, 1]]] {
            let choices = rows.as_flattened().iter().map(|&expert| Choice { expert, weight: 0.5 });
            routing.begin(rows.len()).iter_mut().zip(choices).for_each(|(choice, chosen)| *choice = chosen);
            routing.sort();
            let mut wanted: Vec<(u32, u32)> = Vec::new();
            for (row, experts) in rows.iter().enumerate() {
                wanted.extend(experts.iter().map(|&expert| (expert, row as u32)));
            }
            wanted.sort_unstable();
            let all: Vec<usize> = (0..5).flat_map(|expert| routing.slots_of(expert)).collect();
            assert_eq!(all, (0..routing.slots()).collect::<Vec<_>>());
            for expert in 0..5u32 {
                for slot in routing.slots_of(expert as usize) {
                    assert_eq!((expert, routing.slot_rows()[slot]), wanted[slot]);
                }
                assert_eq!(routing.busy().contains(&expert), wanted.iter().any(|of| of.0 == expert));
            }
            for row in 0..rows.len() {
                for (choice, slot) in routing.of_row(row) {
                    assert_eq!(wanted[slot], (choice.expert, row as u32));
                }
            }
        }
    }

    #[test]
    fn absurd_numbers_are_refused() {
        for (experts, per_row, rows) in [(4, 0, 1), (4, 5, 1), (0, 0, 1), (1 << 20, 1 << 20, usize::MAX)] {
            assert!(Routing::new(experts, per_row, rows).is_err(), "{per_row} of {experts}, {rows} rows");
        }
    }
}
