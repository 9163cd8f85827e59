//! A step's input on the device. Everything has a place that is the same in all steps of so many rows, and only what has
//! changed since the step before is uploaded.

use std::ops::Range;

use super::device::{Device, Memory, bytes_of};
use super::draws::DRAW_WORDS;
use super::driver::{Address, Driver};
use crate::{Result, StepLimits, step::Step};

/// Ids, positions, slots and block tables of the step that runs, as u32.
pub struct StepOnDevice {
    /// For the step's rows, one array after another, so that they are one upload: ids, positions, where each row's block
    /// table begins within its group's part, and the slots of every group. Behind them, how tokens are drawn.
    rows: Memory,
    /// `(groups, entries + 1)`: the last one is the table of rows that belong to nobody.
    tables: Memory,
    /// Rows to be gathered.
    gathered: Memory,
    limits: StepLimits,
    /// How many rows the step has.
    count: usize,
    /// Where in `rows` the words of draws begin.
    draws_at: usize,
    /// What `rows` gets.
    host_rows: Vec<u32>,
    /// What `tables` and `gathered` hold.
    host_tables: Vec<u32>,
    host_gathered: Vec<u32>,
}

/// Arrays of `rows` before the slots.
const BEFORE_SLOTS: usize = 3;

impl StepOnDevice {
    /// Takes the memory for steps within `limits`, with up to `draws` draws.
    pub fn new(device: &Device, limits: StepLimits, draws: usize) -> Result<Self> {
        let array = |lens: &[usize]| device.take_array("a step's input", 4, lens);
        let words = (BEFORE_SLOTS + limits.groups) * limits.rows + draws * DRAW_WORDS;
        let entries = limits.groups * (limits.table_entries + 1);
        let tables = array(&[entries])?;
        device.driver().fill(tables.at(), 0xff, tables.bytes())?;
        Ok(Self {
            rows: array(&[words])?,
            tables,
            gathered: array(&[limits.rows])?,
            limits,
            count: 0,
            draws_at: 0,
            host_rows: Vec::with_capacity(words),
            host_tables: vec![u32::MAX; entries],
            host_gathered: Vec::with_capacity(limits.rows),
        })
    }

    /// Rows that belong to nobody read this block.
    pub fn set_null_block(&mut self, driver: &dyn Driver, block: u32) -> Result<()> {
        let last = self.limits.table_entries;
        (0..self.limits.groups).try_for_each(|group| self.refill_table(driver, group, last, &[block]))
    }

    /// Uploads `step`, and how tokens are drawn after it. Rows after those of its segments belong to nobody.
    pub fn begin(&mut self, device: &Device, step: &Step, draws: &[u32]) {
        self.count = step.rows();
        self.host_rows.clear();
        self.host_rows.extend(step.ids.iter().chain(&step.positions));
        for segment in &step.segments {
            self.host_rows.resize(self.host_rows.len() + segment.rows, segment.first_table_entry as u32);
        }
        self.host_rows.resize(BEFORE_SLOTS * self.count, self.limits.table_entries as u32);
        self.host_rows.extend(&step.slots);
        self.draws_at = self.host_rows.len();
        self.host_rows.extend(draws);
        let groups = step.slots.len() / self.count;
        let entries = step.block_tables.len() / groups;
        device.attempt(|driver| {
            driver.upload(self.rows.at(), bytes_of(&self.host_rows))?;
            let mut tables = step.block_tables.chunks_exact(entries.max(1)).enumerate();
            tables.try_for_each(|(group, table)| self.refill_table(driver, group, 0, table))
        });
    }

    /// Makes `table` the entries of a group from `first` on. Uploads from the first entry that changes to the last.
    fn refill_table(&mut self, driver: &dyn Driver, group: usize, first: usize, table: &[u32]) -> Result<()> {
        let at = group * (self.limits.table_entries + 1) + first;
        let Some(changed) = refill(&mut self.host_tables[at..][..table.len()], table) else { return Ok(()) };
        driver.upload(self.tables.offset(4 * (at + changed.start)), bytes_of(&table[changed]))
    }

    /// Uploads how tokens are drawn from rows of the step that runs.
    pub fn set_draws(&mut self, device: &Device, draws: &[u32]) {
        device.attempt(|driver| driver.upload(self.draws(), bytes_of(draws)));
    }

    /// Uploads the numbers of rows to be gathered; where they lie.
    pub fn gather(&mut self, device: &Device, rows: &[u32]) -> Address {
        assert!(rows.len() <= self.limits.rows, "{} rows are gathered of {}", rows.len(), self.limits.rows);
        if self.host_gathered != rows {
            self.host_gathered.clear();
            self.host_gathered.extend(rows);
            device.attempt(|driver| driver.upload(self.gathered.at(), bytes_of(rows)));
        }
        self.gathered.at()
    }

    /// Token ids, a row each.
    pub fn ids(&self) -> Address {
        self.array(0)
    }
    /// Positions, a row each.
    pub fn positions(&self) -> Address {
        self.array(1)
    }
    /// Where block tables begin, a row each.
    pub fn row_tables(&self) -> Address {
        self.array(2)
    }
    /// Slots of a group, a row each.
    pub fn slots(&self, group: usize) -> Address {
        self.array(BEFORE_SLOTS + group)
    }
    /// Block tables of a group.
    pub fn tables(&self, group: usize) -> Address {
        self.tables.offset(4 * group * (self.limits.table_entries + 1))
    }

    /// How tokens are drawn.
    pub fn draws(&self) -> Address {
        self.rows.offset(4 * self.draws_at)
    }

    fn array(&self, number: usize) -> Address {
        self.rows.offset(4 * number * self.count)
    }
}

/// Makes `held` what is wanted; from the first that changes to the last, if any does.
pub fn refill(held: &mut [u32], wanted: &[u32]) -> Option<Range<usize>> {
    if held == wanted {
        return None; // as nearly always, and much faster than looking for a place
    }
    let differs = |(held, wanted): (&u32, &u32)| held != wanted;
    let first = held.iter().zip(wanted).position(differs)?;
    let last = held.iter().zip(wanted).rposition(differs)?;
    held[first..=last].copy_from_slice(&wanted[first..=last]);
    Some(first..last + 1)
}
