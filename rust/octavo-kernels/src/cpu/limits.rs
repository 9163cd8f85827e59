//! What this machine can do at most: bytes read and operations done per second, measured with the very vectors that the
//! kernels use. A kernel's time is worth little without them: it is fast when it comes close to one.

use std::hint::black_box;
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::avx512::Avx512;
use super::isa::Isa;
use super::memory::{Memory, Pages};
use super::pool::Pool;
use super::vector::{Kernel, Vector};
use crate::Result;

/// The limits of one instruction set on one number of threads. Per second, all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes read from memory.
    pub memory_bytes: f64,
    /// Bytes read from the cores' own caches.
    pub cache_bytes: f64,
    /// f32 operations; a fused multiply-add is two.
    pub f32_operations: f64,
    /// int8 operations as [`Vector::dot`] does them; a multiply with its add is two.
    pub int8_operations: f64,
    /// Operations on pairs of bfloat16 as [`Vector::dot_pairs`] does them, counted likewise.
    pub bf16_operations: f64,
}

/// Each measurement is repeated and the median counts, as it does for whatever is held against it: on a busy machine both
/// are disturbed alike. Many short ones, because there a long one is always disturbed.
const REPEATS: usize = 31;
/// How much of a core's own cache the cache's measurement uses: well inside a second-level cache, far more than a first.
const CACHE_BYTES: usize = 256 << 10;
/// Passes over it: about a millisecond.
const CACHE_PASSES: usize = 512;
/// Loops in a register measurement: about a millisecond.
const LOOPS: usize = 1 << 19;

impl Limits {
    /// Measures all, in about a second.
    pub fn measure(isa: Isa, pool: &mut Pool) -> Result<Self> {
        // Four times the last cache, so that little of one reading is left for the next.
        let memory = (4 * last_cache_bytes()).max(256 << 20);
        let cache = CACHE_BYTES * pool.threads();
        Ok(Self {
            memory_bytes: measure_bandwidth(isa, pool, memory, 1)?,
            cache_bytes: measure_bandwidth(isa, pool, cache, CACHE_PASSES)?,
            f32_operations: measure_f32_rate(isa, pool, LOOPS),
            int8_operations: measure_int8_rate(isa, pool, LOOPS),
            bf16_operations: measure_bf16_rate(isa, pool, LOOPS),
        })
    }
}

/// Bytes per second when each thread reads its own part of `bytes` bytes from start to end: once, from memory, if there
/// are many; `passes` times, from the threads' own caches, if there are few.
pub fn measure_bandwidth(isa: Isa, pool: &mut Pool, bytes: usize, passes: usize) -> Result<f64> {
    let threads = pool.threads();
    let line_count = (bytes / 64).next_multiple_of(READS * threads).max(READS * threads);
    let mut memory = Memory::new("the measurement of bandwidth", line_count * 64, Pages::Huge)?;
    // Written by the threads that will read it, so that its pages exist and lie near them. Not zeroes, which might be one
    // shared page.
    let per_thread = line_count / threads;
    pool.run_pieces(memory.bytes_mut().as_chunks_mut::<64>().0, per_thread, &|_, lines| lines.fill([1; 64]));
    let (lines, _) = memory.bytes().as_chunks::<64>();
    Ok(median_rate(pool, per_thread * 64 * passes, passes == 1, &|i| {
        let lines = &lines[i * per_thread..][..per_thread];
        for _ in 0..passes {
            black_box(isa.run(Read { lines: black_box(lines) }));
        }
    }))
}

/// f32 operations per second, `loops` times in a row in registers on every thread.
pub fn measure_f32_rate(isa: Isa, pool: &mut Pool, loops: usize) -> f64 {
    median_rate(pool, loops * isa.run(Chains) * 16 * 2, false, &|_| _ = black_box(isa.run(MultiplyAdd { loops })))
}

/// int8 operations per second, likewise.
pub fn measure_int8_rate(isa: Isa, pool: &mut Pool, loops: usize) -> f64 {
    let loops = loops / RUN;
    median_rate(pool, loops * RUN * isa.run(Chains) * 64 * 2, false, &|_| _ = black_box(isa.run(DotBytes { loops })))
}

/// bfloat16 operations per second, likewise.
pub fn measure_bf16_rate(isa: Isa, pool: &mut Pool, loops: usize) -> f64 {
    median_rate(pool, loops * isa.run(Chains) * 32 * 2, false, &|_| _ = black_box(isa.run(DotPairs { loops })))
}

