//! Turns: shares of users, priorities that age, and how long anyone waits at most.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use octavo::execute::simulated::{CostModel, Simulated};
use octavo::request::{Request, RequestId, SamplingParams, SessionId, Time};
use octavo::schedule::{Command, SchedulerConfig, Unseen};
use octavo::stages::queue::waiting::AGEING_NS;

use crate::world::{Coins, Gate, VOCAB, World, config, prompt, request};

fn of(user: &str, request: Request) -> Request {
    Request { user: user.into(), ..request }
}

/// A world without cached prefixes, in which a step takes `step_ns`.
fn world(config: SchedulerConfig, step_ns: f64) -> World {
    let mut world = World::unchecked(config);
    world.executor = Simulated::new(CostModel { step_ns, row_ns: 0.0, context_ns: 0.0 }, VOCAB);
    world
}

#[test]
fn one_request_does_not_wait_for_somebody_elses_thousand() {
    let mut world = World::new(SchedulerConfig { max_num_seqs: 2, max_queue: 1000, ..config() });
    world.checked = false;
    for id in 0..1000 {
        world.submit(of("many", request(id, &prompt(id, 9), 8)));
    }
    (0..100).for_each(|_| assert!(world.step()));
    let one = world.submit(of("one", request(1000, &prompt(1000, 9), 8)));
    (0..20).for_each(|_| assert!(world.step()));
    assert!(world.outcome(one).end.is_some(), "next when a place is free");
    // Without users, everybody is one.
    let last = world.submit(of("many", request(1001, &prompt(1001, 9), 8)));
    (0..100).for_each(|_| assert!(world.step()));
    assert!(world.outcome(last).tokens.is_empty(), "its own user's come first");
}

#[test]
fn users_who_always_wait_are_served_alike_whatever_they_send() {
    for seed in 0..60 {
        let mut coins = Coins(seed);
        let config = SchedulerConfig {
            max_num_seqs: coins.within(1, 6),
            max_num_batched_tokens: coins.within(8, 64),
            max_queue: 10_000,
            blocks: 400,
            ..config()
        };
        let mut world = world(config.clone(), 1000.0);
        // Each user's prompts and answers, of very different lengths.
        let sizes: Vec<_> = (0..coins.within(2, 4)).map(|_| (coins.within(1, 100), coins.within(1, 60))).collect();
        let names: Vec<String> = (0..sizes.len()).map(|user| format!("user {user}")).collect();
        let (mut next, mut begun) = (0, None);
        for step in 0..1500 {
            // Enough that they wait until the next look, however short their requests are.
            let living = if step % 50 == 0 { world.living() } else { Vec::new() };
            for (user, &(length, max_tokens)) in sizes.iter().enumerate().filter(|_| step % 50 == 0) {
                let mine = living.iter().filter(|id| id.0 as usize % sizes.len() == user).count();
                for _ in mine..52 * config.max_num_seqs {
                    let id = next * sizes.len() as u64 + user as u64;
                    next += 1;
                    world.submit(of(&names[user], request(id, &prompt(id, length), max_tokens)));
                }
            }
            world.step();
            let served: Vec<_> = names.iter().map(|name| world.scheduler.served(name).unwrap_or(0.0)).collect();
            if step == 200 {
                begun = Some(served.clone());
            }
            let Some(begun) = &begun else { continue };
            let since: Vec<_> = served.iter().zip(begun).map(|(now, then)| now - then).collect();
            let spread = since.iter().copied().fold(0.0, f64::max) - since.iter().copied().fold(f64::MAX, f64::min);
            // Of every user as many requests as may run can be under way, each with at most this much work.
            let most = sizes.iter().map(|&(length, answer)| 1.1 * length as f64 + 3.0 * answer as f64);
            let bound = 2.0 * config.max_num_seqs as f64 * most.fold(0.0, f64::max);
            assert!(spread <= bound, "seed {seed}, step {step}: {since:?} is further apart than {bound}");
        }
        let total: f64 = names.iter().filter_map(|name| world.scheduler.served(name)).sum();
        assert!(total > 1000.0 * sizes.len() as f64, "seed {seed}: hardly anything was served");
    }
}

