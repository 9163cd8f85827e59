//! Who has been served how much: a virtual token counter for each user, after Sheng et al., "Fairness in Serving Large
//! Language Models" (OSDI 2024).
//!
//! A user's counter grows by the work that is done for them, weighted by what it costs; whoever has been served least goes
//! first. A user who comes to wait is lifted to the least counter of those who wait, so that nobody saves up turns while
//! away; what somebody was served beyond the others is not forgiven by a short absence. So of two users who both have
//! requests waiting all the time, neither gets more than the other by more than about the work of two requests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Work, in 64ths of a token of a prompt.
pub type Work = u64;

/// A token of a prompt that is computed.
pub const PROMPT_TOKEN: Work = 64;
/// A token that is generated. It costs more than one of a prompt: a step reads all weights for one row.
const OUTPUT_TOKEN: Work = 2 * PROMPT_TOKEN;
/// A block of the KV cache, held for a step: room that others do not have, and keys and values to read.
const BLOCK_STEP: Work = 1;

/// The most users without requests whose counters are kept. The least served are forgotten first.
const MOST_ABSENT: usize = 4096;

/// What a step does for a sequence that holds `blocks` blocks: it computes `prompt_rows` rows that were never computed
/// before, or generates a token.
pub fn work(prompt_rows: usize, generates: bool, blocks: usize) -> Work {
    prompt_rows as Work * PROMPT_TOKEN + if generates { OUTPUT_TOKEN } else { 0 } + blocks as Work * BLOCK_STEP
}

/// A user's place in [`Users`], while they have requests, or blocks are held for their conversations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UserId(u32);

#[derive(Debug)]
struct User {
    name: Arc<str>,
    /// Up to step `since`.
    served: Work,
    since: u64,
    /// Requests that wait or run.
    living: usize,
    /// Blocks that are held for conversations between their turns.
    held: u64,
}

impl User {
    fn served(&self, step: u64) -> Work {
        self.served + (step - self.since) * self.held * BLOCK_STEP
    }

    fn settle(&mut self, step: u64) {
        (self.served, self.since) = (self.served(step), step);
    }
}

/// The counters of those who have requests, and of those who have had.
#[derive(Debug, Default)]
pub struct Users {
    users: Vec<User>,
    by_name: HashMap<Arc<str>, UserId>,
    /// Places that nobody has.
    vacant: Vec<UserId>,
    /// Users without requests and blocks: their counters stand still.
    absent: BTreeSet<(Work, UserId)>,
    /// Steps so far.
    step: u64,
    /// The least that whoever waited had been served. It never falls, so who was served no more needs no counter.
    floor: Work,
}

impl Users {
    /// One more request of a user.
    pub fn enter(&mut self, name: &Arc<str>) -> UserId {
        let id = match self.by_name.get(name) {
            Some(&id) => id,
            None => self.welcome(name.clone()),
        };
        self.forget_absence(id);
        self.users[id.0 as usize].living += 1;
        id
    }

    /// A step is over: whatever is held was held for one more.
    pub fn step(&mut self) {
        self.step += 1;
    }

    /// So many more blocks are held for a user's conversations, or fewer.
    pub fn hold(&mut self, id: UserId, blocks: i64) {
        self.forget_absence(id);
        let user = &mut self.users[id.0 as usize];
        user.settle(self.step);
        user.held = user.held.checked_add_signed(blocks).expect("no more is given back than was held");
        self.note_absence(id);
    }

    fn forget_absence(&mut self, id: UserId) {
        let user = &mut self.users[id.0 as usize];
        if user.living == 0 && user.held == 0 {
            self.absent.remove(&(user.served, id));
        }
        user.settle(self.step);
    }

