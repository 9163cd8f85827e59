//! Thousands of random days: arrivals with shared beginnings, several answers to a call, namespaces, users, priorities,
//! sessions, cancels, deadlines, stop strings, failing draws, and pools so small that sequences keep losing their blocks. Each
//! day is recorded, and played again from its log.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use octavo::kv::{KvLayout, PinFate};
use octavo::observe::record::{LogWriter, Tokens};
use octavo::request::{Finish, Request, RequestId, SamplingParams, SessionId, Time, Wanted};
use octavo::schedule::{Command, SchedulerConfig};

use crate::record;
use crate::world::{Coins, Outcome, VOCAB, World, alone, prompt};

const HISTORIES: u64 = 3000;
const SESSIONS: u64 = 3;

/// How often each thing happened: a simulation that never preempts proves nothing about preemption.
type Tally = BTreeMap<&'static str, usize>;

#[test]
fn nothing_bad_happens_and_everything_ends() {
    let mut tally = Tally::new();
    for seed in 0..HISTORIES {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| play(seed)));
        match outcome {
            Ok(more) => more.into_iter().for_each(|(name, count)| *tally.entry(name).or_default() += count),
            Err(panic) => {
                eprintln!("history of seed {seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{HISTORIES} histories: {tally:?}");
    for name in [
        "stop",
        "length",
        "cancelled",
        "deadline",
        "rejected",
        "error",
        "preempted",
        "preempted in prefill",
        "cached",
        "deadline in queue",
        "ended in flight",
        "several ended in flight",
        "prompt logprobs after preemption",
        "logits",
        "shared rent",
        "scores",
        "waited for a prefix",
        "resumed",
        "diverged",
        "recomputed",
        "expired",
        "evicted",
        "over_limit",
    ] {
        assert!(tally.get(name).is_some_and(|&count| count >= 10), "hardly any `{name}` in {HISTORIES} histories");
    }
}

fn play(seed: u64) -> Tally {
    let mut coins = Coins(seed);
    let config = any_config(&mut coins);
    let mut world = World::new(config.clone());
    world.log = Some(LogWriter::default());
    let mut tally = Tally::new();
    let mut requests: Vec<Request> = Vec::new();
    for id in 0..SESSIONS {
        world.apply(Command::OpenSession { id: SessionId(id), ttl_ns: coins.within(1000, 100_000) as u64 });
    }
    // Of each request those of its call.
    let mut calls: Vec<Range<usize>> = Vec::new();
    let days = coins.within(1, 60);
    let rush = coins.within(1, 4);
    for _ in 0..days {
        for _ in 0..coins.within(0, rush) {
            let request = any_request(&mut coins, &requests, &config, world.now, &world.outcomes);
            // Some calls want several answers: as many requests, which differ in their coins. A session goes on with one.
            let several = request.session.is_none() && coins.one_in(4);
            let choices = if several { coins.within(2, 3) } else { 1 };
            calls.extend(std::iter::repeat_n(requests.len()..requests.len() + choices, choices));
            for _ in 0..choices {
                let id = RequestId(requests.len() as u64);
                let choice = Request { id, seed: coins.next(), ..request.clone() };
                requests.push(choice.clone());
                if coins.one_in(25) {
                    world.failing.insert(choice.id);
                }
                world.submit(choice);
            }
        }
        disturb(&mut world, &mut coins, &calls);
        if coins.one_in(3) {
            ask(&mut world, &mut coins);
        }
        if coins.one_in(100) {
            world.apply(Command::CloseSession(SessionId(coins.next() % SESSIONS)));
        }
        if world.launch().is_some() {
            let doomed = disturb(&mut world, &mut coins, &calls);
            let in_flight: Vec<_> = doomed.into_iter().filter(|&id| world.outcome(id).end.is_none()).collect();
            world.commit();
            for &id in &in_flight {
                assert!(world.outcome(id).end.is_some(), "{id}: cancelled, and still there after the step");
            }
            *tally.entry("ended in flight").or_default() += in_flight.len();
            *tally.entry("several ended in flight").or_default() += usize::from(in_flight.len() > 1);
        }
        world.now.0 += coins.within(1, 3000) as u64;
    }
    let work: usize = requests.iter().map(|request| request.prompt.len() + request.params.max_tokens).sum();
    world.finish(4 * work + 100);
    (0..SESSIONS).for_each(|id| world.apply(Command::CloseSession(SessionId(id))));
    world.assert_home();
    check_log(&mut world, &config);
    for request in &requests {
        compare(&config, request, world.outcome(request.id), &mut tally);
    }
    tally
}

/// The day can be played again from its log.
fn check_log(world: &mut World, config: &SchedulerConfig) {
    let mut header = LogWriter::default();
    header.header(&record::header(config.clone()));
    let mut log = world.log.take().expect("the day was recorded");
    log.end(0);
    let report = record::play(&record::sealed([&header.take(), &log.take()]), Tokens::Recorded, false).expect("a log");
    assert_eq!((report.difference, report.incomplete), (None, None));
    assert_eq!((report.requests, report.steps), (world.outcomes.len() as u64, world.scheduler.stats().steps));
}

fn any_config(coins: &mut Coins) -> SchedulerConfig {
    let max_num_seqs = coins.within(1, 8);
    let block_size = *coins.pick(&[1, 2, 4, 16]);
    let windows = match coins.within(0, 4) {
        0 => vec![Some(coins.within(2, 40))],
        1 => vec![Some(coins.within(2, 40)), None, Some(coins.within(2, 40))],
        2 => vec![None, Some(coins.within(2, 20))],
        _ => vec![None],
    };
    let layout = KvLayout { block_size, windows };
    let pool = *coins.pick(&[80, 80, 80, 300]); // mostly so little that two or three requests fill it
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + coins.within(0, 24),
        max_queue: coins.within(1, 40),
        itl_target_ns: coins.one_in(2).then(|| coins.within(500, 5000) as u64),
        max_model_len: coins.within(8, 150),
        blocks: layout.groups() * coins.within(1, 4 + pool / block_size),
        layout,
    }
}

