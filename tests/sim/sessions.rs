//! Conversations that keep their blocks between turns.

use octavo::kv::{KvLayout, PinFate, SessionReport};
use octavo::request::{Request, RequestId, SessionId, Time};
use octavo::schedule::{Command, SchedulerConfig};

use crate::world::{World, alone, config, prompt, request};

const S: SessionId = SessionId(1);
const TTL: u64 = 1_000_000_000;

fn open(world: &mut World, id: SessionId) {
    world.apply(Command::OpenSession { id, ttl_ns: TTL });
}

/// Runs a turn to its end, and holds it to what it would get alone.
fn turn(world: &mut World, session: SessionId, tokens: &[u32], max_tokens: usize) -> RequestId {
    let turn = Request {
        session: Some(session),
        arrived: world.now,
        ..request(world.outcomes.len() as u64, tokens, max_tokens)
    };
    let id = world.submit(turn.clone());
    world.finish(1000);
    assert_eq!(world.outcome(id).tokens, alone(&config(), &turn).tokens, "the answer does not depend on what was kept");
    id
}

/// The prompt of the next turn: all that was said, and something new.
fn next(world: &World, before: &[u32], turn: RequestId, new: &[u32]) -> Vec<u32> {
    [before, &world.outcome(turn).tokens, new].concat()
}

fn report(world: &mut World, session: SessionId) -> SessionReport {
    world.scheduler.session(session, world.now).expect("it is open")
}

fn fates(report: &SessionReport) -> Vec<PinFate> {
    report.events.iter().map(|event| event.fate).collect()
}

#[test]
fn the_next_turn_computes_only_new_tokens() {
    let windows = [vec![None], vec![Some(7), None], vec![Some(3)]];
    for (windows, salt) in windows.into_iter().flat_map(|windows| [(windows.clone(), true), (windows, false)]) {
        for length in 1..=9 {
            let layout = KvLayout { block_size: 4, windows: windows.clone() };
            let mut world = World::new(SchedulerConfig { layout, ..config() });
            open(&mut world, S);
            let mut tokens = prompt(1, length);
            let mut known = 0;
            for round in 0..4 {
                let turn = Request {
                    session: Some(S),
                    // Without a namespace nothing can be found, and what is kept is there all the same.
                    cache_salt: salt.then(|| "".into()),
                    ..request(round, &tokens, 5 + round as usize)
                };
                let id = world.submit(turn.clone());
                world.finish(100);
                let got = world.outcome(id);
                assert_eq!(got.tokens, alone(&config(), &turn).tokens, "{windows:?} {length} {round}");
                assert_eq!(got.record().cached_tokens, known, "{windows:?} {length} {round}: what was kept");
                assert_eq!(got.record().kept, (round > 0).then_some(PinFate::Kept).map(|_| PinFate::Resumed));
                // The last token was drawn and not run.
                known = tokens.len() + got.tokens.len() - 1;
                tokens = next(&world, &tokens, id, &prompt(9 + round, 1 + round as usize));
                assert_eq!(report(&mut world, S).tokens, known);
            }
        }
    }
}

#[test]
fn what_nobody_comes_back_to_is_given_up_in_time_and_says_so() {
    let mut world = World::new(config());
    open(&mut world, S);
    let first = turn(&mut world, S, &prompt(1, 10), 5);
    let kept = report(&mut world, S);
    assert_eq!((kept.tokens, kept.blocks), (14, 4));
    assert_eq!(world.scheduler.next_expiry().map(|due| due.since(world.now)), kept.expires_in_ns);
    world.now.0 += TTL / 2;
    let rent = report(&mut world, S).rent_block_ns - kept.rent_block_ns;
    assert_eq!(rent, 4 * u128::from(TTL / 2), "four blocks, half a second");
    assert_eq!(world.scheduler.stats().blocks_pinned, 4);
    world.now.0 += TTL;
    world.scheduler.schedule(world.now);
    let after = report(&mut world, S);
    assert_eq!((after.tokens, after.blocks, after.expires_in_ns), (0, 0, None));
    assert_eq!(fates(&after), [PinFate::Kept, PinFate::Expired]);
    assert_eq!(world.scheduler.stats().blocks_pinned, 0);
    let tokens = next(&world, &prompt(1, 10), first, &[1]);
    let again = turn(&mut world, S, &tokens, 2);
    assert_eq!(world.outcome(again).record().kept, Some(PinFate::Expired));
    assert_eq!(world.outcome(again).record().cached_tokens, 12, "its full blocks were still remembered");
}

#[test]
fn running_requests_win_and_the_oldest_pin_goes_first() {
    let mut world = World::new(SchedulerConfig { blocks: 20, max_model_len: 80, ..config() });
    let other = SessionId(2);
    open(&mut world, S);
    open(&mut world, other);
    turn(&mut world, S, &prompt(1, 10), 7);
    turn(&mut world, other, &prompt(2, 10), 7);
    assert_eq!(world.scheduler.stats().blocks_pinned, 8);
    // 16 of 20 blocks.
    let large = request(7, &prompt(3, 50), 14);
    let id = world.submit(large.clone());
    world.finish(100);
    assert_eq!(world.outcome(id).tokens, alone(&config(), &large).tokens);
    assert_eq!(world.outcome(id).record().preemptions, 0, "a pin goes before anybody loses blocks");
    assert_eq!(fates(&report(&mut world, S)), [PinFate::Kept, PinFate::Evicted]);
    assert_eq!(fates(&report(&mut world, other)), [PinFate::Kept], "one was enough");
    // All of it.
    let id = world.submit(request(8, &prompt(4, 70), 9));
    world.finish(100);
    assert_eq!(world.outcome(id).tokens.len(), 9);
    assert_eq!(fates(&report(&mut world, other)), [PinFate::Kept, PinFate::Evicted]);
}

