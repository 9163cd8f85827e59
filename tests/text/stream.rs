//! Streams against decoding everything at once.

use std::sync::Arc;

use octavo::stages::stream::{StreamParams, TextStream};
use octavo::stages::tokenize::{Special, Tokenizer};

use crate::fixtures::{self, Random};

/// A stream that is looked at after every token.
struct Watched(TextStream);

/// What a token brought.
#[derive(Clone, Debug, Default, PartialEq)]
struct Pushed {
    text: String,
    stopped: Option<String>,
}

impl Watched {
    fn push(&mut self, id: u32, may_stop: bool) -> Pushed {
        // Behind what is there.
        let mut text = "before ".to_owned();
        let stopped = self.0.push(id, may_stop, &mut text);
        Pushed { text: text.strip_prefix("before ").expect("it only adds").to_owned(), stopped }
    }

    fn finish(&mut self, may_stop: bool) -> Pushed {
        let mut text = String::new();
        let stopped = self.0.finish(may_stop, &mut text);
        Pushed { text, stopped }
    }
}

fn stream(tokenizer: &Arc<Tokenizer>, stop: &[String], include_stop: bool, skip_special: bool) -> Watched {
    let params = StreamParams { stop: stop.to_vec(), include_stop, skip_special, continues_text: false };
    Watched(TextStream::new(Arc::clone(tokenizer), params))
}

/// Tokens of single bytes and of parts of characters, so that UTF-8 breaks often.
fn fragments(tokenizer: &Tokenizer) -> Vec<u32> {
    let broken =
        |id: &u32| tokenizer.piece(*id).is_some_and(|piece| piece.len() == 1 || std::str::from_utf8(piece).is_err());
    (0..tokenizer.len() as u32).filter(broken).collect()
}

#[test]
fn pieces_add_up_to_the_decoded_text() {
    for (name, tokenizer) in fixtures::tokenizers() {
        let fragments = fragments(&tokenizer);
        let special: Vec<u32> = (0..tokenizer.len() as u32).filter(|&id| tokenizer.is_special(id)).collect();
        for seed in 0..300 {
            let mut random = Random(seed);
            let ids: Vec<u32> = (0..random.below(24))
                .map(|_| match random.below(6) {
                    0 => random.below(tokenizer.len() + 2) as u32,
                    1 => *random.pick(&special),
                    _ => *random.pick(&fragments),
                })
                .collect();
            for skip_special in [false, true] {
                let mut stream = stream(&tokenizer, &[], false, skip_special);
                let mut text: String = ids.iter().map(|&id| stream.push(id, true).text).collect();
                text += &stream.finish(true).text;
                assert_eq!(text, tokenizer.decode(&ids, skip_special), "{name}, seed {seed}: {ids:?}");
            }
        }
    }
}

/// What is streamed when all goes well: no broken character, and never one that was given out before it was whole.
#[test]
fn every_recorded_string_comes_back() {
    let strings = fixtures::strings();
    for (name, tokenizer) in fixtures::tokenizers() {
        for text in &strings {
            for special in [Special::AsText, Special::Parse] {
                let ids = tokenizer.encode(text, special, true).unwrap().ids;
                for skip_special in [false, true] {
                    let mut stream = stream(&tokenizer, &[], false, skip_special);
                    let streamed: Vec<String> = ids.iter().map(|&id| stream.push(id, true).text).collect();
                    let rest = stream.finish(true).text;
                    let whole = tokenizer.decode(&ids, skip_special);
                    assert_eq!(streamed.concat() + &rest, whole, "{name}: {text:?}");
                    if !text.contains('\u{fffd}') {
                        assert!(!whole.contains('\u{fffd}'), "{name}: {text:?} gave {whole:?}");
                    }
                }
            }
        }
    }
}

/// A character that breaks off is shown as broken only when nothing more can come.
#[test]
fn what_is_broken_is_told_at_the_end() {
    for (name, tokenizer) in fixtures::tokenizers() {
        let ids = tokenizer.encode("a🙂", Special::AsText, false).unwrap().ids;
        let Some(whole) = (0..ids.len()).find(|&n| tokenizer.decode(&ids[..n], true).contains('\u{fffd}')) else {
            continue; // the character is a single token
        };
        let mut stream = stream(&tokenizer, &[], false, true);
        let streamed: String = ids[..whole].iter().map(|&id| stream.push(id, true).text).collect();
        assert!(!streamed.contains('\u{fffd}'), "{name}: {streamed:?}");
        assert!(stream.finish(true).text.contains('\u{fffd}'), "{name}");
    }
}

