//! Looks for stop strings in a text that arrives in parts.

use std::sync::Arc;

/// A stop string was completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Match {
    /// Which of the strings.
    pub index: usize,
    /// Where it ends in the part that was fed, in bytes.
    pub end: usize,
}

/// Knuth, Morris and Pratt's automaton for every string, side by side.
#[derive(Clone)]
pub(super) struct StopMatcher {
    strings: Arc<[StopString]>,
    /// For every string, how many of its bytes the text ends with. Never all of them, between two parts.
    progress: Vec<u16>,
}

struct StopString {
    bytes: Vec<u8>,
    /// `borders[n]`: the longest proper suffix of the first n bytes that the string also begins with.
    borders: Vec<u16>,
}

impl StopString {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut string = Self { borders: vec![0; bytes.len() + 1], bytes };
        for len in 2..=string.bytes.len() {
            string.borders[len] = string.step(string.borders[len - 1], string.bytes[len - 1]);
        }
        string
    }

    /// How far the string has come after one more byte, if it had come `progress` bytes far.
    fn step(&self, mut progress: u16, byte: u8) -> u16 {
        loop {
            if self.bytes.get(progress as usize) == Some(&byte) {
                return progress + 1;
            }
            if progress == 0 {
                return 0;
            }
            progress = self.borders[progress as usize];
        }
    }
}

impl StopMatcher {
    /// The strings are neither empty nor longer than [`crate::request::MAX_STOP_BYTES`], which fits the counters.
    pub fn new(stops: &[String]) -> Self {
        let usable = |stop: &&String| !stop.is_empty() && stop.len() < u16::MAX as usize;
        assert!(stops.iter().all(|stop| usable(&stop)), "stop strings are checked before a request starts");
        let strings: Arc<[StopString]> = stops.iter().map(|stop| StopString::new(stop)).collect();
        Self { progress: vec![0; strings.len()], strings }
    }

    /// Takes the next part. Stops at the first byte that completes a string (the longest, if it completes several), unless
    /// it may not stop.
    pub fn feed(&mut self, part: &str, may_stop: bool) -> Option<Match> {
        for (at, &byte) in part.as_bytes().iter().enumerate() {
            let mut found: Option<usize> = None;
            for (index, (string, progress)) in self.strings.iter().zip(&mut self.progress).enumerate() {
                *progress = string.step(*progress, byte);
                let complete = *progress as usize == string.bytes.len();
                if complete && found.is_none_or(|best| self.strings[best].bytes.len() < string.bytes.len()) {
                    found = Some(index);
                }
            }
            if found.is_some() {
                for (string, progress) in self.strings.iter().zip(&mut self.progress) {
                    if *progress as usize == string.bytes.len() {
                        *progress = string.borders[*progress as usize];
                    }
                }
            }
            if let Some(index) = found.filter(|_| may_stop) {
                return Some(Match { index, end: at + 1 });
            }
        }
        None
    }

    /// How many bytes at the end of the text may be the beginning of a stop string.
    pub fn held_back(&self) -> usize {
        self.progress.iter().copied().max().unwrap_or(0) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(&stops.iter().map(|stop| stop.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn finds_strings_across_parts() {
        let mut matcher = matcher(&["abac", "é🙂"]);
        assert_eq!(matcher.feed("xaba", true), None);
        assert_eq!(matcher.held_back(), 3);
        // The second `aba` begins inside the first.
        assert_eq!(matcher.feed("bac", true), Some(Match { index: 0, end: 3 }));
        assert_eq!(matcher.feed("é", true), None);
        assert_eq!(matcher.held_back(), "é".len());
        assert_eq!(matcher.feed("🙂!", true), Some(Match { index: 1, end: 4 }));
    }

    #[test]
    fn of_strings_that_end_together_the_longest_counts() {
        let mut matcher = matcher(&["c", "abc", "bc"]);
        assert_eq!(matcher.feed("xabc", true), Some(Match { index: 1, end: 4 }));
    }

    #[test]
    fn goes_on_where_it_may_not_stop() {
        let mut matcher = matcher(&["aa"]);
        assert_eq!(matcher.feed("aa", false), None);
        assert_eq!(matcher.held_back(), 1);
        assert_eq!(matcher.feed("a", true), Some(Match { index: 0, end: 1 }));
    }
}
