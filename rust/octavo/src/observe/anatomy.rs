//! Where a request's time and memory went.
//!
//! The times are a partition of the request's life on one monotonic clock, in whole nanoseconds: exclusive, and their sum
//! is the whole. The scheduler fills a [`RequestRecord`] from the moment a request arrives until it ends; the engine adds
//! what lies around it, tokenising before and the reader's pace after, and that is the [`Anatomy`].

use std::fmt;

use crate::kv::PinFate;
use crate::request::Time;

/// Nanoseconds spent in the queue, by what was missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueTimes {
    /// As many sequences ran as may.
    pub sequences: u64,
    /// The KV cache had no room.
    pub blocks: u64,
    /// For a running request that was computing the same prefix.
    pub prefix: u64,
    /// The step's rows were given out, or the step under way had to end.
    pub budget: u64,
}

impl QueueTimes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.sequences + self.blocks + self.prefix + self.budget
    }

    pub(super) fn add(&mut self, more: Self) {
        self.sequences += more.sequences;
        self.blocks += more.blocks;
        self.prefix += more.prefix;
        self.budget += more.budget;
    }

    pub(super) fn minus(self, earlier: Self) -> Self {
        Self {
            sequences: self.sequences - earlier.sequences,
            blocks: self.blocks - earlier.blocks,
            prefix: self.prefix - earlier.prefix,
            budget: self.budget - earlier.budget,
        }
    }
}

/// Nanoseconds spent on reading the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillTimes {
    /// A part of the prompt was in the step.
    pub computing: u64,
    /// Between two parts.
    pub waiting: u64,
}

impl PrefillTimes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.computing + self.waiting
    }
}

/// Nanoseconds spent on generating, from the first token on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeTimes {
    /// The next token was in the step.
    pub computing: u64,
    /// Between two steps.
    pub waiting: u64,
    /// Its blocks were taken away: until what they held was computed again.
    pub preempted: u64,
}

impl DecodeTimes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.computing + self.waiting + self.preempted
    }
}

/// Nanoseconds by stage. The sum is the time from arrival to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Waiting for its turn.
    pub queue: QueueTimes,
    /// Until the first token.
    pub prefill: PrefillTimes,
    /// After the first token.
    pub decode: DecodeTimes,
}

impl StageTimes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.queue.total() + self.prefill.total() + self.decode.total()
    }
}

/// What it cost a request to lose its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preemption {
    /// When, in nanoseconds since it arrived.
    pub at_ns: u64,
    /// Tokens whose keys and values were given up.
    pub lost_tokens: usize,
    /// Of these, those that were run again; the others were still in the cache.
    pub recomputed_tokens: usize,
    /// Until it had again what it had, or ended, or lost its blocks once more.
    pub lost_ns: u64,
}

/// What one request used, as the scheduler saw it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestRecord {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, how many came from the prefix cache when it was first admitted.
    pub cached_tokens: usize,
    /// Tokens that were run, those run again after a preemption included.
    pub computed_tokens: usize,
    /// Of these, how many had been run before.
    pub recomputed_tokens: usize,
    /// Tokens that were generated.
    pub completion_tokens: usize,
    /// Steps that read a part of its prompt.
    pub chunks: usize,
    /// Steps it took part in.
    pub steps: usize,
    /// How often its blocks were taken away.
    pub preemptions: usize,
    /// What that cost, each time.
    pub preempted: Vec<Preemption>,
    /// Sequences that were in these steps besides it, added up over steps.
    pub neighbour_sequences: u64,
    /// The rent of the KV cache in block-nanoseconds. A block that `n` sequences hold costs each of them an `n`th; over all
    /// requests the rents sum to the time that blocks were owned.
    pub block_ns: u128,
    /// A turn of a session: what became of what the one before had left.
    pub kept: Option<PinFate>,
    /// Where the time went.
    pub stages: StageTimes,
    /// When it arrived.
    pub submitted: Time,
    /// When it ended.
    pub finished: Time,
    /// When each token was there, in nanoseconds since `submitted`.
    pub token_ns: Vec<u64>,
}