#[test]
fn whole_characters_are_not_held_back() {
    for (name, tokenizer) in fixtures::tokenizers() {
        let ids = tokenizer.encode("Hello, world 🙂 ok", Special::AsText, false).unwrap().ids;
        let mut stream = stream(&tokenizer, &[], false, true);
        let mut text = String::new();
        for (n, &id) in ids.iter().enumerate() {
            text += &stream.push(id, true).text;
            let so_far = tokenizer.decode(&ids[..=n], true);
            assert!(so_far.contains('\u{FFFD}') || so_far.len() <= text.len() + 4, "{name}: {text:?} of {so_far:?}");
        }
    }
}

/// The stop string that ends first in `text` (the longest of several), as (start, end).
fn first_stop(text: &str, stops: &[String]) -> Option<(usize, usize)> {
    let found = |end: usize| {
        stops
            .iter()
            .filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()))
            .map(|stop| (end - stop.len(), end))
            .min()
    };
    (1..=text.len()).find_map(found)
}

/// How much of the end of `text` is a proper beginning of a stop string.
fn held_back(text: &str, stops: &[String]) -> usize {
    let begins =
        |len: usize| stops.iter().any(|stop| stop.len() > len && text.as_bytes().ends_with(&stop.as_bytes()[..len]));
    (0..=text.len()).rev().find(|&len| begins(len)).unwrap_or(0)
}

fn random_text(random: &mut Random, len: usize) -> String {
    const LETTERS: [&str; 9] = ["a", "b", "aa", "ab", " ", "\n", "é", "🙂", "</s>"];
    (0..random.below(len) + 1).map(|_| *random.pick(&LETTERS)).collect()
}

#[test]
fn stop_strings_end_the_text_where_they_begin() {
    let mut stops_seen = 0;
    for (name, tokenizer) in fixtures::tokenizers() {
        for seed in 0..600 {
            let mut random = Random(seed);
            let ids = tokenizer.encode(&random_text(&mut random, 40), Special::AsText, false).unwrap().ids;
            let stops: Vec<String> = (0..random.below(4) + 1).map(|_| random_text(&mut random, 4)).collect();
            let include = random.below(2) == 0;
            let context = format!("{name}, seed {seed}: stops {stops:?}, ids {ids:?}");
            // The naive way: decode everything after every token, and search.
            let stopped = (1..=ids.len()).find_map(|n| {
                let text = tokenizer.decode(&ids[..n], true);
                first_stop(&text, &stops).map(|(start, end)| {
                    (n, text[start..end].to_owned(), text[..if include { end } else { start }].to_owned())
                })
            });
            let mut plain = stream(&tokenizer, &[], include, true);
            let mut stream = stream(&tokenizer, &stops, include, true);
            let (mut text, mut settled, mut end) = (String::new(), String::new(), None);
            for (n, &id) in ids.iter().enumerate() {
                let pushed = stream.push(id, true);
                text += &pushed.text;
                settled += &plain.push(id, true).text;
                if let Some(stop) = pushed.stopped {
                    end = Some((n + 1, stop, text.clone()));
                    break;
                }
                assert_eq!(text.len(), settled.len() - held_back(&settled, &stops), "{context} after {} tokens", n + 1);
                assert!(settled.starts_with(&text), "{context}");
            }
            assert_eq!(end, stopped, "{context}");
            stops_seen += usize::from(end.is_some());
            let rest = stream.finish(true).text;
            match end {
                Some(_) => assert_eq!(rest, "", "{context}"),
                None => assert_eq!(text + &rest, tokenizer.decode(&ids, true), "{context}"),
            }
            assert_eq!(stream.push(ids[0], true), Default::default(), "{context}: nothing comes after the end");
        }
    }
    assert!(stops_seen > 500, "only {stops_seen} texts were stopped");
}

