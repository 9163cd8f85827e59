//! Named cases: each promise where it is sharpest.

use std::sync::Arc;

use octavo::execute::Executor;
use octavo::kv::KvLayout;
use octavo::request::{Finish, Rejection, Request, RequestId, SamplingParams, StopReason, Time, Wanted};
use octavo::schedule::{Command, Scheduler, SchedulerConfig};

use crate::world::{VOCAB, World, alone, config, prompt, request};

fn with(request: Request, change: impl FnOnce(&mut SamplingParams)) -> Request {
    let mut params = (*request.params).clone();
    change(&mut params);
    Request { params: Arc::new(params), ..request }
}

#[test]
fn a_hit_equals_a_miss_at_every_offset_around_a_blocks_edge() {
    for length in 1..=13 {
        let mut world = World::new(config());
        let first = request(0, &prompt(1, length), 9);
        world.submit(first.clone());
        world.finish(100);
        let again = world.submit(request(1, &first.prompt, 9));
        world.finish(100);
        let want = alone(&config(), &first);
        let got = world.outcome(again);
        assert_eq!(got.tokens, want.tokens, "length {length}");
        assert_eq!(got.record().cached_tokens, length - 1, "length {length}: all but the last token");
        // One that goes on otherwise after the same beginning shares whole blocks.
        let mut other = first.prompt.to_vec();
        other.extend([1, 2, 3, 4, 5]);
        let other = request(2, &other, 9);
        world.submit(other.clone());
        world.finish(100);
        let got = world.outcome(RequestId(2));
        assert_eq!(got.tokens, alone(&config(), &other).tokens, "length {length}");
        assert_eq!(got.record().cached_tokens, length / 4 * 4, "length {length}: whole blocks");
    }
}

#[test]
fn the_next_turn_finds_the_generated_tokens_too() {
    let mut world = World::new(config());
    let first = world.submit(request(0, &prompt(1, 6), 12));
    world.finish(100);
    let mut turn = prompt(1, 6);
    turn.extend(&world.outcome(first).tokens);
    turn.extend(prompt(2, 3));
    let next = world.submit(request(1, &turn, 2));
    world.finish(100);
    // 6 + 12 tokens were known and 17 of them run: four full blocks of 4.
    assert_eq!(world.outcome(next).record().cached_tokens, 16);
}

#[test]
fn whatever_ended_a_request_its_committed_blocks_are_found() {
    for ending in ["cancel", "stop string", "deadline", "error"] {
        let mut world = World::new(config());
        let deadline = (ending == "deadline").then_some(Time(1001));
        let id = world.submit(Request { deadline, ..request(0, &prompt(1, 9), 50) });
        if ending == "error" {
            world.failing.insert(id);
        }
        world.step();
        match ending {
            "cancel" => world.cancel(id),
            "stop string" => world.apply(Command::StopString { id, text: "stop".into() }),
            _ => {}
        }
        world.finish(10);
        let again = world.submit(request(1, &prompt(1, 9), 1));
        world.finish(10);
        assert_eq!(world.outcome(again).record().cached_tokens, 8, "after {ending}");
    }
}

#[test]
fn namespaces_share_nothing() {
    let mut world = World::new(config());
    let salts = ["", "a", "b", "a"];
    let cached: Vec<_> = (0..4)
        .map(|i| {
            let id =
                world.submit(Request { cache_salt: Some(salts[i].into()), ..request(i as u64, &prompt(1, 20), 3) });
            world.finish(100);
            world.outcome(id).record().cached_tokens
        })
        .collect();
    assert_eq!(cached, [0, 0, 0, 19]);
}

#[test]
fn who_shares_with_nobody_is_not_remembered() {
    let mut world = World::new(config());
    for id in 0..2 {
        world.submit(Request { cache_salt: None, ..request(id, &prompt(1, 20), 3) });
        world.finish(100);
    }
    let stats = world.scheduler.stats();
    assert_eq!((stats.tokens_cached, stats.blocks_free), (0, stats.blocks));
}

