//! Which blocks the pool keeps: real traffic and a made one through the real pool, beside those of `policies`.
//!
//! Blocks that nobody will use again are 71 in 100 of the trace, and what comes back does so after very different pauses. So
//! the ideal is near where the pool outlives the pauses of a conversation, and far where it does not; but so is the bound for
//! whoever knows of a block only how often it was used and when last. The pool learns that as it goes, and a little more.

use std::path::Path;

use crate::policies::{Prompt, Trace, belady, bound, least_recently_used, play, read, sizes};
use crate::world::Coins;

/// A share of the distinct blocks, and what of Belady's hits is to be found with so many.
const SIZES: [(f64, f64); 7] =
    [(0.01, 0.43), (0.03, 0.52), (0.1, 0.80), (0.15, 0.89), (0.2, 0.95), (0.3, 0.985), (0.5, 0.995)];

#[test]
fn real_conversations() {
    let path = "../../../shared/traces/mooncake_conversation_trace.jsonl";
    let Some(trace) = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path)) else {
        println!("skipped: the Mooncake conversation trace is not beside this clone");
        return;
    };
    let (accesses, distinct) = sizes(&trace);
    println!("{} requests, {accesses} full blocks of 512 tokens, {distinct} distinct", trace.len());
    for (share, bar) in SIZES {
        let blocks = (distinct as f64 * share) as usize;
        let (found, floor, ideal) = (play(&trace, blocks), least_recently_used(&trace, blocks), belady(&trace, blocks));
        let of_ideal = |hits: usize| hits as f64 / ideal as f64;
        let possible = bound(&trace, blocks);
        println!(
            "{blocks:>6} blocks: {:5.1} % of all found, {:5.1} % of Belady's; least recently used {:5.1} %, bound {:5.1} %",
            100.0 * found as f64 / accesses as f64,
            100.0 * of_ideal(found),
            100.0 * of_ideal(floor),
            100.0 * possible / ideal as f64,
        );
        assert!(found <= ideal, "Belady's is the ideal");
        assert!(found >= floor, "{blocks} blocks: less than the least recently used finds");
        assert!(of_ideal(found) >= bar, "{blocks} blocks: below {bar} of the ideal");
        let gap = (possible - found as f64) / ideal as f64;
        assert!(gap < 0.05, "{blocks} blocks: {gap:.3} of the ideal could be had by what is known of uses and ages");
    }
}

/// Eight blocks.
fn prompt(first: u32) -> Prompt {
    Prompt { blocks: (first..first + 8).collect(), answer: 100 }
}

/// A few conversations that everybody goes on with, in a stream of prompts that come once.
fn hot_set_in_a_scan(seed: u64) -> Trace {
    let mut coins = Coins(seed);
    let mut fresh = 40 * 8;
    let mut request = |coins: &mut Coins| {
        if coins.one_in(4) {
            let conversation = coins.within(0, 39) as u32;
            return prompt(conversation * 8);
        }
        fresh += 8;
        prompt(fresh - 8)
    };
    (0..4000).map(|_| request(&mut coins)).collect()
}

#[test]
fn a_scan_does_not_wash_out_what_is_used_again() {
    for seed in 0..5 {
        let trace = hot_set_in_a_scan(seed);
        // The hot set has 320 blocks, and 24 new ones come between two uses of any: 1,300 between two of the same.
        let (found, floor, ideal) = (play(&trace, 500), least_recently_used(&trace, 500), belady(&trace, 500));
        println!("seed {seed}: {found} found, least recently used {floor}, Belady {ideal}");
        assert!(found >= 2 * floor && found as f64 >= 0.95 * ideal as f64, "{found} of {ideal}, floor {floor}");
    }
}

#[test]
fn what_was_hot_once_goes_in_the_end() {
    // One conversation, used a thousand times, and then nothing but new prompts.
    let hot = vec![prompt(0); 1000];
    let mut trace: Trace = hot.into_iter().chain((1..=4000).map(|i| prompt(i * 8))).collect();
    let before = play(&trace, 100);
    trace.push(prompt(0));
    assert_eq!(play(&trace, 100), before, "still there after 32,000 other blocks");
}
