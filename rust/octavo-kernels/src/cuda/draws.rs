//! Draws on the device: what they need there, how it gets there, and what comes back. The kernels are `cu/adjust.cu`,
//! `cu/draw.cu` and `cu/logprobs.cu`.

use super::device::{Device, Memory, bytes_of, bytes_of_mut};
use super::driver::Address;
use crate::Result;
use crate::draw::{DrawnRow, MOST_TOPS, RowDraw, RowStatistics};

/// Words that say how a row is drawn from: see `cu/draws.cuh`.
pub const DRAW_WORDS: usize = 15;
/// Words that say what became of it.
const DRAWN_WORDS: usize = 9;
/// Biases and counts of a row, together. Whoever has more draws on the host.
pub const MOST_CHANGES: usize = 4096;
const NONE: u32 = u32::MAX;

/// Room for draws.
pub struct Draws {
    vocab: usize,
    /// Rows of one launch, and of one step.
    rows_at_once: usize,
    rows: usize,
    /// `(rows at once, vocab)`.
    adjusted: Memory,
    masks: Mirror,
    changes: Mirror,
    drawn: Memory,
    tops: Memory,
    /// Of the draws at hand.
    words: Vec<u32>,
    wants_tops: bool,
    /// Scratch.
    row: Vec<u32>,
    drawn_words: Vec<u32>,
    top_words: Vec<u32>,
}

/// Rows of words on the device, and what they hold there.
struct Mirror {
    memory: Memory,
    width: usize,
    held: Vec<u32>,
}

impl Draws {
    /// For steps of up to `rows` draws from `vocab` logits each, up to `rows_at_once` of them in one go.
    pub fn new(device: &Device, vocab: usize, rows_at_once: usize, rows: usize) -> Result<Self> {
        let array = |lens: &[usize]| device.take_array("what draws need", 4, lens);
        Ok(Self {
            vocab,
            rows_at_once,
            rows,
            adjusted: array(&[rows_at_once, vocab])?,
            masks: Mirror::new(device, rows, vocab.div_ceil(32))?,
            changes: Mirror::new(device, rows, 2 * MOST_CHANGES)?,
            drawn: array(&[rows, DRAWN_WORDS])?,
            tops: array(&[rows, 2 * MOST_TOPS])?,
            words: Vec::with_capacity(rows * DRAW_WORDS),
            wants_tops: false,
            row: Vec::with_capacity(2 * MOST_CHANGES),
            drawn_words: Vec::with_capacity(rows * DRAWN_WORDS),
            top_words: Vec::with_capacity(rows * 2 * MOST_TOPS),
        })
    }

    /// Logits of a row.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Uploads what has changed of masks and lists; the words that say how the rows are drawn from are for the caller to
    /// upload. Rows up to `rows` that are not among `draws` belong to nobody.
    pub fn begin(&mut self, device: &Device, draws: &[RowDraw<'_>], rows: usize) -> &[u32] {
        assert!(draws.len() <= rows && rows <= self.rows, "{rows} draws of {}", self.rows);
        self.words.clear();
        self.wants_tops = draws.iter().any(|draw| draw.logprobs.is_some_and(|tops| tops > 0));
        for (number, draw) in draws.iter().enumerate() {
            push_words(&mut self.words, draw);
            if let Some(mask) = draw.mask {
                self.row.clear();
                self.row.extend(mask.iter().chain(std::iter::repeat(&0)).take(self.masks.width));
                self.masks.refill(device, number, &self.row);
            }
            if !draw.biases.is_empty() || !draw.counts.is_empty() {
                self.row.clear();
                self.row.extend(draw.biases.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]));
                self.row.extend(draw.counts.iter().flat_map(|&(token, count)| [token, count]));
                self.changes.refill(device, number, &self.row);
            }
        }
        // Words of zeroes take the largest.
        self.words.resize(rows * DRAW_WORDS, 0);
        &self.words
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
            .pointer(self.masks.row(first))
            .pointer(self.changes.row(first))
            .int(self.vocab)
            .int(self.masks.width)
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

    /// What became of the first `rows` draws. Waits for the device.
    pub fn read(&mut self, device: &Device, rows: usize, drawn: &mut Vec<DrawnRow>) {
        let Self { drawn_words, top_words, .. } = self;
        drawn_words.clear();
        drawn_words.resize(rows * DRAWN_WORDS, NONE);
        device.attempt(|driver| driver.download(bytes_of_mut(drawn_words), self.drawn.at()));
        top_words.clear();
        if self.wants_tops {
            top_words.resize(rows * 2 * MOST_TOPS, 0);
            device.attempt(|driver| driver.download(bytes_of_mut(top_words), self.tops.at()));
        }
        let no_tops: &[u32] = &[];
        let tops = top_words.chunks_exact(2 * MOST_TOPS).chain(std::iter::repeat(no_tops));
        let wants = self.words.chunks_exact(DRAW_WORDS).map(|words| words[LOGPROBS] > 0);
        drawn.clear();
        let rows = drawn_words.as_chunks::<DRAWN_WORDS>().0.iter().zip(tops).zip(wants);
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
    let ([offset_low, offset_high], [coin_low, coin_high]) = (halves(draw.min_p_offset), halves(draw.coin));
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
    let &[token, bad_index, bad_logit, rank, largest, logit, total_low, total_high, top_count] = words;
    if bad_index != NONE {
        return DrawnRow::NoLogit(bad_index, f32::from_bits(bad_logit));
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

impl Mirror {
    fn new(device: &Device, rows: usize, width: usize) -> Result<Self> {
        let memory = device.take_array("what draws need", 4, &[rows, width])?;
        device.driver().fill(memory.at(), 0, memory.bytes())?;
        Ok(Self { memory, width, held: vec![0; rows * width] })
    }

    fn row(&self, number: usize) -> Address {
        self.memory.offset(4 * number * self.width)
    }

    /// Makes `words` what a row begins with. Uploads from the first word that changes to the last.
    fn refill(&mut self, device: &Device, number: usize, words: &[u32]) {
        let held = &mut self.held[number * self.width..][..words.len()];
        if let Some(changed) = super::step::refill(held, words) {
            let to = self.row(number) + 4 * changed.start as Address;
            device.attempt(|driver| driver.upload(to, bytes_of(&words[changed])));
        }
    }
}