/// A stop string with U+FFFD may appear only when the end settles what is broken.
#[test]
fn stop_strings_are_found_in_what_the_end_settles() {
    let stops = ["\u{fffd}".to_owned(), "\u{fffd}\u{fffd}\u{fffd}".to_owned()];
    let (mut found_at_the_end, mut pardoned) = (0, 0);
    for (name, tokenizer) in fixtures::tokenizers() {
        let fragments = fragments(&tokenizer);
        for seed in 0..200 {
            let mut random = Random(seed);
            let ids: Vec<u32> = (0..random.below(12) + 1).map(|_| *random.pick(&fragments)).collect();
            let include = random.below(2) == 0;
            let stops = std::slice::from_ref(random.pick(&stops));
            let context = format!("{name}, seed {seed}: stops {stops:?}, ids {ids:?}");
            let whole = tokenizer.decode(&ids, true);
            let stop = first_stop(&whole, stops);
            let want = stop.map_or(&whole[..], |(start, end)| &whole[..if include { end } else { start }]);
            let mut ended = stream(&tokenizer, stops, include, true);
            let pushed: Vec<_> = ids.iter().map(|&id| ended.push(id, true)).collect();
            let tail = ended.finish(true);
            let text: String = pushed.iter().chain([&tail]).map(|pushed| &pushed.text[..]).collect();
            assert_eq!(text, want, "{context}");
            let all: Vec<_> = pushed.into_iter().chain([tail.clone()]).filter_map(|pushed| pushed.stopped).collect();
            assert_eq!(all, stops[..usize::from(stop.is_some())], "{context}");
            found_at_the_end += usize::from(tail.stopped.is_some());
            assert_eq!(ended.finish(true), Default::default(), "{context}: nothing comes after the end");
            // Before the minimum it is text.
            let mut free = stream(&tokenizer, stops, include, true);
            let mut text: String = ids.iter().map(|&id| free.push(id, false).text).collect();
            let tail = free.finish(false);
            text += &tail.text;
            assert_eq!((text, tail.stopped), (whole, None), "{context}");
            pardoned += usize::from(stop.is_some());
        }
    }
    assert!(found_at_the_end > 50 && pardoned > 100, "{found_at_the_end} at the end, {pardoned} pardoned");
}

/// A stop string counts when its last byte comes with a token that may stop, however it began.
#[test]
fn stop_strings_count_from_the_minimum_on() {
    let mut seen = 0;
    for (name, tokenizer) in fixtures::tokenizers() {
        for seed in 0..300 {
            let mut random = Random(seed);
            let ids = tokenizer.encode(&random_text(&mut random, 30), Special::AsText, false).unwrap().ids;
            let stops: Vec<String> = (0..random.below(3) + 1).map(|_| random_text(&mut random, 3)).collect();
            let minimum = random.below(ids.len() + 2);
            let context = format!("{name}, seed {seed}: stops {stops:?}, minimum {minimum}, ids {ids:?}");
            // What an earlier token completed is text by now. A broken end of a text may still become whole.
            let whole = |n: usize| tokenizer.decode(&ids[..n], true).trim_end_matches('\u{fffd}').len();
            let stopped = (1..=ids.len()).filter(|&n| n >= minimum).find_map(|n| {
                let text = tokenizer.decode(&ids[..n], true);
                let old = (0..n).map(whole).max().unwrap_or(0);
                let ends = |end: &usize| stops.iter().any(|stop| text.as_bytes()[..*end].ends_with(stop.as_bytes()));
                (old + 1..=text.len()).find(ends).map(|end| {
                    let longest = stops.iter().filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
                    let start = end - longest.map(String::len).max().unwrap_or(0);
                    (n, text[..start].to_owned())
                })
            });
            let mut stream = stream(&tokenizer, &stops, false, true);
            let (mut text, mut end) = (String::new(), None);
            for (n, &id) in ids.iter().enumerate() {
                let pushed = stream.push(id, n + 1 >= minimum);
                text += &pushed.text;
                if pushed.stopped.is_some() {
                    end = Some((n + 1, text.clone()));
                    break;
                }
            }
            assert_eq!(end, stopped, "{context}");
            seen += usize::from(end.is_some());
        }
    }
    assert!(seen > 300, "only {seen} texts were stopped");
}

#[test]
fn before_the_minimum_stop_strings_are_text() {
    for (name, tokenizer) in fixtures::tokenizers() {
        let ids = tokenizer.encode("a🙂b🙂c", Special::AsText, false).unwrap().ids;
        let smile = ["🙂".to_owned()];
        let mut stream = stream(&tokenizer, &smile, false, true);
        let mut text = String::new();
        // The first smile is allowed, the second ends the text.
        let mut free = true;
        for (n, &id) in ids.iter().enumerate() {
            let pushed = stream.push(id, !free);
            text += &pushed.text;
            if tokenizer.decode(&ids[..=n], true).contains('🙂') {
                free = false;
            }
            if pushed.stopped.is_some() {
                break;
            }
        }
        assert_eq!(text, "a🙂b", "{name}");
    }
}

#[test]
fn a_continued_text_keeps_its_first_space() {
    let tokenizer = fixtures::folder(&fixtures::committed().join("tiny/spm"));
    let ids = tokenizer.encode("ab", Special::AsText, false).unwrap().ids;
    for (continues_text, want) in [(false, "ab"), (true, " ab")] {
        let params = StreamParams { continues_text, ..Default::default() };
        let mut stream = Watched(TextStream::new(Arc::clone(&tokenizer), params));
        let text: String = ids.iter().map(|&id| stream.push(id, true).text).collect();
        assert_eq!(text + &stream.finish(true).text, want);
    }
}
