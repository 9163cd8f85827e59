//! Who reads what happens. Every reader has a bounded queue of its own; one that is too slow loses the oldest events, and
//! sees it: in a counter, and in the gap between two events' numbers. Nobody waits for a reader.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::events::EngineEvent;
use crate::request::Time;

/// An event with its place in the engine's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamped {
    /// Its number, the same for all readers. What lies between two that a reader gets, it has lost.
    pub sequence_number: u64,
    /// When it happened, on the engine's clock; to the edge of a step.
    pub at: Time,
    /// What.
    pub event: EngineEvent,
}

/// The engine's side: everybody who reads.
#[derive(Default)]
pub struct Readers {
    tellers: Vec<Teller>,
    next: u64,
}

impl Readers {
    /// One more.
    pub fn add(&mut self, teller: Teller) {
        self.tellers.push(teller);
    }

    /// Tells everybody. Returns whether there is still somebody.
    pub fn tell(&mut self, events: impl Iterator<Item = EngineEvent>, at: Time) -> bool {
        self.tellers.retain(|Teller(tray)| !tray.abandoned.load(Ordering::Acquire));
        for event in events {
            let stamped = Arc::new(Stamped { sequence_number: self.next, at, event });
            self.next += 1;
            self.tellers.iter().for_each(|Teller(tray)| tray.put(stamped.clone()));
        }
        !self.tellers.is_empty()
    }
}

/// The engine's end of one reader's queue. Wherever it is dropped, on its way or with the engine, the reader hears that
/// nothing more will come.
pub struct Teller(Arc<Tray>);

impl Drop for Teller {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// One reader's queue.
struct Tray {
    state: Mutex<TrayState>,
    arrived: Condvar,
    capacity: usize,
    abandoned: AtomicBool,
}

#[derive(Default)]
struct TrayState {
    events: VecDeque<Arc<Stamped>>,
    dropped: u64,
    /// Nothing more will come.
    closed: bool,
}

impl Tray {
    fn lock(&self) -> MutexGuard<'_, TrayState> {
        // Whole values are moved in and out: nobody can leave a half one behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, event: Arc<Stamped>) {
        let mut state = self.lock();
        if state.events.len() == self.capacity {
            state.events.pop_front();
            state.dropped += 1;
        }
        state.events.push_back(event);
        drop(state);
        self.arrived.notify_one();
    }

    fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_all();
    }
}

/// The most events that a reader's queue may hold.
pub const MAX_CAPACITY: usize = 1 << 22;

/// A reader. Dropping it ends the telling.
pub struct EventReader(Arc<Tray>);

/// What a look brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextEvent {
    /// The oldest that was not read.
    Event(Arc<Stamped>),
    /// The engine, or the reader, is closed, and everything has been read.
    Closed,
    /// Nothing yet.
    NotYet,
}

impl EventReader {
    /// One that keeps up to `capacity` events, and what is to be given to the engine.
    pub fn new(capacity: usize) -> (Self, Teller) {
        let state = Mutex::default();
        let tray = Arc::new(Tray { state, arrived: Condvar::new(), capacity, abandoned: AtomicBool::new(false) });
        (Self(tray.clone()), Teller(tray))
    }

    /// The next event, waiting up to `patience` for it.
    pub fn next_within(&self, patience: Duration) -> NextEvent {
        // An end too far to be told is none.
        let until = Instant::now().checked_add(patience);
        let mut state = self.0.lock();
        loop {
            if let Some(event) = state.events.pop_front() {
                return NextEvent::Event(event);
            }
            let left = until.map_or(patience, |until| until.saturating_duration_since(Instant::now()));
            match (state.closed, left.is_zero()) {
                (true, _) => return NextEvent::Closed,
                (false, true) => return NextEvent::NotYet,
                (false, false) => {
                    state = self.0.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// All that is there.
    pub fn take(&self) -> Vec<Arc<Stamped>> {
        self.0.lock().events.drain(..).collect()
    }

    /// How many were lost because they were not read in time.
    pub fn dropped(&self) -> u64 {
        self.0.lock().dropped
    }

    /// Ends the telling; what is there can still be read.
    pub fn close(&self) {
        self.0.abandoned.store(true, Ordering::Release);
        self.0.close();
    }
}

impl Drop for EventReader {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::RequestId;

    fn first_token(id: u64) -> EngineEvent {
        EngineEvent::FirstToken { id: RequestId(id) }
    }

    #[test]
    fn a_slow_reader_loses_the_oldest_and_sees_it() {
        let (slow, teller) = EventReader::new(3);
        let (fast, other) = EventReader::new(100);
        let mut readers = Readers::default();
        readers.add(teller);
        readers.add(other);
        assert!(readers.tell((0..10).map(first_token), Time(5)));
        let numbers =
            |reader: &EventReader| reader.take().iter().map(|event| event.sequence_number).collect::<Vec<_>>();
        assert_eq!((numbers(&slow), slow.dropped()), (vec![7, 8, 9], 7));
        assert_eq!((numbers(&fast), fast.dropped()), ((0..10).collect(), 0));
        drop(slow);
        assert!(readers.tell(std::iter::empty(), Time(6)), "one is left");
        drop(fast);
        assert!(!readers.tell(std::iter::once(first_token(1)), Time(7)), "nobody is left");
    }

    #[test]
    fn the_end_comes_after_everything_that_was_told() {
        let (reader, teller) = EventReader::new(10);
        let mut readers = Readers::default();
        readers.add(teller);
        assert_eq!(reader.next_within(Duration::ZERO), NextEvent::NotYet);
        readers.tell(std::iter::once(first_token(1)), Time(5));
        drop(readers);
        assert!(matches!(reader.next_within(Duration::ZERO), NextEvent::Event(event) if event.event == first_token(1)));
        assert_eq!(reader.next_within(Duration::from_secs(60)), NextEvent::Closed);
        let (reader, lost_on_its_way) = EventReader::new(10);
        drop(lost_on_its_way);
        assert_eq!(reader.next_within(Duration::from_secs(60)), NextEvent::Closed);
    }
}
