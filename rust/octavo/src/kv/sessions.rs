//! Conversations that keep their blocks between turns.
//!
//! When a turn ends, its blocks stay held for the session: a *pin*, with a time to live and a rent. The next turn takes the
//! blocks over as they are, the last one half full, if its tokens go on from those that were kept; then only new tokens
//! are computed. A pin is a promise with a limit: all pins together hold at most half of the pool, and where a request
//! needs blocks the pin that was made first goes. What becomes of a pin is always told, and its blocks count as its user's.
//!
//! Always true: a pin's blocks are owned by it, and each is due at its time.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::{BlockTable, KvCache};
use crate::observe::events::{EngineEvent, Notes};
use crate::request::{SessionId, Time};
use crate::stages::queue::users::UserId;

/// What has happened to what a session keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinFate {
    /// A turn ended, and its blocks are kept.
    Kept,
    /// The next turn went on from them.
    Resumed,
    /// The next turn did not go on from what was kept: at this many tokens from the start it had others. Whole blocks can
    /// still be found.
    Diverged,
    /// The next turn went on from the same tokens, and asked for something of them that only computing them again tells.
    Recomputed,
    /// Its time to live was over.
    Expired,
    /// Somebody needed the blocks.
    Evicted,
    /// All pins together held more than they may, or this one alone.
    OverLimit,
    /// Another turn of the session ended.
    Replaced,
    /// The turn that went on from it failed, or was given up when its own blocks had been taken away.
    Lost,
    /// The session was closed.
    Closed,
}

impl PinFate {
    /// In one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Resumed => "resumed",
            Self::Diverged => "diverged",
            Self::Recomputed => "recomputed",
            Self::Expired => "expired",
            Self::Evicted => "evicted",
            Self::OverLimit => "over_limit",
            Self::Replaced => "replaced",
            Self::Lost => "lost",
            Self::Closed => "closed",
        }
    }
}

/// Something that has happened to a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionEvent {
    /// When.
    pub at: Time,
    /// What.
    pub fate: PinFate,
    /// How many tokens it kept; if it diverged, how many of them the turn has too.
    pub tokens: usize,
    /// How many blocks it held.
    pub blocks: usize,
}

/// A session as it stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionReport {
    /// Tokens that are kept.
    pub tokens: usize,
    /// Blocks that are held for it, by nobody else.
    pub blocks: usize,
    /// Until they are given up.
    pub expires_in_ns: Option<u64>,
    /// What all its pins cost so far; a shared block is split among its holders.
    pub rent_block_ns: u128,
    /// What has happened, oldest first.
    pub events: Vec<SessionEvent>,
    /// How many events there were before these.
    pub forgotten_events: u64,
}

/// How many events a session remembers.
const MOST_EVENTS: usize = 64;

#[derive(Debug)]
struct Session {
    ttl_ns: u64,
    pin: Option<Pin>,
    rent_block_ns: u128,
    events: VecDeque<SessionEvent>,
    forgotten_events: u64,
}

/// What a turn leaves.
#[derive(Debug)]
pub struct Pin {
    /// Its blocks.
    pub table: BlockTable,
    /// Whose keys and values are in them.
    pub tokens: Vec<u32>,
    /// The namespace that they were computed in.
    pub cache_salt: Option<Arc<str>>,
    /// Whose turn it was.
    pub user: UserId,
    /// Made when.
    since: Time,
    expires: Time,
}

/// All sessions that are open.
#[derive(Debug, Default)]
pub struct Sessions {
    open: HashMap<SessionId, Session>,
    /// Those with a pin, by when it was made and by when it is due.
    by_age: BTreeSet<(Time, SessionId)>,
    by_expiry: BTreeSet<(Time, SessionId)>,
    /// Blocks of all pins; one that several hold counts for each.
    pinned: usize,
    /// Users who hold so many blocks more, or fewer, than was told.
    held: Vec<(UserId, i64)>,
    /// Rent of sessions that are closed.
    closed_rent: u128,
}

impl Sessions {
    /// Begins a session.
    pub fn open(&mut self, id: SessionId, ttl_ns: u64) {
        let events = VecDeque::new();
        let session = Session { ttl_ns, pin: None, rent_block_ns: 0, events, forgotten_events: 0 };
        assert!(self.open.insert(id, session).is_none(), "{id:?} was opened twice");
    }

