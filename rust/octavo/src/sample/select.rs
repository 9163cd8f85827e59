//! The largest values of a vocabulary, without sorting it: one pass of comparisons, and selection among the few that
//! are left.

/// Values that are looked at together: as many as keep the units of the widest vectors busy.
pub const LANES: usize = 64;

/// A value and its index as one number: larger values are larger, and among equal values smaller indices are larger.
/// So the order of keys is the order of likelihood, and no two are equal.
pub fn key(value: f32, index: u32) -> u64 {
    // Adding 0 turns -0 into +0: they are the same number.
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!index)
}

/// The value of a key.
pub fn value_of(key: u64) -> f32 {
    let ordered = (key >> 32) as u32;
    f32::from_bits(if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered })
}

/// The index of a key.
pub fn index_of(key: u64) -> u32 {
    !(key as u32)
}

/// What one look at a row of logits tells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scan {
    /// The largest value; −∞ if there is none.
    pub max: f32,
    /// The first index that holds it.
    pub first: u32,
    /// No value is NaN or +∞. Where one is, the others mean nothing.
    pub all_logits: bool,
}

/// Looks at every value once.
#[inline(always)]
pub fn scan(values: &[f32]) -> Scan {
    const BLOCK: usize = 1024; // small enough to look into again for free
    let (mut max, mut best, mut all_logits) = (f32::NEG_INFINITY, 0, true);
    for (number, block) in values.chunks(BLOCK).enumerate() {
        let (block_max, block_all) = scan_block(block);
        all_logits &= block_all;
        if block_max > max {
            (max, best) = (block_max, number * BLOCK);
        }
    }
    let first = values[best.min(values.len())..].iter().position(|&v| v == max);
    Scan { max, first: (best + first.unwrap_or(0)) as u32, all_logits }
}

/// The largest of these, and whether all are logits.
#[inline(always)]
fn scan_block(values: &[f32]) -> (f32, bool) {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut largest = [f32::NEG_INFINITY; LANES];
    let mut wrong = [0u32; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            let value = chunk[lane];
            largest[lane] = larger(largest[lane], value);
            wrong[lane] |= u32::from(!is_logit(value));
        }
    }
    let mut max = f32::NEG_INFINITY;
    for &value in largest.iter().chain(rest) {
        max = larger(max, value);
    }
    (max, wrong == [0; LANES] && rest.iter().all(|&value| is_logit(value)))
}

/// Whether a model may say this: any number, and −∞ of a token that it rules out.
#[inline(always)]
pub fn is_logit(value: f32) -> bool {
    value < f32::INFINITY
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// Whether any of a chunk is at least `least`. No way out of the loop, so that it is a few vector operations.
#[inline(always)]
pub fn any_reaches(chunk: &[f32], least: f32) -> bool {
    let mut any = false;
    for &value in chunk {
        any |= value >= least;
    }
    any
}

/// Leaves the keys of the `k` largest values in `keys`, the least of them last, the others in no order. Fewer if fewer
/// are above −∞.
#[inline(always)]
pub fn top(values: &[f32], k: usize, keys: &mut Vec<u64>) {
    keys.clear();
    if k == 0 {
        return;
    }
    // Collect what beats the k-th best so far; whenever twice as many as needed have come together, that k-th rises.
    // A later value equal to it has a larger index, so it does not beat it.
    let room = (2 * k).max(256);
    let mut least = f32::NEG_INFINITY;
    for (chunk_index, chunk) in values.chunks(LANES).enumerate() {
        if !any_reaches(chunk, least) {
            continue;
        }
        for (offset, &v) in chunk.iter().enumerate() {
            if v > least {
                keys.push(key(v, (LANES * chunk_index + offset) as u32));
                if keys.len() == room {
                    cut_to(k, keys);
                    least = value_of(keys[k - 1]);
                }
            }
        }
    }
    cut_to(k.min(keys.len()), keys);
}

fn cut_to(k: usize, keys: &mut Vec<u64>) {
    if k > 0 {
        keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        keys.truncate(k);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::random::coin;

    #[test]
    fn keys_order_by_value_then_smaller_index() {
        let rising = [f32::MIN, -1.0, -1e-45, 0.0, 1e-45, f32::MIN_POSITIVE, 1.0, f32::MAX];
        for (i, &a) in rising.iter().enumerate() {
            assert_eq!(value_of(key(a, 7)), a);
            assert_eq!(index_of(key(a, 7)), 7);
            for &b in &rising[i + 1..] {
                assert!(key(a, 0) < key(b, u32::MAX), "{a} {b}");
            }
        }
        assert!(key(-0.0, 1) < key(0.0, 0) && key(-0.0, 0) > key(0.0, 1));
    }

    #[test]
    fn top_matches_sorting() {
        let mut keys = Vec::new();
        for (seed, len) in [0, 1, 15, 16, 17, 255, 256, 257, 3000].into_iter().enumerate() {
            for levels in [1.0, 3.0, 40.0, 1e9] {
                // Few levels: many ties. Some −∞.
                let value = |i| match (coin(seed as u64, i) * levels).floor() as f32 {
                    0.0 if levels > 1.0 => f32::NEG_INFINITY,
                    v => v - 2.0,
                };
                let values: Vec<f32> = (0..len).map(value).collect();
                let mut sorted: Vec<u64> =
                    (0..len).filter(|&i| values[i] > f32::NEG_INFINITY).map(|i| key(values[i], i as u32)).collect();
                sorted.sort_unstable_by(|a, b| b.cmp(a));
                for k in [0, 1, 2, 100, 127, 128, 129, len, len + 1] {
                    let want = &sorted[..k.min(sorted.len())];
                    top(&values, k, &mut keys);
                    assert_eq!(keys.last(), want.last(), "seed {seed}: the {k}-th of {len}, {levels} levels");
                    keys.sort_unstable_by(|a, b| b.cmp(a));
                    assert_eq!(keys, want, "seed {seed}: top {k} of {len}, {levels} levels");
                }
            }
        }
    }
    #[test]
    fn a_scan_finds_the_first_of_the_largest_and_what_is_no_logit() {
        for (seed, len) in [0usize, 1, 63, 64, 65, 1023, 1024, 1025, 3000].into_iter().enumerate() {
            for levels in [1.0, 3.0, 1e9] {
                let value = |i| match (coin(seed as u64, i) * levels).floor() as f32 {
                    0.0 if levels == 3.0 => f32::NEG_INFINITY,
                    v => v - 2.0,
                };
                let mut values: Vec<f32> = (0..len).map(value).collect();
                let best = (0..len).max_by_key(|&i| key(values[i], i as u32));
                let max = best.map_or(f32::NEG_INFINITY, |i| values[i]);
                let want = Scan { max, first: best.unwrap_or(0) as u32, all_logits: true };
                assert_eq!(scan(&values), want, "seed {seed}, {len} values, {levels} levels");
                for at in [0, len / 2, len.saturating_sub(1)] {
                    for wrong in [f32::NAN, f32::INFINITY] {
                        let Some(kept) = values.get(at).copied() else { continue };
                        values[at] = wrong;
                        assert!(!scan(&values).all_logits, "{wrong} at {at} of {len}");
                        values[at] = kept;
                    }
                }
            }
        }
    }
}
