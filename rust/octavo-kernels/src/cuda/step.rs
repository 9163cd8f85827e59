//! A step's input on the device. Everything has a place that is the same in all steps of so many rows, and only what has
//! changed since the step before is uploaded.

use super::device::{Device, Memory, bytes_of};
use super::driver::{Address, Driver};
use crate::{Result, StepLimits, step::Step};

/// Ids, positions, slots and block tables of the step that runs, as u32.
pub struct StepOnDevice {
    /// For the step's rows, one array after another, so that they are one upload: ids, positions, where each row's block
    /// table begins within its group's part, and the slots of every group.
    rows: Memory,
    /// `(groups, entries + 1)`: the last one is the table of rows that belong to nobody.
    tables: Memory,
    /// Rows to be gathered.
    gathered: Memory,
    limits: StepLimits,
    /// How many rows the step has.
    count: usize,
    /// What `rows` gets.
    host_rows: Vec<u32>,
    /// What `tables` and `gathered` hold.
    host_tables: Vec<u32>,
    host_gathered: Vec<u32>,
}

/// Arrays of `rows` before the slots.
const BEFORE_SLOTS: usize = 3;

impl StepOnDevice {
    /// Takes the memory for steps within `limits`.
    pub fn new(device: &Device, limits: StepLimits) -> Result<Self> {
        let array = |lens: &[usize]| device.take_array("a step's input", 4, lens);
        let entries = limits.groups * (limits.table_entries + 1);
        let tables = array(&[entries])?;
        device.driver().fill(tables.at(), 0xff, tables.bytes())?;
        Ok(Self {
            rows: array(&[BEFORE_SLOTS + limits.groups, limits.rows])?,
            tables,
            gathered: array(&[limits.rows])?,
            limits,
            count: 0,
            host_rows: Vec::with_capacity((BEFORE_SLOTS + limits.groups) * limits.rows),
            host_tables: vec![u32::MAX; entries],
            host_gathered: Vec::with_capacity(limits.rows),
        })
    }

    /// Rows that belong to nobody read this block.
    pub fn set_null_block(&mut self, driver: &dyn Driver, block: u32) -> Result<()> {
        let last = self.limits.table_entries;
        (0..self.limits.groups).try_for_each(|group| self.refill_table(driver, group, last, &[block]))
    }

    /// Uploads `step`. Rows after those of its segments belong to nobody.
    pub fn begin(&mut self, device: &Device, step: &Step) {
        self.count = step.rows();
        self.host_rows.clear();
        self.host_rows.extend(step.ids.iter().chain(&step.positions));
        for segment in &step.segments {
            self.host_rows.resize(self.host_rows.len() + segment.rows, segment.first_table_entry as u32);
        }
        self.host_rows.resize(BEFORE_SLOTS * self.count, self.limits.table_entries as u32);
        self.host_rows.extend(&step.slots);
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
        let held = &mut self.host_tables[at..][..table.len()];
        let differs = |(held, wanted): (&u32, &u32)| held != wanted;
        let Some(from) = held.iter().zip(table).position(differs) else { return Ok(()) };
        let to = held.iter().zip(table).rposition(differs).map_or(from, |last| last + 1);
        held[from..to].copy_from_slice(&table[from..to]);
        driver.upload(self.tables.offset(4 * (at + from)), bytes_of(&held[from..to]))
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

    fn array(&self, number: usize) -> Address {
        self.rows.offset(4 * number * self.count)
    }
}
