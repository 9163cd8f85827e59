//! Who is next.
//!
//! Requests stand in lines, one for each user, and one for those who lost their blocks.
//!
//! * **In a line** they stand by the time they came, a level of priority counting as [`AGEING_NS`] earlier: a request is
//!   passed by one with `d` levels more only if that comes within `d` times as long.
//! * **Between lines** the one whose first has the highest priority has its turn; of equal ones those who lost their blocks,
//!   then the user who has been served least (see [`users`](super::users)), to within [`ALIKE`].
//! * **A line ages:** for every `AGEING_NS` since its last turn its first counts as one level higher, and a line that so is
//!   above all others goes before them, whatever its user was served.
//!
//! Hence a bound, whoever comes meanwhile. Let the first of a line have priority `p`, and no other request more than `P`.
//! At the latest `(1 + P - p) · AGEING_NS` after the line's last turn (or after it came to wait), each other line has at most
//! one more turn before it. So with `k` requests before it in its line, `U` lines, and a turn at least every `R` seconds, a
//! request waits no longer than `(k + 1) · ((1 + P - p) · AGEING + U · R)`. Short prompts that may pass a long one (see
//! [`prefill`](crate::stages::prefill)) are limited in number.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::users::{self, UserId, Users, Work};
use crate::observe::meter::QueueClock;
use crate::request::{RequestId, Time};
use crate::sequence::Sequence;

/// Waiting so long is worth one level of priority, in nanoseconds: ten seconds.
pub const AGEING_NS: u64 = 10_000_000_000;

/// A moment that priority has moved: on the engine's clock, and before its beginning.
type Moment = i128;

/// The moment that counts for somebody of this priority who came `since`.
fn moved(since: Time, priority: i32) -> Moment {
    Moment::from(since.0) - Moment::from(priority) * Moment::from(AGEING_NS)
}

/// A place in a line; the smallest is first.
type Turn = (Moment, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LineId {
    /// Those who lost their blocks.
    Resuming,
    Of(UserId),
}

impl LineId {
    fn of(sequence: &Sequence) -> Self {
        if sequence.admitted.is_some() { Self::Resuming } else { Self::Of(sequence.user) }
    }
}

#[derive(Debug)]
struct Line {
    turns: BTreeMap<Turn, RequestId>,
    /// Its last turn, or when it began to wait.
    since: Time,
    /// What it stands under in the indices.
    rank: Option<Rank>,
    /// Tokens of its first.
    tokens: usize,
    /// As it is counted: tokens of its first, while nobody of its user runs.
    unserved: Option<usize>,
}

/// Users who wait and of whom nobody runs: each has a turn before whoever comes now. Who runs is served all the time, and so
/// goes after others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unserved {
    /// How many.
    pub users: usize,
    /// Tokens of the first of each.
    pub tokens: usize,
}

impl Unserved {
    /// A line or its user has changed.
    fn count(&mut self, id: LineId, line: &mut Line, users: &Users) {
        let LineId::Of(user) = id else { return };
        let waits = !line.turns.is_empty() && users.living(user) == line.turns.len();
        let new = waits.then_some(line.tokens);
        let old = std::mem::replace(&mut line.unserved, new);
        self.users = self.users + usize::from(new.is_some()) - usize::from(old.is_some());
        self.tokens = self.tokens + new.unwrap_or(0) - old.unwrap_or(0);
    }
}

/// Users who were served alike but for so much go by name: whoever is served in every step need not be ranked in every step.
/// Sixty-four tokens of a prompt.
const ALIKE: Work = 64 * users::PROMPT_TOKEN;

/// How a line stands to the others. Of a user who has been served since, `served` is what it was: it is read again when the
/// line comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rank {
    priority: Reverse<i32>,
    served: Work,
    age: Moment,
}

