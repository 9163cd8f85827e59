//! A step's input on the device. Everything has a place of its own that never moves, sized by the largest step.

use super::device::{Device, Memory, bytes_of};
use super::driver::Address;
use crate::{Result, StepLimits, step::Step};

/// Ids, positions, slots and block tables of the step that runs, as u32.
pub struct StepOnDevice {
    ids: Memory,
    positions: Memory,
    /// Where each row's block table begins, within its group's part.
    row_tables: Memory,
    /// `(groups, rows)`.
    slots: Memory,
    /// `(groups, entries)`.
    tables: Memory,
    /// Rows to be gathered.
    gathered: Memory,
    limits: StepLimits,
    /// On the host.
    of_rows: Vec<u32>,
}

impl StepOnDevice {
    /// Takes the memory for steps within `limits`.
    pub fn new(device: &Device, limits: StepLimits) -> Result<Self> {
        let array = |lens: &[usize]| device.take_array("a step's input", 4, lens);
        Ok(Self {
            ids: array(&[limits.rows])?,
            positions: array(&[limits.rows])?,
            row_tables: array(&[limits.rows])?,
            slots: array(&[limits.groups, limits.rows])?,
            tables: array(&[limits.groups, limits.table_entries])?,
            gathered: array(&[limits.rows])?,
            limits,
            of_rows: Vec::with_capacity(limits.rows),
        })
    }

    /// Uploads `step`.
    pub fn begin(&mut self, device: &Device, step: &Step) {
        let rows = step.rows();
        self.of_rows.clear();
        for segment in &step.segments {
            self.of_rows.resize(self.of_rows.len() + segment.rows, segment.first_table_entry as u32);
        }
        let groups = step.slots.len() / rows;
        let entries = step.block_tables.len() / groups;
        device.attempt(|driver| {
            driver.upload(self.ids.at(), bytes_of(&step.ids))?;
            driver.upload(self.positions.at(), bytes_of(&step.positions))?;
            driver.upload(self.row_tables.at(), bytes_of(&self.of_rows))?;
            for group in 0..groups {
                driver.upload(self.slots(group), bytes_of(step.slots(group)))?;
                if entries > 0 {
                    driver.upload(self.tables(group), bytes_of(&step.block_tables[group * entries..][..entries]))?;
                }
            }
            Ok(())
        });
    }

    /// Uploads the numbers of rows to be gathered; where they lie.
    pub fn gather(&mut self, device: &Device, rows: &[u32]) -> Address {
        assert!(rows.len() <= self.limits.rows, "{} rows are gathered of {}", rows.len(), self.limits.rows);
        device.attempt(|driver| driver.upload(self.gathered.at(), bytes_of(rows)));
        self.gathered.at()
    }

    /// Token ids, a row each.
    pub fn ids(&self) -> Address {
        self.ids.at()
    }
    /// Positions, a row each.
    pub fn positions(&self) -> Address {
        self.positions.at()
    }
    /// Where block tables begin, a row each.
    pub fn row_tables(&self) -> Address {
        self.row_tables.at()
    }
    /// Slots of a group, a row each.
    pub fn slots(&self, group: usize) -> Address {
        self.slots.offset(4 * group * self.limits.rows)
    }
    /// Block tables of a group.
    pub fn tables(&self, group: usize) -> Address {
        self.tables.offset(4 * group * self.limits.table_entries)
    }
}
