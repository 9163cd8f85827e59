//! The copy of a step's input that a backend keeps from `begin` to the end of the step.

use crate::{Segment, StepInput, StepLimits};

/// A step's ids, positions, slots, segments and block tables. Its memory is taken once, for the largest step.
#[derive(Debug)]
pub(crate) struct Step {
    limits: StepLimits,
    pub ids: Vec<u32>,
    pub positions: Vec<u32>,
    pub slots: Vec<u32>,
    pub segments: Vec<Segment>,
    pub block_tables: Vec<u32>,
    sorted_slots: Vec<u32>,
}

impl Step {
    pub fn new(limits: StepLimits) -> Self {
        Self {
            limits,
            ids: Vec::with_capacity(limits.rows),
            positions: Vec::with_capacity(limits.rows),
            slots: Vec::with_capacity(limits.groups * limits.rows),
            segments: Vec::with_capacity(limits.segments),
            block_tables: Vec::with_capacity(limits.groups * limits.segments * limits.table_entries),
            sorted_slots: Vec::with_capacity(limits.groups * limits.rows),
        }
    }

    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Copies `input`.
    ///
    /// # Panics
    /// When it exceeds the limits or contradicts itself: the operations that follow rely on both.
    pub fn begin(&mut self, input: &StepInput<'_>) {
        check(input, &self.limits);
        // Backends write the rows' slots from several threads at once, and their memory safety rests on this.
        refill(&mut self.sorted_slots, input.slots);
        self.sorted_slots.sort_unstable();
        let twice = self.sorted_slots.windows(2).find(|pair| pair[0] == pair[1]);
        assert!(twice.is_none(), "two rows of a step write slot {}", twice.map_or(0, |pair| pair[0]));

        refill(&mut self.ids, input.ids);
        refill(&mut self.positions, input.positions);
        refill(&mut self.slots, input.slots);
        refill(&mut self.segments, input.segments);
        refill(&mut self.block_tables, input.block_tables);
    }

    /// Adds rows up to `rows` that belong to nobody: token 0 at position 0, whose keys and values go to `slot`.
    pub fn pad(&mut self, rows: usize, slot: u32) {
        let (own, groups) = (self.rows(), self.slots.len() / self.rows());
        self.slots.resize(groups * rows, slot);
        for group in (0..groups).rev() {
            self.slots.copy_within(group * own..(group + 1) * own, group * rows);
            self.slots[group * rows + own..(group + 1) * rows].fill(slot);
        }
        self.ids.resize(rows, 0);
        self.positions.resize(rows, 0);
    }

    /// Every row's slot in `group`.
    pub fn slots(&self, group: usize) -> &[u32] {
        &self.slots[group * self.rows()..][..self.rows()]
    }

    /// The block table of segment number `number` in `group`, all of it.
    pub fn table(&self, number: usize, group: usize) -> &[u32] {
        let in_a_group = self.block_tables.len() / (self.slots.len() / self.rows());
        let next = self.segments.get(number + 1).map_or(in_a_group, |next| next.first_table_entry);
        &self.block_tables[group * in_a_group..][self.segments[number].first_table_entry..next]
    }

    /// The block table of `segment` in `group`, for blocks of `block_size` positions.
    pub fn block_table(&self, segment: &Segment, group: usize, block_size: usize) -> &[u32] {
        let in_a_group = self.block_tables.len() / (self.slots.len() / self.rows());
        let tables = &self.block_tables[group * in_a_group..][..in_a_group];
        let entries = segment.context.div_ceil(block_size);
        let table = tables.get(segment.first_table_entry..).and_then(|rest| rest.get(..entries));
        table.unwrap_or_else(|| panic!("{segment:?} needs {entries} block table entries of {}", tables.len()))
    }
}

fn check(input: &StepInput<'_>, limits: &StepLimits) {
    let rows = input.ids.len();
    assert!(rows <= limits.rows, "a step of {rows} rows exceeds the limit of {}", limits.rows);
    assert!(
        input.segments.len() <= limits.segments,
        "a step of {} segments exceeds the limit of {}",
        input.segments.len(),
        limits.segments
    );
    assert_eq!(input.positions.len(), rows, "every row has a position");
    assert!(
        rows > 0 && input.slots.len() >= rows && input.slots.len().is_multiple_of(rows),
        "every one of {rows} rows has a slot in every group: {} slots",
        input.slots.len()
    );
    let groups = input.slots.len() / rows;
    assert!(groups <= limits.groups, "a step of {groups} groups exceeds the limit of {}", limits.groups);
    let entries = input.block_tables.len() / groups;
    assert_eq!(entries * groups, input.block_tables.len(), "as many block table entries in each of {groups} groups");
    let most = limits.segments * limits.table_entries;
    assert!(entries <= most, "a step of {entries} block table entries exceeds the limit of {most}");
    let mut next_row = 0;
    for segment in input.segments {
        assert_eq!(segment.first_row, next_row, "segments follow one another: {segment:?}");
        assert!(
            0 < segment.rows && segment.rows <= segment.context,
            "a segment's rows are part of its context: {segment:?}"
        );
        next_row += segment.rows;
        assert!(next_row <= rows, "{segment:?} goes past the step's {rows} rows");
        let first_position = segment.context - segment.rows;
        let positions = &input.positions[segment.first_row..next_row];
        assert!(
            positions.iter().enumerate().all(|(i, &position)| position as usize == first_position + i),
            "the rows of {segment:?} sit at the end of its context, not at {positions:?}"
        );
    }
    assert_eq!(next_row, rows, "segments cover every row");
}

fn refill<T: Copy>(kept: &mut Vec<T>, given: &[T]) {
    kept.clear();
    kept.extend_from_slice(given);
}
