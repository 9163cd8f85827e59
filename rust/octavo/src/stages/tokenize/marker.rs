//! Keeps what users wrote from turning into special tokens.
//!
//! Before a template is rendered, every spelled-out control token in a message is replaced by one private-use character
//! that occurs nowhere in the input or the template. In the rendered prompt the characters are replaced by what they stand
//! for, and those places are known to be text. A single character survives whatever a template does to strings.
//!
//! A template can also put a user's word into a token of its own making, `<|{{ name }}|>`. So words that could be the middle
//! of a control token are marked as well, but only if the template does not notice: it may compare such a word with one of its
//! own (`tool.type == "function"`), and what it then writes would be another prompt.

use std::collections::{BTreeSet, HashMap};
use std::ops::{Range, RangeInclusive};

use serde_json::Value;

use super::special::SpecialTokens;

/// The second private-use plane: no tokenizer or template has a meaning for it.
const PLACEHOLDERS: RangeInclusive<u32> = 0x10_0000..=0x10_FFFD;

/// Whether this character may be one of ours.
pub(super) fn is_placeholder(letter: char) -> bool {
    PLACEHOLDERS.contains(&(letter as u32))
}

/// The placeholders of one prompt.
pub(super) struct Marker<'a> {
    specials: &'a SpecialTokens,
    /// Private-use characters of that plane that the input has already.
    taken: BTreeSet<char>,
    next: u32,
    /// Words of the template, which it may compare with; where words that could fill a control token are to be marked.
    middles: Option<&'a str>,
    marked_middles: bool,
    placeholders: HashMap<String, char>,
    literals: HashMap<char, String>,
}

impl<'a> Marker<'a> {
    /// A marker for a prompt made of a template's source and these values.
    pub fn new(specials: &'a SpecialTokens, source: &str, values: &[&Value]) -> Self {
        let mut taken: BTreeSet<char> = source.chars().filter(|&letter| is_placeholder(letter)).collect();
        values.iter().for_each(|value| collect(value, &mut taken));
        Self {
            specials,
            taken,
            next: *PLACEHOLDERS.start(),
            middles: None,
            marked_middles: false,
            placeholders: HashMap::new(),
            literals: HashMap::new(),
        }
    }

    /// The same, for words too that could be the middle of a control token, unless the template's source has them as
    /// words of its own.
    pub fn with_middles(mut self, source: &'a str) -> Self {
        self.middles = Some(source);
        self
    }

    /// Whether there was such a word.
    pub fn marked_middles(&self) -> bool {
        self.marked_middles
    }

    /// Replaces control tokens in all strings of `value`, names of members included.
    pub fn mark(&mut self, value: &Value) -> Value {
        self.mark_member("", value)
    }

    fn mark_member(&mut self, name: &str, value: &Value) -> Value {
        match value {
            // Templates build tokens out of roles (`<|user|>`), so only a whole token in one is suspicious.
            Value::String(text) if name == "role" => Value::String(self.mark_tokens(text)),
            Value::String(text) => {
                let text = self.mark_edges(text);
                let text = self.mark_middle(text);
                Value::String(self.mark_tokens(&text))
            }
            Value::Array(values) => values.iter().map(|value| self.mark_member(name, value)).collect(),
            Value::Object(members) => {
                let marked = members.iter().map(|(name, value)| (self.mark_name(name), self.mark_member(name, value)));
                Value::Object(marked.collect())
            }
            other => other.clone(),
        }
    }

    fn mark_tokens(&mut self, text: &str) -> String {
        let (mut marked, mut done) = (String::with_capacity(text.len()), 0);
        for range in self.specials.control_look_alikes(text) {
            marked.push_str(&text[done..range.start]);
            marked.push_str(&self.placeholder(&text[range.clone()]));
            done = range.end;
        }
        marked + &text[done..]
    }

    fn mark_name(&mut self, name: &str) -> String {
        let name = if self.middles.is_some() { self.mark_edges(name) } else { name.to_owned() };
        self.marked_middles |= self.middles.is_some() && name.chars().any(|letter| self.literals.contains_key(&letter));
        let name = self.mark_middle(name);
        self.mark_tokens(&name)
    }