#[test]
fn prompts_whose_every_row_is_wanted_do_not_read_the_cache() {
    for all_logits in [false, true] {
        let mut world = World::new(config());
        world.submit(request(0, &prompt(1, 30), 2));
        world.finish(100);
        let mut wanting = with(request(1, &prompt(1, 30), 2), |params| params.prompt_logprobs = Some(1));
        if all_logits {
            wanting = Request { wanted: Wanted::AllLogits, ..request(1, &prompt(1, 30), 2) };
        }
        let id = world.submit(wanting.clone());
        world.finish(100);
        let got = world.outcome(id);
        assert_eq!(got.record().cached_tokens, 0);
        if all_logits {
            assert_eq!(got.logits.len(), 30 * VOCAB as usize);
            assert_eq!((got.finish(), got.tokens.len()), (&Finish::Stop(StopReason::Complete), 0));
        } else {
            let ids: Vec<_> = got.prompt_logprobs.iter().map(|entry| entry.token_id).collect();
            assert_eq!(ids, wanting.prompt[1..], "one for each token but the first");
        }
    }
}

#[test]
fn last_logits_are_one_row_and_may_use_the_cache() {
    let mut world = World::new(config());
    for (id, cached) in [(0, 0), (1, 29)] {
        let id = world.submit(Request { wanted: Wanted::LastLogits, ..request(id, &prompt(1, 30), 2) });
        world.finish(100);
        let got = world.outcome(id);
        assert_eq!((got.logits.len(), got.record().cached_tokens), (VOCAB as usize, cached));
    }
    assert_eq!(world.outcome(RequestId(0)).logits, world.outcome(RequestId(1)).logits);
}

#[test]
fn the_rent_of_a_shared_block_is_split_among_its_holders() {
    let mut world = World::new(config());
    world.submit(request(0, &prompt(1, 40), 1));
    world.finish(100);
    // Two that go hand in hand, ten blocks shared and up to six of their own.
    for id in [1, 2] {
        world.submit(request(id, &prompt(1, 41), 20));
    }
    world.finish(100);
    let [one, two] = [1, 2].map(|id| world.outcome(RequestId(id)).record());
    assert_eq!((one.cached_tokens, two.cached_tokens), (40, 40));
    assert!(one.block_ns.abs_diff(two.block_ns) <= 10, "at most a nanosecond for each block they share");
    let held = u128::from(one.stages.prefill.total() + one.stages.decode.total());
    assert!((6 * held..11 * held).contains(&one.block_ns), "{} for holding them {held} ns", one.block_ns);
}

#[test]
fn cancel_frees_the_blocks_at_once_or_with_the_step_under_way() {
    for (steps, in_flight) in [(0, false), (1, false), (1, true), (4, false), (4, true)] {
        let mut world = World::new(config());
        let other = world.submit(request(0, &prompt(2, 5), 30));
        let id = world.submit(request(1, &prompt(1, 40), 30)); // read in several steps
        (0..steps).for_each(|_| assert!(world.step()));
        if in_flight {
            world.launch();
            world.cancel(id);
            let spoken = world.outcome(id).tokens.len();
            world.apply(Command::StopString { id, text: "too late".into() });
            assert!(world.outcome(id).end.is_none(), "the executor may still write its blocks");
            world.commit();
            assert_eq!(world.outcome(id).tokens.len(), spoken, "nobody listens any more");
        } else {
            world.cancel(id);
        }
        assert_eq!(world.outcome(id).finish(), &Finish::Cancelled, "{steps} {in_flight}");
        let stats = world.scheduler.stats();
        assert_eq!(stats.running + stats.waiting, 1);
        world.finish(100);
        assert_eq!(world.outcome(other).tokens, alone(&config(), &request(0, &prompt(2, 5), 30)).tokens);
    }
}

#[test]
fn one_that_is_given_up_when_its_deadline_has_passed_ended_by_that() {
    let mut world = World::new(SchedulerConfig { max_num_seqs: 1, ..config() });
    for (id, deadline, end) in [(0, 1, Finish::Deadline), (1, 1 << 40, Finish::Cancelled)] {
        for in_flight in [false, true] {
            let id = 2 * id + u64::from(in_flight);
            let deadline = Time(world.now.0 + deadline);
            let id = world.submit(Request { deadline: Some(deadline), ..request(id, &prompt(1, 5), 100) });
            if in_flight {
                world.launch().expect("it runs");
            } else {
                world.now.0 += 10;
            }
            world.cancel(id);
            if in_flight {
                world.commit();
            }
            assert_eq!((world.outcome(id).finish(), &world.outcome(id).tokens[..]), (&end, &[][..]));
        }
    }
    world.finish(1);
}

