//! Which blocks the pool keeps: real traffic and a made one through the real pool, beside two twins in plain lists. One
//! forgets the least recently used (the floor), the other what is needed last (Belady: it knows the future, which no pool
//! does).
//!
//! Blocks that nobody will use again are 71 in 100 of the trace; where the pool is a hundredth of it, even a twin that
//! knew *whether* a block comes back, and not when, would find half of what Belady's finds. So the ideal is near where the
//! pool outlives the pauses of a conversation, and far where it does not.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use octavo::kv::{KvCache, KvLayout, PrefixKey};
use octavo::request::Time;

use crate::world::Coins;

/// Requests in order; of each the blocks of its prompt. A block stands for all that comes before it, too.
type Trace = Vec<Vec<u32>>;

/// Blocks that are found when the trace is played through a real pool, one request after the other. Each also takes a block
/// for what does not fill one, and for its answer.
fn play(trace: &Trace, blocks: usize) -> usize {
    let mut kv = KvCache::new(blocks, KvLayout::new(1));
    let distinct = trace.iter().flatten().max().map_or(0, |&most| most + 1);
    let names: Vec<PrefixKey> = (0..distinct).map(|block| PrefixKey::root("").then([block])).collect();
    let mut hits = 0;
    for (i, request) in trace.iter().enumerate() {
        let (now, name) = (Time(i as u64), |index: usize| names[request[index] as usize]);
        let found = kv.find_prefix(request.len(), name);
        hits += found.len;
        let mut table = kv.table();
        kv.share(&mut table, &found, now);
        assert!(kv.grow(&mut table, request.len() + 1, now), "the largest request fits");
        (found.len..request.len())
            .for_each(|index| kv.publish(&table, index, name(index), || (name(index), Arc::default())));
        kv.release(&mut table, now);
    }
    kv.check([].into_iter(), [].into_iter());
    hits
}

/// The same with a pool of which one request after the other has all, and then gives every block of its prompt a rank; the
/// lowest is forgotten first.
fn play_ranked(trace: &Trace, blocks: usize, mut rank: impl FnMut(usize, u32) -> i64) -> usize {
    let mut ranked = BTreeSet::new();
    let mut place = vec![None; trace.iter().flatten().max().map_or(0, |&most| most as usize + 1)];
    let mut hits = 0;
    for (i, request) in trace.iter().enumerate() {
        hits += request.iter().take_while(|&&block| place[block as usize].is_some()).count();
        request.iter().filter_map(|&block| place[block as usize].take()).for_each(|known| _ = ranked.remove(&known));
        while ranked.len() + request.len() + 1 > blocks {
            let (_, _, forgotten) = ranked.pop_first().expect("the largest request fits");
            place[forgotten as usize] = None;
        }
        for (depth, &block) in request.iter().enumerate() {
            let known = (rank(i, block), Reverse(depth), block);
            place[block as usize] = Some(known);
            ranked.insert(known);
        }
    }
    hits
}

fn least_recently_used(trace: &Trace, blocks: usize) -> usize {
    play_ranked(trace, blocks, |now, _| now as i64)
}

fn belady(trace: &Trace, blocks: usize) -> usize {
    let mut uses = vec![Vec::new(); trace.iter().flatten().max().map_or(0, |&most| most as usize + 1)];
    for (i, request) in trace.iter().enumerate().rev() {
        request.iter().for_each(|&block| uses[block as usize].push(i));
    }
    play_ranked(trace, blocks, |_, block| {
        uses[block as usize].pop();
        uses[block as usize].last().map_or(i64::MIN, |&next| -(next as i64))
    })
}

/// A share of the distinct blocks, and what of Belady's hits is to be found with so many.
const SIZES: [(f64, f64); 6] = [(0.01, 0.42), (0.03, 0.48), (0.1, 0.78), (0.2, 0.93), (0.3, 0.97), (0.5, 0.99)];

#[test]
fn real_conversations() {
    let path = "../../../shared/traces/mooncake_conversation_trace.jsonl";
    let Ok(text) = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)) else {
        println!("skipped: the Mooncake conversation trace is not beside this clone");
        return;
    };
    let trace: Trace = text.lines().map(full_blocks).collect();
    let accesses = trace.iter().map(Vec::len).sum::<usize>();
    let distinct = trace.iter().flatten().collect::<BTreeSet<_>>().len();
    println!("{} requests, {accesses} full blocks of 512 tokens, {distinct} distinct", trace.len());
    for (share, bar) in SIZES {
        let blocks = (distinct as f64 * share) as usize;
        let (found, floor, ideal) = (play(&trace, blocks), least_recently_used(&trace, blocks), belady(&trace, blocks));
        let of_ideal = |hits: usize| hits as f64 / ideal as f64;
        println!(
            "{blocks:>6} blocks: {:5.1} % of all found, {:5.1} % of Belady's; least recently used {:5.1} %",
            100.0 * found as f64 / accesses as f64,
            100.0 * of_ideal(found),
            100.0 * of_ideal(floor),
        );
        assert!(found <= ideal, "Belady's is the ideal");
        assert!(found >= floor, "{blocks} blocks: less than the least recently used finds");
        assert!(of_ideal(found) >= bar, "{blocks} blocks: below {bar} of the ideal");
    }
}

/// A line of the trace. Its last hash is of a block that is not full, unless the length says otherwise.
fn full_blocks(line: &str) -> Vec<u32> {
    let line: serde_json::Value = serde_json::from_str(line).expect("a line of the trace is JSON");
    let tokens = line["input_length"].as_u64().expect("a length") as usize;
    let hashes = line["hash_ids"].as_array().expect("a list of hashes");
    hashes.iter().take(tokens / 512).map(|hash| hash.as_u64().expect("a hash is a number") as u32).collect()
}

/// A few conversations that everybody goes on with, in a stream of prompts that come once.
fn hot_set_in_a_scan(seed: u64) -> Trace {
    let mut coins = Coins(seed);
    let mut fresh = 40 * 8;
    let mut request = |coins: &mut Coins| {
        if coins.one_in(4) {
            let conversation = coins.within(0, 39) as u32;
            return (0..8).map(|block| conversation * 8 + block).collect();
        }
        fresh += 8;
        (fresh - 8..fresh).collect()
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
        assert!(found >= 2 * floor && found as f64 >= 0.75 * ideal as f64, "{found} of {ideal}, floor {floor}");
    }
}

#[test]
fn what_was_hot_once_goes_in_the_end() {
    // One conversation, used a thousand times, and then nothing but new prompts.
    let hot = vec![(0..8).collect::<Vec<u32>>(); 1000];
    let scan = (0..4000u32).map(|i| (8 + i * 8..16 + i * 8).collect::<Vec<u32>>());
    let mut trace: Trace = hot.into_iter().chain(scan).collect();
    let before = play(&trace, 100);
    trace.push((0..8).collect());
    assert_eq!(play(&trace, 100), before, "still there after 32,000 other blocks");
}
