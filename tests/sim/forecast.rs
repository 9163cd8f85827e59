//! What a request is told at the door, held against what becomes of it.

use std::collections::BTreeMap;

use octavo::execute::simulated::{CostModel, Simulated};
use octavo::request::{Request, RequestId};
use octavo::schedule::{Forecast, SchedulerConfig};

use crate::world::{Coins, VOCAB, World, config, prompt, request};

/// A random hour: what every request was told, and the world in which all have ended.
fn play(seed: u64, users: usize, priorities: usize, burst: usize) -> (World, BTreeMap<RequestId, Forecast>) {
    let mut coins = Coins(seed);
    let max_num_seqs = coins.within(1, 6);
    let mut world = World::unchecked(SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: coins.within(32, 128),
        max_queue: 100_000,
        blocks: 2000,
        itl_target_ns: coins.one_in(2).then_some(20_000_000),
        ..config()
    });
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
            let load = world.scheduler.load();
            told.insert(RequestId(id), load.forecast(tokens.len(), &user, priority, (0, 0)));
            world.submit(request);
        }
        world.step();
    }
    world.finish(100_000);
    (world, told)
}

#[test]
fn a_forecast_is_about_what_happens() {
    let (mut errors, mut unknown) = (Vec::new(), 0);
    for seed in 0..100 {
        let (world, told) = play(seed, 1, 1, 0);
        for (id, forecast) in told {
            let Some(predicted) = forecast.ttft_ns else {
                unknown += 1;
                continue;
            };
            let measured = world.outcome(id).record().ttft_ns().expect("it generated");
            errors.push((predicted.max(1) as f64 / measured.max(1) as f64).log2());
        }
    }
    errors.sort_by(f64::total_cmp);
    let [p10, p50, p90] = [10, 50, 90].map(|percent| errors[errors.len() * percent / 100]);
    println!("{} forecasts, {unknown} unknown; log2 of predicted / measured: {p10:.2} {p50:.2} {p90:.2}", errors.len());
    assert!(errors.len() > 20 * unknown, "{unknown} of {} heard nothing", errors.len() + unknown);
    assert!(p50.abs() < 0.4 && p10 > -1.5 && p90 < 1.5, "{p10:.2} {p50:.2} {p90:.2}");
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