#[test]
fn an_expired_request_never_prefills_and_a_running_one_ends_at_the_next_step() {
    let mut world = World::new(SchedulerConfig { max_num_seqs: 1, ..config() });
    let running = world.submit(Request { deadline: Some(Time(12_000)), ..request(0, &prompt(1, 5), 100) });
    let queued = world.submit(Request { deadline: Some(Time(2_000)), ..request(1, &prompt(2, 5), 1) });
    let late = world.submit(Request { deadline: Some(Time(0)), ..request(2, &prompt(2, 5), 1) });
    world.finish(100);
    for id in [queued, late] {
        assert_eq!(world.outcome(id).finish(), &Finish::Deadline);
        assert_eq!(world.outcome(id).record().steps, 0);
    }
    let got = world.outcome(running);
    assert_eq!(got.finish(), &Finish::Deadline);
    assert!(got.record().steps > 1 && got.record().finished >= Time(12_000));
    assert!(got.record().finished < Time(12_000 + 2_000), "within a step");
}

#[test]
fn a_request_that_can_never_fit_is_told_the_numbers() {
    let mut world = World::new(SchedulerConfig { blocks: 10, max_model_len: 60, ..config() });
    for (id, length, says) in [
        (0, 0, "empty"),
        (1, 60, "max_model_len of at least 61, it is 60"),
        (2, 40, "11 KV cache blocks of 4 tokens, the cache has 10"),
        (3, 40, "at least 1.10 times"),
    ] {
        let id = world.submit(request(id, &prompt(1, length), 5));
        let Finish::Rejected(Rejection::Impossible(text)) = world.outcome(id).finish() else {
            panic!("{id} was taken")
        };
        assert!(text.contains(says), "{text}");
    }
    let fits = world.submit(request(4, &prompt(1, 39), 5));
    let logits = world.submit(Request { wanted: Wanted::LastLogits, ..request(5, &prompt(1, 40), 5) });
    world.finish(100);
    assert_eq!((world.outcome(fits).finish(), world.outcome(fits).tokens.len()), (&Finish::Length, 1));
    assert_eq!(world.outcome(logits).finish(), &Finish::Stop(StopReason::Complete));
}

#[test]
fn a_full_queue_is_an_answer() {
    // One may run and two may wait.
    let mut world = World::new(SchedulerConfig { max_num_seqs: 1, max_queue: 2, ..config() });
    for id in 0..4 {
        world.submit(request(id, &prompt(id, 5), 5));
    }
    let Finish::Rejected(Rejection::QueueFull { living: 3, most: 3, retry_after_ns }) =
        *world.outcome(RequestId(3)).finish()
    else {
        panic!("there was no place")
    };
    assert!(retry_after_ns > 0);
    while world.outcome(RequestId(0)).end.is_none() {
        world.step();
    }
    world.submit(request(4, &prompt(4, 5), 5));
    world.finish(100);
    assert_eq!(world.outcome(RequestId(4)).finish(), &Finish::Length);
}

#[test]
fn generation_ends_where_it_should() {
    let base = request(0, &prompt(1, 5), 12);
    let free = alone(&config(), &base).tokens;
    let third = free[2];
    assert!(!free[..2].contains(&third), "the case needs a token that is new at the third place");
    let run = |request: Request| alone(&config(), &request);

    let ended = run(Request { end_token_ids: [third].into(), ..base.clone() });
    assert_eq!((ended.finish(), &ended.tokens[..]), (&Finish::Stop(StopReason::EndToken(third)), &free[..3]));
    let stopped = run(with(base.clone(), |params| params.stop_token_ids = vec![third]));
    assert_eq!((stopped.finish(), &stopped.tokens[..]), (&Finish::Stop(StopReason::StopToken(third)), &free[..3]));

    // With min_tokens = 3 the third token may not be the end; with 2 it may.
    let at_least =
        |min_tokens| run(with(base.clone(), |p| (p.stop_token_ids, p.min_tokens) = (vec![third], min_tokens)));
    assert_eq!(at_least(2).tokens, free[..3]);
    let banned = at_least(3);
    assert!(banned.tokens.len() >= 3 && banned.tokens[2] != third, "{:?}", banned.tokens);

    let long = run(with(request(0, &prompt(1, 190), 50), |_| {}));
    assert_eq!((long.finish(), long.tokens.len()), (&Finish::Length, 10), "max_model_len is 200");
    assert_eq!(run(with(base, |params| params.max_tokens = 1)).tokens, free[..1]);
}

