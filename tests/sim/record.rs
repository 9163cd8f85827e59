//! Whatever the scheduler did, its log plays it again; and no bytes that look like a log do harm.

use std::collections::BTreeSet;
use std::sync::Arc;

use octavo::engine::EngineConfig;
use octavo::execute::Executor;
use octavo::execute::simulated::{CostModel, Simulated};
use octavo::kv::KvLayout;
use octavo::observe::events::EngineEvent;
use octavo::observe::record::{Header, Log, LogError, LogWriter, ModelIdentity, Player, Report, Sealer, Tokens};
use octavo::request::{Request, RequestId, SamplingParams, SessionId, Time, Wanted};
use octavo::schedule::{Command, Event, Scheduler, SchedulerConfig};

use crate::world::{Coins, VOCAB, config, prompt, request};

const SESSIONS: u64 = 3;
const COST: CostModel = CostModel { step_ns: 1000.0, row_ns: 70.0, context_ns: 0.5 };

fn any_config(coins: &mut Coins) -> SchedulerConfig {
    let max_num_seqs = coins.within(1, 6);
    let layout = KvLayout {
        block_size: *coins.pick(&[1, 4, 16]),
        windows: if coins.one_in(3) { vec![None, Some(20)] } else { vec![None] },
    };
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + coins.within(0, 20),
        max_queue: coins.within(1, 20),
        itl_target_ns: coins.one_in(2).then_some(3000),
        max_model_len: 100,
        blocks: layout.groups() * coins.within(4, 4 + 160 / layout.block_size),
        layout,
    }
}

pub fn header(limits: SchedulerConfig) -> Header {
    let model =
        ModelIdentity { path: "none".into(), architecture: "simulated".into(), bytes: 0, sha256: String::new() };
    Header {
        octavo: "test".into(),
        model,
        device: "simulated".into(),
        config: EngineConfig::default(),
        kv_cache_bytes: 0,
        limits,
        vocab: VOCAB as usize,
    }
}

fn executor(limits: &SchedulerConfig) -> Simulated {
    Simulated::with_cache(COST, VOCAB, limits.layout.clone(), limits.blocks)
}

struct Day {
    /// What went into the log, step by step.
    chunks: Vec<Vec<u8>>,
    log: Vec<u8>,
    requests: u64,
    steps: u64,
    tokens: u64,
}

/// The file that holds these chunks.
pub fn sealed<'a>(chunks: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<u8> {
    let (mut log, mut sealer) = (Vec::new(), Sealer::default());
    for chunk in chunks {
        sealer.write(&mut log, chunk).expect("room");
    }
    log
}

/// A random day, and its log.
fn live(seed: u64) -> Day {
    let mut coins = Coins(seed);
    let limits = any_config(&mut coins);
    let mut scheduler = Scheduler::new(limits.clone()).expect("a possible configuration");
    let (mut executor, mut writer) = (executor(&limits), LogWriter::default());
    writer.header(&header(limits.clone()));
    let mut chunks = vec![writer.take()];
    let (mut now, mut requests, mut living) = (Time(1 << 40), 0, BTreeSet::new());
    let mut params = Arc::new(SamplingParams::default());
    for turn in 0.. {
        let mut commands = Vec::new();
        if turn < SESSIONS {
            commands.push(Command::OpenSession { id: SessionId(turn), ttl_ns: coins.within(1000, 50_000) as u64 });
        } else if coins.one_in(50) {
            commands.push(Command::CloseSession(SessionId(coins.next() % SESSIONS)));
        }
        for _ in 0..if turn < 40 { coins.within(0, 2) } else { 0 } {
            if coins.one_in(2) {
                let max_tokens = coins.within(1, 40);
                params = Arc::new(SamplingParams { max_tokens, temperature: 0.0, ..SamplingParams::default() });
            }
            let request = any_request(&mut coins, requests, &limits, now, params.clone());
            living.insert(request.id);
            requests += 1;
            commands.push(Command::Submit(Box::new(request)));
        }
        if let Some(&id) = living.iter().next().filter(|_| coins.one_in(8)) {
            let text = "stop".to_owned();
            commands.push(if coins.one_in(2) { Command::Cancel(id) } else { Command::StopString { id, text } });
        }
        for command in commands {
            writer.command(&command, now);
            scheduler.apply(command, now);
            now.0 += coins.within(0, 50) as u64;
        }
        let batch = scheduler.schedule(now);
        writer.planned(batch.as_ref(), now);
        let idle = batch.is_none();
        if let Some(batch) = batch {
            executor.launch(&batch).expect("a simulated device does not fail");
            let output = executor.collect().expect("it was launched");
            now.0 += coins.within(500, 4000) as u64;
            writer.committed(&output, now);
            scheduler.commit(batch, output, now);
        }
        while let Some(event) = scheduler.next_event() {
            if let Event::Finished { id, .. } = event {
                living.remove(&id);
            }
        }
        chunks.push(writer.take());
        if idle && turn >= 40 {
            break;
        }
    }
    writer.end(0);
    chunks.push(writer.take());
    let stats = scheduler.stats();
    Day { log: sealed(&chunks), chunks, requests, steps: stats.steps, tokens: stats.tokens_generated }
}

