//! What a long prompt may cost those who are being answered while it is read.

use octavo::execute::simulated::{CostModel, Simulated};
use octavo::kv::KvLayout;
use octavo::request::{Request, RequestId};
use octavo::schedule::{SchedulerConfig, Unseen};
use octavo::stages::queue::door::Ahead;

use crate::world::{Coins, VOCAB, World, prompt, request};

/// How steps scatter: a factor, by coins and by the step's number.
type Weather = fn(&mut Coins, u64) -> f64;

/// Uniform between 0 and 1.
fn even(coins: &mut Coins) -> f64 {
    (coins.next() >> 11) as f64 / (1u64 << 53) as f64
}

/// The exponential of a normal variable of this deviation: a sum of twelve coins.
fn lognormal(coins: &mut Coins, deviation: f64) -> f64 {
    let normal = (0..12).map(|_| even(coins)).sum::<f64>() - 6.0;
    (deviation * normal).exp()
}

const WEATHERS: [(&str, Weather); 7] = [
    ("none", |_, _| 1.0),
    ("uniform", |coins, _| 0.8 + 0.4 * even(coins)),
    ("lognormal", |coins, _| lognormal(coins, 0.1)),
    ("wild", |coins, _| lognormal(coins, 0.25)),
    ("spikes", |coins, _| (0.95 + 0.1 * even(coins)) * if coins.one_in(50) { 2.0 } else { 1.0 }),
    ("drift", |coins, step| (1.2 + 0.2 * (step as f64 / 150.0).sin()) * (0.95 + 0.1 * even(coins))),
    ("others", |coins, step| (0.95 + 0.1 * even(coins)) * if step / 60 % 2 == 1 { 1.4 } else { 1.0 }),
];

/// The least of `values` that a hundredth of them exceed.
fn p99(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() * 99).div_ceil(100) - 1]
}

/// Sixteen decode in steps of 11 ms while long prompts are read, one after another or several beside each other.
const COST: CostModel = CostModel { step_ns: 3e6, row_ns: 0.15e6, context_ns: 20.0 };
const DECODING_NS: f64 = 3e6 + 16.0 * 0.5e6;

/// What the steps took while the prompts were read (milliseconds), and what prompts took of them without the weather.
fn read_in(weather: Weather, target_ms: f64, at_once: u64, seed: u64) -> (Vec<f64>, f64) {
    let mut world = World::unchecked(SchedulerConfig {
        max_num_seqs: 32,
        max_num_batched_tokens: 512,
        max_queue: 10_000,
        max_model_len: 40_000,
        layout: KvLayout::new(16),
        blocks: 20_000,
        itl_target_ns: Some((target_ms * 1e6) as u64),
    });
    world.executor = Simulated::new(COST, VOCAB);
    let mut coins = Coins(seed);
    // Whatever is beside the rows of prompts costs what decoding does.
    world.weather = Box::new(move |step, ns| {
        let decoding = 16.0 * COST.row_ns;
        ((ns as f64 + (DECODING_NS - COST.step_ns - decoding)) * weather(&mut coins, step)) as u64
    });
    for id in 0..16 {
        world.submit(request(id, &prompt(id, 5), 30_000));
    }
    let (mut next, mut took, mut added) = (100, Vec::new(), 0.0);
    let steps = 1500;
    for step in 0..50 + steps {
        while step >= 50 && world.living().len() < 16 + at_once as usize {
            let salt = Some(format!("{next}").into());
            world.submit(Request { cache_salt: salt, ..request(next, &prompt(next, 8_000), 1) });
            next += 1;
        }
        let before = world.now;
        let batch = world.launch().expect("they decode");
        let rows = batch.rows() - 16.min(batch.rows());
        let ideal = COST.batch_ns(batch) as f64 - COST.step_ns - 16.0 * COST.row_ns;
        world.commit();
        if step >= 50 {
            took.push(world.now.since(before) as f64 / 1e6);
            added += if rows > 0 { ideal / 1e6 } else { 0.0 };
        }
    }
    (took, added)
}