fn any_request(
    coins: &mut Coins,
    earlier: &[Request],
    config: &SchedulerConfig,
    now: Time,
    outcomes: &BTreeMap<RequestId, Outcome>,
) -> Request {
    let longest = *coins.pick(&[8, 50]);
    let mut tokens = prompt(coins.within(0, 2) as u64, coins.within(0, longest));
    let session = coins.one_in(3).then(|| SessionId(coins.next() % SESSIONS));
    let turn = earlier.iter().rev().find(|request| session.is_some() && request.session == session);
    if let Some(turn) = turn.filter(|_| !coins.one_in(6)) {
        // The next turn of a conversation, if the one before has said anything.
        tokens = [&turn.prompt[..], &outcomes[&turn.id].tokens].concat();
    }
    let fresh = coins.within(usize::from(tokens.is_empty()), 12);
    tokens.extend((0..fresh).map(|_| coins.next() as u32 % VOCAB));
    if let Some(answer) = outcomes.values().nth(coins.within(0, 30)).filter(|_| coins.one_in(3)) {
        tokens.extend(&answer.tokens); // not a conversation, but something like it
    }
    if !coins.one_in(30) {
        tokens.truncate(config.layout.longest(config.blocks, config.max_model_len).saturating_sub(1).max(1));
    }
    let max_tokens = coins.within(1, 80 - longest);
    let scores = match tokens.len() {
        1 => Wanted::Tokens,
        len => Wanted::Scores { from: coins.within(1, len - 1) },
    };
    let wanted =
        *coins.pick(&[Wanted::Tokens, Wanted::Tokens, Wanted::Tokens, Wanted::LastLogits, Wanted::AllLogits, scores]);
    let params = SamplingParams {
        max_tokens,
        min_tokens: if coins.one_in(3) { coins.within(0, max_tokens) } else { 0 },
        stop_token_ids: if coins.one_in(3) { vec![7, 8] } else { Vec::new() },
        repetition_penalty: if coins.one_in(4) { 1.5 } else { 1.0 },
        prompt_logprobs: (coins.one_in(5) || wanted == scores).then_some(2),
        logprobs: coins.one_in(5).then_some(1),
        ..Default::default()
    };
    let id = RequestId(earlier.len() as u64);
    Request {
        id,
        call: earlier.last().filter(|_| coins.one_in(2)).map_or(id, |before| before.call),
        prompt: tokens.into(),
        params: Arc::new(params),
        wanted,
        seed: coins.next(),
        end_token_ids: if coins.one_in(3) { [3].into() } else { Arc::default() },
        guide: None,
        priority: coins.within(0, 2) as i32 - 1,
        deadline: coins.one_in(5).then(|| Time(now.0 + coins.within(0, 60_000) as u64)),
        cache_salt: coins.pick(&[Some(""), Some(""), Some("tenant"), None]).map(Arc::from),
        session,
        user: (*coins.pick(&["", "", "a", "b"])).into(),
        arrived: now,
    }
}