    /// Ends a session and gives its blocks back. One that is closed stays closed.
    pub fn close(&mut self, id: SessionId, kv: &mut KvCache, now: Time) {
        self.give_up(id, PinFate::Closed, kv, now);
        if let Some(session) = self.open.remove(&id) {
            self.closed_rent += session.rent_block_ns;
        }
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// None is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Blocks of all pins.
    pub fn pinned(&self) -> usize {
        self.pinned
    }

    /// Blocks of all pins but that of `spared`.
    pub fn pinned_but(&self, spared: Option<SessionId>) -> usize {
        let own = spared.and_then(|id| self.pin(id)).map_or(0, |pin| pin.table.held());
        self.pinned - own
    }

    /// When the next pin is due.
    pub fn next_expiry(&self) -> Option<Time> {
        self.by_expiry.first().map(|&(expires, _)| expires)
    }

    /// Gives up every pin that is due.
    pub fn expire(&mut self, kv: &mut KvCache, now: Time) {
        while let Some(&(_, id)) = self.by_expiry.first().filter(|(expires, _)| *expires <= now) {
            self.give_up(id, PinFate::Expired, kv, now);
        }
    }

    /// Users who hold so many blocks more, or fewer, since the last time.
    pub fn take_held(&mut self) -> impl Iterator<Item = (UserId, i64)> {
        self.held.drain(..)
    }

    /// A turn has come: what is kept for it lives on.
    pub fn touch(&mut self, id: SessionId, now: Time) {
        let Some(session) = self.open.get_mut(&id) else { return };
        let Some(pin) = &mut session.pin else { return };
        self.by_expiry.remove(&(pin.expires, id));
        pin.expires = Time(now.0.saturating_add(session.ttl_ns));
        self.by_expiry.insert((pin.expires, id));
    }

    /// Gives up the pin that was made first, but for that of `spared`. Says no when there is none.
    #[must_use]
    pub fn evict_oldest(&mut self, spared: Option<SessionId>, kv: &mut KvCache, now: Time) -> bool {
        let oldest = self.by_age.iter().map(|&(_, id)| id).find(|&id| Some(id) != spared);
        oldest.map(|id| self.give_up(id, PinFate::Evicted, kv, now)).is_some()
    }

    /// What is kept for the next turn.
    pub fn pin(&self, id: SessionId) -> Option<&Pin> {
        self.open.get(&id)?.pin.as_ref()
    }

    /// What became of the latest pin.
    pub fn fate(&self, id: SessionId) -> Option<PinFate> {
        self.open.get(&id)?.events.back().map(|event| event.fate)
    }

    /// Hands a pin to the turn that goes on from it.
    pub fn resume(&mut self, id: SessionId, kv: &mut KvCache, now: Time) -> Option<Pin> {
        self.take(id, PinFate::Resumed, None, kv, now)
    }

    /// The turn does not go on from the pin, whose first `common` tokens it has too.
    pub fn part(&mut self, id: SessionId, fate: PinFate, common: usize, kv: &mut KvCache, now: Time) {
        if let Some(mut pin) = self.take(id, fate, Some(common), kv, now) {
            kv.release(&mut pin.table, now);
        }
    }

    /// Keeps what a user's turn leaves, if the session is open and there may be as much. Otherwise the table is left as it is.
    pub fn keep(
        &mut self,
        (id, user): (SessionId, UserId),
        table: &mut BlockTable,
        tokens: Vec<u32>,
        cache_salt: Option<Arc<str>>,
        kv: &mut KvCache,
        now: Time,
    ) {
        if !self.open.contains_key(&id) {
            return;
        }
        self.give_up(id, PinFate::Replaced, kv, now);
        let (most, blocks) = (kv.pool().len() / 2, table.held());
        while blocks <= most && self.pinned + blocks > most {
            let oldest = self.by_age.first().map(|&(_, id)| id).expect("pinned blocks have a pin");
            self.give_up(oldest, PinFate::OverLimit, kv, now);
        }
        let Some(session) = self.open.get_mut(&id) else { return };
        if blocks > most {
            let event = SessionEvent { at: now, fate: PinFate::OverLimit, tokens: tokens.len(), blocks };
            session.note(id, event, &mut kv.notes);
            return;
        }
        let event = SessionEvent { at: now, fate: PinFate::Kept, tokens: tokens.len(), blocks };
        session.note(id, event, &mut kv.notes);
        let expires = Time(now.0.saturating_add(session.ttl_ns));
        let table = std::mem::replace(table, kv.table());
        session.pin = Some(Pin { table, tokens, cache_salt, user, since: now, expires });
        self.by_age.insert((now, id));
        self.by_expiry.insert((expires, id));
        self.pinned += blocks;
        self.held.push((user, blocks as i64));
    }

    /// A turn ended that leaves nothing.
    pub fn lose(&mut self, id: SessionId, kv: &mut KvCache, now: Time) {
        if self.fate(id) == Some(PinFate::Resumed)
            && let Some(session) = self.open.get_mut(&id)
        {
            let event = SessionEvent { at: now, fate: PinFate::Lost, tokens: 0, blocks: 0 };
            session.note(id, event, &mut kv.notes);
        }
    }

    fn give_up(&mut self, id: SessionId, fate: PinFate, kv: &mut KvCache, now: Time) {
        if let Some(mut pin) = self.take(id, fate, None, kv, now) {
            // Its rent is settled.
            kv.release(&mut pin.table, now);
        }
    }

    fn take(
        &mut self,
        id: SessionId,
        fate: PinFate,
        common: Option<usize>,
        kv: &mut KvCache,
        now: Time,
    ) -> Option<Pin> {
        let session = self.open.get_mut(&id)?;
        let mut pin = session.pin.take()?;
        let blocks = pin.table.held();
        session.rent_block_ns += kv.settle(&mut pin.table, now);
        let event = SessionEvent { at: now, fate, tokens: common.unwrap_or(pin.tokens.len()), blocks };
        session.note(id, event, &mut kv.notes);
        self.by_age.remove(&(pin.since, id));
        self.by_expiry.remove(&(pin.expires, id));
        self.pinned -= blocks;
        self.held.push((pin.user, -(blocks as i64)));
        Some(pin)
    }

    /// A session as it stands; `None`: it is closed.
    pub fn report(&mut self, id: SessionId, kv: &mut KvCache, now: Time) -> Option<SessionReport> {
        let session = self.open.get_mut(&id)?;
        session.settle(kv, now);
        let pin = session.pin.as_ref();
        Some(SessionReport {
            tokens: pin.map_or(0, |pin| pin.tokens.len()),
            blocks: pin.map_or(0, |pin| pin.table.held()),
            expires_in_ns: pin.map(|pin| pin.expires.since(now)),
            rent_block_ns: session.rent_block_ns,
            events: session.events.iter().copied().collect(),
            forgotten_events: session.forgotten_events,
        })
    }

    /// What all sessions, closed ones included, owe by now.
    pub fn rent_block_ns(&mut self, kv: &mut KvCache, now: Time) -> u128 {
        self.open.values_mut().for_each(|session| session.settle(kv, now));
        self.closed_rent + self.open.values().map(|session| session.rent_block_ns).sum::<u128>()
    }

    /// The tables of all pins.
    pub fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.pins().map(|(_, pin)| &pin.table)
    }