#[test]
fn whatever_steps_scatter_by_prompts_do_not_make_them_longer_than_the_target() {
    for (name, weather) in WEATHERS {
        let mut coins = Coins(7);
        let factor = p99((0..20_000).map(|step| weather(&mut coins, step)).collect());
        for (target, at_once) in [(20.0, 1), (30.0, 1), (30.0, 4), (60.0, 1), (60.0, 4)] {
            let (took, added) = read_in(weather, target, at_once, 11);
            let steps = took.len() as f64;
            // Steps of which many are much longer than the rest have to be seen first: a few, whatever they are.
            let (first, learnt) = took.split_at(if matches!(name, "wild" | "spikes") { 300 } else { 0 });
            let over = first.iter().filter(|ms| **ms > target).count();
            assert!(over <= 15, "{name}, {at_once} at once for {target} ms: {over} of the first steps");
            let p99 = p99(learnt.to_vec());
            // Who knows how steps scatter plans this much of each for prompts.
            let room = target / factor - DECODING_NS / 1e6;
            let share = added / (steps * room);
            println!("{name}, {at_once} for {target} ms: p99 {p99:.1} ms, {:.0} % of the ideal", 100.0 * share);
            let possible = DECODING_NS / 1e6 * factor * 9.0 / 8.0 <= target;
            assert!(!possible || p99 <= target, "{name}, {at_once} at once: {p99} ms for {target} ms");
            assert!(added / steps > 0.05 * DECODING_NS / 1e6, "{name}, {at_once} at once: prompts do not get on");
            // Where little is left, what is kept free for the rarest steps is much of it.
            let least = if room > DECODING_NS / 1e6 { 0.7 } else { 0.4 };
            assert!(!possible || share > least, "{name}, {at_once} at once for {target} ms: {share} of {room} ms");
        }
    }
}

#[test]
fn a_long_prompt_holds_running_requests_up_no_longer_than_the_target() {
    // Whatever else is read meanwhile: a short prompt now and then, some at a time, or one in every step.
    for (every, at_once) in [(250, 1), (10, 1), (3, 1), (2, 1), (1, 1), (7, 3)] {
        long_beside_short(every, at_once);
    }
}

fn long_beside_short(every: u64, at_once: u64) {
    // A small model on a CPU: a step takes 3 ms, a row 0.4 ms and more the longer its context. A chunk of 512 rows would
    // hold everybody up for a fifth of a second.
    let target = 30_000_000;
    let mut world = World::unchecked(SchedulerConfig {
        max_num_seqs: 20,
        max_num_batched_tokens: 512,
        max_queue: 10_000,
        max_model_len: 40_000,
        layout: KvLayout::new(16),
        blocks: 6000,
        itl_target_ns: Some(target),
    });
    world.executor = Simulated::new(CostModel { step_ns: 3e6, row_ns: 0.4e6, context_ns: 100.0 }, VOCAB);
    for id in 0..16 {
        world.submit(request(id, &prompt(id, 40), 2000));
    }
    let long = world.submit(request(100, &prompt(100, 30_000), 2));
    let (mut steps, mut shorts) = (0, Vec::new());
    while world.outcome(long).end.is_none() {
        if steps % every == every / 5 && world.outcome(RequestId(0)).end.is_none() {
            shorts.extend((0..at_once).map(|i| {
                let id = 1000 + at_once * steps + i;
                world.submit(request(id, &prompt(id, 20), 1))
            }));
        }
        world.step();
        steps += 1;
        assert!(steps < 4000, "every {every}: the long one gets on");
    }
    world.finish(4000);
    // A few steps of the target's length, though thousands of tokens were before it.
    let mut waited: Vec<u64> = shorts
        .iter()
        .map(|&id| world.outcome(id).record().ttft_ns().expect("short ones overtake a long one"))
        .collect();
    waited.sort_unstable();
    let mut worst = 0;
    for id in 0..16 {
        let times = &world.outcome(RequestId(id)).record().token_ns;
        let mut gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        gaps.sort_unstable();
        worst = worst.max(gaps[gaps.len() * 99 / 100]);
    }
    let (p50, last) = (waited[waited.len() / 2], waited[waited.len() - 1]);
    println!(
        "{at_once} every {every}: {steps} steps, p99 gap {worst} ns; {} short ones, {p50} to {last} ns",
        shorts.len()
    );
    // One in every step is more than half of what decoding leaves: they queue up, and still hold nobody up.
    assert!(shorts.len() >= 4 && (every == 1 || last <= 15 * target), "every {every}: a short one waited {last} ns");
    assert!(worst <= target * 108 / 100, "every {every}: a gap of {worst} ns");
}