/// Questions, which change nothing: the log knows nothing of them.
fn ask(world: &mut World, coins: &mut Coins) {
    let session = SessionId(coins.next() % SESSIONS);
    match coins.within(0, 3) {
        0 => drop(world.scheduler.session(session, world.now)),
        1 => drop(world.scheduler.explain(&prompt(coins.within(0, 2) as u64, 30), Some(""), Some(session))),
        2 => drop(world.scheduler.load()),
        _ => _ = world.scheduler.session_block_ns(world.now),
    }
}

/// Cancels calls, alive or not, and lets stop strings appear. Says whom it cancelled.
fn disturb(world: &mut World, coins: &mut Coins, calls: &[Range<usize>]) -> Vec<RequestId> {
    let call = if coins.one_in(6) { calls.get(coins.within(0, calls.len())).cloned() } else { None };
    let cancelled: Vec<_> = call.into_iter().flatten().map(|id| RequestId(id as u64)).collect();
    for &id in &cancelled {
        world.cancel(id);
    }
    let speaking = world.living().into_iter().find(|&id| !world.outcome(id).tokens.is_empty());
    if let Some(id) = speaking.filter(|_| coins.one_in(8)) {
        world.apply(Command::StopString { id, text: "stop".into() });
    }
    cancelled
}

/// The answer does not depend on the weather.
fn compare(config: &SchedulerConfig, request: &Request, got: &Outcome, tally: &mut Tally) {
    let mut count = |name, yes: bool| *tally.entry(name).or_default() += usize::from(yes);
    let (finish, record) = (got.finish(), got.record());
    count(finish.name(), true);
    count("preempted", record.preemptions > 0);
    count("preempted in prefill", record.preemptions > 0 && record.stages.decode.preempted == 0);
    count("cached", record.cached_tokens > 0);
    count("deadline in queue", *finish == Finish::Deadline && record.steps == 0);
    count("prompt logprobs after preemption", record.preemptions > 0 && !got.prompt_logprobs.is_empty());
    count("logits", !got.logits.is_empty());
    count("scores", matches!(request.wanted, Wanted::Scores { .. }) && record.cached_tokens > 0);
    let fates = [PinFate::Resumed, PinFate::Diverged, PinFate::Recomputed, PinFate::Expired, PinFate::Evicted];
    for fate in fates.into_iter().chain([PinFate::OverLimit]) {
        count(fate.name(), record.kept == Some(fate));
    }
    count("waited for a prefix", record.stages.queue.prefix > 0);
    count("shared rent", record.cached_tokens > 0 && record.block_ns > 0);
    if matches!(finish, Finish::Rejected(_)) {
        assert_eq!((record.computed_tokens, got.tokens.len()), (0, 0));
        return;
    }
    let want = alone(config, request);
    assert!(want.tokens.starts_with(&got.tokens), "{}: other tokens than alone", request.id);
    assert!(want.prompt_logprobs.starts_with(&got.prompt_logprobs), "{}: other prompt logprobs", request.id);
    assert!(want.logits.starts_with(&got.logits), "{}: other logits than alone", request.id);
    let by_itself = match finish {
        Finish::Length => true,
        Finish::Stop(reason) => !matches!(reason, octavo::request::StopReason::StopString(_)),
        _ => false,
    };
    if by_itself {
        assert_eq!(finish, want.finish(), "{}", request.id);
        assert_eq!(got.tokens, want.tokens, "{}", request.id);
        assert_eq!(got.prompt_logprobs, want.prompt_logprobs, "{}", request.id);
        assert_eq!(got.logits, want.logits, "{}", request.id);
        check_work(request, got);
    }
}

/// Nothing is computed twice, unless blocks were taken away.
fn check_work(request: &Request, got: &Outcome) {
    let record = got.record();
    let run = request.prompt.len() + got.tokens.len().saturating_sub(1);
    if record.preemptions == 0 {
        assert_eq!(record.cached_tokens + record.computed_tokens, run, "{}", request.id);
    }
    assert!(record.steps >= 1 && record.steps <= record.computed_tokens);
}
