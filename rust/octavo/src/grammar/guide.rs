//! The masks of one sequence, and the threads that compute them.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use llguidance::Matcher;

use super::compile::Grammar;
use super::vocabulary::Step;
use crate::sample::TokenMask;

/// Leads one sequence through its grammar.
pub struct Guide {
    grammar: Arc<Grammar>,
    /// Tokens that end it; allowed where the grammar may end.
    ends: Arc<[u32]>,
    /// Only a mask thread takes it. `None`: at the beginning.
    matcher: Mutex<Option<Box<Matcher>>>,
    /// `None`: being computed.
    next: Mutex<Option<Next>>,
    ready: Condvar,
    jobs: Sender<Job>,
}

/// What a grammar has to say about the next token.
#[derive(Clone, Debug)]
pub enum Next {
    /// One of these.
    Tokens(Arc<TokenMask>),
    /// None: it is complete, and nothing can follow.
    Complete,
    /// Why it cannot go on: that sequence's error.
    Failed(String),
}

impl Guide {
    pub(super) fn new(grammar: Arc<Grammar>, ends: Arc<[u32]>, threads: &Threads) -> Arc<Self> {
        let first = grammar.first();
        let next = tokens(first.text.clone(), first.may_end, &ends);
        let (matcher, next) = (Mutex::new(None), Mutex::new(Some(next)));
        Arc::new(Self { grammar, ends, matcher, next, ready: Condvar::new(), jobs: threads.jobs.clone() })
    }

    /// What may come next. Waits for it, should it still be computed; that takes a few milliseconds at most.
    pub fn next(&self) -> Next {
        let next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let next = self.ready.wait_while(next, |next| next.is_none()).unwrap_or_else(PoisonError::into_inner);
        next.clone().unwrap_or_else(|| Next::Failed("there is no mask".into()))
    }

    /// `token` was drawn from what [`Self::next`] allowed. Returns at once; a mask thread goes on from here.
    pub fn advance(self: &Arc<Self>, token: u32) {
        if self.ends.contains(&token) {
            return;
        }
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if self.jobs.send(Job { guide: Arc::downgrade(self), token }).is_err() {
            self.tell(Next::Failed("the threads that compute masks are gone".into()));
        }
    }

    fn tell(&self, next: Next) {
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
        self.ready.notify_all();
    }

    fn compute(&self, token: u32) -> Next {
        let mut matcher = self.matcher.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = matcher.is_none();
        let matcher = matcher.get_or_insert_with(|| Box::new(self.grammar.matcher()));
        match self.grammar.vocabulary().next_step(matcher, token, is_first) {
            Ok(Some(Step { text, may_end })) => tokens(text, may_end, &self.ends),
            Ok(None) => Next::Complete,
            Err(why) => Next::Failed(format!("the grammar cannot be followed any further: {why}")),
        }
    }
}

fn tokens(mut mask: TokenMask, may_end: bool, ends: &[u32]) -> Next {
    if may_end {
        ends.iter().for_each(|&end| mask.allow(end));
    }
    Next::Tokens(Arc::new(mask))
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").finish_non_exhaustive()
    }
}

/// A token to be taken. Of a guide that is gone nobody waits for the mask.
struct Job {
    guide: Weak<Guide>,
    token: u32,
}

/// The threads that compute masks. They end when nobody can give them work any more.
pub(super) struct Threads {
    jobs: Sender<Job>,
}

/// Masks take tens of microseconds, and there is a whole step's time for them: few threads are enough.
const MOST_THREADS: usize = 4;

impl Threads {
    pub fn start() -> Result<Self, String> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (jobs, inbox) = channel();
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..(cores / 2).clamp(1, MOST_THREADS) {
            let inbox = inbox.clone();
            let thread = std::thread::Builder::new().name("octavo-masks".into());
            let failed = |error| format!("no thread can be started to compute masks: {error}");
            thread.spawn(move || work(&inbox)).map_err(failed)?;
        }
        Ok(Self { jobs })
    }
}

fn work(inbox: &Mutex<Receiver<Job>>) {
    loop {
        let job = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { guide, token }) = job else { return };
        let Some(guide) = guide.upgrade() else { continue };
        // Somebody waits for an answer, whatever happens.
        let next = catch_unwind(AssertUnwindSafe(|| guide.compute(token)));
        guide.tell(next.unwrap_or_else(|_| Next::Failed("the grammar failed on an internal error".into())));
    }
}
