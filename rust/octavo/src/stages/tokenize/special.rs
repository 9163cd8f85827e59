//! Finds special tokens in text.

use std::cmp::Ordering;
use std::ops::Range;

/// A token that is looked for in text before the text is cut into words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SpecialToken {
    pub id: u32,
    pub text: String,
    /// Recognised only where the caller allows it; the others are recognised in any text.
    pub control: bool,
    /// Swallows the white space before it.
    pub lstrip: bool,
    /// Swallows the white space after it.
    pub rstrip: bool,
    /// Only where no letter, digit or underscore touches it.
    pub single_word: bool,
}

impl SpecialToken {
    /// A token without conditions.
    pub fn new(id: u32, text: &str, control: bool) -> Self {
        Self { id, text: text.to_owned(), control, lstrip: false, rstrip: false, single_word: false }
    }
}

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// A special token and the text it covers.
    Special(u32, Range<usize>),
    /// Plain text, never empty.
    Text(Range<usize>),
}

/// All special tokens of a vocabulary. Two sorted lists instead of a trie: a match is a binary search that narrows byte by
/// byte, and building it is a sort.
pub(super) struct SpecialTokens {
    tokens: Vec<SpecialToken>,
    all: Sorted,
    user_defined: Sorted,
    /// Which bytes a control token can end with, and how long the longest is.
    last: [bool; 256],
    longest_control: usize,
    /// What stands between the first and the last letter of every control token, one a line.
    inside: String,
}

impl SpecialTokens {
    pub fn new(mut tokens: Vec<SpecialToken>) -> Self {
        tokens.retain(|token| !token.text.is_empty());
        tokens.sort_by(|a, b| a.text.cmp(&b.text));
        tokens.dedup_by(|b, a| a.text == b.text);
        let all = Sorted::new(&tokens, |_| true);
        let user_defined = Sorted::new(&tokens, |token| !token.control);
        let (mut last, mut longest_control, mut inside) = ([false; 256], 0, String::new());
        for token in tokens.iter().filter(|token| token.control) {
            let mut letters = token.text.chars();
            letters.next();
            letters.next_back();
            inside.extend([letters.as_str(), "\n"]);
            last[token.text.as_bytes()[token.text.len() - 1] as usize] = true;
            longest_control = longest_control.max(token.text.len());
        }
        Self { tokens, all, user_defined, last, longest_control, inside }
    }

    /// Cuts `text` at special tokens: leftmost first, and of those the longest. Control tokens count only with `control`,
    /// and never where they touch one of the `literals` (sorted, apart from each other): those are words of a user.
    pub fn split(&self, text: &str, control: bool, literals: &[Range<usize>]) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut literals = literals.iter().peekable();
        let (mut done, mut at) = (0, 0);
        while at < text.len() {
            while literals.next_if(|literal| literal.end <= at).is_some() {}
            let free_until = literals.peek().map_or(text.len(), |literal| literal.start);
            let found = control
                .then(|| self.all.longest(&self.tokens, text, at))
                .flatten()
                .filter(|&(index, end)| !self.tokens[index].control || end <= free_until)
                .or_else(|| self.user_defined.longest(&self.tokens, text, at));
            let Some((index, end)) = found.filter(|&(index, end)| self.stands_free(index, text, at..end)) else {
                at += 1;
                continue;
            };
            let covered = self.widened(index, text, done, at..end);
            if done < covered.start {
                segments.push(Segment::Text(done..covered.start));
            }
            (done, at) = (covered.end, covered.end);
            segments.push(Segment::Special(self.tokens[index].id, covered));
        }
        if done < text.len() {
            segments.push(Segment::Text(done..text.len()));
        }
        segments
    }

    /// Where control tokens are spelled out in `text`.
    pub fn control_look_alikes(&self, text: &str) -> Vec<Range<usize>> {
        let mut ranges = Vec::new();
        let mut at = 0;
        while at < text.len() {
            match self.all.longest(&self.tokens, text, at).filter(|&(index, _)| self.tokens[index].control) {
                Some((_, end)) => {
                    ranges.push(at..end);
                    at = end;
                }
                None => at += 1,
            }
        }
        ranges
    }

    /// Whether `text` could complete a control token whose other half stands directly before it, and directly after it.
    pub fn could_complete(&self, text: &str) -> (bool, bool) {
        let bytes = text.as_bytes();
        let reach = self.longest_control.min(bytes.len());
        // Most texts have neither the last byte of a token near their beginning nor the first of one near their end.
        let near_start = bytes[..reach].iter().any(|&byte| self.last[byte as usize]);
        let near_end = bytes[bytes.len() - reach..].iter().any(|&byte| self.all.first[byte as usize]);
        let any = |cut: &dyn Fn(&str, &str) -> bool| {
            let mut control = self.tokens.iter().filter(|token| token.control).map(|token| &token.text);
            control.any(|token| token.char_indices().skip(1).any(|(at, _)| cut(&token[..at], &token[at..])))
        };
        let after = near_start && any(&|_, tail| text.starts_with(tail));
        let before = near_end && any(&|head, _| text.ends_with(head));
        (after, before)
    }

    /// Whether `text` could be the middle of a control token, its ends on either side.
    pub fn could_fill(&self, text: &str) -> bool {
        !text.is_empty() && text.len() < self.longest_control && self.inside.contains(text)
    }

    fn stands_free(&self, index: usize, text: &str, range: Range<usize>) -> bool {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        !self.tokens[index].single_word
            || !(text[..range.start].chars().next_back().is_some_and(word)
                || text[range.end..].chars().next().is_some_and(word))
    }

    /// The range with the white space that the token swallows, not reaching back beyond `from`.
    fn widened(&self, index: usize, text: &str, from: usize, range: Range<usize>) -> Range<usize> {
        let token = &self.tokens[index];
        let start = if token.lstrip { from + text[from..range.start].trim_end().len() } else { range.start };
        let rest = &text[range.end..];
        let end = if token.rstrip { text.len() - rest.trim_start().len() } else { range.end };
        start..end
    }
}

