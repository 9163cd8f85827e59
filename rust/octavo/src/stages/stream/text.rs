//! The text of one request.

use std::sync::Arc;

use super::detokenize::Detokenizer;
use super::stop::StopMatcher;
use crate::stages::tokenize::Tokenizer;

/// What a request wants of its text.
#[derive(Clone, Debug, Default)]
pub struct StreamParams {
    /// Texts that end it, none of them empty.
    pub stop: Vec<String>,
    /// Keep the text that ended it.
    pub include_stop: bool,
    /// Control tokens leave no text.
    pub skip_special: bool,
    /// The text goes on after a prompt, so that a leading space is its own and not one that the tokenizer puts before
    /// every text. (Matters for SentencePiece only.)
    pub continues_text: bool,
}

/// What a token brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// New text, perhaps none. Never part of a stop string.
    pub text: String,
    /// The stop string that has appeared. The text is complete then.
    pub stopped: Option<String>,
}

/// Turns the tokens of one request into text.
pub struct TextStream {
    detokenizer: Detokenizer,
    stops: Vec<String>,
    include_stop: bool,
    matcher: StopMatcher,
    /// Settled text that may turn out to begin a stop string.
    held: String,
    ahead: Option<Ahead>,
    done: bool,
}

/// The search continued into text that is not settled. Stopping settles it, so a stop string in it counts at once.
struct Ahead {
    matcher: StopMatcher,
    /// How much of the unsettled text was searched.
    searched: usize,
    /// How much of it was searched when stopping was not allowed.
    pardoned: usize,
}

impl Ahead {
    fn new(matcher: &StopMatcher) -> Self {
        Self { matcher: matcher.clone(), searched: 0, pardoned: 0 }
    }
}

impl TextStream {
    /// A stream at its beginning.
    pub fn new(tokenizer: Arc<Tokenizer>, params: StreamParams) -> Self {
        let StreamParams { stop, include_stop, skip_special, continues_text } = params;
        Self {
            detokenizer: Detokenizer::new(tokenizer, skip_special, continues_text),
            matcher: StopMatcher::new(&stop),
            stops: stop,
            include_stop,
            held: String::new(),
            ahead: None,
            done: false,
        }
    }

    /// Asks the memory for what taking this token touches: where its `bytes` are, or these.
    pub fn prefetch(&self, id: u32, bytes: bool) {
        self.detokenizer.prefetch(id, bytes);
    }

    /// Takes the next token. Without `may_stop` a stop string that it completes is text like any other.
    pub fn push(&mut self, id: u32, may_stop: bool) -> Pushed {
        if self.done {
            return Pushed::default();
        }
        let settled = self.detokenizer.push(id);
        if self.matcher.is_empty() {
            return Pushed { text: settled, stopped: None };
        }
        if let Some((index, end)) = self.settle(&settled, may_stop).or_else(|| self.look_ahead(may_stop)) {
            return self.stop(index, end);
        }
        let keep = self.matcher.held_back();
        let text = self.held.drain(..self.held.len() - keep).collect();
        Pushed { text, stopped: None }
    }

    /// No more tokens come: the rest of the text. Bytes that stay broken settle only now, so a stop string (one with
    /// U+FFFD in it) may still appear; `may_stop` as for the last token.
    pub fn finish(&mut self, may_stop: bool) -> Pushed {
        if std::mem::replace(&mut self.done, true) {
            return Pushed::default();
        }
        let settled = self.detokenizer.finish();
        if let Some((index, end)) = self.settle(&settled, may_stop) {
            return self.stop(index, end);
        }
        Pushed { text: std::mem::take(&mut self.held), stopped: None }
    }

    /// Takes settled text into `held`. Returns which stop string it completes, and where in `held` that ends.
    fn settle(&mut self, settled: &str, may_stop: bool) -> Option<(usize, usize)> {
        if settled.is_empty() {
            return None;
        }
        let pardoned = self.ahead.take().map_or(0, |ahead| ahead.pardoned);
        let (old, new) = settled.split_at_checked(pardoned).unwrap_or(("", settled));
        self.matcher.feed(old, false);
        self.held.push_str(settled);
        let found = self.matcher.feed(new, may_stop)?;
        Some((found.index, self.held.len() - new.len() + found.end))
    }

    /// Looks for stop strings in unsettled text; if one is there, takes that text into `held`.
    fn look_ahead(&mut self, may_stop: bool) -> Option<(usize, usize)> {
        let unsettled = self.detokenizer.unsettled().filter(|text| !text.is_empty())?;
        let ahead = self.ahead.get_or_insert_with(|| Ahead::new(&self.matcher));
        let found = ahead.matcher.feed(&unsettled[ahead.searched..], may_stop);
        let end = found.map(|found| self.held.len() + ahead.searched + found.end);
        ahead.searched = unsettled.len();
        if !may_stop {
            ahead.pardoned = unsettled.len();
        }
        if found.is_some() {
            self.held.push_str(unsettled);
        }
        found.map(|found| found.index).zip(end)
    }

    /// The stop string `index` ends at byte `end` of the held text.
    fn stop(&mut self, index: usize, end: usize) -> Pushed {
        self.done = true;
        let stop = self.stops[index].clone();
        let mut text = std::mem::take(&mut self.held);
        text.truncate(if self.include_stop { end } else { end - stop.len() });
        Pushed { text, stopped: Some(stop) }
    }
}
