//! The largest values of a vocabulary, without sorting it: one pass of comparisons, and selection among the few that
//! are left.

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

/// The largest value; −∞ if there is none.
pub fn max(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = values.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, v);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// The first index that holds `value`, which must be there.
pub fn first(values: &[f32], value: f32) -> u32 {
    let (chunks, _) = values.as_chunks::<16>();
    let has_it = |chunk: &[f32; 16]| chunk.iter().fold(false, |any, &v| any | (v == value));
    let from = 16 * chunks.iter().position(has_it).unwrap_or(chunks.len());
    let place = values[from..].iter().position(|&v| v == value).expect("the value was found in these values");
    (from + place) as u32
}

/// Leaves the keys of the `k` largest values in `keys`, the least of them last, the others in no order. Fewer if fewer
/// are above −∞.
pub fn top(values: &[f32], k: usize, keys: &mut Vec<u64>) {
    keys.clear();
    if k == 0 {
        return;
    }
    // Collect what beats the k-th best so far; whenever twice as many as needed have come together, that k-th rises.
    // A later value equal to it has a larger index, so it does not beat it.
    let room = (2 * k).max(256);
    let mut least = f32::NEG_INFINITY;
    for (chunk_index, chunk) in values.chunks(16).enumerate() {
        if !chunk.iter().fold(false, |any, &v| any | (v > least)) {
            continue;
        }
        for (offset, &v) in chunk.iter().enumerate() {
            if v > least {
                keys.push(key(v, (16 * chunk_index + offset) as u32));
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
                let best = max(&values);
                assert_eq!(best, sorted.first().map_or(f32::NEG_INFINITY, |&k| value_of(k)));
                if let Some(&key) = sorted.first() {
                    assert_eq!(first(&values, best), index_of(key), "seed {seed}, {len} values, {levels} levels");
                }
            }
        }
    }
}
