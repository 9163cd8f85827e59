//! Draws on the device: what they need there, how it gets there, and what comes back. The kernels are `cu/adjust.cu`,
//! `cu/draw.cu` and `cu/logprobs.cu`.

use std::collections::VecDeque;

use super::changes::{Changes, OF_DRAWS};
use super::device::{Device, HostMemory, Memory, bytes_of, bytes_of_mut};
use super::driver::Address;
use crate::Result;
use crate::draw::{DrawnRow, MOST_TOPS, RowDraw, RowStatistics};

/// Words that say how a row is drawn from: see `cu/draws.cuh`.
pub const DRAW_WORDS: usize = 15;
/// Words that say what became of it.
const DRAWN_WORDS: usize = 9;
/// Biases and counts of a row, together. Whoever has more draws on the host.
pub const MOST_CHANGES: usize = 4096;
/// A row's changes of logits: a token each, and by how much or how often.
const CHANGES_WORDS: usize = 2 * MOST_CHANGES;
/// The most words of a row's lists that go up with the step's own: of a penalty, one token more.
const MOST_LISTED_OF_ROW: usize = 16;
const NONE: u32 = u32::MAX;

/// Room for draws.
pub struct Draws {
    vocab: usize,
    /// Rows of one launch, and of one step.
    rows_at_once: usize,
    rows: usize,
    /// `(rows at once, vocab)`.
    adjusted: Memory,
    /// What rows are told in lists, and what the device holds of it: `(rows, [mask])`, then `(rows, [changes of logits])`.
    lists: Memory,
    held: Vec<u32>,
    mask_words: usize,
    drawn: Memory,
    tops: Memory,
    /// Of the draws at hand.
    words: Vec<u32>,
    /// Where outcomes are sent.
    idle: Vec<HostMemory>,
    /// What was sent and has not been read, oldest first.
    sent: VecDeque<Sent>,
    /// Scratch.
    row: Vec<u32>,
    outcomes: Vec<u32>,
}

/// Outcomes of draws that are on their way to the host.
struct Sent {
    to: HostMemory,
    /// How many there are.
    rows: usize,
    /// How many of the best are there of each.
    tops: usize,
    /// Which draws want log-probabilities.
    wants_logprobs: Vec<bool>,
}

/// So many may be on their way at a time: of the step that is waited for, and of the one after it.
const MOST_SENT: usize = 2;

impl Draws {
    /// For steps of up to `rows` draws from `vocab` logits each, up to `rows_at_once` of them in one go.
    pub fn new(device: &Device, vocab: usize, rows_at_once: usize, rows: usize) -> Result<Self> {
        let array = |lens: &[usize]| device.take_array("what draws need", 4, lens);
        let mask_words = vocab.div_ceil(32);
        let lists = array(&[rows, mask_words + CHANGES_WORDS])?;
        device.driver().fill(lists.at(), 0, lists.bytes())?;
        Ok(Self {
            vocab,
            rows_at_once,
            rows,
            adjusted: array(&[rows_at_once, vocab])?,
            held: vec![0; rows * (mask_words + CHANGES_WORDS)],
            lists,
            mask_words,
            drawn: array(&[rows, DRAWN_WORDS])?,
            tops: array(&[rows, 2 * MOST_TOPS])?,
            words: Vec::with_capacity(rows * DRAW_WORDS),
            idle: {
                let bytes = 4 * rows * (DRAWN_WORDS + 2 * MOST_TOPS);
                let take = |_| device.take_host("the outcomes of draws", bytes);
                (0..MOST_SENT).map(take).collect::<Result<_>>()?
            },
            sent: VecDeque::with_capacity(MOST_SENT),
            row: Vec::with_capacity(2 * MOST_CHANGES),
            outcomes: Vec::with_capacity(rows * (DRAWN_WORDS + 2 * MOST_TOPS)),
        })
    }

