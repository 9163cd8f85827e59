//! A model over a backend, in this process.

use std::collections::VecDeque;
use std::sync::Arc;

use octavo_kernels::{Backend, DrawnRow, RowDraw};

use super::ahead::{Ahead, Bounds};
use super::{Batch, Draw, Drawn, Entry, EntryOutput, Executor, LogitRows, StepOutput};
use crate::grammar::{Guide, Next};
use crate::model::Decoder;
use crate::model::decoder::LOGIT_ROWS;
use crate::sample::{self, RowChanges, Sampler, TokenMask, check_numbers, logprobs};

/// Runs batches through a decoder, and draws: on the backend where it does and nothing else is wanted of a row's logits,
/// otherwise here. It makes no difference to what is drawn.
pub struct LocalExecutor<B: Backend> {
    decoder: Decoder<B>,
    sampler: Sampler,
    /// Rows of the batch at hand that need logits.
    head_rows: Vec<HeadRow>,
    /// Launched batches, oldest first.
    launched: VecDeque<Launched>,
    /// A step that was begun unasked, after those.
    ahead: Option<Ahead>,
    /// What the draws of the step before it gave.
    tokens: Vec<u32>,
    /// How many batches were under way, all of them, when they were asked for.
    batches_ahead: u64,
}

/// A batch that was launched.
enum Launched {
    /// What it gave is known.
    Done(StepOutput),
    /// The device draws: which draw is each entry's.
    Draws(Vec<usize>),
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
    /// Its logits are wanted for a draw and nothing else, and the backend can do it.
    drawn_there: bool,
}

impl<B: Backend> LocalExecutor<B> {
    /// Over `decoder`.
    pub fn new(decoder: Decoder<B>) -> Self {
        let sampler = Sampler::new(decoder.spec().vocab_size);
        Self {
            decoder,
            sampler,
            head_rows: Vec::new(),
            launched: VecDeque::new(),
            ahead: None,
            tokens: Vec::new(),
            batches_ahead: 0,
        }
    }

    /// What it runs.
    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    /// How many batches were under way, all of them, when they were asked for.
    pub fn batches_ahead(&self) -> u64 {
        self.batches_ahead
    }

    /// Runs what of a batch is not under way already.
    fn run(&mut self, batch: &Batch) -> Launched {
        let Some(ahead) = self.ahead.take() else { return self.run_whole(batch) };
        let claim = ahead.claim(batch, &self.tokens);
        self.decoder.copy_blocks(&claim.copies);
        if claim.count() == batch.entries.len() {
            self.batches_ahead += 1;
            self.decoder.copy_blocks(&batch.copies);
            return Launched::Draws(claim.rows.into_iter().flatten().collect());
        }
        // Read even if nobody wants it: outcomes are read in the order in which they were sent.
        let drawn: Vec<_> = self.decoder.drawn().iter().map(draw_output).collect();
        if claim.count() == 0 {
            return self.run_whole(batch);
        }
        let rest = Batch { copies: batch.copies.clone(), ..batch.part(|number| claim.rows[number].is_none()) };
        let rest = self.run_whole(&rest);
        let mut rest = self.finish(rest).entries.into_iter();
        let entry = |row: Option<usize>| row.map_or_else(|| rest.next().unwrap_or_default(), |row| drawn[row].clone());
        Launched::Done(StepOutput { entries: claim.rows.into_iter().map(entry).collect() })
    }

    /// Begins what is likely to be asked for next.
    fn look_ahead(&mut self, batch: &Batch, sources: &[usize]) {
        let bounds = Bounds {
            block_size: self.decoder.block_size(),
            max_positions: self.decoder.spec().max_positions,
            spares: self.decoder.backend().spare_blocks(),
        };
        self.ahead = Ahead::of(batch, sources, bounds);
        let Some(ahead) = &self.ahead else { return };
        let draws: Vec<&Draw> = ahead.batch().entries.iter().filter_map(|entry| entry.draw.as_ref()).collect();
        let changes: Vec<_> = draws.iter().map(|draw| RowChanges::new(draw, None)).collect();
        let rows: Vec<_> = changes.iter().zip(draws).map(|(changes, draw)| changes.row(draw)).collect();
        self.decoder.forward_and_draw(&ahead.batch().input(), &rows);
    }

    /// What a batch gave. Waits for the device.
    fn finish(&mut self, launched: Launched) -> StepOutput {
        match launched {
            Launched::Done(output) => output,
            Launched::Draws(sources) => {
                let drawn = self.decoder.drawn();
                self.tokens.clear();
                self.tokens
                    .extend(drawn.iter().map(|row| if let DrawnRow::Token(id, _) = row { *id } else { u32::MAX }));
                StepOutput { entries: sources.into_iter().map(|source| draw_output(&drawn[source])).collect() }
            }
        }
    }