/// What users get of a queue that is too short for them. The first asks for a place at every step, the others when they were
/// told to. How far apart they are, as a share of their mean.
fn crowd(seed: u64, claims: bool) -> f64 {
    let mut coins = Coins(seed);
    let users = coins.within(2, 4);
    let max_num_seqs = coins.within(1, 6);
    let config = SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: coins.within(32, 128),
        max_queue: users * coins.within(2, 20),
        blocks: 2000,
        ..config()
    };
    let (mut world, mut gate) = (world(config.clone(), 3e6), Gate::default());
    let sizes: Vec<_> = (0..users).map(|_| (coins.within(1, 60), coins.within(4, 40))).collect();
    let names: Vec<String> = (0..users).map(|user| format!("user {user}")).collect();
    let (mut next, mut back, mut begun) = (0, vec![Time(0); users], Vec::new());
    for step in 0..7000 {
        for (user, &(length, answer)) in sizes.iter().enumerate() {
            while back[user] <= world.now {
                let request = of(&names[user], request(next, &prompt(next, length), answer));
                match gate.enter(&config, &request, world.now) {
                    Ok(_) => {
                        world.submit(Request { cache_salt: None, ..request });
                        next += 1;
                    }
                    Err(full) => {
                        let retry_after_ns = world.scheduler.load().place_ns(full.ends, &Unseen::default(), world.now);
                        if claims {
                            gate.door.claim(&Gate::call(&request), world.now, retry_after_ns);
                        }
                        back[user] = Time(world.now.0 + if user == 0 { 1 } else { retry_after_ns });
                    }
                }
            }
        }
        world.step();
        gate.let_out(&world);
        // Before anything has run the others are told to stay away for seconds.
        if step == 2500 {
            begun = names.iter().map(|name| world.scheduler.served(name).unwrap_or(0.0)).collect();
        }
    }
    let served = names.iter().map(|name| world.scheduler.served(name).unwrap_or(0.0));
    let served: Vec<_> = served.zip(begun).map(|(now, then)| now - then).collect();
    let spread = served.iter().copied().fold(0.0, f64::max) - served.iter().copied().fold(f64::MAX, f64::min);
    spread / (served.iter().sum::<f64>() / users as f64)
}

#[test]
fn whoever_comes_back_when_told_gets_as_much_as_one_who_asks_all_the_time() {
    let (mut spreads, mut unfair) = (Vec::new(), 0);
    for seed in 0..40 {
        let spread = crowd(seed, true);
        println!("seed {seed}: {spread:.3}");
        spreads.push(spread);
        unfair += usize::from(crowd(seed, false) > 1.0);
    }
    spreads.sort_by(f64::total_cmp);
    println!(
        "median {:.3}, most {:.3}; without claims {unfair} of 40 are further apart than their mean",
        spreads[20], spreads[39]
    );
    assert!(spreads[39] <= 0.2, "{spreads:?}");
    assert!(unfair > 20, "only {unfair} were unfair without claims: the test shows nothing");
}

#[test]
fn blocks_kept_for_conversations_are_work_whether_anybody_comes_back_or_not() {
    for seed in 0..20 {
        // Both send the same. One leaves every answer in a session of its own, and goes on with none.
        let mut coins = Coins(seed);
        let (length, max_tokens) = (coins.within(1, 30), coins.within(5, 25));
        let max_num_seqs = coins.within(2, 4);
        let mut world =
            world(SchedulerConfig { max_num_seqs, max_num_batched_tokens: 64, max_queue: 10_000, ..config() }, 1000.0);
        for id in 0..4000 {
            let session = (id % 2 == 0).then_some(SessionId(id));
            if let Some(id) = session {
                world.apply(Command::OpenSession { id, ttl_ns: u64::MAX });
            }
            let user = if session.is_some() { "leaves" } else { "plain" };
            world.submit(of(user, Request { session, ..request(id, &prompt(id, length), max_tokens) }));
        }
        let mut held = 0;
        for _ in 0..3000 {
            world.step();
            held += world.scheduler.stats().blocks_pinned;
        }
        world.scheduler.check();
        let served = ["leaves", "plain"].map(|user| world.scheduler.served(user).expect("it waits"));
        let tokens =
            |first: u64| (first..4000).step_by(2).map(|id| world.outcome(RequestId(id)).tokens.len()).sum::<usize>();
        let (leaves, plain, held) = (tokens(0), tokens(1), held as f64 / 64.0);
        let bound = 2.0 * max_num_seqs as f64 * (1.1 * length as f64 + 3.0 * max_tokens as f64);
        assert!((served[0] - served[1]).abs() <= bound, "seed {seed}: {served:?} are further apart than {bound}");
        // What was held for one is work that the other one got.
        let each = 2.0 + (length as f64 + 0.5 * (length + max_tokens) as f64 / 64.0) / max_tokens as f64;
        let more = (plain as f64 - leaves as f64) * each;
        assert!((more - held).abs() <= bound + 0.1 * held, "seed {seed}: {more} more for {held} held");
        assert!(held > 2.0 * bound, "seed {seed}: {held} held in all is hardly more than {bound}");
    }
}