impl RequestRecord {
    /// Of a request of which nobody counted where the time went: it is told as waiting, so that the parts are still the whole.
    pub fn waited(submitted: Time, finished: Time) -> Self {
        let mut record = Self { submitted, finished, ..Self::default() };
        record.stages.queue.budget = finished.since(submitted);
        record
    }

    /// Nanoseconds from arrival to end: the sum of the stages.
    pub fn total_ns(&self) -> u64 {
        self.finished.since(self.submitted)
    }

    /// When the first token was there.
    pub fn first_token(&self) -> Option<Time> {
        self.token_ns.first().map(|ns| Time(self.submitted.0 + ns))
    }

    /// Nanoseconds from arrival to the first token: queue + prefill.
    pub fn ttft_ns(&self) -> Option<u64> {
        self.token_ns.first().copied()
    }

    /// Mean nanoseconds per token after the first.
    pub fn tpot_ns(&self) -> Option<f64> {
        let [first, .., last] = self.token_ns[..] else { return None };
        Some((last - first) as f64 / (self.token_ns.len() - 1) as f64)
    }

    /// Nanoseconds between one token and the next.
    pub fn itl_ns(&self) -> impl Iterator<Item = u64> {
        self.token_ns.windows(2).map(|pair| pair[1] - pair[0])
    }
}

/// The whole picture of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Anatomy {
    /// What the scheduler saw.
    pub record: RequestRecord,
    /// Nanoseconds before: text to token ids.
    pub tokenize_ns: u64,
    /// Nanoseconds after: until the reader had everything.
    pub stream_ns: u64,
    /// Bytes of one block of the KV cache.
    pub block_bytes: usize,
    /// What [`Anatomy::ttft_ns`] was expected to be when the request was taken.
    pub predicted_ttft_ns: u64,
}

impl Anatomy {
    /// Nanoseconds of the whole life.
    pub fn total_ns(&self) -> u64 {
        self.tokenize_ns + self.record.stages.total() + self.stream_ns
    }

    /// Time to first token: tokenize + queue + prefill.
    pub fn ttft_ns(&self) -> Option<u64> {
        self.record.ttft_ns().map(|ns| self.tokenize_ns + ns)
    }

    /// The rent of the KV cache in block-seconds.
    pub fn block_seconds(&self) -> f64 {
        self.record.block_ns as f64 / 1e9
    }

    /// The rent of the KV cache in byte-seconds.
    pub fn byte_seconds(&self) -> f64 {
        self.block_seconds() * self.block_bytes as f64
    }
}

/// Columns of the picture, and of the time line in it.
const WIDTH: usize = 78;
const LINE: u64 = 20;

impl fmt::Display for Anatomy {
    /// A picture of at most 78 columns: one line per stage, its bar where it lies in the request's life.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { record, .. } = self;
        let stages = &record.stages;
        writeln!(
            f,
            "{} prompt tokens ({} cached) → {} tokens in {}",
            record.prompt_tokens,
            record.cached_tokens,
            record.completion_tokens,
            Nanoseconds(self.total_ns())
        )?;
        let mut start = 0;
        for (name, ns, note) in [
            ("tokenize", self.tokenize_ns, String::new()),
            ("queue", stages.queue.total(), queue_note(&stages.queue)),
            ("prefill", stages.prefill.total(), self.prefill_note()),
            ("decode", stages.decode.total(), self.decode_note()),
            ("stream", self.stream_ns, String::new()),
        ] {
            let bar = bar(start, ns, self.total_ns());
            let line = format!("{name:<9}{bar}{:>9}  {note}", Nanoseconds(ns).to_string());
            let end = line.char_indices().nth(WIDTH).map_or(line.len(), |(end, _)| end);
            writeln!(f, "{}", line[..end].trim_end())?;
            start += ns;
        }
        if let Some(ttft) = self.ttft_ns() {
            write!(f, "first token after {} ({} expected)", Nanoseconds(ttft), Nanoseconds(self.predicted_ttft_ns))?;
            match record.tpot_ns() {
                Some(tpot) => writeln!(f, ", then one every {}", Nanoseconds(tpot as u64))?,
                None => writeln!(f)?,
            }
        }
        if record.steps > 0 {
            let others = record.neighbour_sequences as f64 / record.steps as f64;
            writeln!(f, "shared {} steps with {others:.1} other sequences on average", record.steps)?;
        }
        let mib_seconds = self.byte_seconds() / f64::from(1 << 20);
        write!(f, "KV cache rent {} block·s, {} MiB·s", Short(self.block_seconds()), Short(mib_seconds))
    }
}

