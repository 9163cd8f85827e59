//! Who may come in: places are counted, and shared by those who want one.
//!
//! `max_num_seqs + max_queue` requests may live. If the place that becomes free were for whoever happens to ask next, a user
//! who asks all the time would get every one, and another who comes back when told to would get none. So a refusal is a
//! *claim*. While it stands, for twice as long as the user was told to stay away, free places are kept for them.
//!
//! From users who would have more than their *share*, all places by the number of users who are here or have a claim, they are
//! kept up to the claimant's share; no more than the queue has, or were asked for. Users within their share, and who have
//! nothing yet and want more than it at once, come in the order in which they were first refused: a place in the queue is kept
//! for what was asked for earlier, and one in which a request would run at once for whoever is due just now, since it would
//! stay empty for all others. So everybody may fill the queue while nobody else wants to wait, nobody who was taken is sent
//! away for others, whoever obeys is let in, and who never comes back keeps nobody out for long.
//!
//! Within a user a claim keeps its places from calls of lower priority.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::limits;
use crate::request::Time;
use crate::schedule::SchedulerConfig;

/// A claim stands at least so long, in nanoseconds: who was told to come back in a millisecond may need some.
const LEAST_CLAIM_NS: u64 = 100_000_000;
/// The most claims that stand at a time.
const MOST_CLAIMS: usize = 1024;

/// A call that wants to come in.
#[derive(Clone, Debug)]
pub struct Call {
    /// Whose it is.
    pub user: Arc<str>,
    /// Higher goes first.
    pub priority: i32,
    /// How many requests it is.
    pub count: usize,
}

/// Who is there when a call comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// All that run or wait.
    pub living: usize,
    /// Of its own user, at its priority and above.
    pub own: usize,
    /// Of others at its priority, as many of each as of its own user: those take turns with it.
    pub alike: usize,
    /// Of others above its priority.
    pub above: usize,
    /// Other users who have more at its priority than it has at its and above.
    pub others: usize,
}

/// There is no place for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Requests that run or wait.
    pub living: usize,
    /// Places that are kept for others.
    pub kept: usize,
    /// How many have to end before there is one.
    pub ends: usize,
}

/// A user who has requests here, or a claim.
#[derive(Debug, Default)]
struct Guest {
    /// Requests at each priority.
    living: BTreeMap<i32, usize>,
    held: usize,
    /// One for each priority at most.
    claims: BTreeMap<i32, Claim>,
}

#[derive(Clone, Copy, Debug)]
struct Claim {
    /// As many as were asked for last.
    count: usize,
    /// When it was refused first.
    since: Time,
    /// When it was told to come back.
    due: Time,
    until: Time,
    /// What it stood for is here. What else its user's share has is still kept from those who have more than theirs.
    met: bool,
}

impl Claim {
    /// Its owner was told to come back about now.
    fn is_due(&self, now: Time) -> bool {
        self.due <= now && now.since(self.due) < LEAST_CLAIM_NS
    }
}

impl Guest {
    fn unmet(&self) -> impl Iterator<Item = (i32, &Claim)> {
        self.claims.iter().filter(|(_, claim)| !claim.met).map(|(priority, claim)| (*priority, claim))
    }
}

/// Counts of those who came in, and claims of those who could not.
#[derive(Debug, Default)]
pub struct Door {
    living: usize,
    guests: HashMap<Arc<str>, Guest>,
    /// By when they end: whose, and at which priority.
    claims: BTreeSet<(Time, Arc<str>, i32)>,
}

impl Door {
    /// Takes a place for each request of a call, or none. Says who was there before.
    pub fn enter(&mut self, config: &SchedulerConfig, call: &Call, now: Time) -> Result<Ahead, Full> {
        self.forget_claims(now);
        let (living, kept) = (self.living, self.kept_from(config, call, now));
        let ends = (living + kept + call.count).saturating_sub(limits::most_living(config));
        if ends > 0 {
            return Err(Full { living, kept, ends });
        }
        let ahead = self.ahead(call);
        let guest = self.guests.entry(call.user.clone()).or_default();
        *guest.living.entry(call.priority).or_default() += call.count;
        guest.held += call.count;
        for (_, claim) in guest.claims.range_mut(..=call.priority) {
            (claim.count, claim.met) = (1, true);
        }
        self.living += call.count;
        Ok(ahead)
    }