#[test]
fn an_idle_user_saves_nothing_up() {
    let mut world = World::new(SchedulerConfig { max_num_seqs: 1, max_queue: 400, ..config() });
    world.checked = false;
    for id in 0..100 {
        world.submit(of("busy", request(id, &prompt(id, 9), 8)));
    }
    (0..300).for_each(|_| assert!(world.step()));
    // Somebody new does not catch up with what the busy one was served meanwhile: from now on they take turns.
    for id in 100..200 {
        world.submit(of("new", request(id, &prompt(id, 9), 8)));
    }
    let ended = |world: &World, ids: std::ops::Range<u64>| {
        ids.filter(|&id| world.outcome(RequestId(id)).end.is_some()).count() as i64
    };
    let before = ended(&world, 0..100);
    (0..200).for_each(|_| assert!(world.step()));
    let (busy, new) = (ended(&world, 0..100) - before, ended(&world, 100..200));
    assert!(busy >= 5 && (busy - new).abs() <= 2, "{busy} of the busy one, {new} of the new one");
}

#[test]
fn a_long_prompt_of_somebody_served_less_is_read_beside_another_ones() {
    for (user, beside) in [("light", true), ("heavy", false)] {
        let config = SchedulerConfig { max_num_batched_tokens: 64, max_model_len: 40_000, blocks: 10_000, ..config() };
        let mut world = world(config, 1000.0);
        let long = world.submit(of("heavy", request(0, &prompt(0, 20_000), 1)));
        (0..10).for_each(|_| assert!(world.step()));
        let second = world.submit(of(user, request(1, &prompt(1, 15_000), 1)));
        // Half of each step, and one to begin.
        (0..15_000 / 32 + 2).for_each(|_| assert!(world.step()));
        assert_eq!(world.outcome(second).end.is_some(), beside, "{user}");
        world.finish(1000);
        assert!(world.outcome(long).end.is_some());
    }
}

#[test]
fn a_level_of_priority_is_worth_ten_seconds_of_waiting() {
    assert_eq!(AGEING_NS, 10_000_000_000);
    for (low, high, passes) in [("a", "a", 2), ("a", "b", 3)] {
        // A stream of higher priority that fills the only place, a request for each second.
        let mut world = world(SchedulerConfig { max_num_seqs: 1, ..config() }, 1e9);
        for id in 0..4 {
            world.submit(of(high, Request { priority: 2, ..request(id, &prompt(id, 4), 1) }));
        }
        let waits = world.submit(of(low, request(1000, &prompt(1000, 4), 1)));
        let mut id = 4;
        while world.outcome(waits).end.is_none() {
            world.submit(of(high, Request { priority: 2, ..request(id, &prompt(id, 4), 1) }));
            world.step();
            id += 1;
        }
        // In one line exactly two levels; between lines the level that puts it above all others.
        let seconds = world.outcome(waits).record().ttft_ns().unwrap_or(0) / 1_000_000_000;
        assert!((passes * 10..passes * 10 + 6).contains(&seconds), "{low} behind {high}: {seconds} s");
    }
}

/// Who waits, told from what went in and what began.
#[derive(Default)]
struct Line {
    waiting: BTreeSet<RequestId>,
    since: u64,
    /// Turns of each other user since this line is above all that came later.
    passed: BTreeMap<String, usize>,
}

#[test]
fn nobody_waits_longer_than_the_bound() {
    let (mut aged, mut longest) = (0, 0.0f64);
    for seed in 0..400 {
        println!("seed {seed}");
        let (old, share) = wait(seed);
        aged += old;
        longest = longest.max(share);
    }
    println!("{aged} lines were old enough; the longest wait was {longest:.3} of its bound");
    assert!(aged > 1000, "only {aged} lines were ever old enough to go first");
    assert!((0.05..=1.0).contains(&longest), "the longest wait was {longest} of its bound");
}

