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
            slots: Vec::with_capacity(limits.rows),
            segments: Vec::with_capacity(limits.segments),
            block_tables: Vec::with_capacity(limits.table_entries),
            sorted_slots: Vec::with_capacity(limits.rows),
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

    /// The block table of `segment`, for blocks of `block_size` positions.
    pub fn block_table(&self, segment: &Segment, block_size: usize) -> &[u32] {
        let entries = segment.context.div_ceil(block_size);
        let table = self.block_tables.get(segment.first_table_entry..).and_then(|rest| rest.get(..entries));
        table
            .unwrap_or_else(|| panic!("{segment:?} needs {entries} block table entries of {}", self.block_tables.len()))
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
    assert!(
        input.block_tables.len() <= limits.table_entries,
        "a step of {} block table entries exceeds the limit of {}",
        input.block_tables.len(),
        limits.table_entries
    );
    assert_eq!(input.positions.len(), rows, "every row has a position");
    assert_eq!(input.slots.len(), rows, "every row has a slot");
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
