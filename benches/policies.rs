//! What of a trace of prompts a pool finds: the engine's own, and others to hold it against. One forgets the least recently
//! used (the floor), one what is needed last (Belady's: it knows the future, which no pool does). The bound between them is
//! for whoever knows of a block how often it was used and how long ago, and how such blocks come back, and nothing else of it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use octavo::kv::{KvCache, KvLayout, PrefixKey};
use octavo::request::Time;

/// Tokens of a block.
const BLOCK_SIZE: usize = 512;

/// A request of a trace.
#[derive(Clone)]
pub struct Prompt {
    /// The blocks of its prompt. A block stands for all that comes before it, too.
    pub blocks: Vec<u32>,
    /// Tokens of its answer.
    pub answer: usize,
}

/// Requests in order.
pub type Trace = Vec<Prompt>;

/// A trace in Mooncake's format: lines of JSON with the hashes of blocks of 512 tokens. `None`: there is no such file.
pub fn read(path: &Path) -> Option<Trace> {
    Some(std::fs::read_to_string(path).ok()?.lines().map(prompt).collect())
}

/// A line of the trace. Its last hash is of a block that is not full, unless the length says otherwise.
fn prompt(line: &str) -> Prompt {
    let line: serde_json::Value = serde_json::from_str(line).expect("a line of the trace is JSON");
    let tokens = |length: &str| line[length].as_u64().expect("a length") as usize;
    let hashes =
        line["hash_ids"].as_array().expect("a list of hashes").iter().take(tokens("input_length") / BLOCK_SIZE);
    let blocks = hashes.map(|hash| hash.as_u64().expect("a hash is a number") as u32).collect();
    Prompt { blocks, answer: tokens("output_length") }
}

/// The blocks of all prompts in order.
fn uses(trace: &Trace) -> impl Iterator<Item = u32> {
    trace.iter().flat_map(|request| &request.blocks).copied()
}

/// Blocks of all prompts, and how many of them are different.
pub fn sizes(trace: &Trace) -> (usize, usize) {
    (uses(trace).count(), uses(trace).collect::<BTreeSet<_>>().len())
}

/// One more than the largest block.
fn end(trace: &Trace) -> usize {
    uses(trace).max().map_or(0, |most| most as usize + 1)
}

/// Blocks that are found when the trace is played through a real pool, one request after the other. Each also takes a block
/// for what does not fill one, and for its answer.
pub fn play(trace: &Trace, blocks: usize) -> usize {
    let mut kv = KvCache::new(blocks, KvLayout::new(BLOCK_SIZE));
    let names: Vec<PrefixKey> = (0..end(trace)).map(|block| PrefixKey::root("").then([block as u32])).collect();
    let mut hits = 0;
    for (i, Prompt { blocks: request, answer }) in trace.iter().enumerate() {
        let (now, name) = (Time(i as u64), |index: usize| names[request[index] as usize]);
        let found = kv.find_prefix(request.len(), name);
        hits += found.len;
        let mut table = kv.table();
        kv.share(&mut table, &found, now);
        assert!(kv.grow(&mut table, request.len() * BLOCK_SIZE + 1, now), "the largest request fits");
        (found.len..request.len())
            .for_each(|index| kv.publish(&table, index, name(index), || (name(index), Arc::default())));
        kv.mark(&table, request.len() * BLOCK_SIZE, *answer);
        kv.release(&mut table, now);
    }
    kv.check([].into_iter(), [].into_iter());
    hits
}

/// The same with a pool of which one request after the other has all, and then gives every block of its prompt a rank; the
/// lowest is forgotten first.
fn play_ranked(trace: &Trace, blocks: usize, mut rank: impl FnMut(usize, u32) -> i64) -> usize {
    let mut ranked = BTreeSet::new();
    let mut place = vec![None; end(trace)];
    let mut hits = 0;
    for (i, Prompt { blocks: request, .. }) in trace.iter().enumerate() {
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

pub fn least_recently_used(trace: &Trace, blocks: usize) -> usize {
    play_ranked(trace, blocks, |now, _| now as i64)
}

pub fn belady(trace: &Trace, blocks: usize) -> usize {
    let mut uses = vec![Vec::new(); end(trace)];
    for (i, request) in trace.iter().enumerate().rev() {
        request.blocks.iter().for_each(|&block| uses[block as usize].push(i));
    }
    play_ranked(trace, blocks, |_, block| {
        uses[block as usize].pop();
        uses[block as usize].last().map_or(i64::MIN, |&next| -(next as i64))
    })
}

/// After so many uses a block is like those of more.
const MOST_USES: usize = 9;

/// Pauses after the first, second, … use of blocks, in blocks used meanwhile, and in the end without another use.
#[derive(Default)]
struct Pauses {
    ended: Vec<u64>,
    endless: Vec<u64>,
}

/// The most that any policy finds on the average which tells blocks apart by their number of uses and the time since the
/// last, even one that knows beforehand how such blocks come back: it keeps those of each number up to an age, and room goes
/// where it finds most.
pub fn bound(trace: &Trace, blocks: usize) -> f64 {
    let (mut clock, mut known) = (0u64, BTreeMap::<u32, (usize, u64)>::new());
    let mut pauses: [Pauses; MOST_USES] = Default::default();
    for block in uses(trace) {
        clock += 1;
        let (uses, last) = known.entry(block).or_insert((0, 0));
        if *uses > 0 {
            pauses[*uses - 1].ended.push(clock - *last);
        }
        (*uses, *last) = ((*uses + 1).min(MOST_USES), clock);
    }
    known.values().for_each(|&(uses, last)| pauses[uses - 1].endless.push(clock - last));
    let mut steps: Vec<(f64, f64)> = pauses.iter().flat_map(|pauses| steps(pauses, clock)).collect();
    steps.sort_by(|(room, hits), (other_room, other_hits)| (other_hits * room).total_cmp(&(hits * other_room)));
    let (mut left, mut found) = (blocks as f64, 0.0);
    for (room, hits) in steps {
        let share = (left / room).clamp(0.0, 1.0);
        (left, found) = (left - share * room, found + share * hits);
    }
    found
}

/// What it takes to keep blocks longer and longer, in blocks of the pool, and how much more of them is found: the upper hull,
/// best first.
fn steps(pauses: &Pauses, total: u64) -> Vec<(f64, f64)> {
    let mut all: Vec<(u64, bool)> = pauses
        .ended
        .iter()
        .map(|&pause| (pause, true))
        .chain(pauses.endless.iter().map(|&pause| (pause, false)))
        .collect();
    all.sort_unstable();
    // Room and hits when every block is kept up to the age of each pause in turn.
    let (mut held, mut hits, mut hull) = (0u64, 0.0, vec![(0.0, 0.0)]);
    for (i, &(pause, ended)) in all.iter().enumerate() {
        hits += f64::from(u8::from(ended));
        let room = (held + (all.len() - i) as u64 * pause) as f64 / total as f64;
        held += pause;
        if !ended {
            continue;
        }
        while let [.., (a, b), (c, d)] = hull[..]
            && (d - b) * (room - a) <= (hits - b) * (c - a)
        {
            hull.pop();
        }
        hull.push((room, hits));
    }
    hull.windows(2).map(|pair| (pair[1].0 - pair[0].0, pair[1].1 - pair[0].1)).collect()
}