impl Anatomy {
    fn prefill_note(&self) -> String {
        let RequestRecord { prompt_tokens, cached_tokens, chunks, stages, .. } = &self.record;
        if stages.prefill.computing == 0 {
            return String::new();
        }
        let tokens = prompt_tokens - cached_tokens;
        let parts = if *chunks > 1 { format!(", {chunks} parts") } else { String::new() };
        let waiting = waiting_note(stages.prefill.waiting, stages.prefill.total());
        format!("{} tok/s{parts}{waiting}", Short(per_second(tokens as u64, stages.prefill.total())))
    }

    fn decode_note(&self) -> String {
        let RequestRecord { completion_tokens, preemptions, stages, .. } = &self.record;
        let Some(after_first) = completion_tokens.checked_sub(1).filter(|&tokens| tokens > 0) else {
            return String::new();
        };
        let lost = match preemptions {
            0 => waiting_note(stages.decode.waiting, stages.decode.total()),
            times => format!(", preempted {times}×: {}", Nanoseconds(stages.decode.preempted)),
        };
        format!("{} tok/s{lost}", Short(per_second(after_first as u64, stages.decode.total())))
    }
}

fn queue_note(queue: &QueueTimes) -> String {
    let reasons =
        [("sequences", queue.sequences), ("blocks", queue.blocks), ("prefix", queue.prefix), ("budget", queue.budget)];
    match reasons.into_iter().max_by_key(|&(_, ns)| ns) {
        Some((reason, ns)) if ns > 0 => format!("for {reason}"),
        _ => String::new(),
    }
}

/// Says how much of a stage was waiting, if it is worth a word.
fn waiting_note(waiting: u64, total: u64) -> String {
    if waiting > total / 20 { format!(", waited {}", Nanoseconds(waiting)) } else { String::new() }
}

fn per_second(count: u64, ns: u64) -> f64 {
    count as f64 * 1e9 / ns.max(1) as f64
}

/// `[start, start + ns)` on a line that stands for `total`. Whatever took time shows.
fn bar(start: u64, ns: u64, total: u64) -> String {
    let column = |at: u64| (u128::from(at) * u128::from(LINE) / u128::from(total.max(1))) as usize;
    let line = LINE as usize;
    let first = column(start).min(line - 1);
    let last = column(start + ns).clamp(first, line);
    let mark = match (ns, last - first) {
        (0, _) => String::new(),
        (_, 0) => "▏".to_owned(),
        (_, wide) => "█".repeat(wide),
    };
    let gap = line - first - mark.chars().count();
    format!("{}{mark}{}", " ".repeat(first), " ".repeat(gap))
}

/// A duration with three or four significant digits.
struct Nanoseconds(u64);

impl fmt::Display for Nanoseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ns if ns < 1_000_000 => write!(f, "{} µs", Short(ns as f64 / 1e3)),
            ns if ns < 1_000_000_000 => write!(f, "{} ms", Short(ns as f64 / 1e6)),
            ns => write!(f, "{} s", Short(ns as f64 / 1e9)),
        }
    }
}