    /// Replaces the first visible letter of a text that could be the middle of a control token.
    fn mark_middle(&mut self, text: String) -> String {
        let inner = text.trim();
        let Some(source) = self.middles.filter(|_| self.specials.could_fill(inner)) else { return text };
        let own = |open: &str, close: &str| source.contains(&format!("{open}{inner}{close}"));
        if own("'", "'") || own("\"", "\"") || own(".", "") {
            return text;
        }
        let at = text.len() - text.trim_start().len();
        let len = inner.chars().next().map_or(0, char::len_utf8);
        self.marked_middles = true;
        let placeholder = self.placeholder(&text[at..at + len]);
        [&text[..at], &placeholder, &text[at + len..]].concat()
    }

    /// A text that begins or ends with a part of a control token could become one together with the template's text beside
    /// it. Its outermost visible letter is replaced then.
    fn mark_edges(&mut self, text: &str) -> String {
        let inner = text.trim();
        let (start, end) = self.specials.could_complete(inner);
        let mut letters = inner.chars();
        let first = letters.next().filter(|_| start).map(|letter| letter.to_string());
        let last = letters.next_back().filter(|_| end).map(|letter| letter.to_string());
        // A single letter can be at both edges.
        let first = first.or_else(|| (end && last.is_none()).then(|| inner.to_owned()));
        let middle = first.as_deref().map_or(0, str::len)..inner.len() - last.as_deref().map_or(0, str::len);
        let mut mark = |edge: &Option<String>| edge.as_deref().map(|edge| self.placeholder(edge)).unwrap_or_default();
        let (first, last) = (mark(&first), mark(&last));
        let lead = &text[..text.len() - text.trim_start().len()];
        let trail = &text[text.trim_end().len().max(lead.len())..];
        [lead, &first, &inner[middle], &last, trail].concat()
    }

    /// The character that stands for `literal`. If all 65 534 were taken the literal stays: a prompt that holds every
    /// character of the plane can only be an attack on its own author.
    fn placeholder(&mut self, literal: &str) -> String {
        if let Some(placeholder) = self.placeholders.get(literal) {
            return placeholder.to_string();
        }
        while self.next <= *PLACEHOLDERS.end() {
            let letter = char::from_u32(self.next).filter(|letter| !self.taken.contains(letter));
            self.next += 1;
            if let Some(letter) = letter {
                self.placeholders.insert(literal.to_owned(), letter);
                self.literals.insert(letter, literal.to_owned());
                return letter.to_string();
            }
        }
        literal.to_owned()
    }

    /// The prompt with every placeholder replaced, and where that happened.
    pub fn restore(&self, rendered: &str) -> (String, Vec<Range<usize>>) {
        let (mut text, mut ranges) = (String::with_capacity(rendered.len()), Vec::new());
        for letter in rendered.chars() {
            match self.literals.get(&letter) {
                Some(literal) => {
                    let start = text.len();
                    text.push_str(literal);
                    ranges.push(start..text.len());
                }
                None => text.push(letter),
            }
        }
        (text, ranges)
    }
}

fn collect(value: &Value, taken: &mut BTreeSet<char>) {
    match value {
        Value::String(text) => taken.extend(text.chars().filter(|&letter| is_placeholder(letter))),
        Value::Array(values) => values.iter().for_each(|value| collect(value, taken)),
        Value::Object(members) => {
            for (name, value) in members {
                taken.extend(name.chars().filter(|&letter| is_placeholder(letter)));
                collect(value, taken);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::special::SpecialToken;
    use super::*;
    use serde_json::json;

    #[test]
    fn marks_and_restores() {
        let tokens = ["<|end|>", "<s>"].iter().zip(0..).map(|(text, id)| SpecialToken::new(id, text, true)).collect();
        let specials = SpecialTokens::new(tokens);
        let value = json!({"role": "<s>", "content": " a<|end|>b<", "deep": [{"<s>": "|end|>"}, 1, null, "x", ">", "é <|end|"]});
        let mut marker = Marker::new(&specials, "{{ x }}\u{100000}", &[&value]);
        let marked = marker.mark(&value).to_string();
        assert!(!marked.contains("<s>") && !marked.contains("<|end|") && !marked.contains("|end|>"), "{marked}");
        assert!(!marked.contains('\u{100000}'), "the template's own characters are left alone");
        let (text, ranges) = marker.restore(&marked);
        assert_eq!(text, value.to_string());
        let literals: Vec<_> = ranges.into_iter().map(|range| &text[range]).collect();
        assert_eq!(literals, ["<s>", "<|end|>", "<", "<s>", "|", ">", "|"]);
    }
}