/// Units per second of all threads together, when a task does `units`. What the threads share, such as memory, is timed
/// from the first's start to the last's end. What each has for itself is timed by each for itself, so that a thread that
/// has to wait for its core does not count as a slow one.
fn median_rate(pool: &mut Pool, units: usize, is_shared: bool, task: &(dyn Fn(usize) + Sync)) -> f64 {
    let threads = pool.threads();
    let own_nanoseconds: Vec<_> = (0..threads).map(|_| AtomicU64::new(1)).collect();
    let mut rate = || {
        let begin = Instant::now();
        pool.run(threads, &|i| {
            let begin = Instant::now();
            task(i);
            own_nanoseconds[i].store(begin.elapsed().as_nanos().max(1) as u64, Ordering::Relaxed);
        });
        let per_second = |nanoseconds: u64| units as f64 * 1e9 / nanoseconds as f64;
        if is_shared {
            return threads as f64 * per_second(begin.elapsed().as_nanos().max(1) as u64);
        }
        own_nanoseconds.iter().map(|nanoseconds| per_second(nanoseconds.load(Ordering::Relaxed))).sum()
    };
    rate(); // wakes the threads and the clock
    let mut rates: Vec<f64> = (0..REPEATS).map(|_| rate()).collect();
    rates.sort_by(f64::total_cmp);
    rates[REPEATS / 2]
}

/// The size of the largest cache, or a guess where the system does not tell.
pub fn last_cache_bytes() -> usize {
    const GUESS: usize = 64 << 20;
    let size = |index| {
        let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size")).ok()?;
        Some(text.trim().strip_suffix('K')?.parse::<usize>().ok()? << 10)
    };
    (0..8).filter_map(size).max().unwrap_or(GUESS)
}

/// Lines that are read before the next ones: as many sums side by side.
const READS: usize = 4;

struct Read<'a> {
    lines: &'a [[u8; 64]],
}

impl Kernel for Read<'_> {
    type Output = i32;
    #[inline(always)]
    fn run<V: Vector>(self, v: V) -> i32 {
        let (groups, _) = self.lines.as_chunks::<READS>();
        let mut seen = [v.splat_byte(0); READS];
        for group in groups {
            for i in 0..READS {
                seen[i] = v.or(seen[i], v.load_bytes(&group[i]));
            }
        }
        let both = v.or(v.or(seen[0], seen[1]), v.or(seen[2], seen[3]));
        v.sum_i32(v.total(v.dot(v.sums(v.splat_i32(0)), v.and(both, v.splat_byte(1)), v.splat_byte(1))))
    }
}

/// How many independent sums fill the arithmetic units without leaving the registers.
struct Chains;

impl Kernel for Chains {
    type Output = usize;
    #[inline(always)]
    fn run<V: Vector>(self, _: V) -> usize {
        if has_wide_registers::<V>() { 12 } else { 5 }
    }
}

/// 32 registers of 16 lanes, rather than 16 of 8.
#[inline(always)]
fn has_wide_registers<V: Vector>() -> bool {
    V::ROWS == 8
}

struct MultiplyAdd {
    loops: usize,
}

impl Kernel for MultiplyAdd {
    type Output = f32;
    #[inline(always)]
    fn run<V: Vector>(self, v: V) -> f32 {
        if has_wide_registers::<V>() {
            multiply_add::<V, 12>(v, self.loops)
        } else {
            multiply_add::<V, 5>(v, self.loops)
        }
    }
}

#[inline(always)]
fn multiply_add<V: Vector, const CHAINS: usize>(v: V, loops: usize) -> f32 {
    // Values that the compiler cannot know and that stay ordinary numbers: a sum tends to 1.
    let (half, other) = (v.splat(black_box(0.5)), v.splat(black_box(0.5)));
    let mut sums = [v.splat(1.0); CHAINS];
    for _ in 0..loops {
        for sum in &mut sums {
            *sum = v.fma(*sum, half, other);
        }
    }
    sums.iter().map(|&sum| v.sum(sum)).sum()
}

/// Whether dot products of bfloat16 pairs are worth their instruction. On some CPUs it runs at half the rate of the two
/// fused multiply-adds that it stands for; on others at the same rate, which saves the widening, or at twice.
#[cfg(target_arch = "x86_64")]
pub(super) fn has_quick_pairs(v: Avx512<true>) -> bool {
    // Far from 1/2 and from 1, so that a busy machine gives the same answer every time.
    const ENOUGH: f64 = 0.75;
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        // A tenth of a millisecond in all. The shortest time is the undisturbed one.
        let (loops, repeats) = (500, 24);
        let shortest = |task: &dyn Fn() -> f32| {
            let time = |_| {
                let begin = Instant::now();
                black_box(task());
                begin.elapsed()
            };
            (0..repeats).map(time).min().unwrap_or_default().as_secs_f64()
        };
        let singles = shortest(&|| v.run(MultiplyAdd { loops }));
        let pairs = shortest(&|| v.run(DotPairs { loops }));
        2.0 * singles >= ENOUGH * pairs
    })
}