    /// Runs a batch.
    fn run_whole(&mut self, batch: &Batch) -> Launched {
        self.decoder.copy_blocks(&batch.copies);
        if self.decodes_there(batch) {
            return Launched::Draws((0..batch.entries.len()).collect());
        }
        self.decoder.forward(&batch.input());
        self.find_head_rows(batch);
        let mut output = StepOutput { entries: vec![EntryOutput::default(); batch.entries.len()] };
        let head_rows = std::mem::take(&mut self.head_rows);
        for slice in head_rows.chunks(LOGIT_ROWS) {
            let mut rows = [0; LOGIT_ROWS];
            for (row, head_row) in rows.iter_mut().zip(slice) {
                *row = head_row.row;
            }
            self.decoder.head(&rows[..slice.len()]);
            let there = slice.partition_point(|row| row.drawn_there);
            self.draw_there(batch, &slice[..there], &mut output);
            self.finish_here(batch, slice, there, &mut output);
        }
        self.head_rows = head_rows;
        Launched::Done(output)
    }

    /// A step of one row for each sequence, every one of which the backend draws a token for, needs nobody before its
    /// tokens are there. Says no, and does nothing, if it is not such a step.
    fn decodes_there(&mut self, batch: &Batch) -> bool {
        let draws = batch.entries.iter().filter(|entry| wants_draw_alone(entry) && entry.guide.is_none());
        let draws: Vec<&Draw> = draws.filter_map(|entry| entry.draw.as_ref()).collect();
        if draws.len() < batch.rows() {
            return false;
        }
        let changes: Vec<_> = draws.iter().map(|draw| RowChanges::new(draw, None)).collect();
        let rows: Vec<_> = changes.iter().zip(&draws).map(|(changes, draw)| changes.row(draw)).collect();
        let all = rows.iter().all(|row| self.decoder.draws_from(row));
        if all {
            self.decoder.forward_and_draw(&batch.input(), &rows);
        }
        all
    }

    /// Rows that need logits: first those that the backend draws from, then the others, in the batch's order.
    fn find_head_rows(&mut self, batch: &Batch) {
        let Self { decoder, head_rows, .. } = self;
        head_rows.clear();
        for (number, (entry, segment)) in batch.entries.iter().zip(&batch.segments).enumerate() {
            let wanted = (0..segment.rows).filter(|&index| needs_logits(entry, index, index + 1 == segment.rows));
            let draw = entry.draw.as_ref().filter(|_| wants_draw_alone(entry));
            let drawn_there = draw.is_some_and(|draw| decoder.draws_from(&RowChanges::new(draw, None).row(draw)));
            let row = |index| (segment.first_row + index) as u32;
            head_rows.extend(wanted.map(|index| HeadRow { entry: number, index, row: row(index), drawn_there }));
        }
        head_rows.sort_unstable_by_key(|row| (!row.drawn_there, row.row)); // takes no memory, unlike a stable sort
    }

    /// Draws from the first of the logits where they are, so that nothing but tokens is read.
    fn draw_there(&mut self, batch: &Batch, rows: &[HeadRow], output: &mut StepOutput) {
        if rows.is_empty() {
            return;
        }
        let entries = || rows.iter().map(|row| &batch.entries[row.entry]);
        let next: Vec<_> = entries().map(|entry| entry.guide.as_ref().map(|guide| guide.next())).collect();
        let draws: Vec<&Draw> = entries().filter_map(|entry| entry.draw.as_ref()).collect();
        let mask = |next: &Option<Next>| if let Some(Next::Tokens(mask)) = next { Some(mask.clone()) } else { None };
        let changes: Vec<_> = draws.iter().zip(&next).map(|(draw, next)| RowChanges::new(draw, mask(next))).collect();
        let changed = changes.iter().zip(&draws).map(|(changes, draw)| changes.row(draw));
        // Where nothing can follow, nothing that is drawn counts.
        let ends = |next: &Option<Next>| matches!(next, Some(Next::Complete | Next::Failed(_)));
        let draws: Vec<_> =
            changed.zip(&next).map(|(row, next)| if ends(next) { RowDraw::LARGEST } else { row }).collect();
        let drawn = self.decoder.draw(&draws);
        for ((row, drawn), next) in rows.iter().zip(drawn).zip(next) {
            let (entry, output) = (&batch.entries[row.entry], &mut output.entries[row.entry]);
            finish_draw(output, entry.guide.as_ref(), next, |_| sample::drawn(drawn.clone()));
        }
    }

