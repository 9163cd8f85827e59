//! Coins. A coin is a function of (seed, position): no state, so a draw can be repeated, moved to another batch or run
//! after a preemption, and stays the same.

/// A number in [0, 1) with 53 random bits, for the token at `position` of the sequence whose seed is `seed`.
pub fn coin(seed: u64, position: usize) -> f64 {
    (mix(seed, position as u64) >> 11) as f64 / (1u64 << 53) as f64
}

/// 64 random bits, a function of both. Also makes the seed of the `index`-th of several sequences from one seed.
pub fn mix(seed: u64, index: u64) -> u64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15; // 2^64 / golden ratio: consecutive indices land far apart
    // The seed is scrambled first, so that sequences with neighbouring seeds are not shifted copies of one another.
    scramble(scramble(seed ^ STEP).wrapping_add(index.wrapping_mul(STEP)))
}

/// SplitMix64's finalizer (Stafford's variant 13): every input bit flips every output bit about half the time.
fn scramble(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How far the counts of `bins` equal bins are from even: χ² as a standard normal variable (Wilson–Hilferty).
    fn unevenness(coins: impl Iterator<Item = f64>, bins: usize) -> f64 {
        let mut counts = vec![0.0f64; bins];
        coins.for_each(|c| counts[(c * bins as f64) as usize] += 1.0);
        let expected = counts.iter().sum::<f64>() / bins as f64;
        let chi_square: f64 = counts.iter().map(|c| (c - expected).powi(2) / expected).sum();
        let spread = 2.0 / (9.0 * (bins - 1) as f64);
        ((chi_square / (bins - 1) as f64).cbrt() - (1.0 - spread)) / spread.sqrt()
    }

    #[test]
    fn coins_are_a_function_of_seed_and_position() {
        for (seed, position) in [(0, 0), (0, 1), (1, 0), (u64::MAX, usize::MAX)] {
            assert_eq!(coin(seed, position), coin(seed, position));
            assert!((0.0..1.0).contains(&coin(seed, position)));
        }
        // Fixed for good: a seed that a user wrote down must give the same text in later versions.
        assert_eq!(coin(42, 7), 0.19535155971618223);
    }

    #[test]
    fn coins_are_even_along_positions_and_along_seeds() {
        for fixed in [0, 1, 12345, u64::MAX / 3] {
            let along_positions = unevenness((0..40_000).map(|i| coin(fixed, i)), 100);
            let along_seeds = unevenness((0..40_000).map(|i| coin(i, fixed as usize)), 100);
            assert!(along_positions.abs() < 4.5, "seed {fixed}: {along_positions}");
            assert!(along_seeds.abs() < 4.5, "position {fixed}: {along_seeds}");
        }
    }

    #[test]
    fn neighbours_are_independent() {
        // A pair of coins in one of 10 × 10 bins: next positions, next seeds, and the shift that plain SplitMix would show.
        let step = 0x9e37_79b9_7f4a_7c15u64;
        let pair = |a: f64, b: f64| ((a * 10.0).floor() + b) / 10.0;
        type Coin = fn(u64, u64) -> f64;
        let neighbours: [(&str, Coin); 3] = [
            ("position", |i, _| coin(5, i as usize + 1)),
            ("seed", |i, _| coin(6, i as usize)),
            ("shifted seed", |i, step| coin(5u64.wrapping_add(step), i as usize)),
        ];
        for (name, other) in neighbours {
            let uneven = unevenness((0..40_000).map(|i| pair(coin(5, i as usize), other(i, step))), 100);
            assert!(uneven.abs() < 4.5, "{name}: {uneven}");
        }
    }
}
