//! What a call has been given so far. The engine thread appends; the caller reads from where it last stopped. A slow
//! reader costs no more memory than the answer itself: updates it has not read melt into one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use octavo_kernels::prefetch::{prefetch, prefetch_end};

use crate::observe::anatomy::RequestRecord;
use crate::request::{Finish, TokenLogprobs};

/// Called when something arrives for a caller that cannot block (an event loop). At most once per step and waker.
pub trait Wake: Send + Sync {
    /// Must not block, and must not call back into the engine.
    fn wake(&self);
}

/// One call's choices. Shared by the engine thread and the call's [`super::Ticket`].
pub struct Mailbox {
    state: Mutex<State>,
    arrived: Condvar,
    /// Readers that are blocked. Changed under the lock, so that whoever has added something knows without it whether one
    /// was waiting for that: to wake nobody is a call into the kernel too, and there is one for every token.
    blocked: AtomicUsize,
    /// Whom to tell besides a blocked reader.
    waker: Option<Arc<dyn Wake>>,
    /// Whether the reader wants every token when it exists, or only the end.
    every_token: bool,
    /// Tokens that there are, over all choices, given or not. Only the engine thread adds.
    tokens: AtomicUsize,
}

struct State {
    choices: Vec<Choice>,
    unfinished: usize,
}

/// A part of an answer.
#[derive(Default)]
pub(super) struct News {
    pub text: String,
    pub token_ids: Vec<u32>,
    /// One per token, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
}

impl News {
    /// Adds what comes after it, which is empty afterwards.
    fn append(&mut self, more: &mut Self) {
        if self.token_ids.is_empty() && self.text.is_empty() {
            // The usual answer is one piece, which need not be copied.
            return std::mem::swap(self, more);
        }
        self.text.push_str(&more.text);
        more.text.clear();
        self.token_ids.append(&mut more.token_ids);
        self.logprobs.append(&mut more.logprobs);
    }
}

/// One choice: the answer as far as it was given, and how much of it the reader has.
#[derive(Default)]
struct Choice {
    given: News,
    prompt_logprobs: Vec<TokenLogprobs>,
    logits: Vec<f32>,
    /// It has left the queue: from then on only the engine thread ends it.
    begun: bool,
    end: Option<(Finish, Box<RequestRecord>)>,
    text_read: usize,
    tokens_read: usize,
    end_read: bool,
}

/// The newest part of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Update {
    /// Which choice.
    pub index: usize,
    /// New text, always whole characters. May be empty: a token need not complete one.
    pub text: String,
    /// New tokens.
    pub token_ids: Vec<u32>,
    /// One per new token, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why the choice ended, with its last part.
    pub finish: Option<Finish>,
}

/// What a wait brought.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Something new.
    Update(Update),
    /// Everything has been read.
    Finished,
    /// Nothing yet.
    NotYet,
}

/// A finished choice, whole.
#[derive(Clone, Debug)]
pub struct ChoiceResult {
    /// The text.
    pub text: String,
    /// Every token that was drawn, the one that ended it included.
    pub token_ids: Vec<u32>,
    /// One per token, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// One per token of the prompt but for the first, when asked for.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Raw logits, when asked for.
    pub logits: Vec<f32>,
    /// Why it ended.
    pub finish: Finish,
    /// What it cost.
    pub record: RequestRecord,
}

