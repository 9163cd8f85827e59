//! What the cache says about a prompt, and what it then finds.

use octavo::kv::{CacheExplanation, MissReason};
use octavo::request::{Request, SessionId, Time};
use octavo::schedule::{Command, SchedulerConfig};

use crate::world::{Coins, VOCAB, World, config, prompt, request};

fn explain(world: &World, tokens: &[u32], salt: &str) -> CacheExplanation {
    world.scheduler.explain(tokens, Some(salt), None)
}

/// Runs a prompt and holds the explanation given before to what was found.
fn run(world: &mut World, tokens: &[u32], salt: &str) -> MissReason {
    let said = explain(world, tokens, salt);
    let id = world.outcomes.len() as u64;
    let id = world.submit(Request { cache_salt: Some(salt.into()), ..request(id, tokens, 1) });
    world.finish(1000);
    assert_eq!(world.outcome(id).record().cached_tokens, said.cached_tokens, "{said:?}");
    said.reason
}

#[test]
fn every_reason_where_it_is_true() {
    let mut world = World::new(config());
    let first = prompt(1, 14);
    assert_eq!(run(&mut world, &first, ""), MissReason::EmptyNamespace);
    assert_eq!(run(&mut world, &first, ""), MissReason::Complete);
    assert_eq!(run(&mut world, &first[..13], ""), MissReason::Complete, "whole blocks, and one to compute");
    assert_eq!(run(&mut world, &first[..11], ""), MissReason::ShorterThanBlock);
    assert_eq!(run(&mut world, &[49, 49, 49, 49, 49], ""), MissReason::NeverSeen);
    let mut other = first.clone();
    other[6] = (other[6] + 1) % VOCAB;
    assert_eq!(run(&mut world, &other, ""), MissReason::Differs { index: 6, stored: first[6..8].to_vec() });
    let longer = [&first[..12], &prompt(5, 9)].concat();
    assert_eq!(run(&mut world, &longer, ""), MissReason::NeverSeen, "nothing full goes on from there");
    assert_eq!(
        run(&mut world, &first, "tenant"),
        MissReason::EmptyNamespace,
        "another namespace has it, and it is not told"
    );
    assert_eq!(world.scheduler.explain(&first, None, None).reason, MissReason::Disabled);
    assert!(explain(&world, &prompt(8, 40), "").lost_ns.is_some_and(|ns| ns > 0));
}

#[test]
fn what_is_being_computed_and_what_was_forgotten() {
    let mut world = World::new(SchedulerConfig { blocks: 12, max_model_len: 48, ..config() });
    assert_eq!(explain(&world, &prompt(1, 20), "").lost_ns, None, "nothing was measured yet");
    world.submit(request(0, &prompt(1, 40), 1));
    world.step();
    let said = explain(&world, &prompt(1, 40), "");
    assert_eq!((said.cached_tokens, said.reason), (16, MissReason::NotYetFilled));
    world.finish(100);
    let before = world.now;
    run(&mut world, &prompt(2, 40), "");
    let said = explain(&world, &prompt(1, 40), "");
    let MissReason::Evicted { at } = said.reason else { panic!("{said:?}") };
    assert!(before <= at && at <= world.now);
    assert_eq!(explain(&world, &prompt(1, 40), "tenant").reason, MissReason::EmptyNamespace);
}

#[test]
fn a_session_is_explained_too() {
    let (mut world, session) = (World::new(config()), SessionId(0));
    world.apply(Command::OpenSession { id: session, ttl_ns: 1_000_000 });
    let id = world.submit(Request { session: Some(session), arrived: Time(0), ..request(0, &prompt(1, 10), 7) });
    world.finish(100);
    let next = [&prompt(1, 10)[..], &world.outcome(id).tokens, &[1, 2]].concat();
    let said = world.scheduler.explain(&next, Some(""), Some(session));
    assert_eq!(
        (said.cached_tokens, said.reason),
        (16, MissReason::NeverSeen),
        "all but the last drawn and the new ones"
    );
    let said = world.scheduler.explain(&next[..17], Some(""), Some(session));
    assert_eq!((said.cached_tokens, said.reason), (16, MissReason::Complete));
}

#[test]
fn it_is_right_whatever_happened_before() {
    for seed in 0..200 {
        println!("seed {seed}");
        let mut coins = Coins(seed);
        let mut world = World::new(SchedulerConfig { blocks: coins.within(14, 40), max_model_len: 50, ..config() });
        for _ in 0..30 {
            // Few tokens and few families, so that prompts have beginnings in common.
            let mut tokens = prompt(coins.within(0, 2) as u64, coins.within(1, 40));
            if coins.one_in(2) {
                let at = coins.within(0, tokens.len() - 1);
                tokens[at] = 1;
            }
            let salt = *coins.pick(&["", "tenant"]);
            let reason = run(&mut world, &tokens, salt);
            if let MissReason::Differs { index, stored } = reason {
                assert_ne!(tokens[index], stored[0]);
            }
        }
    }
}

#[test]
fn another_tenants_prompt_looks_like_nobodys() {
    // Two worlds that differ in one thing: whether somebody else has the prompt that is asked for.
    let secret = prompt(7, 30);
    let probe = |theirs: &[u32]| {
        let mut world = World::new(config());
        world.submit(Request { cache_salt: Some("tenant".into()), ..request(0, theirs, 5) });
        world.finish(100);
        let before = world.scheduler.stats();
        let said = explain(&world, &secret, "");
        let begun = world.now;
        let id = world.submit(Request { cache_salt: Some("".into()), arrived: begun, ..request(1, &secret, 5) });
        world.finish(100);
        let (after, record) = (world.scheduler.stats(), world.outcome(id).record().clone());
        let counters = (after.tokens_cached - before.tokens_cached, after.tokens_computed - before.tokens_computed);
        let blocks = (after.blocks_free, after.blocks_remembered, after.blocks_owned);
        (said.cached_tokens, said.reason, counters, blocks, record.cached_tokens, record.steps, record.stages)
    };
    let other = prompt(8, 30);
    assert_eq!(probe(&secret), probe(&other), "time, counters and explanation tell nothing of another namespace");
}