    /// Logits of a row.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Adds to `changes` what has changed of masks and lists, or uploads it; the words that say how the rows are drawn from
    /// are for the caller to upload. Rows up to `rows` that are not among `draws` belong to nobody.
    pub fn begin(
        &mut self,
        device: &Device,
        mut changes: Option<&mut Changes>,
        draws: &[RowDraw<'_>],
        rows: usize,
    ) -> &[u32] {
        assert!(draws.len() <= rows && rows <= self.rows, "{rows} draws of {}", self.rows);
        self.words.clear();
        for (number, draw) in draws.iter().enumerate() {
            push_words(&mut self.words, draw);
            if let Some(mask) = draw.mask {
                self.row.clear();
                self.row.extend(mask.iter().chain(std::iter::repeat(&0)).take(self.mask_words));
                self.refill(device, changes.as_deref_mut(), number * self.mask_words);
            }
            if !draw.biases.is_empty() || !draw.counts.is_empty() {
                self.row.clear();
                self.row.extend(draw.biases.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]));
                self.row.extend(draw.counts.iter().flat_map(|&(token, count)| [token, count]));
                self.refill(device, changes.as_deref_mut(), self.changes_of(number));
            }
        }
        // Words of zeroes take the largest.
        self.words.resize(rows * DRAW_WORDS, 0);
        &self.words
    }

    /// Where among the lists the changes of a row's logits begin.
    fn changes_of(&self, row: usize) -> usize {
        self.rows * self.mask_words + row * CHANGES_WORDS
    }

    /// Makes the scratch row what lies from word `first` of the lists on.
    fn refill(&mut self, device: &Device, changes: Option<&mut Changes>, first: usize) {
        let held = &mut self.held[first..][..self.row.len()];
        if changes.is_some_and(|changes| changes.list(held, &self.row, OF_DRAWS + first, MOST_LISTED_OF_ROW)) {
            return;
        }
        if let Some(changed) = super::step::refill(held, &self.row) {
            let to = self.lists.offset(4 * (first + changed.start));
            device.attempt(|driver| driver.upload(to, bytes_of(&self.row[changed])));
        }
    }

    /// What rows are told in lists.
    pub fn lists(&self) -> Address {
        self.lists.at()
    }

    /// What was drawn last.
    pub fn drawn(&self) -> Address {
        self.drawn.at()
    }

    /// Draws from `rows` rows of `logits` as `words`, an address, say for the rows from `first` on.
    pub fn launch(&self, device: &Device, logits: Address, words: Address, first: usize, rows: usize) {
        assert!(first + rows <= self.rows && rows <= self.rows_at_once, "draws {first} to {}", first + rows);
        let threads = self.vocab.div_ceil(16).next_multiple_of(32).clamp(32, 1024);
        let words = words + 4 * (first * DRAW_WORDS) as Address;
        let drawn = self.drawn.offset(4 * first * DRAWN_WORDS);
        device
            .launch("adjust", [rows], threads)
            .pointer(self.adjusted.at())
            .pointer(logits)
            .pointer(words)
            .pointer(self.lists.offset(4 * first * self.mask_words))
            .pointer(self.lists.offset(4 * self.changes_of(first)))
            .int(self.vocab)
            .int(self.mask_words)
            .int(MOST_CHANGES)
            .go();
        device
            .launch("draw", [rows], threads)
            .pointer(drawn)
            .pointer(logits)
            .pointer(self.adjusted.at())
            .pointer(words)
            .int(self.vocab)
            .go();
        device
            .launch("logprobs", [rows], threads)
            .pointer(drawn)
            .pointer(self.tops.offset(4 * first * 2 * MOST_TOPS))
            .pointer(logits)
            .pointer(words)
            .int(self.vocab)
            .go();
    }

    /// Sends what becomes of the first `rows` draws to the host.
    pub fn send(&mut self, rows: usize) {
        let to = self.idle.pop().expect("no more than are read again");
        let wanted = self.words.chunks_exact(DRAW_WORDS).take(rows).map(|words| words[LOGPROBS]);
        let wants_logprobs = wanted.clone().map(|tops| tops > 0).collect();
        let tops = if wanted.max() > Some(1) { MOST_TOPS } else { 0 };
        let drawn_bytes = 4 * rows * DRAWN_WORDS;
        to.download_later(0, self.drawn.at(), drawn_bytes);
        if tops > 0 {
            to.download_later(drawn_bytes, self.tops.at(), 4 * rows * 2 * tops);
        }
        self.sent.push_back(Sent { to, rows, tops, wants_logprobs });
    }

    /// What was sent first of all that has not been read. Waits for the device.
    pub fn read(&mut self, drawn: &mut Vec<DrawnRow>) {
        let Sent { to, rows, tops, wants_logprobs } = self.sent.pop_front().expect("something was sent");
        self.outcomes.clear();
        self.outcomes.resize(rows * (DRAWN_WORDS + 2 * tops), NONE);
        to.read(bytes_of_mut(&mut self.outcomes));
        self.idle.push(to);
        let (words, top_words) = self.outcomes.split_at(rows * DRAWN_WORDS);
        let no_tops: &[u32] = &[];
        let tops = top_words.chunks_exact(2 * MOST_TOPS).chain(std::iter::repeat(no_tops));
        let rows = words.as_chunks::<DRAWN_WORDS>().0.iter().zip(tops).zip(wants_logprobs);
        drawn.clear();
        drawn.extend(rows.map(|((words, tops), wanted)| drawn_row(words, tops, wanted)));
    }
}

