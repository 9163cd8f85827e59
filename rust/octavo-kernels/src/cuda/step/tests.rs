//! What the device makes of a step is that step, whatever came before; and where little is new, little is uploaded.

use super::*;
use crate::{Segment, StepInput};

const LIMITS: StepLimits = StepLimits { rows: 40, segments: 6, groups: 2, table_entries: 20 };
const BLOCK_SIZE: usize = 16;
const DRAWS: usize = 6;
const NULL_BLOCK: u32 = 9999;

/// xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % end
    }
}

/// A sequence: how many positions it has, and its blocks in each group.
struct Sequence {
    context: usize,
    tables: [Vec<u32>; 2],
}

#[derive(Default)]
struct Arrays {
    ids: Vec<u32>,
    positions: Vec<u32>,
    slots: [Vec<u32>; 2],
    segments: Vec<Segment>,
    block_tables: [Vec<u32>; 2],
}

impl Arrays {
    /// The sequence goes on by `rows`, whose ids begin at `id`.
    fn add(&mut self, sequence: &mut Sequence, rows: usize, id: u32, blocks: &mut impl FnMut() -> u32) {
        let context = sequence.context + rows;
        let (first_row, first_table_entry) = (self.ids.len(), self.block_tables[0].len());
        self.segments.push(Segment { first_row, rows, context, first_table_entry });
        self.ids.extend((0..rows as u32).map(|row| id + row));
        self.positions.extend((sequence.context..context).map(|position| position as u32));
        for (group, table) in sequence.tables.iter_mut().enumerate() {
            table.resize_with(context.div_ceil(BLOCK_SIZE), &mut *blocks);
            let slot = |position: usize| table[position / BLOCK_SIZE] * 16 + (position % BLOCK_SIZE) as u32;
            self.slots[group].extend((sequence.context..context).map(slot));
            self.block_tables[group].extend(&*table);
        }
        sequence.context = context;
    }

    fn step(&self, limits: StepLimits) -> Step {
        let (slots, block_tables) = (self.slots.concat(), self.block_tables.concat());
        let mut step = Step::new(limits);
        let Self { ids, positions, segments, .. } = self;
        step.begin(&StepInput { ids, positions, slots: &slots, segments, block_tables: &block_tables });
        step
    }
}

fn words(device: &Device, at: Address, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; 4 * count];
    device.driver().download(&mut bytes, at).unwrap();
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// All that a step is told in.
struct Parts {
    on_device: StepOnDevice,
    changes: Changes,
    draws: Draws,
}

impl Parts {
    fn new(device: &Device, limits: StepLimits, draws: usize) -> Self {
        let on_device = StepOnDevice::new(device, limits, draws).unwrap();
        Self { on_device, changes: Changes::new(device).unwrap(), draws: Draws::new(device, 64, draws, draws).unwrap() }
    }
}

/// Begins `step`, and compares all that kernels read with it.
fn check(device: &Device, parts: &mut Parts, step: &Step, words_of_draws: &[u32], what: &str) {
    let Parts { on_device, changes, draws } = parts;
    on_device.begin(device, changes, step, words_of_draws);
    on_device.advance(device, changes, Some(draws));
    assert_eq!(device.failure(), None, "{what}");
    let rows = step.rows();
    let read = |at| words(device, at, rows);
    // Draw number n gave the token 1000 + n.
    let known = |&id: &u32| if id >= StepInput::DRAWN { 1000 + (id - StepInput::DRAWN) } else { id };
    assert_eq!(read(on_device.ids()), step.ids.iter().map(known).collect::<Vec<_>>(), "{what}: ids");
    assert_eq!(read(on_device.positions()), step.positions, "{what}: positions");
    assert_eq!(words(device, on_device.draws(), words_of_draws.len()), words_of_draws, "{what}: draws");
    let row_tables = read(on_device.row_tables());
    let own: usize = step.segments.iter().map(|segment| segment.rows).sum();
    for group in 0..2 {
        assert_eq!(read(on_device.slots(group)), step.slots(group), "{what}: slots");
        let at = |row: usize| on_device.tables(group) + 4 * Address::from(row_tables[row]);
        for (number, segment) in step.segments.iter().enumerate() {
            let table = step.table(number, group);
            for row in segment.first_row..segment.first_row + segment.rows {
                assert_eq!(words(device, at(row), table.len()), table, "{what}: row {row}");
            }
        }
        assert!((own..rows).all(|row| words(device, at(row), 1) == [NULL_BLOCK]), "{what}");
    }
}