#[test]
fn a_failing_draw_ends_that_request_alone() {
    let mut world = World::new(config());
    let bad = world.submit(request(0, &prompt(1, 5), 5));
    let good = world.submit(request(1, &prompt(2, 5), 5));
    world.failing.insert(bad);
    world.finish(100);
    assert_eq!(world.outcome(bad).finish(), &Finish::Error("logits that are no numbers".into()));
    assert_eq!((world.outcome(good).finish(), world.outcome(good).tokens.len()), (&Finish::Length, 5));
}

#[test]
fn closing_ends_everything_and_takes_nothing_more() {
    for in_flight in [false, true] {
        let mut world = World::new(SchedulerConfig { max_num_seqs: 2, ..config() });
        for id in 0..4 {
            world.submit(request(id, &prompt(id, 5), 50));
        }
        world.step();
        if in_flight {
            world.launch();
        }
        world.fail_all("closed");
        world.submit(request(9, &prompt(9, 5), 50));
        world.assert_home();
        assert!(world.outcomes.values().all(|outcome| outcome.finish().name() == "error"));
    }
}

#[test]
fn a_dead_executor_ends_everything_with_its_last_words() {
    let mut world = World::new(SchedulerConfig { max_num_seqs: 2, ..config() });
    for id in 0..3 {
        world.submit(request(id, &prompt(id, 5), 50));
    }
    let batch = world.scheduler.schedule(world.now).expect("work");
    world.executor.launch(&batch).expect("simulated");
    world.scheduler.fail_all("the device is gone", world.now);
    world.apply(Command::Cancel(RequestId(0)));
    let gone = Finish::Error("the device is gone".into());
    assert!(world.outcomes.values().all(|outcome| *outcome.finish() == gone));
    assert!(world.scheduler.schedule(world.now).is_none());
    assert_eq!(world.scheduler.stats().blocks_owned, 0);
}

#[test]
fn running_requests_speak_at_every_step_while_a_long_prompt_is_read() {
    let mut world = World::new(SchedulerConfig {
        max_num_seqs: 20,
        max_num_batched_tokens: 64,
        max_model_len: 40_000,
        layout: KvLayout::new(16),
        blocks: 4000,
        ..config()
    });
    world.checked = false;
    for id in 0..16 {
        world.submit(request(id, &prompt(id, 3), 100));
    }
    world.step();
    let long = world.submit(request(100, &prompt(100, 3000), 2));
    world.step();
    for step in 1..=60 {
        // Short prompts keep coming; they overtake the long one, and it still gets half of what is left.
        let short = world.submit(request(1000 + step, &prompt(1000 + step, 5), 1));
        world.step();
        assert_eq!(world.outcome(RequestId(0)).tokens.len() as u64, 2 + step, "who speaks keeps speaking");
        assert!(world.outcome(short).end.is_some(), "a short prompt does not wait for the long one");
    }
    world.finish(3000 / 20 + 200);
    assert_eq!(world.outcome(long).finish(), &Finish::Length);
}

#[test]
fn a_long_prompt_is_not_overtaken_for_ever() {
    // Two places: a long prompt is being read in one, another long one waits, and short ones come without end.
    let mut world = World::new(SchedulerConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: 16,
        max_queue: 100_000,
        max_model_len: 20_000,
        layout: KvLayout::new(16),
        blocks: 4000,
        ..config()
    });
    world.checked = false;
    let (first, second) = (request(0, &prompt(1, 1000), 1), request(1, &prompt(2, 1000), 1));
    world.submit(first);
    world.submit(second);
    for id in 2.. {
        world.submit(request(id, &prompt(id, 3), 1));
        world.submit(request(1_000_000 + id, &prompt(id, 3), 1));
        world.step();
        if world.outcome(RequestId(1)).end.is_some() {
            break;
        }
        assert!(id < 2 * 2000 / 8 + 100, "the second long prompt starves");
    }
    assert!(world.outcome(RequestId(0)).end.is_some());
    let shorts = world.outcomes.values().filter(|outcome| outcome.end.is_some()).count() - 2;
    assert!(shorts >= 64, "only {shorts} short prompts overtook");
}