    /// A call was refused, and told to come back after so many nanoseconds.
    pub fn claim(&mut self, call: &Call, now: Time, retry_after_ns: u64) {
        let after = |ns: u64| Time(now.0.saturating_add(ns));
        let until = after(retry_after_ns.saturating_mul(2).max(LEAST_CLAIM_NS));
        let guest = self.guests.get_mut(&call.user);
        let old = guest.and_then(|guest| guest.claims.remove(&call.priority));
        if let Some(old) = old {
            self.claims.remove(&(old.until, call.user.clone(), call.priority));
        }
        if self.claims.len() < MOST_CLAIMS {
            let since = old.filter(|old| !old.met).map_or(now, |old| old.since);
            let claim = Claim { count: call.count, since, due: after(retry_after_ns), until, met: false };
            self.guests.entry(call.user.clone()).or_default().claims.insert(call.priority, claim);
            self.claims.insert((until, call.user.clone(), call.priority));
        }
    }

    /// A request has ended.
    pub fn leave(&mut self, user: &Arc<str>, priority: i32) {
        let guest = self.guests.get_mut(user).expect("who leaves was here");
        let living = guest.living.get_mut(&priority).expect("who leaves was here");
        *living -= 1;
        if *living == 0 {
            guest.living.remove(&priority);
        }
        guest.held -= 1;
        self.living -= 1;
        self.forget(user);
    }

    /// Requests that run or wait.
    pub fn living(&self) -> usize {
        self.living
    }

    /// Users who are known.
    pub fn guests(&self) -> usize {
        self.guests.len()
    }

    fn forget_claims(&mut self, now: Time) {
        while let Some((until, ..)) = self.claims.first()
            && *until <= now
            && let Some((_, user, priority)) = self.claims.pop_first()
        {
            if let Some(guest) = self.guests.get_mut(&user) {
                guest.claims.remove(&priority);
            }
            self.forget(&user);
        }
    }

    fn forget(&mut self, user: &Arc<str>) {
        if self.guests.get(user).is_some_and(|guest| guest.held == 0 && guest.claims.is_empty()) {
            self.guests.remove(user);
        }
    }

    /// Places that a call may not have although nobody is in them.
    fn kept_from(&self, config: &SchedulerConfig, call: &Call, now: Time) -> usize {
        let own = self.guests.get(&call.user);
        let of_own = || own.into_iter().flat_map(Guest::unmet);
        let for_own: usize = of_own().filter(|(at, _)| *at > call.priority).map(|(_, claim)| claim.count).sum();
        let users = self.guests.len() + usize::from(own.is_none());
        let share = (limits::most_living(config) / users).max(1);
        let held = own.map_or(0, |own| own.held);
        let for_others = if held > 0 && held + call.count > share {
            self.for_shares(config, call, share)
        } else {
            let first = of_own().filter(|(at, _)| *at <= call.priority).map(|(_, claim)| claim.since).min();
            self.for_earlier(config, call, share, first.unwrap_or(now), now)
        };
        for_own + for_others
    }

    /// Others who have claims, and less than their share.
    fn claimants(&self, call: &Call, share: usize) -> impl Iterator<Item = &Guest> {
        // Everybody once, by the first of their claims.
        let is_first = |(_, user, priority): &&(Time, Arc<str>, i32)| {
            self.guests
                .get(user)
                .is_some_and(|guest| guest.claims.first_key_value().map(|(at, _)| at) == Some(priority))
        };
        let others = self.claims.iter().filter(|(_, user, _)| *user != call.user).filter(is_first);
        others.filter_map(|(_, user, _)| self.guests.get(user)).filter(move |guest| guest.held < share)
    }

    /// What is kept from who would have more than their share.
    fn for_shares(&self, config: &SchedulerConfig, call: &Call, share: usize) -> usize {
        let (mut lacking, mut asked) = (0, 0);
        for guest in self.claimants(call, share) {
            let count = guest.claims.values().map(|claim| claim.count).max().unwrap_or(0);
            lacking += (share - guest.held).max(count);
            asked += count;
        }
        lacking.min(asked.max(config.max_queue))
    }

    /// What is kept from who was first refused at `first`, or comes new.
    fn for_earlier(&self, config: &SchedulerConfig, call: &Call, share: usize, first: Time, now: Time) -> usize {
        let would_wait = self.living + call.count > config.max_num_seqs;
        let earlier = |guest: &Guest| {
            let counts = guest.unmet().filter(|(_, claim)| claim.since < first && (would_wait || claim.is_due(now)));
            let (sum, most) = counts.fold((0, 0), |(sum, most): (usize, usize), (_, claim)| {
                (sum.saturating_add(claim.count), most.max(claim.count))
            });
            sum.min(most.max(share - guest.held))
        };
        self.claimants(call, share).map(earlier).sum()
    }

