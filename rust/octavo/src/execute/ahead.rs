//! The next step, before it is asked for: so a device need not wait for the host between two steps.
//!
//! What follows a step in which everybody decodes is nearly always the same with one token more for each. So it is begun as
//! soon as the step is, with the tokens that the device will have drawn by then. The scheduler is not told. When it asks for
//! its next batch, the rows of it that are under way already are not run again; what else was begun is forgotten.
//!
//! This is allowed because a row's result does not depend on its neighbours, and because a device does everything in order:
//! what a forgotten row writes lies behind its sequence's last token, in a block that was the sequence's own when the row
//! began, and whoever gets that block next writes it later. Only a block that a row begins is not known yet; it is a spare
//! one, which is copied to the sequence's own as soon as that is known.

use std::ops::Range;
use std::sync::Arc;

use octavo_kernels::{BlockCopy, Segment, StepInput};

use super::{Batch, Draw, Entry, LogitRows};

/// A step that was begun unasked: its rows, one for each sequence.
#[derive(Debug)]
pub struct Ahead {
    batch: Batch,
    /// Which draw of the step before gives each row's token.
    sources: Vec<usize>,
    spares: Range<u32>,
}

/// What of a batch is under way.
#[derive(Debug, Default)]
pub struct Claim {
    /// For each entry its row ahead, if it has one.
    pub rows: Vec<Option<usize>>,
    /// Spare blocks whose contents belong to the batch's own.
    pub copies: Vec<BlockCopy>,
}

impl Claim {
    /// Everything, something or nothing.
    pub fn count(&self) -> usize {
        self.rows.iter().flatten().count()
    }
}

/// What bounds a step ahead.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Positions in a block.
    pub block_size: usize,
    /// Most positions of a sequence.
    pub max_positions: usize,
    /// Blocks that nobody owns.
    pub spares: Range<u32>,
}

impl Ahead {
    /// What may follow `batch`, each of whose entries has one row and a draw, number `sources[entry]` of the last step with
    /// draws. `None`: it cannot be known before the tokens are.
    pub fn of(batch: &Batch, sources: &[usize], bounds: Bounds) -> Option<Self> {
        let draws = batch.entries.iter().filter_map(|entry| entry.draw.as_ref());
        if draws.clone().count() < batch.rows() || draws.clone().any(|draw| draw.params.needs_history()) {
            return None;
        }
        let context = |number: usize| batch.segments[number].context;
        let goes_on = |number: &usize| batch.entries[*number].goes_on && context(*number) < bounds.max_positions;
        let numbers: Vec<usize> = (0..batch.entries.len()).filter(goes_on).collect();
        let mut ahead = Batch::default();
        let mut spares = bounds.spares.clone();
        for group in 0..batch.groups() {
            for &number in &numbers {
                let (position, table) = (context(number), batch.table(number, group));
                let first_table_entry = ahead.block_tables.len();
                ahead.block_tables.extend(table);
                if position == table.len() * bounds.block_size {
                    ahead.block_tables.push(spares.next()?);
                }
                let block = ahead.block_tables[first_table_entry + position / bounds.block_size];
                ahead.slots.push(block * bounds.block_size as u32 + (position % bounds.block_size) as u32);
                if group == 0 {
                    let first_row = ahead.ids.len();
                    ahead.segments.push(Segment { first_row, rows: 1, context: position + 1, first_table_entry });
                    ahead.ids.push(StepInput::DRAWN + sources[number] as u32);
                    ahead.positions.push(position as u32);
                    ahead.entries.push(next_entry(&batch.entries[number]));
                }
            }
        }
        let sources = numbers.iter().map(|&number| sources[number]).collect();
        (!numbers.is_empty()).then_some(Self { batch: ahead, sources, spares: bounds.spares })
    }

    /// Its rows.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Which of a batch's entries are under way, now that the step before has given these `tokens`.
    pub fn claim(&self, batch: &Batch, tokens: &[u32]) -> Claim {
        let mut claim = Claim::default();
        let mut from = 0;
        for (number, entry) in batch.entries.iter().enumerate() {
            // Both are in the order of those who run.
            let rest = &self.batch.entries[from..];
            let row = rest.iter().position(|ahead| ahead.id == entry.id).map(|place| from + place);
            from = row.map_or(from, |row| row + 1);
            let copies = claim.copies.len();
            let claimed = row.filter(|&row| {
                let token = tokens.get(self.sources[row]);
                token == Some(&batch.ids[batch.segments[number].first_row])
                    && is_same(&self.batch, row, batch, number)
                    && self.has_same_blocks(row, batch, number, &mut claim.copies)
            });
            if claimed.is_none() {
                claim.copies.truncate(copies);
            }
            claim.rows.push(claimed);
        }
        claim
    }

    /// Whether the tables of a row ahead are an entry's, but for blocks that it did not know or that were given back since.
    fn has_same_blocks(&self, row: usize, batch: &Batch, number: usize, copies: &mut Vec<BlockCopy>) -> bool {
        (0..batch.groups()).all(|group| {
            let (ahead, asked) = (self.batch.table(row, group), batch.table(number, group));
            let same = |(&from, &to): (&u32, &u32)| {
                if self.spares.contains(&from) {
                    copies.push(BlockCopy { from, to });
                    return true;
                }
                from == to || to == StepInput::NO_BLOCK
            };
            // Nearly always they are the same, which is much faster seen as a whole.
            ahead == asked || ahead.len() == asked.len() && ahead.iter().zip(asked).all(same)
        })
    }
}

/// The entry of the step after, whatever the token.
fn next_entry(entry: &Entry) -> Entry {
    let draw = entry.draw.clone().map(|draw| Draw { position: draw.position + 1, ..draw });
    Entry { draw, ..entry.clone() }
}

/// Whether the same is wanted of a row ahead and of an entry, at the same place.
fn is_same(ahead: &Batch, row: usize, batch: &Batch, number: usize) -> bool {
    let (segment, entry) = (&batch.segments[number], &batch.entries[number]);
    let (Some(one), Some(other)) = (&ahead.entries[row].draw, &entry.draw) else { return false };
    segment.rows == 1
        && segment.context == ahead.segments[row].context
        && entry.guide.is_none()
        && entry.prompt_logprobs.is_none()
        && entry.logits == LogitRows::None
        && Arc::ptr_eq(&one.params, &other.params)
        && (one.seed, one.position) == (other.seed, other.position)
        && one.banned == other.banned
}
