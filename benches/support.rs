//! The benches' harness: what a line did, how long it took, and which share of a limit of this machine that is. The limits
//! are measured in the same run, so a busy or throttled machine shows in both.
//!
//! `cargo bench` times. Run by `cargo test` (no `--bench` among the arguments) every line runs once, untimed, at a tiny
//! size, so that no bench rots. Other arguments choose benches, and lines of others: those that contain one of them.
#![allow(dead_code)] // every bench uses its part

use std::hint::black_box;
use std::time::{Duration, Instant};

use octavo_kernels::cpu::isa::Isa;
use octavo_kernels::cpu::limits::Limits;
use octavo_kernels::cpu::pool::Pool;

/// A sample is at least this long, so that reading the clock does not show.
const SAMPLE: Duration = Duration::from_millis(1);
/// A line takes this long, and at least [`SAMPLES`] samples.
const LINE: Duration = Duration::from_millis(250);
/// Fewest samples that have a median worth printing.
const SAMPLES: usize = 5;

/// What a line must do at least. The time that the limits allow for it is the floor that its own time is held against.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    memory_bytes: usize,
    cache_bytes: usize,
    f32_operations: usize,
    int8_operations: usize,
    bf16_operations: usize,
}

impl Work {
    /// Reads `bytes` that do not fit the caches.
    pub fn memory(bytes: usize) -> Self {
        Self { memory_bytes: bytes, ..Self::default() }
    }
    /// Reads `bytes` that were used a moment ago.
    pub fn cache(bytes: usize) -> Self {
        Self { cache_bytes: bytes, ..Self::default() }
    }
    /// Does f32 operations too; a multiply and its add are two.
    pub fn f32(self, operations: usize) -> Self {
        Self { f32_operations: operations, ..self }
    }
    /// Does int8 operations too.
    pub fn int8(self, operations: usize) -> Self {
        Self { int8_operations: operations, ..self }
    }
    /// Does operations on pairs of bfloat16 too.
    pub fn bf16(self, operations: usize) -> Self {
        Self { bf16_operations: operations, ..self }
    }

    /// All operations.
    fn operations(&self) -> usize {
        self.f32_operations + self.int8_operations + self.bf16_operations
    }

    /// The seconds that it takes at least, and what takes them.
    fn floor(&self, limits: &Limits) -> (f64, &'static str) {
        let arithmetic = self.f32_operations as f64 / limits.f32_operations
            + self.int8_operations as f64 / limits.int8_operations
            + self.bf16_operations as f64 / limits.bf16_operations;
        let floors = [
            (self.memory_bytes as f64 / limits.memory_bytes, "memory"),
            (self.cache_bytes as f64 / limits.cache_bytes, "cache"),
            (arithmetic, "arithmetic"),
        ];
        floors.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("there are three")
    }
}

/// One bench: its table and its mode.
pub struct Bench {
    /// `None`: the tiny run.
    limits: Option<Limits>,
    chosen: Vec<String>,
}

impl Bench {
    /// Reads the arguments. When it is to be timed, measures the limits of `threads` threads (`None`: all) and prints
    /// them and the table's head.
    pub fn start(title: &str, threads: Option<usize>) -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let mut chosen: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with('-')).cloned().collect();
        // `cargo bench schedule`: a bench that is named is run whole.
        if chosen.iter().any(|chosen| title.contains(chosen.as_str())) {
            chosen.clear();
        }
        if !arguments.iter().any(|argument| argument == "--bench") {
            return Self { limits: None, chosen };
        }
        let isa = Isa::from_environment().expect("an instruction set that this CPU has");
        let mut pool = Pool::new(threads).expect("threads");
        let limits = Limits::measure(isa, &mut pool).expect("memory for measuring");
        Self::within(&format!("{title}, {}, {} thread(s)", isa.describe(), pool.threads()), limits, chosen)
    }

    /// A timed run, held against `limits`. Prints them and the table's head.
    pub fn within(title: &str, limits: Limits, chosen: Vec<String>) -> Self {
        let Limits { memory_bytes, cache_bytes, f32_operations, int8_operations, bf16_operations } = limits;
        println!(
            "\n{title}. Limits: memory {}, cache {}, f32 {}, int8 {}, bf16 {}",
            rate(memory_bytes, "B/s"),
            rate(cache_bytes, "B/s"),
            rate(f32_operations, "op/s"),
            rate(int8_operations, "op/s"),
            rate(bf16_operations, "op/s"),
        );
        let (time, bytes, operations, share) = ("time", "bytes", "operations", "share of the limit");
        println!("{:<36}{:<36}{time:>11}{bytes:>14}{operations:>14}  {share}", "", "");
        Self { limits: Some(limits), chosen }
    }

    /// Whether this run only shows that everything still works.
    pub fn is_tiny(&self) -> bool {
        self.limits.is_none()
    }

    /// Whether a line with this title is to be run.
    pub fn chooses(&self, title: &str) -> bool {
        self.chosen.is_empty() || self.chosen.iter().any(|chosen| title.contains(chosen.as_str()))
    }

    /// A size of this run.
    pub fn size(&self, full: usize, tiny: usize) -> usize {
        if self.is_tiny() { tiny } else { full }
    }

    /// One line of the table: runs `work`, again and again if it is to be timed. Check its result before.
    pub fn line<T>(&self, name: &str, shape: &str, work: Work, mut run: impl FnMut() -> T) {
        let runs = |count| (0..count).for_each(|_| drop(black_box(run())));
        self.line_of_runs(name, shape, work, runs);
    }

    /// The same for what is waited for only after as many runs as it is told.
    pub fn line_of_runs(&self, name: &str, shape: &str, work: Work, mut runs: impl FnMut(u32)) {
        let title = format!("{name} {shape}");
        if !self.chooses(&title) {
            return;
        }
        let Some(limits) = &self.limits else {
            runs(1);
            println!("{title}: runs");
            return;
        };
        let seconds = median_seconds(runs);
        let (floor, by) = work.floor(limits);
        let per_second = |count: usize, unit| if count > 0 { rate(count as f64 / seconds, unit) } else { "-".into() };
        println!(
            "{name:<36}{shape:<36}{:>11}{:>14}{:>14}  {:.3}% of {by}",
            time(seconds),
            per_second(work.memory_bytes + work.cache_bytes, "B/s"),
            per_second(work.operations(), "op/s"),
            100.0 * floor / seconds,
        );
    }
}

/// Seconds of one run: the median over samples of equally many runs.
fn median_seconds(mut run: impl FnMut(u32)) -> f64 {
    let mut sample = |runs: u32| {
        let begin = Instant::now();
        run(runs);
        begin.elapsed()
    };
    sample(1); // the first touch of everything
    let mut runs = 1;
    while sample(runs) < SAMPLE {
        runs *= 2;
    }
    let begin = Instant::now();
    let mut seconds = Vec::new();
    while seconds.len() < SAMPLES || begin.elapsed() < LINE {
        seconds.push(sample(runs).as_secs_f64() / f64::from(runs));
    }
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s < 1e-6 => (s * 1e9, "ns"),
        s if s < 1e-3 => (s * 1e6, "µs"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    format!("{value:.2} {unit}")
}

fn rate(per_second: f64, unit: &str) -> String {
    let (value, prefix) = match per_second {
        r if r < 1e6 => (r / 1e3, "k"),
        r if r < 1e9 => (r / 1e6, "M"),
        r if r < 1e12 => (r / 1e9, "G"),
        r => (r / 1e12, "T"),
    };
    format!("{value:.1} {prefix}{unit}")
}