    fn welcome(&mut self, name: Arc<str>) -> UserId {
        let user = User { name: name.clone(), served: 0, since: self.step, living: 0, held: 0 };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.users[id.0 as usize] = user;
                id
            }
            None => {
                self.users.push(user);
                UserId(self.users.len() as u32 - 1)
            }
        };
        self.by_name.insert(name, id);
        id
    }

    /// One request less.
    pub fn leave(&mut self, id: UserId) {
        self.users[id.0 as usize].living -= 1;
        self.note_absence(id);
    }

    fn note_absence(&mut self, id: UserId) {
        let user = &mut self.users[id.0 as usize];
        user.settle(self.step);
        if user.living > 0 || user.held > 0 {
            return;
        }
        self.absent.insert((user.served, id));
        while let Some(&(served, id)) = self.absent.first()
            && (served <= self.floor || self.absent.len() > MOST_ABSENT)
        {
            self.absent.pop_first();
            self.by_name.remove(&self.users[id.0 as usize].name);
            self.vacant.push(id);
        }
    }

    /// Requests of a user that wait or run.
    pub fn living(&self, id: UserId) -> usize {
        self.users[id.0 as usize].living
    }

    /// What whoever comes to wait counts as having been served at least.
    pub fn floor(&self) -> Work {
        self.floor
    }

    /// How much a user has been served.
    pub fn served(&self, id: UserId) -> Work {
        self.users[id.0 as usize].served(self.step)
    }

    /// The same in tokens of a prompt, if the user is known.
    pub fn served_by_name(&self, name: &str) -> Option<f64> {
        self.by_name.get(name).map(|&id| self.served(id) as f64 / PROMPT_TOKEN as f64)
    }

    /// Work is done for a user.
    pub fn charge(&mut self, id: UserId, work: Work) {
        self.users[id.0 as usize].served += work;
    }

    /// A user who had nothing waiting comes to wait. `least`: what those who wait have been served at least.
    pub fn lift(&mut self, id: UserId, least: Option<Work>) {
        self.raise_floor(least.unwrap_or(0));
        let user = &mut self.users[id.0 as usize];
        user.settle(self.step);
        user.served = self.floor.max(user.served);
    }

    /// Nobody who comes to wait from now on counts as served less than this.
    pub fn raise_floor(&mut self, served: Work) {
        self.floor = self.floor.max(served);
    }

    /// Users who have requests, or blocks between turns.
    pub fn present(&self) -> usize {
        self.by_name.len() - self.absent.len()
    }

    /// How many counters there are.
    pub fn counters(&self) -> usize {
        self.by_name.len()
    }

    /// Asserts that there is a counter for each user with requests, `living` of them in all, or with blocks `held` between
    /// turns, and a bounded number besides.
    pub fn check(&self, living: usize, held: &BTreeMap<UserId, u64>) {
        assert_eq!(self.by_name.len() + self.vacant.len(), self.users.len(), "every place is somebody's or vacant");
        assert!(self.absent.len() <= MOST_ABSENT, "the absent are forgotten");
        let mut present = 0;
        for (name, &id) in &self.by_name {
            let user = &self.users[id.0 as usize];
            assert_eq!(*name, user.name, "a name leads to its user");
            let is_absent = user.living == 0 && user.held == 0;
            assert_eq!(self.absent.contains(&(user.served, id)), is_absent, "{name}: absent with nothing here");
            assert_eq!(user.held, held.get(&id).copied().unwrap_or(0), "{name}: what is held for it is counted");
            present += user.living;
        }
        assert_eq!(present, living, "every living request is some user's");
        let holders = self.users.iter().filter(|user| user.held > 0).count();
        assert_eq!(holders, held.len(), "nobody holds what is not there");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absence_earns_nothing_and_forgives_nothing() {
        let mut users = Users::default();
        let [busy, away]: [Arc<str>; 2] = ["busy".into(), "away".into()];
        let id = users.enter(&busy);
        users.charge(id, 1000);
        let other = users.enter(&away);
        users.lift(other, Some(1000));
        assert_eq!(users.served(other), 1000, "lifted to those who wait");
        users.charge(other, 500);
        users.leave(other);
        let other = users.enter(&away);
        users.lift(other, Some(1000));
        assert_eq!(users.served(other), 1500, "what was served is still known");
        users.leave(other);
        users.raise_floor(1500);
        users.leave(id);
        assert_eq!(users.counters(), 0, "who has no more than anybody who comes needs no counter");
    }

    #[test]
    fn what_is_held_counts_whether_anybody_comes_back_or_not() {
        let mut users = Users::default();
        let name: Arc<str> = "leaves".into();
        let id = users.enter(&name);
        users.hold(id, 6);
        users.leave(id);
        (0..10).for_each(|_| users.step());
        assert_eq!(users.served(id), 60, "while nobody is there");
        users.raise_floor(1000);
        users.hold(id, -2);
        (0..5).for_each(|_| users.step());
        assert_eq!([users.served(id), users.counters() as u64], [80, 1], "kept while it holds anything");
        users.check(0, &BTreeMap::from([(id, 4)]));
        users.hold(id, -4);
        users.check(0, &BTreeMap::new());
        assert_eq!(users.counters(), 0);
    }

    #[test]
    fn the_absent_are_bounded_in_number() {
        let mut users = Users::default();
        for index in 0..3 * MOST_ABSENT {
            let id = users.enter(&format!("user {index}").into());
            users.charge(id, 1 + index as Work);
            users.leave(id);
            users.check(0, &BTreeMap::new());
            assert!(users.counters() <= MOST_ABSENT && users.users.len() <= MOST_ABSENT + 1);
        }
        let id = users.enter(&format!("user {}", 3 * MOST_ABSENT - 1).into());
        assert_eq!(users.served(id), 3 * MOST_ABSENT as Work, "the most served are remembered longest");
    }
}
