//! A model over a backend, in this process.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use octavo_kernels::Backend;

use super::{Batch, Draw, Drawn, Entry, EntryOutput, Executor, LogitRows, StepOutput};
use crate::grammar::{Guide, Next};
use crate::model::Decoder;
use crate::model::decoder::LOGIT_ROWS;
use crate::sample::{Sampler, takes_largest};

/// Runs batches through a decoder, and draws.
pub struct LocalExecutor<B: Backend> {
    decoder: Decoder<B>,
    /// Those that nobody uses; as many as look at logits at once, when none does.
    samplers: Mutex<Vec<Sampler>>,
    /// What was found in each row of the logits at hand.
    found: Vec<Mutex<EntryOutput>>,
    /// Rows of the batch at hand that need logits.
    head_rows: Vec<HeadRow>,
    /// Results of launched batches, oldest first.
    done: VecDeque<StepOutput>,
}

/// A row of a batch that needs logits.
#[derive(Clone, Copy, Debug)]
struct HeadRow {
    /// Whose: index into the batch's entries.
    entry: usize,
    /// Which of the entry's rows.
    index: usize,
    /// Which row of the batch.
    row: u32,
    /// Nothing is wanted of it but the token with the largest logit.
    greedy: bool,
}

impl<B: Backend> LocalExecutor<B> {
    /// Over `decoder`.
    pub fn new(decoder: Decoder<B>) -> Self {
        let vocab = decoder.spec().vocab_size;
        let at_once = decoder.backend().threads().min(LOGIT_ROWS);
        Self {
            samplers: Mutex::new((0..at_once).map(|_| Sampler::new(vocab)).collect()),
            found: (0..LOGIT_ROWS).map(|_| Mutex::default()).collect(),
            decoder,
            head_rows: Vec::new(),
            done: VecDeque::new(),
        }
    }

    /// What it runs.
    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    fn run(&mut self, batch: &Batch) -> StepOutput {
        if !batch.copies.is_empty() {
            self.decoder.copy_blocks(&batch.copies);
        }
        self.decoder.forward(&batch.input());
        find_head_rows(batch, &mut self.head_rows);
        let mut output = StepOutput { entries: vec![EntryOutput::default(); batch.entries.len()] };
        for slice in self.head_rows.chunks(LOGIT_ROWS) {
            let mut rows = [0; LOGIT_ROWS];
            for (row, head_row) in rows.iter_mut().zip(slice) {
                *row = head_row.row;
            }
            self.decoder.head(&rows[..slice.len()]);
            if slice.iter().all(|row| row.greedy) && Self::draw_there(&mut self.decoder, slice, &mut output) {
                continue;
            }
            // Rows are independent, so whoever looks at them in whichever order finds the same.
            let (samplers, found) = (&self.samplers, &self.found);
            self.decoder.look(slice.len(), &|index, logits| {
                let HeadRow { entry, index: row, .. } = slice[index];
                let last = row + 1 == batch.segments[entry].rows;
                let unused = held(samplers).pop();
                let mut sampler = unused.unwrap_or_else(|| Sampler::new(logits.len()));
                let seen = look(&mut sampler, &batch.entries[entry], row, last, logits);
                held(samplers).push(sampler);
                *held(&found[index]) = seen;
            });
            for (head_row, found) in slice.iter().zip(found) {
                take_in(&mut output.entries[head_row.entry], std::mem::take(&mut *held(found)));
            }
        }
        output
    }

    /// Draws the tokens of greedy rows where the logits are, so that nothing but tokens is read. `false`: the backend does
    /// not, or some row has none to draw; then whoever looks at the logits can say why.
    fn draw_there(decoder: &mut Decoder<B>, rows: &[HeadRow], output: &mut StepOutput) -> bool {
        let Some(tokens) = decoder.largest(rows.len()) else { return false };
        if tokens.contains(&u32::MAX) {
            return false;
        }
        for (row, &token_id) in rows.iter().zip(tokens) {
            output.entries[row.entry].drawn = Some(Ok(Drawn { token_id, logprobs: None }));
        }
        true
    }
}

