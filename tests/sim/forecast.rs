//! What a request is told at the door, held against what becomes of it.

use std::collections::BTreeMap;

use octavo::execute::simulated::{CostModel, Simulated};
use octavo::request::{Request, RequestId, Time};
use octavo::schedule::{Forecast, SchedulerConfig, Unseen};

use crate::world::{Coins, Gate, VOCAB, World, config, prompt, request};

/// A random hour: what every request was told, and the world in which all have ended.
fn play(seed: u64, users: usize, priorities: usize, burst: usize) -> (World, BTreeMap<RequestId, Forecast>) {
    let mut coins = Coins(seed);
    let max_num_seqs = coins.within(1, 6);
    let config = SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: coins.within(32, 128),
        max_queue: 100_000,
        blocks: 2000,
        itl_target_ns: coins.one_in(2).then_some(20_000_000),
        ..config()
    };
    let (mut world, mut gate) = (World::unchecked(config.clone()), Gate::default());
    world.executor = Simulated::new(CostModel { step_ns: 3e6, row_ns: 0.2e6, context_ns: 0.0 }, VOCAB);
    let mut told = BTreeMap::new();
    let (longest, most, rush) = (coins.within(5, 150), coins.within(2, 40), coins.within(1, 3));
    for _ in 0..coins.within(100, 400) {
        let arrivals = if coins.one_in(4) { coins.within(0, rush) } else { 0 };
        for _ in 0..arrivals + if coins.one_in(200) { burst } else { 0 } {
            let id = told.len() as u64;
            let user = format!("user {}", coins.within(1, users));
            let priority = coins.within(1, priorities) as i32;
            let tokens = prompt(id, coins.within(1, longest));
            let request = Request {
                user: (*user).into(),
                priority,
                cache_salt: None,
                ..request(id, &tokens, coins.within(1, most))
            };
            let ahead = gate.enter(&config, &request, world.now).expect("there is room");
            told.insert(
                RequestId(id),
                world.scheduler.load().forecast(tokens.len(), &ahead, &Unseen::default(), world.now),
            );
            world.submit(request);
        }
        world.step();
        gate.let_out(&world);
    }
    world.finish(100_000);
    (world, told)
}

#[test]
fn a_forecast_is_about_what_happens() {
    for (users, priorities) in [(1, 1), (3, 1), (2, 2)] {
        let mut errors = Vec::new();
        for seed in 0..100 {
            let (world, told) = play(seed, users, priorities, 0);
            for (id, forecast) in told {
                let measured = world.outcome(id).record().ttft_ns().expect("it generated");
                errors.push((forecast.ttft_ns.max(1) as f64 / measured.max(1) as f64).log2());
            }
        }
        errors.sort_by(f64::total_cmp);
        let [p10, p50, p90] = [10, 50, 90].map(|percent| errors[errors.len() * percent / 100]);
        println!("{users} users: {} forecasts; log2 of predicted / measured: {p10:.2} {p50:.2} {p90:.2}", errors.len());
        assert!(p50.abs() < 0.5 && p10 > -2.0 && p90 < 2.0, "{p10:.2} {p50:.2} {p90:.2}");
    }
}

/// Everybody asks at once, and others come when there is no place. Says for every step when the next place becomes free, as
/// it was promised and as it was, both in steps, and how many had ended then.
fn promises(places: usize, requests: u64, answer: impl Fn(u64) -> (usize, bool)) -> Vec<(f64, f64, u64)> {
    let config = SchedulerConfig {
        max_num_seqs: places,
        max_num_batched_tokens: 512,
        max_queue: 10_000,
        blocks: 200_000,
        max_model_len: 5000,
        ..config()
    };
    let step_ns = 4e6;
    let mut world = World::unchecked(config);
    world.executor = Simulated::new(CostModel { step_ns, row_ns: 10e3, context_ns: 0.0 }, VOCAB);
    for id in 0..requests {
        let (max_tokens, early) = answer(id);
        let end_token_ids = if early { [7].into() } else { [].into() };
        let seed = id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        world.submit(Request { cache_salt: None, end_token_ids, seed, ..request(id, &prompt(id, 10), max_tokens) });
    }
    let (mut told, mut ends) = (Vec::new(), vec![world.now.0]);
    let mut finished = 0;
    loop {
        let load = world.scheduler.load();
        if load.waiting > 0 && load.running == places {
            told.push((world.now.0, load.place_ns(1, &Unseen::default(), world.now), finished));
        }
        if !world.step() {
            break;
        }
        let now = world.scheduler.stats().finished;
        if now > finished {
            ends.push(world.now.0);
            finished = now;
        }
    }
    let next = |at: u64| ends.iter().find(|end| **end > at).map(|end| end - at);
    let steps = |ns: u64| ns as f64 / step_ns + 1.0;
    told.into_iter().filter_map(|(at, promised, ended)| Some((steps(promised), steps(next(at)?), ended))).collect()
}

/// Logarithms of promised by measured: the tenth, the middle and the ninetieth of a hundred.
fn errors<'a>(promises: impl Iterator<Item = &'a (f64, f64, u64)>) -> [f64; 3] {
    let mut errors: Vec<f64> = promises.map(|(promised, measured, _)| (promised / measured).log2()).collect();
    errors.sort_by(f64::total_cmp);
    [10, 50, 90].map(|percent| errors[errors.len() * percent / 100])
}