    fn pins(&self) -> impl Iterator<Item = (SessionId, &Pin)> {
        self.open.iter().filter_map(|(&id, session)| Some((id, session.pin.as_ref()?)))
    }

    /// How many blocks each user's pins hold.
    pub fn held(&self) -> BTreeMap<UserId, u64> {
        let mut held = BTreeMap::new();
        self.pins().for_each(|(_, pin)| *held.entry(pin.user).or_default() += pin.table.held() as u64);
        held
    }

    /// Asserts what is always true.
    pub fn check(&self, kv: &KvCache) {
        let pins = || self.pins();
        assert!(self.held.is_empty(), "what users hold is told");
        assert_eq!(self.pinned, self.tables().map(BlockTable::held).sum::<usize>(), "pinned blocks are counted");
        assert!(self.pinned <= kv.pool().len() / 2, "pins hold more than half of the pool");
        assert!(self.by_age.iter().copied().eq(pins().map(|(id, pin)| (pin.since, id)).collect::<BTreeSet<_>>()));
        assert!(self.by_expiry.iter().copied().eq(pins().map(|(id, pin)| (pin.expires, id)).collect::<BTreeSet<_>>()));
        for (id, pin) in pins() {
            assert_eq!(pin.table.len(), kv.layout().entries(pin.tokens.len()), "{id:?}: blocks for what it keeps");
        }
    }
}

impl Session {
    fn note(&mut self, id: SessionId, event: SessionEvent, notes: &mut Notes) {
        notes.push(|| EngineEvent::Session { id, event });
        if self.events.len() == MOST_EVENTS {
            self.events.pop_front();
            self.forgotten_events += 1;
        }
        self.events.push_back(event);
    }

    fn settle(&mut self, kv: &mut KvCache, now: Time) {
        if let Some(pin) = &mut self.pin {
            self.rent_block_ns += kv.settle(&mut pin.table, now);
        }
    }
}

impl Pin {
    /// How many of the kept tokens these begin with.
    pub fn common(&self, tokens: impl Iterator<Item = u32>) -> usize {
        self.tokens.iter().zip(tokens).take_while(|(kept, token)| *kept == token).count()
    }
}