/// The sequences that wait. No operation takes time in their number, but for a logarithm.
#[derive(Debug, Default)]
pub struct Waiting {
    /// Why the queue waits, for everybody in it.
    pub clock: QueueClock,
    /// Who has been served how much.
    pub users: Users,
    sequences: HashMap<RequestId, Box<Sequence>>,
    lines: BTreeMap<LineId, Line>,
    by_share: BTreeSet<(Reverse<i32>, Work, LineId)>,
    by_service: BTreeSet<(Work, LineId)>,
    by_age: BTreeSet<(Moment, LineId)>,
    /// Known tokens of all who wait.
    tokens: usize,
    unserved: Unserved,
}

impl Waiting {
    /// How many wait.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Nobody waits.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Known tokens of all who wait.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Users who wait and of whom nobody runs.
    pub fn unserved(&self) -> Unserved {
        self.unserved
    }

    /// A request of a user has ended.
    pub fn leave(&mut self, user: UserId) {
        self.users.leave(user);
        let id = LineId::Of(user);
        if self.users.living(user) > 0
            && let Some(line) = self.lines.get_mut(&id)
        {
            self.unserved.count(id, line, &self.users);
        }
    }

    /// Joins the queue.
    pub fn push(&mut self, sequence: Box<Sequence>, now: Time) {
        let (id, line, turn) = (sequence.request.id, LineId::of(&sequence), turn(&sequence));
        if let LineId::Of(user) = line
            && !self.lines.contains_key(&line)
        {
            let least = self.least_served();
            self.users.lift(user, least);
        }
        self.tokens += sequence.known();
        self.sequences.insert(id, sequence);
        let new = || Line { turns: BTreeMap::new(), since: now, rank: None, tokens: 0, unserved: None };
        self.lines.entry(line).or_insert_with(new).turns.insert(turn, id);
        self.rank(line);
    }

    /// Leaves the queue without having had a turn.
    pub fn remove(&mut self, id: RequestId) -> Option<Box<Sequence>> {
        let sequence = self.sequences.remove(&id)?;
        self.tokens -= sequence.known();
        let line = LineId::of(&sequence);
        if let Some(of) = self.lines.get_mut(&line) {
            of.turns.remove(&turn(&sequence));
        }
        self.rank(line);
        Some(sequence)
    }

    /// Leaves the queue to run. If it was its line's first, its line has had a turn.
    pub fn admit(&mut self, id: RequestId, now: Time) -> Option<Box<Sequence>> {
        if let Some(line) = self.lines.get_mut(&LineId::of(self.sequences.get(&id)?))
            && line.turns.values().next() == Some(&id)
        {
            line.since = now;
        }
        self.remove(id)
    }

    /// Whoever is next.
    pub fn head(&mut self, now: Time) -> Option<RequestId> {
        while let Some(&(_, served, line)) = self.by_share.first()
            && self.is_behind(line, served)
        {
            self.rank(line);
        }
        let &(.., fair) = self.by_share.first()?;
        let &(age, oldest) = self.by_age.first()?;
        let level = |age: Moment| (Moment::from(now.0) - age).div_euclid(Moment::from(AGEING_NS));
        let fair_age = self.lines.get(&fair)?.rank?.age;
        let line = if level(age) > level(fair_age) { oldest } else { fair };
        self.lines.get(&line)?.turns.values().next().copied()
    }

    /// One that waits.
    pub fn get(&self, id: RequestId) -> Option<&Sequence> {
        self.sequences.get(&id).map(|sequence| &**sequence)
    }