impl Mailbox {
    /// An empty mailbox for `choices` choices.
    pub(super) fn new(choices: usize, every_token: bool, waker: Option<Arc<dyn Wake>>) -> Self {
        let state = State { choices: (0..choices).map(|_| Choice::default()).collect(), unfinished: choices };
        Self {
            state: Mutex::new(state),
            arrived: Condvar::new(),
            blocked: AtomicUsize::new(0),
            waker,
            every_token,
            tokens: AtomicUsize::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A reader that panicked leaves whole values behind: every append below is complete before the guard drops.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a thread waits for what has been added.
    fn is_read(&self) -> bool {
        self.blocked.load(Ordering::Relaxed) > 0
    }

    /// Tells whoever waits to look.
    pub(super) fn tell(&self) {
        if self.is_read() {
            self.arrived.notify_all();
        }
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }

    /// Whether the reader wants every token when it exists.
    pub(super) fn every_token(&self) -> bool {
        self.every_token
    }

    /// Asks the memory for a choice, or for where it goes on, if a token changes it.
    pub(super) fn prefetch(&self, index: usize, ends: bool) {
        if self.every_token
            && let Ok(state) = self.state.try_lock()
            && let Some(choice) = state.choices.get(index)
        {
            if ends {
                prefetch_end(choice.given.text.as_bytes());
                prefetch_end(&choice.given.token_ids);
            } else {
                prefetch(choice);
            }
        }
    }

    /// There is one more token.
    pub(super) fn count_token(&self) {
        self.tokens.store(self.tokens.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Adds what has come. As with all that is added: whoever waits is still to be told.
    pub(super) fn push(&self, index: usize, news: &mut News) {
        self.lock().choices[index].given.append(news);
    }

    /// Adds log-probabilities of the prompt.
    pub(super) fn push_prompt_logprobs(&self, index: usize, logprobs: Vec<TokenLogprobs>) {
        self.lock().choices[index].prompt_logprobs.extend(logprobs);
    }

    /// Adds raw logits.
    pub(super) fn push_logits(&self, index: usize, logits: Vec<f32>) {
        let mut state = self.lock();
        let all = &mut state.choices[index].logits;
        // The usual answer is one piece, which need not be copied.
        if all.is_empty() { *all = logits } else { all.extend(logits) }
    }

    /// A choice leaves the queue. Says no if it has ended there.
    #[must_use]
    pub(super) fn begin(&self, index: usize) -> bool {
        // One that has ended may have been read and taken away.
        let mut state = self.lock();
        let waiting = state.choices.get_mut(index).filter(|choice| choice.end.is_none());
        waiting.map(|choice| choice.begun = true).is_some()
    }

    /// Ends all choices that wait in the queue, without asking the engine thread, which may be busy with a long step. It
    /// hears of them as they would begin, at the latest. Says how many there were to `before_told`.
    pub(super) fn end_waiting(&self, finish: &Finish, record: &RequestRecord, before_told: impl FnOnce(usize)) {
        let mut state = self.lock();
        let State { choices, unfinished } = &mut *state;
        let before = *unfinished;
        for choice in choices.iter_mut().filter(|choice| !choice.begun && choice.end.is_none()) {
            choice.end = Some((finish.clone(), Box::new(record.clone())));
            *unfinished -= 1;
        }
        let ended = before - *unfinished;
        if ended > 0 {
            before_told(ended);
            drop(state);
            self.tell();
        }
    }

    /// Ends a choice, with the rest of its answer. Only the first end counts; there is no second, and nothing to do before
    /// it is told.
    pub(super) fn finish(
        &self,
        index: usize,
        rest: &mut News,
        finish: Finish,
        record: RequestRecord,
        before_told: impl FnOnce(),
    ) {
        let mut state = self.lock();
        if let Some(choice) = state.choices.get_mut(index).filter(|choice| choice.end.is_none()) {
            before_told();
            choice.given.append(rest);
            choice.end = Some((finish, Box::new(record)));
            state.unfinished -= 1;
        }
    }

    /// Waits until something new is there, everything has been read, or `patience` has passed.
    pub fn next_within(&self, patience: Duration) -> Next {
        let every_token = self.every_token;
        self.wait(patience, |state| match state.next(every_token) {
            Next::NotYet => None,
            found => Some(found),
        })
        .unwrap_or(Next::NotYet)
    }

    /// Whether every choice has ended; waits for it up to `patience`.
    pub fn finished_within(&self, patience: Duration) -> bool {
        self.wait(patience, |state| (state.unfinished == 0).then_some(())).is_some()
    }

    /// What `look` finds, now or when something has arrived, up to `patience`. The clock is read only when it matters.
    fn wait<T>(&self, patience: Duration, mut look: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        let mut found = look(&mut state);
        if found.is_some() || patience.is_zero() {
            return found;
        }
        // An end too far to be told is none.
        let until = Instant::now().checked_add(patience);
        let mut left = patience;
        while found.is_none() && !left.is_zero() {
            self.blocked.fetch_add(1, Ordering::Relaxed);
            state = self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            self.blocked.fetch_sub(1, Ordering::Relaxed);
            found = look(&mut state);
            if found.is_none() {
                left = until.map_or(patience, |until| until.saturating_duration_since(Instant::now()));
            }
        }
        found
    }

    /// The whole choices, once every one has ended. They move out: a second call gets `None`.
    pub fn take_results(&self) -> Option<Vec<ChoiceResult>> {
        let mut state = self.lock();
        if state.unfinished > 0 || state.choices.is_empty() {
            return None;
        }
        std::mem::take(&mut state.choices).into_iter().map(Choice::into_result).collect()
    }

    /// Tokens that there are so far, over all choices.
    pub fn tokens(&self) -> usize {
        self.tokens.load(Ordering::Relaxed)
    }
}

/// Whom a step has brought something. They are told when it has handed out everything, and once: whoever wakes takes a
/// processor from the engine, and would look again and again.
#[derive(Default)]
pub(super) struct Touched {
    mailboxes: Vec<Arc<Mailbox>>,
    wakers: Vec<Arc<dyn Wake>>,
}

impl Touched {
    /// Something was added to this.
    pub fn add(&mut self, mailbox: &Arc<Mailbox>) {
        // The choices of a call come one after another.
        if mailbox.is_read() && !self.mailboxes.last().is_some_and(|last| Arc::ptr_eq(last, mailbox)) {
            self.mailboxes.push(mailbox.clone());
        }
        if let Some(waker) = &mailbox.waker
            && !self.wakers.iter().any(|known| Arc::ptr_eq(known, waker))
        {
            self.wakers.push(waker.clone());
        }
    }

    /// Tells them.
    pub fn tell(&mut self) {
        self.mailboxes.drain(..).for_each(|mailbox| mailbox.arrived.notify_all());
        self.wakers.drain(..).for_each(|waker| waker.wake());
    }
}

impl State {
    fn next(&mut self, every_token: bool) -> Next {
        for (index, choice) in self.choices.iter_mut().enumerate() {
            if (every_token || choice.end.is_some()) && choice.has_news() {
                return Next::Update(choice.read(index));
            }
        }
        if self.unfinished == 0 { Next::Finished } else { Next::NotYet }
    }
}

impl Choice {
    fn has_news(&self) -> bool {
        self.tokens_read < self.given.token_ids.len() || (self.end.is_some() && !self.end_read)
    }

    fn read(&mut self, index: usize) -> Update {
        let update = Update {
            index,
            text: self.given.text[self.text_read..].to_owned(),
            token_ids: self.given.token_ids[self.tokens_read..].to_vec(),
            logprobs: self.given.logprobs.get(self.tokens_read..).unwrap_or_default().to_vec(),
            finish: self.end.as_ref().map(|(finish, _)| finish.clone()),
        };
        self.text_read = self.given.text.len();
        self.tokens_read = self.given.token_ids.len();
        self.end_read = self.end.is_some();
        update
    }

    fn into_result(self) -> Option<ChoiceResult> {
        let (finish, record) = self.end?;
        Some(ChoiceResult {
            text: self.given.text,
            token_ids: self.given.token_ids,
            logprobs: self.given.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            logits: self.logits,
            finish,
            record: *record,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn news(text: &str, token_ids: &[u32]) -> News {
        News { text: text.into(), token_ids: token_ids.into(), logprobs: Vec::new() }
    }

    #[test]
    fn whoever_waits_for_ever_hears_of_everything() {
        let mailbox = Arc::new(Mailbox::new(1, true, None));
        let engine = mailbox.clone();
        let thread = std::thread::spawn(move || {
            for token in 0..1000 {
                engine.push(0, &mut news("x", &[token]));
                engine.tell();
                if token % 100 == 0 {
                    std::thread::yield_now();
                }
            }
            engine.finish(0, &mut news("", &[]), Finish::Length, RequestRecord::default(), || {});
            engine.tell();
        });
        let mut tokens = 0;
        while let Next::Update(update) = mailbox.next_within(Duration::MAX) {
            tokens += update.token_ids.len();
        }
        assert_eq!(tokens, 1000);
        assert!(mailbox.finished_within(Duration::MAX));
        thread.join().expect("it only writes");
    }

    #[test]
    fn a_choice_ends_once_whoever_ends_it() {
        let record = RequestRecord::default();
        let mailbox = Mailbox::new(2, true, None);
        assert!(mailbox.begin(0));
        let mut told = Vec::new();
        mailbox.end_waiting(&Finish::Deadline, &record, |ended| told.push(ended));
        mailbox.end_waiting(&Finish::Cancelled, &record, |ended| told.push(ended));
        assert!(!mailbox.begin(1));
        mailbox.finish(0, &mut news("", &[]), Finish::Length, record.clone(), || told.push(10));
        mailbox.finish(0, &mut news("", &[]), Finish::Cancelled, record.clone(), || told.push(20));
        assert_eq!(told, [1, 10], "the second one waited, the first one ran");
        let ends: Vec<_> = mailbox.take_results().into_iter().flatten().map(|choice| choice.finish).collect();
        assert_eq!(ends, [Finish::Length, Finish::Deadline]);
        // The engine thread may still have something to say about what has been taken.
        assert!(!mailbox.begin(1));
        mailbox.finish(1, &mut news("late", &[]), Finish::Length, record, || panic!("it has ended"));
        assert!(mailbox.take_results().is_none() && mailbox.finished_within(Duration::ZERO));
    }

    #[test]
    fn whoever_waits_is_told_once_and_nobody_else_is_there_to_tell() {
        struct Count(AtomicUsize);
        impl Wake for Count {
            fn wake(&self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let watched = || Arc::new(Mailbox::new(1, true, Some(count.clone() as Arc<dyn Wake>)));
        let (mailbox, mut touched) = (Arc::new(Mailbox::new(1, true, None)), Touched::default());
        mailbox.push(0, &mut news("a", &[1]));
        touched.add(&mailbox);
        assert!(touched.mailboxes.is_empty(), "nobody waits");
        assert!(matches!(mailbox.next_within(Duration::from_secs(60)), Next::Update(update) if update.text == "a"));
        let reader = mailbox.clone();
        let reader = std::thread::spawn(move || reader.next_within(Duration::from_secs(60)));
        while !mailbox.is_read() {
            std::thread::yield_now();
        }
        // All of a step, and then once.
        mailbox.push(0, &mut news("b", &[2]));
        touched.add(&mailbox);
        mailbox.push(0, &mut news("c", &[3]));
        mailbox.finish(0, &mut news("d", &[]), Finish::Length, RequestRecord::default(), || ());
        touched.add(&mailbox);
        [watched(), watched()].iter().for_each(|mailbox| touched.add(mailbox));
        assert_eq!(touched.mailboxes.len(), 1);
        touched.tell();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        let Ok(Next::Update(update)) = reader.join() else { panic!("something is there") };
        assert_eq!((&*update.text, update.token_ids, update.finish), ("bcd", vec![2, 3], Some(Finish::Length)));
        assert!(!mailbox.is_read());
        assert_eq!(mailbox.next_within(Duration::ZERO), Next::Finished);
    }
}
