//! From planned counts to the flat arrays of a batch.

use octavo_kernels::Segment;

use crate::execute::{Batch, Entry, LogitRows};
use crate::request::{Time, Wanted};
use crate::sequence::Sequence;

/// Writes the planned rows of all running sequences into an empty batch.
pub fn assemble(batch: &mut Batch, running: &mut [Sequence], block_size: usize, now: Time) {
    for sequence in running.iter_mut().filter(|sequence| sequence.planned > 0) {
        sequence.entry = batch.entries.len();
        write_rows(batch, sequence, block_size);
        batch.entries.push(entry(sequence));
        sequence.meter.enter(sequence.activity(true), now);
    }
}

fn write_rows(batch: &mut Batch, sequence: &Sequence, block_size: usize) {
    let context = sequence.computed + sequence.planned;
    batch.segments.push(Segment {
        first_row: batch.ids.len(),
        rows: sequence.planned,
        context,
        first_table_entry: batch.block_tables.len(),
    });
    batch.block_tables.extend(sequence.table.blocks().iter().map(|block| block.0));
    for position in sequence.computed..context {
        batch.ids.push(sequence.token(position));
        batch.positions.push(position as u32);
        batch.slots.push(sequence.table.slot(position, block_size));
    }
}

fn entry(sequence: &Sequence) -> Entry {
    let request = &sequence.request;
    let end = sequence.computed + sequence.planned;
    let last = end == sequence.known();
    let gives_rows = sequence.gives_rows();
    let prompt_next = match request.params.prompt_logprobs {
        Some(_) if gives_rows => request.prompt[sequence.computed + 1..request.prompt.len().min(end + 1)].to_vec(),
        _ => Vec::new(),
    };
    Entry {
        id: request.id,
        draw: (last && request.wanted == Wanted::Tokens).then(|| sequence.draw()),
        guide: request.guide.clone(),
        prompt_logprobs: request.params.prompt_logprobs.filter(|_| !prompt_next.is_empty()),
        prompt_next,
        logits: if gives_rows || request.wanted == Wanted::LastLogits {
            LogitRows::of(request.wanted, last)
        } else {
            LogitRows::None
        },
    }
}
