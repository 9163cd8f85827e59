//! Numbers at the ends of their types, and nobody who is harmed by them.

use std::sync::Arc;

use octavo::request::{Finish, Request, SamplingParams, SessionId, Time};
use octavo::schedule::{Command, SchedulerConfig};
use octavo::stages::queue::door::{Call, Door};

use crate::world::{Coins, World, config, prompt, request};

#[test]
fn whatever_the_numbers_everybody_comes_to_one_end() {
    for seed in 0..200 {
        println!("seed {seed}");
        let mut coins = Coins(seed);
        let itl_target_ns = *coins.pick(&[None, Some(0), Some(1), Some(2000), Some(u64::MAX)]);
        let mut world = World::new(SchedulerConfig { itl_target_ns, ..config() });
        for session in 0..3 {
            let ttl_ns = *coins.pick(&[0, 1, 5000, u64::MAX]);
            world.apply(Command::OpenSession { id: SessionId(session), ttl_ns });
        }
        for id in 0..40 {
            let deadline = *coins.pick(&[None, Some(Time(0)), Some(world.now), Some(Time(u64::MAX))]);
            let max_tokens = *coins.pick(&[1, 3, usize::MAX - 1, usize::MAX]);
            let params = SamplingParams { temperature: 0.0, max_tokens, ..Default::default() };
            let turn = coins.one_in(4).then(|| SessionId(coins.next() % 3));
            world.submit(Request {
                params: Arc::new(params),
                priority: *coins.pick(&[i32::MIN, -1, 0, 1, i32::MAX]),
                deadline,
                session: turn,
                user: format!("user {}", coins.within(0, 3)).into(),
                ..request(id, &prompt(coins.next() % 5, coins.within(1, 30)), 1)
            });
            for _ in 0..coins.within(0, 20) {
                world.step();
            }
            if deadline.is_some_and(|deadline| deadline <= world.now) && world.step() {
                let outcome = &world.outcomes[&octavo::request::RequestId(id)];
                assert!(matches!(outcome.end, Some((Finish::Deadline, _) | (Finish::Length, _))), "{outcome:?}");
            }
        }
        world.finish(20_000);
    }
}

#[test]
fn a_door_counts_calls_of_any_priority_and_claims_of_any_length() {
    let config = SchedulerConfig { max_num_seqs: 2, max_queue: 0, ..config() };
    let mut door = Door::default();
    let call = |user: &str, priority| Call { user: user.into(), priority, count: 1 };
    for priority in [i32::MIN, i32::MAX] {
        door.enter(&config, &call("a", priority), Time(u64::MAX)).expect("there is room");
    }
    for retry_after_ns in [0, u64::MAX] {
        door.claim(&call("b", i32::MAX), Time(u64::MAX - 1), retry_after_ns);
    }
    assert!(door.enter(&config, &call("b", i32::MIN), Time(0)).is_err());
    door.leave(&"a".into(), i32::MIN);
    assert!(door.enter(&config, &call("b", i32::MIN), Time(0)).is_err(), "its own claim has a higher priority");
    let ahead = door.enter(&config, &call("b", i32::MAX), Time(0)).expect("it is its place");
    assert_eq!((ahead.living, ahead.own, ahead.above), (1, 0, 0));
}