#[test]
fn a_pin_does_not_go_where_that_lets_nobody_in() {
    let mut world = World::new(SchedulerConfig { blocks: 20, max_model_len: 80, ..config() });
    open(&mut world, S);
    turn(&mut world, S, &prompt(1, 10), 2);
    // 12 of the 17 blocks that are left.
    let long = world.submit(request(7, &prompt(3, 40), 8));
    (0..4).for_each(|_| _ = world.step());
    let waiting = world.submit(request(8, &prompt(4, 60), 4));
    (0..3).for_each(|_| _ = world.step());
    assert_eq!(world.scheduler.stats().waiting, 1);
    assert_eq!(fates(&report(&mut world, S)), [PinFate::Kept]);
    world.finish(100);
    assert_eq!([long, waiting].map(|id| world.outcome(id).tokens.len()), [8, 4]);
}

#[test]
fn pins_hold_at_most_half_of_the_pool() {
    let mut world = World::new(SchedulerConfig { blocks: 20, max_model_len: 80, ..config() });
    for id in 0..4 {
        open(&mut world, SessionId(id));
        turn(&mut world, SessionId(id), &prompt(id, 12), 5);
    }
    // Four blocks each, and ten may be held.
    assert_eq!(world.scheduler.stats().blocks_pinned, 8);
    for id in 0..2 {
        assert_eq!(fates(&report(&mut world, SessionId(id))), [PinFate::Kept, PinFate::OverLimit]);
    }
    turn(&mut world, SessionId(3), &prompt(9, 50), 5);
    let long = report(&mut world, SessionId(3));
    assert_eq!((long.tokens, fates(&long).last()), (0, Some(&PinFate::OverLimit)), "longer than all pins may be");
    assert_eq!(world.scheduler.stats().blocks_pinned, 4, "and nobody else loses anything by it");
}

#[test]
fn a_turn_that_goes_on_otherwise_finds_whole_blocks() {
    let mut world = World::new(config());
    open(&mut world, S);
    let first = turn(&mut world, S, &prompt(1, 10), 5);
    let mut tokens = next(&world, &prompt(1, 10), first, &[1, 2, 3]);
    tokens[9] = (tokens[9] + 1) % 50;
    let second = turn(&mut world, S, &tokens, 3);
    assert_eq!(world.outcome(second).record().kept, Some(PinFate::Diverged));
    assert_eq!(world.outcome(second).record().cached_tokens, 8);
    let events = report(&mut world, S).events;
    assert_eq!(events[1].tokens, 9, "nine tokens were the same");
    // Another namespace is another conversation, whatever the session.
    let foreign = Request { session: Some(S), cache_salt: Some("tenant".into()), ..request(9, &tokens, 3) };
    let id = world.submit(foreign);
    world.finish(100);
    assert_eq!(
        (world.outcome(id).record().kept, world.outcome(id).record().cached_tokens),
        (Some(PinFate::Diverged), 0)
    );
}

#[test]
fn a_turn_that_was_given_up_is_gone_on_from_too() {
    let mut world = World::new(config());
    open(&mut world, S);
    let id = world.submit(Request { session: Some(S), ..request(0, &prompt(1, 10), 50) });
    (0..6).for_each(|_| _ = world.step());
    world.cancel(id);
    world.finish(10);
    let said = world.outcome(id).tokens.len();
    assert_eq!(report(&mut world, S).tokens, 10 + said - 1);
    world.apply(Command::CloseSession(S));
    world.apply(Command::CloseSession(S));
    assert_eq!(world.scheduler.session(S, world.now), None);
    let stats = world.scheduler.stats();
    assert_eq!((stats.sessions, stats.blocks_pinned, stats.blocks_owned), (0, 0, 0));
    // A turn of a session that is closed is a request like any other.
    let late = world.submit(Request { session: Some(S), ..request(1, &prompt(1, 10), 3) });
    world.finish(10);
    assert_eq!((world.outcome(late).record().kept, world.scheduler.stats().blocks_owned), (None, 0));
}

#[test]
fn an_error_keeps_nothing() {
    let mut world = World::new(config());
    open(&mut world, S);
    turn(&mut world, S, &prompt(1, 10), 5);
    world.submit(Request { session: Some(S), arrived: Time(0), ..request(5, &prompt(1, 12), 5) });
    world.fail_all("gone");
    assert_eq!(world.scheduler.stats().blocks_pinned, 4, "what was kept had not been taken over");
}

#[test]
fn what_is_kept_between_turns_is_its_users_hold() {
    let mut world = World::new(config());
    open(&mut world, S);
    let of = |user: &str, id, tokens: &[u32], max_tokens| Request {
        session: (user == "a").then_some(S),
        user: user.into(),
        ..request(id, tokens, max_tokens)
    };
    world.submit(of("a", 0, &prompt(1, 10), 5));
    world.finish(100);
    let before = world.scheduler.served("a").expect("it was served");
    let steps = world.scheduler.stats().steps;
    world.submit(of("b", 1, &prompt(2, 4), 100));
    world.finish(200);
    let steps = world.scheduler.stats().steps - steps;
    // A 64th of a token of a prompt for each of four blocks and every step, though nobody has come back.
    assert_eq!(world.scheduler.served("a").map(|served| served - before), Some(4.0 * steps as f64 / 64.0));
}