/// The same for pairs of bfloat16.
struct DotPairs {
    loops: usize,
}

impl Kernel for DotPairs {
    type Output = f32;
    #[inline(always)]
    fn run<V: Vector>(self, v: V) -> f32 {
        if has_wide_registers::<V>() { dot_pairs::<V, 12>(v, self.loops) } else { dot_pairs::<V, 5>(v, self.loops) }
    }
}

#[inline(always)]
fn dot_pairs<V: Vector, const CHAINS: usize>(v: V, loops: usize) -> f32 {
    let (pair, quarters) =
        (v.splat_pair(black_box([bf16::from_f32_const(0.5); 2])), black_box([bf16::from_f32_const(0.25); 2]));
    let mut sums = [v.splat(1.0); CHAINS];
    for _ in 0..loops {
        for sum in &mut sums {
            *sum = v.dot_pairs(*sum, pair, v.splat_pair(quarters));
        }
    }
    sums.iter().map(|&sum| v.sum(sum)).sum()
}

/// Products of 4-bit codes that are summed before they are widened.
const RUN: usize = 8;

struct DotBytes {
    loops: usize,
}

impl Kernel for DotBytes {
    type Output = i32;
    #[inline(always)]
    fn run<V: Vector>(self, v: V) -> i32 {
        if has_wide_registers::<V>() { dot_bytes::<V, 12>(v, self.loops) } else { dot_bytes::<V, 5>(v, self.loops) }
    }
}

#[inline(always)]
fn dot_bytes<V: Vector, const CHAINS: usize>(v: V, loops: usize) -> i32 {
    let mut totals = [v.splat_i32(0); CHAINS];
    for i in 0..loops {
        let mut sums = [v.sums(v.splat_i32(0)); CHAINS];
        for _ in 0..RUN {
            // As if different every time, so that no part of the product can be done once for all.
            let codes = v.splat_byte(black_box(i as u8 & 15));
            for (chain, sum) in sums.iter_mut().enumerate() {
                *sum = v.dot(*sum, codes, v.splat_quad([chain as i8; 4]));
            }
        }
        for (total, sum) in totals.iter_mut().zip(sums) {
            *total = v.add_i32(*total, v.total(sum));
        }
    }
    totals.iter().fold(0i32, |all, &total| all.wrapping_add(v.sum_i32(total)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_limits_of_a_sane_size() {
        let mut pool = Pool::new(Some(2)).unwrap();
        for isa in Isa::available() {
            for bytes in [0, 1, 4096, 1 << 20] {
                let bandwidth = measure_bandwidth(isa, &mut pool, bytes, 2).unwrap();
                assert!((1e6..1e14).contains(&bandwidth), "{}: {bandwidth} bytes per second", isa.describe());
            }
            let f32_rate = measure_f32_rate(isa, &mut pool, 1 << 12);
            let int8_rate = measure_int8_rate(isa, &mut pool, 1 << 12);
            assert!((1e6..1e14).contains(&f32_rate), "{}: {f32_rate} operations per second", isa.describe());
            let bf16_rate = measure_bf16_rate(isa, &mut pool, 1 << 12);
            assert!((1e6..1e14).contains(&int8_rate), "{}: {int8_rate} operations per second", isa.describe());
            assert!((1e6..1e14).contains(&bf16_rate), "{}: {bf16_rate} operations per second", isa.describe());
        }
    }

    #[test]
    fn reading_sees_every_line() {
        // One bit in any line reaches the result, so nothing is skipped.
        for isa in Isa::available() {
            for at in [0, 1, 63, 64, 255, 1023] {
                let mut lines = [[0u8; 64]; 16];
                lines[at / 64][at % 64] = 1;
                assert_eq!(isa.run(Read { lines: &lines }), 1, "{}: byte {at}", isa.describe());
            }
        }
    }

    #[test]
    fn the_loops_compute_what_they_claim() {
        for isa in Isa::available() {
            let chains = isa.run(Chains);
            assert_eq!(isa.run(MultiplyAdd { loops: 3 }), 16.0 * chains as f32);
            // Each lane adds two eighths to 1, three times.
            assert_eq!(isa.run(DotPairs { loops: 3 }), 16.0 * 1.75 * chains as f32, "{}", isa.describe());
            // Each of the 16 lanes of chain c adds 4 · 8 · (0 + 1 + 2) · c.
            let chain_sum = (chains * (chains - 1) / 2) as i32;
            assert_eq!(isa.run(DotBytes { loops: 3 }), 16 * 4 * RUN as i32 * 3 * chain_sum, "{}", isa.describe());
        }
    }
}