#[test]
fn whoever_is_told_to_come_back_is_told_about_when_there_is_a_place() {
    for places in [1, 4, 16] {
        for tokens in [20, 200, 1000] {
            // All are alike and began together, so they end together; or they began one after another.
            for apart in [0, tokens / 2] {
                let first = |id: u64| tokens - apart * (id as usize % places) / places;
                let promises = promises(places, 4 * places as u64, |id| (first(id), false));
                let [p10, p50, p90] = errors(promises.iter().filter(|(.., ended)| *ended > 0));
                let case = format!("{places} of {tokens} tokens, {apart} apart: {p10:.2} {p50:.2} {p90:.2}");
                assert!(p10 > -1.0 && p90 < 1.0, "{case}");
                // Before any has ended, a long answer is not known to be one.
                let worst = f64::max(1.0, (tokens as f64 / 256.0).log2() + 0.1);
                let cold = promises.iter().skip(2).filter(|(.., ended)| *ended == 0);
                let cold = cold.map(|(promised, measured, _)| (promised / measured).log2().abs()).fold(0.0, f64::max);
                println!("{case}, first {cold:.2}");
                assert!(cold <= worst, "{case}: {cold:.2} before any has ended");
            }
        }
    }
}

#[test]
fn answers_that_end_early_are_not_waited_for_to_their_limit() {
    for (places, tokens) in [(1, 4000), (4, 4000), (16, 1000)] {
        let promises = promises(places, 60 * places as u64, |_| (tokens, true));
        let [p10, p50, p90] = errors(promises.iter().filter(|(.., ended)| *ended > 2 * places as u64));
        println!("{places} places: {p10:.2} {p50:.2} {p90:.2}");
        // When such a one ends is chance; that of the middle is not.
        assert!(p50.abs() < 1.0, "{places} places: {p10:.2} {p50:.2} {p90:.2}");
        let cold = promises.iter().skip(2).filter(|(.., ended)| *ended == 0).map(|(promised, ..)| *promised);
        assert!(cold.fold(0.0, f64::max) <= 300.0, "nobody waits for an answer of {tokens} tokens");
    }
}

#[test]
fn there_is_always_an_answer() {
    for places in [1, 3, 8] {
        let config = SchedulerConfig { max_num_seqs: places, ..config() };
        let (mut world, mut gate) = (World::unchecked(config.clone()), Gate::default());
        // On its way: what it asked for is known.
        let mut unseen = Unseen::default();
        let before = world.scheduler.load().place_ns(1, &unseen, world.now);
        unseen.add(Unseen::of(&request(0, &[1, 2], 10), &config));
        let after = world.scheduler.load().place_ns(1, &unseen, world.now);
        assert!(after > 0 && after < before / 5, "{after} and {before} before anything is known");
        for id in 0..20 {
            let request = request(id, &prompt(id, 9), 7);
            let ahead = gate.enter(&config, &request, world.now).expect("there is room");
            let load = world.scheduler.load();
            assert!(
                load.place_ns(1, &unseen, world.now) > 0 && load.forecast(9, &ahead, &unseen, world.now).ttft_ns > 0
            );
            for ends in [0, 1, 100, usize::MAX] {
                assert!(load.place_ns(ends, &unseen, world.now) > 0);
            }
            world.submit(request);
            world.step();
            gate.let_out(&world);
        }
    }
}

#[test]
fn a_hopeless_wait_is_known_when_a_few_have_ended() {
    let config = SchedulerConfig { max_queue: 1000, max_num_batched_tokens: 64, blocks: 2000, ..config() };
    let (mut world, mut gate) = (World::unchecked(config.clone()), Gate::default());
    for id in 0..300 {
        let request = Request { cache_salt: None, ..request(id, &prompt(id, 30), 100) };
        gate.enter(&config, &request, world.now).expect("there is room");
        world.submit(request);
    }
    let forecast = |world: &World, gate: &Gate, user: &str| {
        let call = Gate::call(&Request { user: user.into(), ..request(1000, &[1], 1) });
        let mut door = Gate::default().door;
        // A copy of the same counts.
        (0..gate.door.living()).for_each(|_| {
            door.enter(&config, &Gate::call(&request(0, &[1], 1)), Time(0)).expect("there is room");
        });
        world.scheduler.load().forecast(
            30,
            &door.enter(&config, &call, Time(0)).expect("there is room"),
            &Unseen::default(),
            world.now,
        )
    };
    while world.scheduler.stats().finished < 4 {
        world.step();
        gate.let_out(&world);
    }
    let own = forecast(&world, &gate, "");
    assert!(own.least_ns > own.ttft_ns / 12, "{own:?}");
    let other = forecast(&world, &gate, "other");
    assert!(other.least_ns == 0 && other.ttft_ns < own.ttft_ns / 50, "somebody else has the next turn: {other:?}");
}

#[test]
fn nobody_is_sent_away_who_would_have_been_in_time() {
    let mut sure = 0;
    for seed in 0..200 {
        println!("seed {seed}");
        let (world, told) = play(seed, 1 + seed as usize % 2, 1 + seed as usize / 2 % 2, 120);
        for (id, forecast) in told {
            let waited = world.outcome(id).record().stages.queue.total();
            assert!(forecast.least_ns <= waited, "{id} was told {} ns at least and waited {waited}", forecast.least_ns);
            sure += usize::from(forecast.least_ns > 0);
        }
    }
    println!("{sure} were told that they wait for certain");
    assert!(sure > 500, "only {sure} were told anything");
}