#[test]
fn a_long_prompt_gets_half_of_what_decoding_leaves_whatever_else_comes() {
    let mut world = World::new(SchedulerConfig {
        max_num_seqs: 16,
        max_num_batched_tokens: 16,
        max_queue: 100_000,
        max_model_len: 20_000,
        layout: KvLayout::new(16),
        blocks: 4000,
        ..config()
    });
    world.checked = false;
    let long = world.submit(request(0, &prompt(1, 1000), 1));
    let mut steps = 0;
    while world.outcome(long).end.is_none() {
        steps += 1;
        assert!(steps < 1000, "the long prompt starves");
        for short in 0..8 {
            let id = 10 * steps + short;
            world.submit(request(id, &prompt(id, 4), 1));
        }
        world.step();
    }
    assert!((1000 / 8 - 1..=1000 / 8 + 1).contains(&steps), "{steps} steps for 1000 tokens, 8 a step");
    let shorts = world.outcomes.values().filter(|outcome| outcome.end.is_some()).count() - 1;
    assert!(shorts as u64 >= 2 * steps - 2, "only {shorts} short prompts in {steps} steps");
}

#[test]
fn nobody_is_admitted_into_blocks_that_are_spoken_for() {
    // Ten blocks of 4. Four idle ones remember a prompt of 16; somebody grows to 6 blocks meanwhile. Coming back to the
    // prompt takes the four idle blocks and more: only 4 are available, so it waits, and nobody is preempted.
    let mut world = World::new(SchedulerConfig { blocks: 10, max_model_len: 40, ..config() });
    let known = world.submit(request(0, &prompt(1, 17), 1));
    world.finish(100);
    let running = world.submit(request(1, &prompt(2, 14), 8));
    let back = world.submit(request(2, &prompt(1, 24), 1));
    world.finish(100);
    assert_eq!(world.scheduler.stats().preemptions, 0);
    assert_eq!(world.outcome(back).record().cached_tokens, 16);
    assert!(world.outcome(back).record().stages.queue.blocks > 0);
    assert!(world.outcome(known).end.is_some() && world.outcome(running).end.is_some());

    // A prompt of 24 is read in parts; while it is, its 7 blocks are spoken for, though it holds fewer. Another one of 14
    // needs 4.
    let mut world = World::new(SchedulerConfig { blocks: 10, max_model_len: 40, ..config() });
    world.submit(request(0, &prompt(1, 24), 2));
    let other = world.submit(request(1, &prompt(2, 14), 1));
    world.finish(100);
    assert_eq!(world.scheduler.stats().preemptions, 0);
    assert!(world.outcome(other).record().stages.queue.blocks > 0);
}

#[test]
fn running_sequences_have_room_to_grow_before_anybody_joins() {
    // 64 blocks of 4; four sequences hold 10 each. Of the 24 others, 4 are left for them to grow into.
    for (newcomer, joins) in [(79, true), (80, false)] {
        let config = SchedulerConfig { max_num_seqs: 8, max_num_batched_tokens: 256, blocks: 64, ..config() };
        let mut world = World::new(config);
        for id in 0..4 {
            world.submit(request(id, &prompt(id, 38), 50));
        }
        world.step();
        world.submit(request(4, &prompt(4, newcomer), 1));
        world.launch();
        assert_eq!(world.scheduler.stats().waiting, usize::from(!joins), "{newcomer} tokens and one more");
        world.commit();
        world.finish(300);
    }
}

#[test]
fn higher_priority_goes_first_and_equal_priority_in_order_of_arrival() {
    let mut world = World::new(SchedulerConfig { max_num_seqs: 1, ..config() });
    for (id, priority) in [(0, 0), (1, 0), (2, 5), (3, 5), (4, -1)] {
        world.submit(Request { priority, ..request(id, &prompt(id, 5), 2) });
    }
    world.finish(100);
    let mut ids: Vec<_> = world.outcomes.keys().map(|id| id.0).collect();
    ids.sort_by_key(|&id| world.outcome(RequestId(id)).record().finished);
    assert_eq!(ids, [2, 3, 0, 1, 4]);
}