#[test]
fn every_step_is_what_it_was_told_whatever_came_before() {
    let device = Device::shim().unwrap();
    let mut parts = Parts::new(&device, LIMITS, DRAWS);
    parts.on_device.set_null_block(device.driver(), NULL_BLOCK).unwrap();
    let tokens: Vec<u32> = (0..DRAWS as u32).flat_map(|n| [1000 + n, 0, 0, 0, 0, 0, 0, 0, 0]).collect();
    device.driver().upload(parts.draws.drawn(), bytes_of(&tokens)).unwrap();
    for seed in 1..=12u64 {
        let random = &mut Random(seed * 0x9e37_79b9);
        let (mut next_block, mut sequences) = (0, Vec::new());
        let mut blocks = || {
            next_block += 1;
            next_block - 1
        };
        for number in 0..60 {
            // Now and then somebody comes or goes, or all are as they were.
            if sequences.len() < LIMITS.segments && random.below(4) == 0 {
                sequences.push(Sequence { context: 0, tables: Default::default() });
            }
            if !sequences.is_empty() && random.below(8) == 0 {
                sequences.remove(random.below(sequences.len()));
            }
            sequences.retain(|sequence| sequence.context + 10 < LIMITS.table_entries * BLOCK_SIZE);
            let (mut arrays, mut decodes) = (Arrays::default(), true);
            let some_wait = random.below(6) == 0;
            for (place, sequence) in sequences.iter_mut().enumerate() {
                if some_wait && random.below(2) == 0 {
                    continue;
                }
                let rows = if sequence.context == 0 || random.below(12) == 0 { 1 + random.below(6) } else { 1 };
                decodes &= rows == 1;
                let id = [7, StepInput::DRAWN + place as u32][usize::from(rows == 1) * random.below(2)];
                arrays.add(sequence, rows, id, &mut blocks);
                // What lies before a window is given back; what was begun in a spare block is moved.
                let table = &mut sequence.tables[random.below(2)];
                match random.below(10) {
                    0 if table.len() > 2 => table[0] = StepInput::NO_BLOCK,
                    1 => *table.last_mut().unwrap() = blocks(),
                    _ => {}
                }
            }
            if arrays.ids.is_empty() {
                continue;
            }
            let mut step = arrays.step(LIMITS);
            if decodes {
                step.pad(step.rows().next_power_of_two(), NULL_BLOCK * 16);
            }
            let count = if decodes { random.below(2) * arrays.ids.len() } else { 0 };
            let draws: Vec<u32> = (0..count * DRAW_WORDS).map(|word| random.below(2) as u32 * word as u32).collect();
            check(&device, &mut parts, &step, &draws, &format!("seed {seed}, step {number}"));
        }
    }
}

#[test]
fn a_step_that_only_goes_on_uploads_nothing_and_a_block_a_few_words() {
    let limits = StepLimits { rows: 64, segments: 64, groups: 2, table_entries: 512 };
    let (device, null) = Device::null();
    let Parts { mut on_device, mut changes, .. } = Parts::new(&device, limits, 64);
    let mut next_block = 0;
    let mut blocks = || {
        next_block += 1;
        next_block - 1
    };
    let new = |number: usize| Sequence { context: 8000 + number % 16, tables: Default::default() };
    let mut sequences: Vec<_> = (0..64).map(new).collect();
    let draws = vec![0; 64 * DRAW_WORDS];
    let mut uploads = |sequences: &mut Vec<Sequence>, blocks: &mut dyn FnMut() -> u32| {
        let mut arrays = Arrays::default();
        let before = null.calls();
        for (number, sequence) in sequences.iter_mut().enumerate() {
            arrays.add(sequence, 1, StepInput::DRAWN + number as u32, &mut || blocks());
        }
        on_device.begin(&device, &mut changes, &arrays.step(limits), &draws[..sequences.len() * DRAW_WORDS]);
        let after = null.calls();
        (after.uploads - before.uploads, after.uploaded_bytes - before.uploaded_bytes)
    };
    // The first takes all of it.
    assert!(uploads(&mut sequences, &mut blocks).1 > 64 * 500 * 4);
    for _ in 0..40 {
        let begun: Vec<_> = sequences.iter().filter(|sequence| sequence.context % BLOCK_SIZE == 0).collect();
        // A table's new entry and a slot, in both groups, with their places; and how many there are.
        let bytes = 4 + begun.len() as u64 * 2 * 2 * 8;
        let wanted = if begun.is_empty() { (0, 0) } else { (1, bytes) };
        assert_eq!(uploads(&mut sequences, &mut blocks), wanted);
    }
    // Whoever goes takes no other's place with it, and whoever comes has one.
    sequences.remove(10);
    sequences.remove(30);
    let words = 1 + (BESIDE_SLOTS + 2 + DRAW_WORDS) * 62;
    assert!(uploads(&mut sequences, &mut blocks).1 < 4 * words as u64 + 400);
    sequences.push(new(0));
    let words = 1 + (BESIDE_SLOTS + 2 + DRAW_WORDS) * 63;
    assert!(uploads(&mut sequences, &mut blocks).1 < 4 * (words as u64 + 2 * 501) + 400);
    // A place at each end of a step: nothing moves, whoever is left out for once.
    let mut others = sequences.split_off(1);
    uploads(&mut sequences, &mut blocks);
    sequences.append(&mut others);
    assert!(uploads(&mut sequences, &mut blocks).1 < 4 * words as u64 + 400);
}