/// A few minutes under too much load. How many lines grew old, and the longest wait as a share of its bound.
fn wait(seed: u64) -> (usize, f64) {
    let mut coins = Coins(seed);
    let max_num_seqs = coins.within(1, 3);
    let config = SchedulerConfig { max_num_seqs, max_num_batched_tokens: 64, max_queue: 60, ..config() };
    let mut world = world(config, 0.4e9);
    // A queue of users who never come back, and a few who do, at priorities from -1 to 2.
    let (low, high) = (-(coins.within(0, 1) as i32), coins.within(0, 2) as i32);
    let mut lines: BTreeMap<String, Line> = BTreeMap::new();
    let mut requests: BTreeMap<RequestId, (Request, Time)> = BTreeMap::new();
    let (mut aged, mut longest, mut most_lines, mut gap, mut last) = (0, 0.0f64, 0, 0, world.now.0);
    let mut waits = Vec::new();
    let mut began: BTreeSet<RequestId> = BTreeSet::new();
    for step in 0..600 {
        for _ in 0..if step < 400 { coins.within(0, 2) } else { 0 } {
            let id = requests.len() as u64;
            let user = if coins.one_in(2) { format!("once {id}") } else { format!("user {}", coins.within(0, 3)) };
            let priority = if coins.one_in(4) { low } else { coins.within(0, (high - low) as usize) as i32 + low };
            let request =
                Request { priority, ..of(&user, request(id, &prompt(id, coins.within(1, 8)), coins.within(1, 6))) };
            let id = world.submit(request.clone());
            if world.outcome(id).end.is_none() {
                let line = lines.entry(user).or_default();
                if line.waiting.is_empty() {
                    *line = Line { since: world.now.0, ..Line::default() };
                }
                line.waiting.insert(id);
            }
            requests.insert(id, (request, world.now));
        }
        if coins.one_in(10) {
            let id = RequestId(coins.within(0, requests.len()) as u64);
            if let Some((request, _)) = requests.get(&id)
                && let Some(line) = lines.get_mut(&*request.user)
            {
                line.waiting.remove(&id);
            }
            world.cancel(id);
        }
        let now = world.now.0;
        most_lines = most_lines.max(lines.values().filter(|line| !line.waiting.is_empty()).count());
        let Some(batch) = world.launch() else { continue };
        let started: Vec<_> = batch.entries.iter().map(|entry| entry.id).filter(|id| began.insert(*id)).collect();
        let is_old = |line: &Line| now >= line.since + (1 + high - low) as u64 * AGEING_NS;
        for &id in &started {
            gap = gap.max(now - last);
            last = now;
            let (request, came) = &requests[&id];
            let line = lines.get_mut(&*request.user).expect("it waited in a line");
            line.waiting.remove(&id);
            aged += usize::from(is_old(line));
            (line.since, line.passed) = (now, BTreeMap::new());
            waits.push((id, request.user.to_string(), request.priority, came.0, now));
        }
        for id in started {
            let user = &*requests[&id].0.user;
            for (name, line) in lines.iter_mut().filter(|(_, line)| !line.waiting.is_empty() && is_old(line)) {
                let turns = line.passed.entry(user.to_owned()).or_default();
                *turns += 1;
                assert!(*turns <= 1, "{name} was passed by {user} twice");
            }
        }
        world.commit();
    }
    // The bound itself, with the longest time that passed between two turns.
    for (id, user, priority, came, went) in &waits {
        let same =
            waits.iter().filter(|(other, of, _, _, at)| other != id && of == user && at > came && at <= went).count();
        let turn = (1 + high - priority) as f64 * AGEING_NS as f64 + most_lines as f64 * gap as f64;
        let share = (went - came) as f64 / ((same + 1) as f64 * turn);
        assert!(share <= 1.0, "{id} of {user} waited {share} of its bound");
        longest = longest.max(share);
    }
    (aged, longest)
}

#[test]
fn a_parameter_of_one_call_is_no_other_ones() {
    // Equal requests of different users give equal answers, and share blocks: shares are about turns only.
    let mut world = World::new(config());
    let params = Arc::new(SamplingParams { max_tokens: 6, ..Default::default() });
    for (id, user) in [(0, "a"), (1, "b")] {
        world.submit(of(user, Request { params: params.clone(), ..request(id, &prompt(1, 20), 6) }));
        world.finish(50);
    }
    let [a, b] = [0, 1].map(|id| world.outcome(RequestId(id)).clone());
    assert_eq!((a.tokens, b.record().cached_tokens), (b.tokens.clone(), 19));
}