    fn ahead(&self, call: &Call) -> Ahead {
        let at_least = |guest: &Guest| guest.living.range(call.priority..).map(|(_, count)| count).sum::<usize>();
        let own = self.guests.get(&call.user).map_or(0, at_least);
        let mut ahead = Ahead { living: self.living, own, ..Ahead::default() };
        for guest in self.guests.iter().filter(|(user, _)| **user != call.user).map(|(_, guest)| guest) {
            let alike = guest.living.get(&call.priority).copied().unwrap_or(0);
            ahead.alike += alike.min(own);
            ahead.others += usize::from(alike > own);
            ahead.above += at_least(guest) - alike;
        }
        ahead
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvLayout;

    fn config(max_num_seqs: usize, max_queue: usize) -> SchedulerConfig {
        SchedulerConfig {
            max_num_seqs,
            max_num_batched_tokens: max_num_seqs,
            max_queue,
            max_model_len: 100,
            layout: KvLayout::new(4),
            blocks: 100,
            itl_target_ns: None,
        }
    }

    fn call(user: &str, priority: i32, count: usize) -> Call {
        Call { user: user.into(), priority, count }
    }

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn one_user_may_have_every_place_while_nobody_else_wants_one() {
        let (config, mut door) = (config(4, 8), Door::default());
        for _ in 0..12 {
            door.enter(&config, &call("a", 0, 1), Time(0)).expect("there is room");
        }
        let full = door.enter(&config, &call("a", 0, 2), Time(0));
        assert_eq!(full, Err(Full { living: 12, kept: 0, ends: 2 }));
        assert_eq!((door.living(), door.guests()), (12, 1));
    }

    #[test]
    fn what_becomes_free_is_kept_for_who_was_refused_up_to_its_share_and_for_some_time() {
        let (config, mut door) = (config(4, 8), Door::default());
        door.enter(&config, &call("a", 0, 12), Time(0)).expect("there is room");
        let full = door.enter(&config, &call("b", 0, 1), Time(0)).expect_err("it is full");
        assert_eq!(full.ends, 1);
        door.claim(&call("b", 0, 1), Time(0), SECOND);
        door.leave(&"a".into(), 0);
        let full = door.enter(&config, &call("a", 0, 1), Time(SECOND)).expect_err("kept");
        assert_eq!(full, Full { living: 11, kept: 6, ends: 6 });
        door.enter(&config, &call("b", 0, 1), Time(SECOND)).expect("kept for it");
        (0..6).for_each(|_| door.leave(&"a".into(), 0));
        assert!(door.enter(&config, &call("a", 0, 1), Time(SECOND)).is_ok(), "its own share");
        assert_eq!(door.enter(&config, &call("a", 0, 1), Time(SECOND)).expect_err("kept").kept, 5);
        assert!(door.enter(&config, &call("a", 0, 2), Time(2 * SECOND)).is_ok(), "the claim is over");
    }

    #[test]
    fn a_claim_is_for_as_many_places_as_were_asked_for_and_goes_by_priority_within_a_user() {
        let (config, mut door) = (config(4, 0), Door::default());
        door.enter(&config, &call("a", 0, 4), Time(0)).expect("there is room");
        door.claim(&call("b", 0, 2), Time(0), SECOND);
        (0..2).for_each(|_| door.leave(&"a".into(), 0));
        assert_eq!(door.enter(&config, &call("a", 0, 1), Time(1)).expect_err("kept").kept, 2);
        door.enter(&config, &call("b", 0, 2), Time(1)).expect("kept for it");
        door.claim(&call("b", 7, 1), Time(1), SECOND);
        door.leave(&"b".into(), 0);
        assert!(door.enter(&config, &call("b", 6, 1), Time(1)).is_err());
        assert!(door.enter(&config, &call("b", 7, 1), Time(1)).is_ok());
    }

    #[test]
    fn whoever_wants_more_than_a_share_at_once_is_let_in_by_an_idle_engine() {
        for (max_num_seqs, max_queue, users, count) in [(2, 0, 2, 2), (2, 2, 6, 2), (64, 1024, 200, 8), (4, 4, 9, 8)] {
            let (config, mut door) = (config(max_num_seqs, max_queue), Door::default());
            let most = max_num_seqs + max_queue;
            door.enter(&config, &call("x", 0, most), Time(0)).expect("there is room");
            let calls: Vec<Call> = (0..users).map(|user| call(&format!("user {user}"), 0, count)).collect();
            let refused = |door: &mut Door, call: &Call, now: Time| {
                let refused = door.enter(&config, call, now).is_err();
                if refused {
                    door.claim(call, now, SECOND);
                }
                refused
            };
            for (i, call) in calls.iter().enumerate() {
                assert!(refused(&mut door, call, Time(i as u64)));
            }
            (0..most).for_each(|_| door.leave(&"x".into(), 0));
            // They come back when told to, again and again, and are gone soon after they came in.
            let mut waiting = calls;
            for round in 1..=users as u64 {
                let mut come_in = Vec::new();
                waiting.retain(|call| {
                    let stays = refused(&mut door, call, Time(round * (SECOND + 1000)));
                    if !stays {
                        come_in.push(call.user.clone());
                    }
                    stays
                });
                assert!(waiting.is_empty() || come_in.len() * count + count > max_num_seqs, "places stay empty");
                come_in.iter().for_each(|user| (0..count).for_each(|_| door.leave(user, 0)));
            }
            assert!(waiting.is_empty(), "{} of {users} never came in", waiting.len());
        }
    }

    #[test]
    fn users_within_their_share_come_in_in_the_order_in_which_they_were_refused() {
        let (config, mut door) = (config(2, 2), Door::default());
        for user in ["a", "b", "c", "d"] {
            door.enter(&config, &call(user, 0, 1), Time(0)).expect("there is room");
        }
        for (now, user) in [(1, "e"), (2, "f")] {
            door.enter(&config, &call(user, 0, 1), Time(now)).expect_err("it is full");
            door.claim(&call(user, 0, 1), Time(now), SECOND);
        }
        door.leave(&"a".into(), 0);
        for user in ["a", "f", "new"] {
            assert!(door.enter(&config, &call(user, 0, 1), Time(3)).is_err(), "the place is kept for e");
        }
        // Asking again and again makes nobody later or earlier.
        door.claim(&call("e", 0, 1), Time(4), SECOND);
        door.enter(&config, &call("e", 0, 1), Time(5)).expect("its turn");
    }

    #[test]
    fn where_a_request_would_run_at_once_nobody_is_waited_for_who_is_not_due() {
        let (config, mut door) = (config(2, 0), Door::default());
        for user in ["a", "b"] {
            door.enter(&config, &call(user, 0, 1), Time(0)).expect("there is room");
        }
        door.claim(&call("f", 0, 1), Time(0), SECOND);
        door.leave(&"a".into(), 0);
        door.enter(&config, &call("new", 0, 1), Time(1)).expect("it runs");
        door.leave(&"new".into(), 0);
        for (now, is_kept) in [(SECOND, true), (SECOND + LEAST_CLAIM_NS - 1, true), (SECOND + LEAST_CLAIM_NS, false)] {
            assert_eq!(door.enter(&config, &call("g", 0, 1), Time(now)).is_err(), is_kept, "at {now}");
        }
    }

    #[test]
    fn a_claim_lasts_no_longer_for_others_of_its_user() {
        let (config, mut door) = (config(2, 0), Door::default());
        door.enter(&config, &call("x", 0, 2), Time(0)).expect("there is room");
        door.claim(&call("a", 5, 2), Time(0), SECOND);
        (0..2).for_each(|_| door.leave(&"x".into(), 0));
        for now in [1, SECOND, 2 * SECOND - 1] {
            assert!(door.enter(&config, &call("a", 0, 1), Time(now)).is_err(), "it has a better one");
            door.claim(&call("a", 0, 1), Time(now), SECOND);
        }
        door.enter(&config, &call("a", 0, 1), Time(2 * SECOND)).expect("the better one never came");
        // Nor is one for many places renewed as that by a call for one.
        door.claim(&call("b", 0, 2), Time(2 * SECOND), SECOND);
        door.claim(&call("b", 0, 1), Time(2 * SECOND), SECOND);
        assert_eq!(door.guests["b"].claims[&0].count, 1);
    }

    #[test]
    fn who_is_ahead_goes_by_turns() {
        let (config, mut door) = (config(50, 50), Door::default());
        for (user, priority, count) in [("a", 0, 30), ("b", 0, 3), ("b", 2, 4), ("c", 1, 6), ("c", -1, 9)] {
            door.enter(&config, &call(user, priority, count), Time(0)).expect("there is room");
        }
        let ahead = |user, priority| door.ahead(&call(user, priority, 1));
        assert_eq!(ahead("a", 0), Ahead { living: 52, own: 30, alike: 3, above: 10, others: 0 });
        assert_eq!(ahead("b", 0), Ahead { living: 52, own: 7, alike: 7, above: 6, others: 1 });
        assert_eq!(ahead("new", 0), Ahead { living: 52, own: 0, alike: 0, above: 10, others: 2 });
        assert_eq!(ahead("new", -2), Ahead { living: 52, own: 0, alike: 0, above: 52, others: 0 });
    }

    #[test]
    fn nobody_is_remembered_for_long_and_claims_are_bounded() {
        let (config, mut door) = (config(1, 0), Door::default());
        door.enter(&config, &call("a", 0, 1), Time(0)).expect("there is room");
        for user in 0..3 * MOST_CLAIMS {
            door.claim(&call(&format!("user {user}"), 0, 1), Time(0), SECOND);
        }
        assert_eq!(door.guests(), 1 + MOST_CLAIMS);
        door.leave(&"a".into(), 0);
        door.enter(&config, &call("b", 0, 1), Time(2 * SECOND)).expect("claims are over");
        assert_eq!((door.guests(), door.claims.len()), (1, 0));
    }
}
