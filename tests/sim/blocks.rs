//! The KV cache's books against plain lists: a list of what is remembered, searched from the front, and a list of idle
//! blocks in the order in which they were given back, each with how it was used. What a wait is worth says the same
//! [`Habit`], told of the same events, as of one block at a time.

use std::sync::Arc;

use octavo::kv::{BlockId, BlockTable, Found, Habit, KvCache, KvLayout, Mark, Past, PrefixChain};
use octavo::request::Time;

use crate::world::Coins;

const SALTS: [&str; 2] = ["", "tenant"];

struct Holder {
    salt: usize,
    tokens: Vec<u32>,
    table: BlockTable,
    chain: PrefixChain,
    rent: u128,
}

/// Whose block, of which group, and all tokens up to its end.
type Name = (usize, usize, Vec<u32>);

/// The obvious version.
struct Model {
    owners: Vec<usize>,
    /// The first with a name keeps it.
    remembered: Vec<(Name, BlockId)>,
    /// Least recently used first.
    idle: Vec<BlockId>,
    /// Of every block how what is in it was used, and of names that were forgotten.
    pasts: Vec<Past>,
    forgotten: Vec<(Name, Past)>,
    /// Blocks taken and shared.
    clock: u64,
    habit: Habit,
}

impl Model {
    fn is_remembered(&self, block: BlockId) -> bool {
        self.remembered.iter().any(|known| known.1 == block)
    }
    fn free(&self) -> usize {
        let used = |id: &usize| self.owners[*id] > 0 || self.is_remembered(BlockId(*id as u32));
        (0..self.owners.len()).filter(|id| !used(id)).count()
    }
    fn tick(&mut self) {
        self.clock += 1;
        self.habit.tick(self.clock);
    }
    fn take(&mut self, block: BlockId) {
        assert_eq!(self.owners[block.0 as usize], 0, "{block:?} has an owner");
        if self.is_remembered(block) {
            assert_eq!(self.free(), 0, "evicts although blocks are free");
            let Self { idle, habit, pasts, .. } = self;
            // Whose wait is worth least; of equals the oldest cohort's, of these the least used, and the first that waited.
            let turns = idle.iter().map(|&idle| {
                let past = pasts[idle.0 as usize];
                let (worth, began) = habit.worth(past);
                ((worth, began, past.class()), idle)
            });
            let first = turns.reduce(|first, next| if next.0 < first.0 { next } else { first });
            assert_eq!(first.map(|(_, idle)| idle), Some(block), "it was another one's turn");
            self.idle.retain(|&idle| idle != block);
            let past = self.pasts[block.0 as usize];
            let named = self.remembered.extract_if(.., |known| known.1 == block);
            self.forgotten.extend(named.map(|(name, _)| (name, past)));
        }
        self.tick();
        self.owners[block.0 as usize] = 1;
        self.pasts[block.0 as usize] = Past { touched: self.clock, ..Past::default() };
    }
    fn share(&mut self, block: BlockId) {
        self.tick();
        let past = &mut self.pasts[block.0 as usize];
        if self.idle.extract_if(.., |&mut idle| idle == block).count() > 0 {
            self.habit.wake(*past, self.clock);
        }
        (past.uses, past.touched) = (past.uses + 1, self.clock);
        self.owners[block.0 as usize] += 1;
    }
    fn remember(&mut self, name: Name, block: BlockId) {
        let past = &mut self.pasts[block.0 as usize];
        past.uses = 1;
        if let Some(index) = self.forgotten.iter().position(|forgotten| forgotten.0 == name) {
            let before = self.forgotten.remove(index).1;
            (past.uses, past.mark) = (before.uses + 1, before.mark);
            self.habit.wake(before, self.clock);
        }
        self.remembered.push((name, block));
    }
    fn mark(&mut self, table: &BlockTable, layout: &KvLayout, prompt: usize, answer: usize) {
        let held = |group: usize| table.blocks(group).iter().filter(|&&block| block != BlockId::NONE);
        let pasts: Vec<Past> = held(0).map(|block| self.pasts[block.0 as usize]).collect();
        let new = pasts.iter().filter(|past| past.uses == 1).count() * layout.block_size;
        let known: Vec<&Past> = pasts.iter().filter(|past| past.uses > 1).collect();
        let mark = Mark::new(known.last().is_some_and(|past| past.mark.is_end), new, answer);
        for (index, &block) in (0..layout.groups()).flat_map(|group| table.blocks(group).iter().enumerate()) {
            if block != BlockId::NONE {
                self.pasts[block.0 as usize].mark = mark.at_end(index + 2 >= prompt / layout.block_size);
            }
        }
    }
    fn named(&self, salt: usize, group: usize, prefix: &[u32]) -> Option<BlockId> {
        let is_it = |known: &&(Name, BlockId)| known.0 == (salt, group, prefix.to_vec());
        self.remembered.iter().find(is_it).map(|known| known.1)
    }
    /// The longest prefix after which the next token finds everything that it sees.
    fn find(&self, salt: usize, tokens: &[u32], layout: &KvLayout) -> Found {
        let size = layout.block_size;
        let seen = |group: usize, window: Option<usize>, len: usize, block: usize| {
            let is_seen = window.is_none_or(|window| (block + 1) * size + window > len * size + 1);
            if is_seen { self.named(salt, group, &tokens[..(block + 1) * size]) } else { Some(BlockId::NONE) }
        };
        let groups = |len: usize| -> Option<Vec<Vec<BlockId>>> {
            let windows = layout.windows.iter().enumerate();
            windows.map(|(group, &window)| (0..len).map(|block| seen(group, window, len, block)).collect()).collect()
        };
        let lens = (0..=tokens.len() / size).rev();
        lens.map(|len| (len, groups(len))).find_map(|(len, groups)| Some(Found { len, groups: groups? })).unwrap()
    }
    fn give_back(&mut self, block: BlockId) {
        self.owners[block.0 as usize] -= 1;
        if self.owners[block.0 as usize] == 0 && self.is_remembered(block) {
            self.idle.push(block);
            self.pasts[block.0 as usize].touched = self.clock;
            self.habit.rest(self.pasts[block.0 as usize].class());
        }
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
    let window = Some(coins.within(1, 8));
    let windows = coins.pick(&[vec![None], vec![None], vec![window], vec![None, window], vec![window, None]]).clone();
    let layout = KvLayout { block_size: coins.within(1, 3), windows };
    let blocks = coins.within(1, 24) * layout.groups();
    let mut kv = KvCache::new(blocks, layout.clone());
    let mut model = Model {
        owners: vec![0; blocks],
        remembered: Vec::new(),
        idle: Vec::new(),
        pasts: vec![Past::default(); blocks],
        forgotten: Vec::new(),
        clock: 0,
        habit: Habit::new(blocks),
    };
    let mut holders: Vec<Holder> = Vec::new();
    let (mut now, mut rents, mut owned_ns) = (0, 0, 0);
    let (mut evictions, mut hits) = (0, 0);
    for _ in 0..200 {
        let passed = coins.within(0, 1000) as u64;
        now += passed;
        owned_ns += u128::from(passed) * model.owners.iter().filter(|&&owners| owners > 0).count() as u128;
        match coins.within(0, 3) {
            0 => {
                let (salt, tokens) = (coins.within(0, 1), 0..coins.within(1, 12));
                let tokens = tokens.map(|_| u32::from(coins.one_in(4))).collect();
                let mut holder = Holder { salt, tokens, table: kv.table(), chain: PrefixChain::default(), rent: 0 };
                let found = find(&kv, &mut holder);
                assert_eq!(found, model.find(salt, &holder.tokens, &layout), "the longest remembered prefix");
                hits += found.len;
                kv.share(&mut holder.table, &found, Time(now));
                found.blocks().for_each(|block| model.share(block));
                holders.push(holder);
            }
            1 if !holders.is_empty() => {
                let index = coins.within(0, holders.len() - 1);
                let holder = &mut holders[index];
                let before = holder.table.len();
                let needed = layout.entries(holder.tokens.len()).saturating_sub(before) * layout.groups();
                let available = model.free() + model.idle.len();
                assert_eq!(kv.grow(&mut holder.table, holder.tokens.len(), Time(now)), needed <= available);
                for entry in before..holder.table.len() {
                    for group in (0..layout.groups()).rev() {
                        let block = holder.table.blocks(group)[entry];
                        evictions += usize::from(model.is_remembered(block));
                        model.take(block);
                    }
                }
                let grown = holder.table.len() - before;
                assert_eq!(grown * layout.groups(), if needed <= available { needed } else { 0 }, "all or nothing");
            }
            2 if !holders.is_empty() => {
                let index = coins.within(0, holders.len() - 1);
                let holder = &mut holders[index];
                publish(&mut kv, &mut model, holder);
                if holder.table.len() == layout.entries(holder.tokens.len()) {
                    leave_behind(&mut kv, &mut model, holder, Time(now));
                }
            }
            _ if !holders.is_empty() => {
                let index = coins.within(0, holders.len() - 1);
                let mut holder = holders.swap_remove(index);
                let table = &holder.table;
                let entries = (0..table.len()).rev().flat_map(|i| (0..layout.groups()).rev().map(move |g| (g, i)));
                let given: Vec<_> = entries.map(|(group, index)| table.blocks(group)[index]).collect();
                if coins.one_in(2) {
                    let (prompt, answer) = (coins.within(0, holder.tokens.len()), coins.within(0, 100));
                    kv.mark(table, prompt, answer);
                    model.mark(table, &layout, prompt, answer);
                }
                holder.rent += kv.release(&mut holder.table, Time(now));
                rents += holder.rent;
                given.into_iter().filter(|&block| block != BlockId::NONE).for_each(|block| model.give_back(block));
            }
            _ => {}
        }
        kv.check(holders.iter().map(|holder| &holder.table), [].into_iter());
        let counts = (kv.pool().free(), kv.pool().idle(), kv.pool().owned());
        assert_eq!(counts, (model.free(), model.idle.len(), blocks - model.free() - model.idle.len()));
    }
    for mut holder in holders {
        rents += holder.rent + kv.release(&mut holder.table, Time(now));
    }
    assert_eq!(kv.owned_ns(Time(now)), owned_ns, "the time that blocks were owned");
    assert_eq!(rents, owned_ns, "is paid for to the nanosecond");
    (evictions, hits)
}

fn find(kv: &KvCache, holder: &mut Holder) -> Found {
    let Holder { tokens, chain, salt, .. } = holder;
    let size = kv.layout().block_size;
    kv.find_prefix(tokens.len() / size, |index| {
        chain.key(index, SALTS[*salt], |block| tokens[block * size..][..size].to_vec())
    })
}

fn publish(kv: &mut KvCache, model: &mut Model, holder: &mut Holder) {
    let Holder { salt, tokens, table, chain, .. } = holder;
    let size = kv.layout().block_size;
    for index in 0..table.len().min(tokens.len() / size) {
        let key = chain.key(index, SALTS[*salt], |block| tokens[block * size..][..size].to_vec());
        kv.publish(table, index, key, || (key, Arc::default()));
        for group in 0..kv.layout().groups() {
            let (block, prefix) = (table.blocks(group)[index], &tokens[..(index + 1) * size]);
            let is_new = block != BlockId::NONE && !model.is_remembered(block);
            if is_new && model.named(*salt, group, prefix).is_none() {
                model.remember((*salt, group, prefix.to_vec()), block);
            }
        }
    }
}

/// Gives back what the next token's window does not show.
fn leave_behind(kv: &mut KvCache, model: &mut Model, holder: &mut Holder, now: Time) {
    let (computed, size) = (holder.tokens.len(), kv.layout().block_size);
    let before = holder.table.clone();
    holder.rent += kv.give_back_outside(&mut holder.table, computed, now);
    for (group, window) in kv.layout().windows.clone().into_iter().enumerate() {
        for (index, &block) in before.blocks(group).iter().enumerate() {
            let is_seen = window.is_none_or(|window| (index + 1) * size + window > computed + 1);
            assert_eq!(holder.table.blocks(group)[index] != BlockId::NONE, is_seen, "block {index} of {window:?}");
            if !is_seen && block != BlockId::NONE {
                model.give_back(block);
            }
        }
    }
}