fn any_request(
    coins: &mut Coins,
    id: u64,
    limits: &SchedulerConfig,
    now: Time,
    params: Arc<SamplingParams>,
) -> Request {
    let mut tokens = prompt(coins.within(0, 2) as u64, coins.within(1, 40));
    tokens.truncate(limits.layout.longest(limits.blocks, limits.max_model_len).saturating_sub(1).max(1));
    let scores = Wanted::Scores { from: 1 };
    let wanted = *coins.pick(&[Wanted::Tokens, Wanted::Tokens, Wanted::Tokens, Wanted::LastLogits, scores]);
    Request {
        params,
        wanted: if tokens.len() < 2 { Wanted::Tokens } else { wanted },
        seed: coins.next(),
        end_token_ids: [7].into(),
        priority: coins.within(0, 2) as i32 - 1,
        deadline: coins.one_in(6).then(|| Time(now.0 + coins.within(0, 60_000) as u64)),
        cache_salt: (!coins.one_in(4)).then(|| if coins.one_in(3) { "a".into() } else { "".into() }),
        session: coins.one_in(3).then(|| SessionId(coins.next() % SESSIONS)),
        user: (*coins.pick(&["ada", "ben"])).into(),
        arrived: now,
        ..request(id, &tokens, 1)
    }
}

/// Plays a log again; `checked`: and proves the scheduler's invariants on the way.
pub fn play(log: &[u8], tokens: Tokens, checked: bool) -> Result<Report, LogError> {
    let log = Log::new(log, log.len() as u64)?;
    let mut player = Player::new(log, tokens, checked).map_err(|what| LogError::Malformed { at: 0, what })?;
    while player.advance()? {}
    Ok(player.report().clone())
}

fn over(simulated: Simulated) -> Tokens {
    Tokens::Model { executor: Box::new(simulated), grammars: None }
}

fn limits_of(log: &[u8]) -> SchedulerConfig {
    Log::new(log, log.len() as u64).expect("a log").header.limits
}

#[test]
fn a_log_plays_the_same_day_again() {
    let mut bytes_a_token = 0.0f64;
    for seed in 0..200 {
        let day = live(seed);
        for tokens in [Tokens::Recorded, over(executor(&limits_of(&day.log)))] {
            let report = play(&day.log, tokens, true).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            assert_eq!(report.difference, None, "seed {seed}");
            assert_eq!(report.incomplete, None, "seed {seed}");
            assert_eq!((report.requests, report.steps, report.tokens), (day.requests, day.steps, day.tokens));
        }
        bytes_a_token += day.log.len() as f64 / day.tokens.max(1) as f64 / 200.0;
    }
    assert!(bytes_a_token < 70.0, "{bytes_a_token} bytes a token are not compact");
}

#[test]
fn the_first_difference_is_told() {
    let day = (0..).map(live).find(|day| day.tokens > 100).expect("a day with work");
    let limits = limits_of(&day.log);
    // Another model: other tokens, from the first one on.
    let other = Simulated::with_cache(COST, VOCAB - 1, limits.layout.clone(), limits.blocks);
    let difference = play(&day.log, over(other), true).expect("a log").difference.expect("other tokens");
    assert!(difference.wanted.starts_with("token ") && difference.found.starts_with("token "), "{difference}");
    assert!(difference.request.is_some());
    // Another scheduler: other steps.
    let mut writer = LogWriter::default();
    writer.header(&header(SchedulerConfig { max_num_batched_tokens: limits.max_num_seqs, ..limits }));
    let log = sealed([&writer.take()].into_iter().chain(&day.chunks[1..]));
    let difference = play(&log, Tokens::Recorded, true).expect("a log").difference.expect("other steps");
    assert!(difference.wanted.contains("positions"), "{difference}");
}