    /// One that waits.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Sequence> {
        self.sequences.get_mut(&id).map(|sequence| &mut **sequence)
    }

    /// All that wait, line by line, roughly in order.
    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        let lines = self.by_share.iter().filter_map(|(.., line)| self.lines.get(line));
        lines.flat_map(|line| line.turns.values()).filter_map(|id| self.get(*id))
    }

    /// Takes any one out.
    pub fn pop(&mut self) -> Option<Box<Sequence>> {
        let id = self.iter().next()?.request.id;
        self.remove(id)
    }

    /// What somebody counts as having been served who comes to wait now, at least.
    pub fn newcomers_served(&mut self) -> Work {
        let least = self.least_served();
        self.users.floor().max(least.unwrap_or(0))
    }

    /// The least that a user who waits has been served.
    fn least_served(&mut self) -> Option<Work> {
        while let Some(&(served, line)) = self.by_service.first() {
            if !self.is_behind(line, served) {
                return Some(served);
            }
            self.rank(line);
        }
        None
    }

    fn served(&self, line: LineId) -> Work {
        if let LineId::Of(user) = line { self.users.served(user) / ALIKE * ALIKE } else { 0 }
    }

    /// The user has been served since the line was ranked.
    fn is_behind(&self, line: LineId, served: Work) -> bool {
        self.served(line) > served
    }

    /// Puts a line where it belongs.
    fn rank(&mut self, id: LineId) {
        let served = self.served(id);
        let Some(line) = self.lines.get_mut(&id) else { return };
        let head = line.turns.values().next().and_then(|first| self.sequences.get(first));
        let new = head.map(|head| {
            let priority = head.request.priority;
            Rank { priority: Reverse(priority), served, age: moved(line.since, priority) }
        });
        let old = std::mem::replace(&mut line.rank, new);
        line.tokens = head.map_or(0, |head| head.known());
        self.unserved.count(id, line, &self.users);
        let share = |rank: Rank| (rank.priority, rank.served, id);
        replace(&mut self.by_share, old.map(share), new.map(share));
        replace(&mut self.by_age, old.map(|rank| (rank.age, id)), new.map(|rank| (rank.age, id)));
        let service = |rank: Rank| (id != LineId::Resuming).then_some((rank.served, id));
        replace(&mut self.by_service, old.and_then(service), new.and_then(service));
        if new.is_none() {
            self.lines.remove(&id);
            if self.by_service.is_empty() {
                self.users.raise_floor(served);
            }
        }
    }

    /// Asserts that the lines hold those who wait, and that every line is where it belongs. Walks the queue.
    pub fn check(&self) {
        let (mut places, mut unserved) = (0, Unserved::default());
        for (&id, line) in &self.lines {
            let first = line.turns.values().next().expect("no line is empty");
            let rank = line.rank.expect("every line has a rank");
            let priority = self.sequences[first].request.priority;
            assert_eq!((rank.priority, rank.age), (Reverse(priority), moved(line.since, priority)), "{id:?}");
            assert!(rank.served <= self.served(id), "{id:?}: nobody is served less than before");
            assert!(self.by_share.contains(&(rank.priority, rank.served, id)) && self.by_age.contains(&(rank.age, id)));
            assert_eq!(self.by_service.contains(&(rank.served, id)), id != LineId::Resuming, "{id:?}");
            for (&at, request) in &line.turns {
                let sequence = &self.sequences[request];
                assert_eq!((turn(sequence), LineId::of(sequence)), (at, id), "{request}: stands where it belongs");
                assert!(sequence.table.is_empty() && sequence.computed == 0, "{request}: waits with blocks");
            }
            if let LineId::Of(user) = id
                && self.users.living(user) == line.turns.len()
            {
                unserved.users += 1;
                unserved.tokens += self.sequences[first].known();
            }
            places += line.turns.len();
        }
        assert_eq!(self.unserved, unserved, "of these users nobody runs");
        assert_eq!(places, self.len(), "everybody stands in one line");
        assert_eq!([self.by_share.len(), self.by_age.len()], [self.lines.len(); 2]);
        assert_eq!(self.tokens, self.sequences.values().map(|sequence| sequence.known()).sum::<usize>());
    }
}

/// Takes one entry of an index for another.
fn replace<T: Ord>(index: &mut BTreeSet<T>, old: Option<T>, new: Option<T>) {
    if old != new {
        old.map(|old| index.remove(&old));
        index.extend(new);
    }
}

/// Where a sequence stands in its line.
fn turn(sequence: &Sequence) -> Turn {
    let priority = sequence.request.priority;
    match sequence.admitted {
        // The order in which they run.
        Some(admitted) => (moved(Time(0), priority), admitted),
        None => (moved(sequence.record.submitted, priority), sequence.arrival),
    }
}
