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

/// Turns the tokens of one request into text.
pub struct TextStream {
    detokenizer: Detokenizer,
    /// `None`: there are no stop strings.
    search: Option<Box<Search>>,
    done: bool,
}

/// The search for stop strings.
struct Search {
    stops: Vec<String>,
    include_stop: bool,
    matcher: StopMatcher,
    /// Settled text that may turn out to begin a stop string.
    held: String,
    ahead: Option<Ahead>,
}

/// The search continued into text that is not settled. Stopping settles it, so a stop string in it counts at once.
struct Ahead {
    matcher: StopMatcher,
    /// How much of the unsettled text was searched.
    searched: usize,
    /// How much of it was searched when stopping was not allowed.
    pardoned: usize,
}

impl TextStream {
    /// A stream at its beginning.
    pub fn new(tokenizer: Arc<Tokenizer>, params: StreamParams) -> Self {
        let StreamParams { stop, include_stop, skip_special, continues_text } = params;
        Self {
            detokenizer: Detokenizer::new(tokenizer, skip_special, continues_text),
            search: (!stop.is_empty()).then(|| Box::new(Search::new(stop, include_stop))),
            done: false,
        }
    }

    /// Asks the memory for what taking this token touches: where its `bytes` are, or these.
    pub fn prefetch(&self, id: u32, bytes: bool) {
        self.detokenizer.prefetch(id, bytes);
    }

    /// Takes the next token, and adds new text to `text`, perhaps none and never part of a stop string. Returns the stop
    /// string that has appeared; the text is complete then. Without `may_stop` it is text like any other.
    pub fn push(&mut self, id: u32, may_stop: bool, text: &mut String) -> Option<String> {
        if self.done {
            return None;
        }
        let Some(search) = &mut self.search else {
            self.detokenizer.push(id, text);
            return None;
        };
        let mut settled = String::new();
        self.detokenizer.push(id, &mut settled);
        let found = search.settle(&settled, may_stop);
        match found.or_else(|| search.look_ahead(self.detokenizer.unsettled(), may_stop)) {
            Some((index, end)) => {
                self.done = true;
                Some(search.stop(index, end, text))
            }
            None => {
                let certain = search.held.len() - search.matcher.held_back();
                text.push_str(&search.held[..certain]);
                search.held.drain(..certain);
                None
            }
        }
    }

    /// No more tokens come: the rest of the text. Bytes that stay broken settle only now, so a stop string (one with
    /// U+FFFD in it) may still appear; `may_stop` as for the last token.
    pub fn finish(&mut self, may_stop: bool, text: &mut String) -> Option<String> {
        if std::mem::replace(&mut self.done, true) {
            return None;
        }
        let Some(search) = &mut self.search else {
            self.detokenizer.finish(text);
            return None;
        };
        let mut settled = String::new();
        self.detokenizer.finish(&mut settled);
        if let Some((index, end)) = search.settle(&settled, may_stop) {
            return Some(search.stop(index, end, text));
        }
        text.push_str(&std::mem::take(&mut search.held));
        None
    }
}

impl Search {
    fn new(stops: Vec<String>, include_stop: bool) -> Self {
        Self { matcher: StopMatcher::new(&stops), stops, include_stop, held: String::new(), ahead: None }
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
    fn look_ahead(&mut self, unsettled: Option<&str>, may_stop: bool) -> Option<(usize, usize)> {
        let unsettled = unsettled.filter(|text| !text.is_empty())?;
        let matcher = &self.matcher;
        let new = || Ahead { matcher: matcher.clone(), searched: 0, pardoned: 0 };
        let ahead = self.ahead.get_or_insert_with(new);
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

    /// The stop string `index` ends at byte `end` of the held text: adds the last of the text, and says which string it is.
    fn stop(&mut self, index: usize, end: usize, text: &mut String) -> String {
        let stop = self.stops[index].clone();
        let held = std::mem::take(&mut self.held);
        text.push_str(&held[..if self.include_stop { end } else { end - stop.len() }]);
        stop
    }
}