#[test]
fn the_last_in_order_is_preempted_and_the_first_never() {
    // Ten blocks of 4; each of three sequences wants up to 30 tokens.
    let small = SchedulerConfig { blocks: 10, max_model_len: 40, ..config() };
    let mut world = World::new(small.clone());
    let requests: Vec<_> = (0..3).map(|id| request(id, &prompt(id, 6), 24)).collect();
    requests.iter().for_each(|request| _ = world.submit(request.clone()));
    world.finish(1000);
    let records: Vec<_> = (0..3).map(|id| world.outcome(RequestId(id)).record().clone()).collect();
    assert_eq!(records[0].preemptions, 0);
    for cost in records.iter().flat_map(|record| &record.preempted) {
        assert!(cost.lost_tokens > 0 && cost.lost_ns > 0 && cost.recomputed_tokens <= cost.lost_tokens, "{cost:?}");
    }
    assert!(records[2].preemptions > 0 && records[2].stages.decode.preempted > 0, "{records:?}");
    assert!(records[0].finished < records[2].finished);
    for request in &requests {
        assert_eq!(world.outcome(request.id).tokens, alone(&small, request).tokens);
    }
}

#[test]
fn queueing_says_what_for() {
    let queued = |config: SchedulerConfig, longer: usize| {
        let mut world = World::new(config);
        world.submit(request(0, &prompt(0, longer), 20));
        world.submit(request(1, &prompt(1, 14), 2));
        world.step();
        world.step();
        let second = RequestId(1);
        world.finish(500);
        world.outcome(second).record().stages.queue
    };
    let sequences = queued(SchedulerConfig { max_num_seqs: 1, ..config() }, 5);
    assert!(sequences.sequences > 0 && sequences.blocks == 0, "{sequences:?}");
    let blocks = queued(SchedulerConfig { blocks: 7, ..config() }, 13);
    assert!(blocks.blocks > 0 && blocks.sequences == 0, "{blocks:?}");
    let budget = queued(SchedulerConfig { max_num_batched_tokens: 4, ..config() }, 30);
    assert!(budget.budget > 0 && budget.blocks + budget.sequences == 0, "{budget:?}");
}

