//! The KV cache's books against plain lists: a list of what is remembered, searched from the front, and a list of idle
//! blocks in the order in which they were given back.

use octavo::kv::{BlockId, BlockTable, KvCache, PrefixChain};
use octavo::request::Time;

use crate::world::Coins;

const SALTS: [&str; 2] = ["", "tenant"];

#[derive(Default)]
struct Holder {
    salt: usize,
    tokens: Vec<u32>,
    table: BlockTable,
    chain: PrefixChain,
    rent: u128,
}

/// The obvious version.
#[derive(Default)]
struct Model {
    owners: Vec<usize>,
    /// All tokens up to a block's end, and whose; the first with a name keeps it.
    remembered: Vec<(usize, Vec<u32>, BlockId)>,
    /// Least recently used first.
    idle: Vec<BlockId>,
}

impl Model {
    fn is_remembered(&self, block: BlockId) -> bool {
        self.remembered.iter().any(|known| known.2 == block)
    }
    fn free(&self) -> usize {
        let used = |id: &usize| self.owners[*id] > 0 || self.is_remembered(BlockId(*id as u32));
        (0..self.owners.len()).filter(|id| !used(id)).count()
    }
    fn take(&mut self, block: BlockId) {
        assert_eq!(self.owners[block.0 as usize], 0, "{block:?} has an owner");
        if self.is_remembered(block) {
            assert_eq!(self.free(), 0, "evicts although blocks are free");
            assert_eq!(block, self.idle.remove(0), "not the least recently used");
            self.remembered.retain(|known| known.2 != block);
        }
        self.owners[block.0 as usize] = 1;
    }
    fn find(&self, salt: usize, tokens: &[u32], size: usize) -> Vec<BlockId> {
        let full = (1..=tokens.len() / size).map(|blocks| &tokens[..blocks * size]);
        full.map_while(|prefix| self.remembered.iter().find(|known| known.0 == salt && known.1 == prefix))
            .map(|known| known.2)
            .collect()
    }
}

#[test]
fn the_books_agree_with_plain_lists() {
    let (mut evictions, mut hits) = (0, 0);
    for seed in 0..400 {
        println!("seed {seed}");
        let (evicted, hit) = play(seed);
        evictions += evicted;
        hits += hit;
    }
    assert!(evictions > 1000 && hits > 1000, "{evictions} evictions, {hits} hits");
}

fn play(seed: u64) -> (usize, usize) {
    let mut coins = Coins(seed);
    let (size, blocks) = (coins.within(1, 3), coins.within(1, 24));
    let mut kv = KvCache::new(blocks, size, true);
    let mut model = Model { owners: vec![0; blocks], ..Default::default() };
    let mut holders: Vec<Holder> = Vec::new();
    let (mut now, mut rents, mut owned_ns) = (0, 0, 0);
    let (mut evictions, mut hits) = (0, 0);
    for _ in 0..200 {
        let passed = coins.within(0, 1000) as u64;
        now += passed;
        owned_ns += u128::from(passed) * model.owners.iter().filter(|&&owners| owners > 0).count() as u128;
        match coins.within(0, 3) {
            0 => {
                let mut holder = Holder { salt: coins.within(0, 1), ..Default::default() };
                holder.tokens = (0..coins.within(1, 12)).map(|_| u32::from(coins.one_in(4))).collect();
                let found = find(&kv, &mut holder, size);
                assert_eq!(found, model.find(holder.salt, &holder.tokens, size), "the longest remembered prefix");
                hits += found.len();
                kv.share(&mut holder.table, &found, Time(now));
                for block in found {
                    model.idle.retain(|&idle| idle != block);
                    model.owners[block.0 as usize] += 1;
                }
                holders.push(holder);
            }
            1 if !holders.is_empty() => {
                let index = coins.within(0, holders.len() - 1);
                let holder = &mut holders[index];
                let before = holder.table.len();
                let needed = kv.blocks_for(holder.tokens.len()).saturating_sub(before);
                let available = model.free() + model.idle.len();
                assert_eq!(kv.grow(&mut holder.table, holder.tokens.len(), Time(now)), needed <= available);
                let taken = holder.table.blocks()[before..].to_vec();
                assert_eq!(taken.len(), if needed <= available { needed } else { 0 }, "all or nothing");
                for block in taken {
                    evictions += usize::from(model.is_remembered(block));
                    model.take(block);
                }
            }
            2 if !holders.is_empty() => {
                let index = coins.within(0, holders.len() - 1);
                publish(&mut kv, &mut model, &mut holders[index], size);
            }
            _ if !holders.is_empty() => {
                let index = coins.within(0, holders.len() - 1);
                let mut holder = holders.swap_remove(index);
                let given: Vec<_> = holder.table.blocks().iter().rev().copied().collect();
                holder.rent += kv.release(&mut holder.table, Time(now));
                rents += holder.rent;
                for block in given {
                    model.owners[block.0 as usize] -= 1;
                    if model.owners[block.0 as usize] == 0 && model.is_remembered(block) {
                        model.idle.push(block);
                    }
                }
            }
            _ => {}
        }
        kv.check(holders.iter().map(|holder| &holder.table));
        let counts = (kv.pool().free(), kv.pool().idle(), kv.pool().owned());
        assert_eq!(counts, (model.free(), model.idle.len(), blocks - model.free() - model.idle.len()));
    }
    for mut holder in holders {
        rents += kv.release(&mut holder.table, Time(now));
    }
    assert_eq!(kv.owned_ns(Time(now)), owned_ns, "the time that blocks were owned");
    assert_eq!(rents, owned_ns, "is paid for to the nanosecond");
    (evictions, hits)
}

fn find(kv: &KvCache, holder: &mut Holder, size: usize) -> Vec<BlockId> {
    let Holder { tokens, chain, salt, .. } = holder;
    kv.find_prefix(tokens.len() / size, |index| {
        chain.key(index, SALTS[*salt], |block| tokens[block * size..][..size].to_vec())
    })
}

fn publish(kv: &mut KvCache, model: &mut Model, holder: &mut Holder, size: usize) {
    let Holder { salt, tokens, table, chain, .. } = holder;
    for index in 0..table.len().min(tokens.len() / size) {
        let key = chain.key(index, SALTS[*salt], |block| tokens[block * size..][..size].to_vec());
        kv.publish(table, index, key);
        let (block, prefix) = (table.blocks()[index], &tokens[..(index + 1) * size]);
        if model.find(*salt, prefix, size).len() <= index && !model.is_remembered(block) {
            let named = model.remembered.iter().any(|known| known.0 == *salt && known.1 == prefix);
            if !named {
                model.remembered.push((*salt, prefix.to_vec(), block));
            }
        }
    }
}
