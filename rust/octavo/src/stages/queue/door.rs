//! Who may come in: places are counted, and shared by those who want one.
//!
//! `max_num_seqs + max_queue` requests may live. If the place that becomes free were for whoever happens to ask next, a user
//! who asks all the time would get every one, and another who comes back when told to would get none. So a refusal is a
//! *claim*. While it stands, for twice as long as the user was told to stay away, free places are kept for them up to their
//! *share*, all places by the number of users who are here or have a claim. They are kept from users who would have more than
//! that, and no more than the queue has, or were asked for: who may run runs. So everybody may fill the queue while nobody
//! else wants to wait, nobody who was taken is sent away for others, and whoever obeys is let in.
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
    claim: Option<Claim>,
}

#[derive(Clone, Copy, Debug)]
struct Claim {
    count: usize,
    priority: i32,
    until: Time,
}

/// Counts of those who came in, and claims of those who could not.
#[derive(Debug, Default)]
pub struct Door {
    living: usize,
    guests: HashMap<Arc<str>, Guest>,
    /// By when they end.
    claims: BTreeSet<(Time, Arc<str>)>,
}

impl Door {
    /// Takes a place for each request of a call, or none. Says who was there before.
    pub fn enter(&mut self, config: &SchedulerConfig, call: &Call, now: Time) -> Result<Ahead, Full> {
        self.forget_claims(now);
        let (living, kept) = (self.living, self.kept_from(config, call));
        let ends = (living + kept + call.count).saturating_sub(limits::most_living(config));
        if ends > 0 {
            return Err(Full { living, kept, ends });
        }
        let ahead = self.ahead(call);
        let guest = self.guests.entry(call.user.clone()).or_default();
        *guest.living.entry(call.priority).or_default() += call.count;
        guest.held += call.count;
        if let Some(claim) = guest.claim.as_mut().filter(|claim| claim.priority <= call.priority) {
            // What it stood for is here.
            (claim.count, claim.priority) = (1, i32::MIN);
        }
        self.living += call.count;
        Ok(ahead)
    }

    /// A call was refused, and told to come back after so many nanoseconds.
    pub fn claim(&mut self, call: &Call, now: Time, retry_after_ns: u64) {
        let guest = self.guests.get_mut(&call.user);
        let (mut count, mut priority) = (call.count, call.priority);
        if let Some(old) = guest.and_then(|guest| guest.claim.take()) {
            self.claims.remove(&(old.until, call.user.clone()));
            (count, priority) = (count.max(old.count), priority.max(old.priority));
        }
        if self.claims.len() < MOST_CLAIMS {
            let until = Time(now.0.saturating_add(retry_after_ns.saturating_mul(2).max(LEAST_CLAIM_NS)));
            self.guests.entry(call.user.clone()).or_default().claim = Some(Claim { count, priority, until });
            self.claims.insert((until, call.user.clone()));
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
        while let Some((until, _)) = self.claims.first()
            && *until <= now
            && let Some((_, user)) = self.claims.pop_first()
        {
            if let Some(guest) = self.guests.get_mut(&user) {
                guest.claim = None;
            }
            self.forget(&user);
        }
    }

    fn forget(&mut self, user: &Arc<str>) {
        if self.guests.get(user).is_some_and(|guest| guest.held == 0 && guest.claim.is_none()) {
            self.guests.remove(user);
        }
    }

    /// Places that a call may not have although nobody is in them.
    fn kept_from(&self, config: &SchedulerConfig, call: &Call) -> usize {
        let own = self.guests.get(&call.user);
        let claim = own.and_then(|own| own.claim).filter(|claim| claim.priority > call.priority);
        let for_own = claim.map_or(0, |claim| claim.count);
        let users = self.guests.len() + usize::from(own.is_none());
        let share = (limits::most_living(config) / users).max(1);
        if own.map_or(0, |own| own.held) + call.count <= share {
            return for_own;
        }
        let (mut lacking, mut asked) = (0, 0);
        for (_, user) in self.claims.iter().filter(|(_, user)| *user != call.user) {
            if let Some(Guest { held, claim: Some(claim), .. }) = self.guests.get(user)
                && *held < share
            {
                lacking += (share - held).max(claim.count);
                asked += claim.count;
            }
        }
        for_own + lacking.min(asked.max(config.max_queue))
    }

    fn ahead(&self, call: &Call) -> Ahead {
        let at_least = |guest: &Guest| guest.living.range(call.priority..).map(|(_, count)| count).sum::<usize>();
        let own = self.guests.get(&call.user).map_or(0, at_least);
        let mut ahead = Ahead { living: self.living, own, ..Ahead::default() };
        for guest in self.guests.iter().filter(|(user, _)| **user != call.user).map(|(_, guest)| guest) {
            let alike = guest.living.get(&call.priority).copied().unwrap_or(0);
            ahead.alike += alike.min(own);
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
    fn who_is_ahead_goes_by_turns() {
        let (config, mut door) = (config(50, 50), Door::default());
        for (user, priority, count) in [("a", 0, 30), ("b", 0, 3), ("b", 2, 4), ("c", 1, 6), ("c", -1, 9)] {
            door.enter(&config, &call(user, priority, count), Time(0)).expect("there is room");
        }
        let ahead = |user, priority| door.ahead(&call(user, priority, 1));
        assert_eq!(ahead("a", 0), Ahead { living: 52, own: 30, alike: 3, above: 10 });
        assert_eq!(ahead("b", 0), Ahead { living: 52, own: 7, alike: 7, above: 6 });
        assert_eq!(ahead("new", 0), Ahead { living: 52, own: 0, alike: 0, above: 10 });
        assert_eq!(ahead("new", -2), Ahead { living: 52, own: 0, alike: 0, above: 52 });
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