/// Rows that need logits: first those of which nothing is wanted but their largest, then the others, in the batch's order.
fn find_head_rows(batch: &Batch, head_rows: &mut Vec<HeadRow>) {
    head_rows.clear();
    for (number, (entry, segment)) in batch.entries.iter().zip(&batch.segments).enumerate() {
        let wanted = (0..segment.rows).filter(|&index| needs_logits(entry, index, index + 1 == segment.rows));
        let greedy = is_greedy(entry);
        let row = |index| (segment.first_row + index) as u32;
        head_rows.extend(wanted.map(|index| HeadRow { entry: number, index, row: row(index), greedy }));
    }
    head_rows.sort_unstable_by_key(|row| (!row.greedy, row.row)); // takes no memory, unlike a stable sort
}

/// Whether all that is wanted of an entry is the token with the largest logit.
fn is_greedy(entry: &Entry) -> bool {
    let draws = entry.draw.as_ref().is_some_and(|draw| draw.params.logprobs.is_none() && takes_largest(draw));
    draws && entry.guide.is_none() && entry.prompt_logprobs.is_none() && entry.logits == LogitRows::None
}

fn needs_logits(entry: &Entry, index: usize, last: bool) -> bool {
    let wanted = match entry.logits {
        LogitRows::All => true,
        LogitRows::Last => last,
        LogitRows::None => false,
    };
    wanted || (last && entry.draw.is_some()) || (entry.prompt_logprobs.is_some() && index < entry.prompt_next.len())
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an entry wants of the logits of one of its rows.
fn look(sampler: &mut Sampler, entry: &Entry, index: usize, last: bool, logits: &[f32]) -> EntryOutput {
    let mut output = EntryOutput::default();
    let gives_logits = entry.logits == LogitRows::All || (entry.logits == LogitRows::Last && last);
    let gives_logprobs = entry.prompt_logprobs.zip(entry.prompt_next.get(index));
    // A failure is this entry's alone. A draw looks for itself: twice over a vocabulary would be felt at every token.
    if (gives_logits || gives_logprobs.is_some())
        && let Err(why) = sampler.check(logits)
    {
        output.drawn = Some(Err(why));
        return output;
    }
    if gives_logits {
        output.logits = logits.to_vec();
    }
    if let Some((alternatives, &next)) = gives_logprobs {
        output.prompt_logprobs.push(sampler.logprobs(logits, next, alternatives));
    }
    if let Some(draw) = entry.draw.as_ref().filter(|_| last) {
        match &entry.guide {
            None => output.drawn = Some(sampler.draw(logits, draw, None)),
            Some(guide) => draw_guided(sampler, guide, draw, logits, &mut output),
        }
    }
    output
}

/// Adds what was found in the next row of an entry. A failure stays.
fn take_in(output: &mut EntryOutput, row: EntryOutput) {
    if !matches!(output.drawn, Some(Err(_))) {
        output.drawn = row.drawn;
        output.complete = row.complete;
    }
    output.prompt_logprobs.extend(row.prompt_logprobs);
    // The usual answer is one row, which need not be copied.
    if output.logits.is_empty() { output.logits = row.logits } else { output.logits.extend(row.logits) }
}

/// A draw from what a grammar allows. The next mask is computed from here on, while other rows are drawn and other work is
/// done, up to the next draw of this sequence.
fn draw_guided(sampler: &mut Sampler, guide: &Arc<Guide>, draw: &Draw, logits: &[f32], output: &mut EntryOutput) {
    output.drawn = match guide.next() {
        Next::Tokens(mask) => Some(sampler.draw(logits, draw, Some(&mask))),
        Next::Failed(why) => Some(Err(why)),
        Next::Complete => {
            output.complete = true;
            None
        }
    };
    if let Some(Ok(drawn)) = &output.drawn {
        guide.advance(drawn.token_id);
    }
}

impl<B: Backend> Executor for LocalExecutor<B> {
    fn launch(&mut self, batch: &Batch) -> Result<(), String> {
        assert_eq!(batch.entries.len(), batch.segments.len(), "an entry per segment");
        let output = self.run(batch);
        match self.decoder.backend().failure() {
            Some(failure) => Err(failure),
            None => {
                self.done.push_back(output);
                Ok(())
            }
        }
    }

    fn collect(&mut self) -> Result<StepOutput, String> {
        self.done.pop_front().ok_or_else(|| "no batch was launched".into())
    }
}