#[test]
fn a_log_that_was_cut_is_played_as_far_as_it_goes() {
    let day = live(3);
    for len in (0..day.log.len()).step_by(7) {
        match play(&day.log[..len], Tokens::Recorded, true) {
            Err(LogError::Malformed { what, .. }) => assert!(what.contains("no octavo log") || what.contains("ends")),
            Err(error) => panic!("{error}"),
            Ok(report) => {
                assert_eq!(report.difference, None);
                assert!(report.incomplete.is_some_and(|why| why.contains("without saying so")));
            }
        }
    }
    // What is whole is played: all but the last step.
    let report = play(&day.log[..day.log.len() - 40], Tokens::Recorded, true).expect("a log");
    assert!(report.requests == day.requests && report.steps > 0);
}

#[test]
fn damage_is_found_where_it_is() {
    let day = (0..).map(live).find(|day| day.tokens > 30).expect("a day with work");
    let refused = |log: &[u8], what: &str| match play(log, Tokens::Recorded, true) {
        Err(LogError::Damaged { at, .. }) => at,
        other => panic!("{what}: {other:?}"),
    };
    let body = 15;
    for bit in (8 * body..8 * day.log.len()).step_by(37) {
        let mut log = day.log.clone();
        log[bit / 8] ^= 1 << (bit % 8);
        let at = refused(&log, &format!("bit {bit}")) as usize;
        // Of its own chunk, or of the sum after it.
        let chunk = day.chunks.iter().map(Vec::len).max().unwrap_or(0);
        assert!(at <= bit / 8 && bit / 8 <= at + chunk + 8, "bit {bit}, told at byte {at}");
    }
    for appended in [&b"x"[..], &[0; 100], &day.log] {
        let at = refused(&[&day.log[..], appended].concat(), "something after the end");
        assert_eq!(at as usize, day.log.len());
    }
    // A chunk that is as it was, and not where it was.
    let whole: Vec<Vec<u8>> = (0..=day.chunks.len()).map(|count| sealed(&day.chunks[..count])).collect();
    let third = [&whole[2][..], &day.log[whole[3].len()..]].concat();
    refused(&third, "a chunk that is missing");
    refused(&[&whole[3][..], &day.log[whole[2].len()..]].concat(), "a chunk that is there twice");
}

#[test]
fn no_bytes_do_harm() {
    let mut kinds = [0; 3];
    for seed in 0..1500u64 {
        let mut coins = Coins(seed);
        let mut chunks = live(seed % 10).chunks;
        for _ in 0..coins.within(1, 4) {
            let at = if coins.one_in(4) { 0 } else { coins.within(0, chunks.len() - 1) };
            let (chunk, any) = (&mut chunks[at], coins.next() as u8);
            let at = coins.within(0, chunk.len() - 1);
            chunk[at] = *coins.pick(&[0, 1, 0x7f, 0x80, 0xff, b'9', any]);
        }
        // As somebody would write it who wants it read.
        let log = sealed(&chunks);
        let played = std::panic::catch_unwind(|| play(&log, Tokens::Recorded, true));
        match played.unwrap_or_else(|panic| {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic)
        }) {
            Err(_) => kinds[0] += 1,
            Ok(Report { difference: Some(_), .. }) => kinds[1] += 1,
            Ok(_) => kinds[2] += 1,
        }
    }
    println!("malformed, different, played: {kinds:?}");
    assert!(kinds.iter().all(|&count| count > 50), "{kinds:?}");
}

#[test]
fn a_plan_of_impossible_rows_is_a_difference() {
    let mut log = LogWriter::default();
    log.header(&header(config()));
    let mut chunks = vec![log.take()];
    log.command(&Command::Submit(Box::new(request(7, &[1, 2, 3], 1))), Time(5));
    let mut entries = log.take();
    // A plan, at once, of one sequence: as many rows as there are numbers, from the last position that there could be.
    let most = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
    entries.extend([&[4, 0, 1, 7][..], &most, &most].concat());
    chunks.push(entries);
    let report = play(&sealed(&chunks), Tokens::Recorded, true).expect("a log");
    let difference = report.difference.expect("nobody plans that");
    assert!(difference.wanted.contains(&u64::MAX.to_string()), "{difference}");
    assert_eq!(difference.found, "positions 0 to 3 of request 7");
}