#[test]
fn impossible_settings_are_named() {
    type Breaking = fn(&mut SchedulerConfig);
    let broken: [(&str, Breaking); 6] = [
        ("max_num_seqs", |config| config.max_num_seqs = 0),
        ("max_num_batched_tokens", |config| config.max_num_batched_tokens = config.max_num_seqs - 1),
        ("max_model_len", |config| config.max_model_len = 0),
        ("block_size", |config| config.layout.block_size = 0),
        ("blocks", |config| config.blocks = 0),
        ("32 bits", |config| config.blocks = usize::MAX / 2),
    ];
    for (name, breaking) in broken {
        let mut config = config();
        breaking(&mut config);
        let error = Scheduler::new(config).expect_err("impossible");
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn a_burst_with_one_prefix_computes_it_once() {
    // Whatever it shares with the first one, and whether it arrives with it or while it is being read.
    for length in [1, 3, 4, 5, 33, 100] {
        let mut world = World::new(SchedulerConfig { max_num_seqs: 6, ..config() });
        for id in 0..6 {
            let mut tokens = prompt(1, length);
            tokens.extend(prompt(10 + id, 1 + id as usize % 2));
            world.submit(request(id, &tokens, 4));
            if id == 3 {
                world.step();
            }
        }
        world.finish(200);
        for id in 1..6 {
            // All share whole blocks; those that have one token of their own, as the first has, share all but that.
            let (record, own) = (world.outcome(RequestId(id)).record(), 1 + id as usize % 2);
            let cached = if own == 1 { length } else { length / 4 * 4 };
            assert_eq!(record.cached_tokens, cached, "{length} tokens, request {id}");
            assert_eq!(record.computed_tokens, length + own - cached + 3, "{length} tokens, request {id}");
        }
    }
}

#[test]
fn nobody_waits_for_a_prefix_that_will_not_come() {
    // The one that computes it is cancelled half-way: the next one goes on from what is there.
    let mut world = World::new(config());
    let first = world.submit(request(0, &prompt(1, 60), 4));
    world.step();
    let second = world.submit(request(1, &prompt(1, 60), 4));
    world.step();
    assert_eq!(world.outcome(second).tokens.len(), 0);
    world.cancel(first);
    world.finish(100);
    let record = world.outcome(second).record();
    assert!(record.cached_tokens >= 16 && record.cached_tokens < 56, "{}", record.cached_tokens);
    assert!(record.stages.queue.prefix > 0);
}

#[test]
fn who_waits_for_a_prefix_does_not_hold_up_others() {
    let mut world = World::new(SchedulerConfig { max_num_seqs: 20, max_num_batched_tokens: 32, ..config() });
    world.submit(request(0, &prompt(1, 150), 1));
    world.step();
    for id in 1..12 {
        world.submit(request(id, &prompt(1, 150), 1));
    }
    let other = world.submit(request(100, &prompt(2, 3), 1));
    world.step();
    assert!(world.outcome(other).end.is_some(), "a short prompt passes those that wait for a long one's prefix");
    world.finish(200);
}

#[test]
fn a_long_prompt_holds_no_more_than_its_windows_show() {
    // Two groups that see 10 tokens and one that sees all: a prompt of 150 in chunks of 16, then 40 tokens more.
    let layout = KvLayout { block_size: 4, windows: vec![Some(10), None, Some(10)] };
    let blocks = layout.blocks_for(190);
    assert_eq!(blocks, 48 + 2 * 4);
    let mut world = World::new(SchedulerConfig { layout: layout.clone(), blocks, ..config() });
    let id = world.submit(request(0, &prompt(1, 150), 40));
    let mut most = 0;
    while world.step() {
        most = most.max(world.scheduler.stats().blocks_owned);
    }
    assert_eq!(world.outcome(id).finish(), &Finish::Length);
    assert!(most <= blocks, "{most} blocks of {blocks}");

    // A layout of windows alone reads a prompt that is far longer than its pool.
    let layout = KvLayout { block_size: 4, windows: vec![Some(10)] };
    let mut world = World::new(SchedulerConfig { layout, blocks: 4, ..config() });
    let id = world.submit(request(0, &prompt(1, 150), 40));
    world.finish(400);
    assert_eq!(world.outcome(id).finish(), &Finish::Length);
    assert_eq!(world.scheduler.stats().preemptions, 0);
}

#[test]
fn a_hit_needs_only_what_the_next_token_sees() {
    // 40 tokens are known; a sequence that goes on from token 36 sees 10 of them in one group and all in the other.
    let layout = KvLayout { block_size: 4, windows: vec![Some(10), None] };
    let mut world = World::new(SchedulerConfig { layout, blocks: 60, ..config() });
    world.submit(request(0, &prompt(1, 40), 1));
    world.finish(100);
    let id = world.submit(request(1, &prompt(1, 40), 30));
    world.step();
    // Of the group that sees all ten blocks; of the other those of what token 40 will see: tokens 31 to 39.
    assert_eq!(world.scheduler.stats().blocks_owned, 10 + 3);
    world.finish(100);
    assert_eq!(world.outcome(id).record().cached_tokens, 39);
}

#[test]
fn scores_share_the_prompt_and_compute_the_rest() {
    let mut world = World::new(SchedulerConfig { max_num_batched_tokens: 64, ..config() });
    let context = prompt(1, 21);
    for id in 0..4 {
        let mut tokens = context.clone();
        tokens.extend(prompt(10 + id, 3));
        let wanting = with(request(id, &tokens, 1), |params| params.prompt_logprobs = Some(0));
        world.submit(Request { wanted: Wanted::Scores { from: 21 }, ..wanting });
    }
    world.finish(100);
    for id in 0..4 {
        let outcome = world.outcome(RequestId(id));
        let scored: Vec<_> = outcome.prompt_logprobs.iter().map(|scored| scored.token_id).collect();
        assert_eq!(scored, prompt(10 + id, 3));
        // The row of token 20 is computed by everybody: it scores the first token after it.
        assert_eq!(outcome.record().cached_tokens, if id == 0 { 0 } else { 20 });
        assert!(outcome.tokens.is_empty() && *outcome.finish() == Finish::Stop(StopReason::Complete));
    }
}
