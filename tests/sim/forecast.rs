//! What a request is told at the door, held against what becomes of it.

use std::collections::BTreeMap;

use octavo::execute::simulated::{CostModel, Simulated};
use octavo::request::{Request, RequestId, Time};
use octavo::schedule::{Forecast, SchedulerConfig};

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
            told.insert(RequestId(id), world.scheduler.load().forecast(tokens.len(), &ahead, 0));
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

#[test]
fn there_is_always_an_answer_and_it_is_right_soon() {
    for seed in 0..40 {
        println!("seed {seed}");
        let mut coins = Coins(seed);
        let (max_num_seqs, answer, length) = (coins.within(1, 8), coins.within(1, 60), coins.within(1, 40));
        let config = SchedulerConfig { max_num_seqs, max_num_batched_tokens: 64, blocks: 2000, ..config() };
        let (mut world, mut gate) = (World::unchecked(config.clone()), Gate::default());
        world.executor = Simulated::new(CostModel { step_ns: 3e6, row_ns: 0.2e6, context_ns: 0.0 }, VOCAB);
        assert!(world.scheduler.load().place_ns() > 0, "before anything has run");
        for id in 0..80 {
            let request = Request { cache_salt: None, ..request(id, &prompt(id, length), answer) };
            let ahead = gate.enter(&config, &request, world.now).expect("there is room");
            let load = world.scheduler.load();
            assert!(load.place_ns() > 0 && load.forecast(length, &ahead, 0).ttft_ns > 0);
            world.submit(request);
        }
        let (begun, mut told) = (world.now.0, 0);
        let mut promised = Vec::new();
        while world.step() {
            gate.let_out(&world);
            let load = world.scheduler.load();
            if load.waiting > 0 && load.running == max_num_seqs {
                told += 1;
                promised.push(load.place_ns() as f64);
            }
        }
        // As many places as there were requests, but for those that could begin at once.
        let each = (world.now.0 - begun) as f64 / 80.0;
        promised.sort_by(f64::total_cmp);
        let Some(median) = promised.get(told / 2) else { continue };
        assert!((0.5..2.0).contains(&(median.max(1e6) / each.max(1e6))), "{median} promised, {each} measured");
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
        world.scheduler.load().forecast(30, &door.enter(&config, &call, Time(0)).expect("there is room"), 0)
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