#[test]
fn an_empty_prompt_and_one_too_long_are_refused_as_they_were() {
    let limits = config();
    let mut writer = LogWriter::default();
    writer.header(&header(limits));
    let header = writer.take();
    for (id, len) in [(0, 0), (1, 10_000)] {
        writer.command(&Command::Submit(Box::new(request(id, &prompt(1, len), 4))), Time(5));
    }
    writer.planned(None, Time(6));
    writer.end(3);
    let report = play(&sealed([&header, &writer.take()]), Tokens::Recorded, true).expect("a log");
    assert_eq!((report.requests, report.steps, report.difference), (2, 0, None));
    assert!(report.incomplete.is_some_and(|why| why.starts_with("3 entries")));
}

// ---- events ----------------------------------------------------------------------------------------------------------

/// Whoever follows the events knows at every moment which blocks can be found, and where every request is.
#[test]
fn events_tell_the_whole_story() {
    for seed in 0..100 {
        let mut coins = Coins(seed);
        let limits = any_config(&mut coins);
        let mut scheduler = Scheduler::new(limits.clone()).expect("a possible configuration");
        let mut executor = executor(&limits);
        scheduler.watch(true);
        let (mut now, mut story) = (Time(0), Story::default());
        for turn in 0..2000u64 {
            if turn < 60 && coins.one_in(2) {
                let params = SamplingParams { max_tokens: coins.within(1, 30), ..SamplingParams::default() };
                let request = any_request(&mut coins, turn, &limits, now, Arc::new(params));
                scheduler.apply(Command::Submit(Box::new(request)), now);
            }
            if coins.one_in(10) {
                scheduler.apply(Command::Cancel(RequestId(coins.within(0, 60) as u64)), now);
            }
            let batch = scheduler.schedule(now);
            let idle = batch.is_none();
            if let Some(batch) = batch {
                executor.launch(&batch).expect("a simulated device does not fail");
                now.0 += 1000;
                scheduler.commit(batch, executor.collect().expect("it was launched"), now);
            }
            while scheduler.next_event().is_some() {}
            for event in scheduler.take_notes() {
                story.hear(event, limits.layout.block_size);
            }
            if idle && turn > 60 {
                break;
            }
            // A store that a prefix does not reach is one that was never told of.
            now.0 += coins.within(0, 900) as u64;
        }
        assert!(story.living.is_empty(), "seed {seed}: {story:?}");
        assert_eq!(story.ended, scheduler.stats().finished, "seed {seed}");
        assert_eq!(story.preempted, scheduler.stats().preemptions, "seed {seed}");
        scheduler.apply(Command::OpenSession { id: SessionId(0), ttl_ns: 1 }, now);
        assert!(!scheduler.start_over(), "a session is open");
        scheduler.apply(Command::CloseSession(SessionId(0)), now);
        assert!(scheduler.start_over(), "nobody lives");
        let cleared: Vec<_> = scheduler.take_notes().collect();
        assert_eq!(cleared, [EngineEvent::AllBlocksCleared]);
    }
}

#[derive(Debug, Default)]
struct Story {
    /// Waiting, or running.
    living: std::collections::BTreeMap<RequestId, bool>,
    blocks: BTreeSet<(u64, u32)>,
    ended: u64,
    preempted: u64,
}

impl Story {
    fn hear(&mut self, event: EngineEvent, block_size: usize) {
        match event {
            EngineEvent::Queued { id, .. } => assert_eq!(self.living.insert(id, false), None),
            EngineEvent::Admitted { id, .. } => assert_eq!(self.living.insert(id, true), Some(false)),
            EngineEvent::FirstToken { id } => assert!(self.living[&id]),
            EngineEvent::Preempted { id, .. } => {
                assert_eq!(self.living.insert(id, false), Some(true));
                self.preempted += 1;
            }
            EngineEvent::Finished { id, .. } => {
                assert!(self.living.remove(&id).is_some());
                self.ended += 1;
            }
            EngineEvent::BlockStored { hash, token_ids, group, .. } => {
                assert_eq!(token_ids.len(), block_size);
                assert!(self.blocks.insert((hash, group)), "stored twice");
            }
            EngineEvent::BlockRemoved { hash, group } => assert!(self.blocks.remove(&(hash, group)), "never stored"),
            EngineEvent::AllBlocksCleared => self.blocks.clear(),
            EngineEvent::Session { .. } => {}
        }
    }
}
