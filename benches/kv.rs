//! The bookkeeping of KV cache blocks, on one thread: taking, naming, finding, sharing. Floor: the ids or names are read once.

mod support;

use std::sync::Arc;

use octavo::kv::{BlockTable, KvCache, KvLayout, PrefixChain, PrefixKey};
use octavo::request::Time;
use support::{Bench, Work};

const BLOCK_SIZE: usize = 16;
const NOW: Time = Time(0);

/// The names of the blocks of a sequence whose tokens begin with `first`.
fn names(first: u32, blocks: usize) -> Vec<PrefixKey> {
    let mut chain = PrefixChain::default();
    let tokens = |block: usize| (0..BLOCK_SIZE).map(move |i| first + (block * BLOCK_SIZE + i) as u32);
    (0..blocks).map(|index| chain.key(index, "", tokens)).collect()
}

/// A sequence that took `names.len()` blocks and published them all.
fn publish(kv: &mut KvCache, names: &[PrefixKey]) -> BlockTable {
    let mut table = kv.table();
    assert!(kv.grow(&mut table, names.len() * BLOCK_SIZE, NOW), "there are enough blocks");
    names.iter().enumerate().for_each(|(index, &name)| kv.publish(&table, index, name, || (name, Arc::default())));
    table
}

fn main() {
    let bench = Bench::start("kv", Some(1));
    let blocks = bench.size(256, 4);
    let tokens = blocks * BLOCK_SIZE;
    let shape = format!("{blocks} blocks ({tokens} tokens)");
    let (ids, keys) = (Work::cache(4 * blocks), Work::cache(size_of::<PrefixKey>() * blocks));

    let mut kv = KvCache::new(bench.size(100_000, 100), KvLayout::new(BLOCK_SIZE));
    let mut table = kv.table();
    bench.line("take and give back", &shape, ids, || {
        assert!(kv.grow(&mut table, tokens, NOW));
        kv.release(&mut table, NOW)
    });
    assert_eq!(kv.pool().owned(), 0);

    bench.line("name (SHA-256)", &shape, Work::cache(4 * tokens), || names(1, blocks));

    let shared = names(1, blocks);
    let mut owner = publish(&mut kv, &shared);
    kv.release(&mut owner, NOW);
    let find = |kv: &KvCache| kv.find_prefix(blocks, |index| shared[index]);
    assert_eq!(find(&kv).len, blocks, "what was published is found");
    assert_eq!(kv.find_prefix(1, |_| names(2, 1)[0]).len, 0, "nothing else is");
    bench.line("find", &shape, keys, || find(&kv));

    let found = find(&kv);
    bench.line("share and give back", &shape, ids, || {
        kv.share(&mut table, &found, NOW);
        kv.release(&mut table, NOW)
    });
    kv.check([].into_iter(), [].into_iter());

    // A pool with nothing but remembered blocks: whoever takes some makes others forgotten.
    let mut full = KvCache::new(4 * blocks, KvLayout::new(BLOCK_SIZE));
    let generations: Vec<Vec<PrefixKey>> = (0..8).map(|i| names(1 + i * 1_000_000, blocks)).collect();
    let mut turn = 0;
    let mut replace = || {
        let mut table = publish(&mut full, &generations[turn % generations.len()]);
        turn += 1;
        full.release(&mut table, NOW)
    };
    (0..generations.len()).for_each(|_| _ = replace());
    bench.line("evict, publish, give back", &shape, keys, replace);
    assert_eq!((full.pool().free(), full.pool().idle()), (0, 4 * blocks), "all is remembered");
    full.check([].into_iter(), [].into_iter());
}
