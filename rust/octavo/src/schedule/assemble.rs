//! From planned counts to the flat arrays of a batch.

use octavo_kernels::Segment;

use crate::execute::{Batch, Entry, LogitRows};
use crate::kv::KvLayout;
use crate::request::{Time, Wanted};
use crate::schedule::Running;
use crate::sequence::Sequence;

/// Writes the planned rows of all running sequences into an empty batch.
pub fn assemble(batch: &mut Batch, running: &mut Running, layout: &KvLayout, now: Time) {
    let mut first_table_entry = 0;
    for sequence in running.iter_mut().filter(|sequence| sequence.planned > 0) {
        let (first_row, rows, context) = (batch.ids.len(), sequence.planned, sequence.computed + sequence.planned);
        batch.segments.push(Segment { first_row, rows, context, first_table_entry });
        first_table_entry += sequence.table.len();
        batch.ids.extend((sequence.computed..context).map(|position| sequence.token(position)));
        batch.positions.extend(sequence.computed as u32..context as u32);
        batch.entries.push(entry(sequence));
        sequence.meter.enter(sequence.activity(true), now);
        push_table(batch, sequence, 0, layout);
    }
    for group in 1..layout.groups() {
        for sequence in running.iter().filter(|sequence| sequence.planned > 0) {
            push_table(batch, sequence, group, layout);
        }
    }
}

/// A group's slots of the planned rows, and its block table.
fn push_table(batch: &mut Batch, sequence: &Sequence, group: usize, layout: &KvLayout) {
    let rows = sequence.computed..sequence.computed + sequence.planned;
    batch.slots.extend(rows.map(|position| sequence.table.slot(group, position, layout.block_size)));
    batch.block_tables.extend(sequence.table.blocks(group).iter().map(|block| block.0));
}

fn entry(sequence: &Sequence) -> Entry {
    let request = &sequence.request;
    let end = sequence.computed + sequence.planned;
    let last = end == sequence.known();
    let gives_rows = sequence.gives_rows();
    // Looked up only where it may be asked for: the parameters are not in the caches.
    let prompt_logprobs = if gives_rows { request.params.prompt_logprobs } else { None };
    let prompt_next = match prompt_logprobs {
        Some(_) => request.prompt[sequence.computed + 1..request.prompt.len().min(end + 1)].to_vec(),
        None => Vec::new(),
    };
    Entry {
        id: request.id,
        draw: (last && request.wanted == Wanted::Tokens).then(|| sequence.draw()),
        goes_on: sequence.generated.len() + 1 < sequence.most_new_tokens,
        guide: request.guide.clone(),
        prompt_logprobs: prompt_logprobs.filter(|_| !prompt_next.is_empty()),
        prompt_next,
        logits: if gives_rows || request.wanted == Wanted::LastLogits {
            LogitRows::of(request.wanted, last)
        } else {
            LogitRows::None
        },
    }
}