    /// Takes from the logits of the rows from number `first` on what is wanted of them.
    fn finish_here(&mut self, batch: &Batch, rows: &[HeadRow], first: usize, output: &mut StepOutput) {
        if first == rows.len() {
            return;
        }
        let vocab = self.decoder.spec().vocab_size;
        let logits = self.decoder.logits(rows.len());
        // Serial: a draw costs tens of microseconds, so with many sequences this is the place for threads. Rows are
        // independent, so the order in which they are drawn changes nothing.
        for (head_row, logits) in rows.iter().zip(logits.chunks_exact(vocab)).skip(first) {
            let entry = &batch.entries[head_row.entry];
            let last = head_row.index + 1 == batch.segments[head_row.entry].rows;
            finish_row(&mut self.sampler, entry, head_row.index, last, logits, &mut output.entries[head_row.entry]);
        }
    }
}

/// Whether all that is wanted of an entry is a token.
fn wants_draw_alone(entry: &Entry) -> bool {
    entry.draw.is_some() && entry.prompt_logprobs.is_none() && entry.logits == LogitRows::None
}

fn needs_logits(entry: &Entry, index: usize, last: bool) -> bool {
    let wanted = match entry.logits {
        LogitRows::All => true,
        LogitRows::Last => last,
        LogitRows::None => false,
    };
    wanted || (last && entry.draw.is_some()) || (entry.prompt_logprobs.is_some() && index < entry.prompt_next.len())
}

/// Takes from the logits of an entry's row what the entry wants of it.
fn finish_row(
    sampler: &mut Sampler,
    entry: &Entry,
    index: usize,
    last: bool,
    logits: &[f32],
    output: &mut EntryOutput,
) {
    let gives_logits = entry.logits == LogitRows::All || (entry.logits == LogitRows::Last && last);
    let gives_logprobs = entry.prompt_logprobs.zip(entry.prompt_next.get(index));
    // A failure is this entry's alone. A draw looks for itself: twice over a vocabulary would be felt at every token.
    if (gives_logits || gives_logprobs.is_some())
        && let Err(why) = check_numbers(logits)
    {
        output.drawn = Some(Err(why));
        return;
    }
    if gives_logits {
        output.logits.extend_from_slice(logits);
    }
    if let Some((alternatives, &next)) = gives_logprobs {
        output.prompt_logprobs.push(logprobs::of(logits, next, alternatives));
    }
    if let Some(draw) = entry.draw.as_ref().filter(|_| last && output.drawn.is_none()) {
        let next = entry.guide.as_ref().map(|guide| guide.next());
        finish_draw(output, entry.guide.as_ref(), next, |mask| sampler.draw(logits, draw, mask));
    }
}

/// What became of an entry's draw, from what its grammar allows. The next mask is computed from here on, while other rows
/// are drawn and other work is done, up to the next draw of this sequence.
fn finish_draw(
    output: &mut EntryOutput,
    guide: Option<&Arc<Guide>>,
    next: Option<Next>,
    draw: impl FnOnce(Option<&TokenMask>) -> Result<Drawn, String>,
) {
    output.drawn = match next {
        None => Some(draw(None)),
        Some(Next::Tokens(mask)) => Some(draw(Some(&mask))),
        Some(Next::Failed(why)) => Some(Err(why)),
        Some(Next::Complete) => {
            output.complete = true;
            None
        }
    };
    if let (Some(Ok(drawn)), Some(guide)) = (&output.drawn, guide) {
        guide.advance(drawn.token_id);
    }
}

fn draw_output(drawn: &DrawnRow) -> EntryOutput {
    EntryOutput { drawn: Some(sample::drawn(drawn.clone())), ..EntryOutput::default() }
}

impl<B: Backend> Executor for LocalExecutor<B> {
    fn launch(&mut self, batch: &Batch) -> Result<(), String> {
        assert_eq!(batch.entries.len(), batch.segments.len(), "an entry per segment");
        // What is under way can be told from what is asked for only once the tokens before are known.
        for launched in std::mem::take(&mut self.launched) {
            let output = self.finish(launched);
            self.launched.push_back(Launched::Done(output));
        }
        let launched = self.run(batch);
        if let Launched::Draws(sources) = &launched {
            self.look_ahead(batch, sources);
        }
        self.launched.push_back(launched);
        self.decoder.backend().failure().map_or(Ok(()), Err)
    }

    fn collect(&mut self) -> Result<StepOutput, String> {
        let launched = self.launched.pop_front().ok_or("no batch was launched")?;
        let output = self.finish(launched);
        self.decoder.backend().failure().map_or(Ok(output), Err)
    }
}