/// With room for many sequences, in steps that cost something.
fn world_of_lists(max_num_batched_tokens: usize, target: u64) -> World {
    let mut world = World::new(SchedulerConfig {
        max_num_seqs: 64,
        max_num_batched_tokens,
        max_queue: 1000,
        max_model_len: 1000,
        layout: KvLayout::new(16),
        blocks: 2000,
        itl_target_ns: Some(target),
    });
    world.executor = Simulated::new(COST, VOCAB);
    world
}

/// Rows of the steps until everybody of a list has begun to answer.
fn read_list(world: &mut World, list: &[RequestId]) -> Vec<usize> {
    let mut rows = Vec::new();
    while list.iter().any(|&id| world.outcome(id).tokens.is_empty()) {
        rows.push(world.launch().expect("they live").rows());
        world.commit();
    }
    rows
}

#[test]
fn a_list_is_read_in_full_steps_until_somebody_else_lives() {
    let target = 30_000_000;
    // A full step takes 80 ms, one of forty that decode 9 ms.
    let mut world = world_of_lists(512, target);
    let list = |world: &mut World, ids: std::ops::Range<u64>, tokens| -> Vec<RequestId> {
        ids.map(|id| world.submit(Request { call: RequestId(0), ..request(id, &prompt(id, 128), tokens) })).collect()
    };
    let all = list(&mut world, 0..40, 200);
    let rows = read_list(&mut world, &all);
    let (last, full) = rows.split_last().expect("there are some");
    assert!(full.iter().all(|&rows| rows == 512) && *last <= 512, "{rows:?}");
    // Half a step and two full ones, or steps of 24 ms of which decoding takes 9.
    (0..5).for_each(|_| assert!(world.step()));
    let forecast = |call| {
        let load = world.scheduler.load().seen_by(call);
        load.forecast(512, &Ahead::default(), &Unseen::default(), world.now).ttft_ns
    };
    let [own, others] = [Some(RequestId(0)), None].map(forecast);
    assert!(own < 110_000_000 && others > 120_000_000, "{own} and {others} ns");
    // Whoever comes beside them is not held up by what the list still brings.
    let other = world.submit(request(100, &prompt(100, 5), 100));
    (0..20).for_each(|_| assert!(world.step()));
    let more = list(&mut world, 200..216, 10);
    world.finish(1000);
    let gaps: Vec<u64> = world.outcome(other).record().token_ns.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.len() == 99 && gaps.iter().all(|&gap| gap <= target), "{gaps:?}");
    let read = |id: &RequestId| world.outcome(*id).record().ttft_ns().expect("it was read");
    assert!(more.iter().map(read).max() < Some(40 * target), "and the list gets on");
    // What full steps took says nothing against prompts beside others.
    let decoding: Vec<RequestId> = (300..304).map(|id| world.submit(request(id, &prompt(id, 5), 100))).collect();
    (0..10).for_each(|_| assert!(world.step()));
    world.submit(request(400, &prompt(400, 900), 1));
    let step = |world: &mut World| {
        let before = world.now;
        world.step();
        world.now.since(before)
    };
    let took: Vec<u64> = (0..5).map(|_| step(&mut world)).collect();
    assert!(took.iter().any(|&ns| ns > target * 7 / 10) && took.iter().all(|&ns| ns <= target), "{took:?}");
    assert!(decoding.iter().all(|&id| world.outcome(id).end.is_none()));
}

#[test]
fn a_list_alone_makes_no_step_that_others_wait_long_for() {
    let target = 30_000_000;
    let mut world = world_of_lists(2048, target);
    let list = |world: &mut World, ids: std::ops::Range<u64>| {
        let call = RequestId(ids.start);
        for id in ids {
            world.submit(Request { call, ..request(id, &prompt(id, 128), 20) });
        }
        let mut longest = 0;
        loop {
            let before = world.now;
            if !world.step() {
                return longest;
            }
            longest = longest.max(world.now.since(before));
        }
    };
    // The first teaches what a row takes; all 2,048 of a step take ten targets.
    list(&mut world, 0..40);
    let longest = list(&mut world, 100..140);
    assert!(longest > 2 * target && longest < 7 * target / 2, "{longest} ns");
}