/// A number at the length that a reader takes in.
struct Short(f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0.0 => f.write_str("0"),
            small if small < 10.0 => write!(f, "{small:.2}"),
            middle if middle < 100.0 => write!(f, "{middle:.1}"),
            large if large < 1e6 => write!(f, "{large:.0}"),
            huge => write!(f, "{huge:.2e}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Anatomy {
        let stages = StageTimes {
            queue: QueueTimes { sequences: 0, blocks: 11_000_000, prefix: 0, budget: 1_000_000 },
            prefill: PrefillTimes { computing: 280_000_000, waiting: 20_000_000 },
            decode: DecodeTimes { computing: 1_500_000_000, waiting: 1_000_000, preempted: 99_000_000 },
        };
        let record = RequestRecord {
            prompt_tokens: 812,
            cached_tokens: 512,
            completion_tokens: 3,
            chunks: 2,
            steps: 4,
            preemptions: 1,
            neighbour_sequences: 10,
            block_ns: 52_000_000_000,
            stages,
            submitted: Time(5),
            finished: Time(5 + stages.total()),
            token_ns: vec![312_000_000, 900_000_000, 1_912_000_000],
            ..Default::default()
        };
        Anatomy { record, tokenize_ns: 400_000, stream_ns: 0, block_bytes: 1 << 20, predicted_ttft_ns: 250_000_000 }
    }

    #[test]
    fn the_picture_is_at_most_78_columns_wide() {
        let mut anatomy = example();
        for scale in [0, 1, 1000] {
            anatomy.record.stages.queue.sequences = scale * 1_000_000_000;
            anatomy.record.stages.prefill.waiting = scale * 99_900_000_000;
            anatomy.record.chunks = 1_000_000;
            anatomy.stream_ns = scale * 1_000_000_000;
            for line in anatomy.to_string().lines() {
                assert!(line.chars().count() <= WIDTH, "{} columns: {line}", line.chars().count());
            }
        }
        for line in Anatomy::default().to_string().lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
    }

    #[test]
    fn the_picture_says_what_happened() {
        let text = example().to_string();
        println!("{text}");
        let said = [
            "812 prompt tokens (512 cached) → 3 tokens in 1.91 s",
            "for blocks",
            "1000 tok/s, 2 parts, waited 20.0 ms",
            "preempted 1×: 99.0 ms",
            "first token after 312 ms (250 ms expected), then one every 800 ms",
            "2.5 other sequences",
            "52.0 block·s, 52.0 MiB·s",
        ];
        for said in said {
            assert!(text.contains(said), "`{said}` is missing in:\n{text}");
        }
    }

    #[test]
    fn bars_lie_end_to_end_and_nothing_that_took_time_is_invisible() {
        assert_eq!(bar(0, 50, 100), format!("{}{}", "█".repeat(10), " ".repeat(10)));
        assert_eq!(bar(50, 50, 100), format!("{}{}", " ".repeat(10), "█".repeat(10)));
        for (start, ns, total) in [(0, 1, u64::MAX), (u64::MAX - 1, 1, u64::MAX), (0, u64::MAX, u64::MAX), (7, 0, 7)] {
            let bar = bar(start, ns, total);
            assert_eq!(bar.chars().count(), LINE as usize);
            assert_eq!(bar.trim().is_empty(), ns == 0);
        }
    }

    #[test]
    fn rates_need_enough_tokens() {
        let mut record = example().record;
        assert_eq!(record.ttft_ns(), Some(312_000_000));
        assert_eq!(record.tpot_ns(), Some(800_000_000.0));
        assert_eq!(record.itl_ns().collect::<Vec<_>>(), [588_000_000, 1_012_000_000]);
        record.token_ns.truncate(1);
        assert_eq!((record.tpot_ns(), record.itl_ns().count()), (None, 0));
        record.token_ns.clear();
        assert_eq!((record.ttft_ns(), record.first_token()), (None, None));
    }
}