/// Indices of tokens in byte order of their text.
struct Sorted {
    indices: Vec<u32>,
    /// Which bytes a token can begin with.
    first: [bool; 256],
}

impl Sorted {
    fn new(tokens: &[SpecialToken], wanted: impl Fn(&SpecialToken) -> bool) -> Self {
        let mut sorted = Self { indices: Vec::new(), first: [false; 256] };
        for (index, token) in (0..).zip(tokens).filter(|(_, token)| wanted(token)) {
            sorted.indices.push(index);
            sorted.first[token.text.as_bytes()[0] as usize] = true;
        }
        sorted
    }

    /// The longest token that `text` has at byte `at`: its index and where it ends.
    fn longest(&self, tokens: &[SpecialToken], text: &str, at: usize) -> Option<(usize, usize)> {
        let rest = &text.as_bytes()[at..];
        if !self.first[*rest.first()? as usize] {
            return None;
        }
        let mut candidates = &self.indices[..];
        let mut best = None;
        for (depth, &byte) in rest.iter().enumerate() {
            // All candidates agree with `rest` before `depth`; the shortest comes first.
            let compare = |&index: &u32| match tokens[index as usize].text.as_bytes().get(depth) {
                None => Ordering::Less,
                Some(other) => other.cmp(&byte),
            };
            let low = candidates.partition_point(|index| compare(index) == Ordering::Less);
            let high = candidates.partition_point(|index| compare(index) != Ordering::Greater);
            candidates = &candidates[low..high];
            let Some(&first) = candidates.first() else { break };
            if tokens[first as usize].text.len() == depth + 1 {
                best = Some((first as usize, at + depth + 1));
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens() -> SpecialTokens {
        SpecialTokens::new(vec![
            SpecialToken::new(1, "<s>", true),
            SpecialToken::new(2, "<s>>", true),
            SpecialToken::new(3, "\n\n", false),
            SpecialToken::new(4, "\n\n\n\n", false),
            SpecialToken { lstrip: true, rstrip: true, ..SpecialToken::new(5, "<mask>", true) },
            SpecialToken { single_word: true, ..SpecialToken::new(6, "word", false) },
        ])
    }

    fn ids(text: &str, control: bool, literals: &[Range<usize>]) -> Vec<(i64, String)> {
        let name = |segment: &Segment| match segment {
            Segment::Special(id, range) => (*id as i64, text[range.clone()].to_owned()),
            Segment::Text(range) => (-1, text[range.clone()].to_owned()),
        };
        tokens().split(text, control, literals).iter().map(name).collect()
    }

    fn check(text: &str, control: bool, literals: &[Range<usize>], want: &[(i64, &str)]) {
        let want: Vec<_> = want.iter().map(|(id, text)| (*id, text.to_string())).collect();
        assert_eq!(ids(text, control, literals), want, "{text:?}");
    }

    #[test]
    fn splits_leftmost_longest() {
        check("", true, &[], &[]);
        check("é<s>>a<s>", true, &[], &[(-1, "é"), (2, "<s>>"), (-1, "a"), (1, "<s>")]);
        check("\n\n\n\n\n\n\n", true, &[], &[(4, "\n\n\n\n"), (3, "\n\n"), (-1, "\n")]);
        check("<s", true, &[], &[(-1, "<s")]);
    }

    #[test]
    fn control_tokens_need_permission() {
        check("<s>\n\n", false, &[], &[(-1, "<s>"), (3, "\n\n")]);
        // A literal that touches the token makes it text, one beside it does not.
        check("<s><s>", true, std::slice::from_ref(&(0..3)), &[(-1, "<s>"), (1, "<s>")]);
        check("<s><s>", true, std::slice::from_ref(&(2..3)), &[(-1, "<s>"), (1, "<s>")]);
        check("a<s>b", true, &[0..1, 4..5], &[(-1, "a"), (1, "<s>"), (-1, "b")]);
    }

    #[test]
    fn stripping_and_single_words() {
        check("a  <mask> b", true, &[], &[(-1, "a"), (5, "  <mask> "), (-1, "b")]);
        check("word words", true, &[], &[(6, "word"), (-1, " words")]);
    }

    #[test]
    fn look_alikes_and_halves() {
        assert_eq!(tokens().control_look_alikes("x<s>y<s>>\n\n"), vec![1..4, 5..9]);
        assert_eq!(tokens().could_complete("> quote"), (true, false));
        assert_eq!(tokens().could_complete("a <"), (false, true));
        assert_eq!(tokens().could_complete("a < b"), (false, false));
        assert!(tokens().could_fill("s") && tokens().could_fill("mas"));
        assert!(!tokens().could_fill("<s>") && !tokens().could_fill("") && !tokens().could_fill("sm"));
    }
}