/// Which of a row's words say how many log-probabilities are wanted.
const LOGPROBS: usize = 9;

fn push_words(words: &mut Vec<u32>, draw: &RowDraw<'_>) {
    assert!(draw.logprobs.is_none_or(|tops| tops <= MOST_TOPS), "{draw:?}");
    let (biases, counts) = (draw.biases.len(), draw.counts.len());
    assert!(biases + counts <= MOST_CHANGES, "{biases} biases and {counts} counts");
    let halves = |value: f64| [value.to_bits() as u32, (value.to_bits() >> 32) as u32];
    // Whoever takes the largest has no use for a coin, which would be another word in every step.
    let coin = if draw.temperature == 0.0 { 0.0 } else { draw.coin };
    let ([offset_low, offset_high], [coin_low, coin_high]) = (halves(draw.min_p_offset), halves(coin));
    let all: [u32; DRAW_WORDS] = [
        draw.changes_logits().into(),
        draw.mask.is_some().into(),
        draw.temperature.to_bits(),
        draw.top_k,
        draw.top_p.to_bits(),
        offset_low,
        offset_high,
        coin_low,
        coin_high,
        draw.logprobs.map_or(0, |tops| 1 + tops as u32),
        biases as u32,
        counts as u32,
        draw.repetition_penalty.to_bits(),
        draw.frequency_penalty.to_bits(),
        draw.presence_penalty.to_bits(),
    ];
    words.extend(all);
}

fn drawn_row(words: &[u32; DRAWN_WORDS], tops: &[u32], wants_logprobs: bool) -> DrawnRow {
    let &[token, bad, bad_logit, rank, largest, logit, total_low, total_high, top_count] = words;
    if let Some(index) = bad.checked_sub(1) {
        return DrawnRow::NoLogit(index, f32::from_bits(bad_logit));
    }
    if token == NONE {
        return DrawnRow::NothingLeft;
    }
    let statistics = || RowStatistics {
        logit: f32::from_bits(logit),
        rank,
        largest: f32::from_bits(largest),
        total: f64::from_bits(u64::from(total_high) << 32 | u64::from(total_low)),
        top: {
            let pairs = tops.as_chunks::<2>().0.iter().take(top_count as usize);
            pairs.map(|&[token, logit]| (token, f32::from_bits(logit))).collect()
        },
    };
    DrawnRow::Token(token, wants_logprobs.then(statistics))
}
