//! What a grammar has to know of a tokenizer: the bytes of every token that is text, in a trie.

use std::fmt::Display;
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, TokenParser};

use crate::sample::TokenMask;
use crate::stages::tokenize::Tokenizer;

/// Limits of compiling and of one mask. A grammar that would exceed them ends in its request's error.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2000,
        // About 20 ms of building automata.
        initial_lexer_fuel: 1_000_000,
        // About 15 ms and 3 ms for one mask.
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        // 1 to 2 kB each, for every sequence.
        max_lexer_states: 20_000,
        max_grammar_size: 250_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Tokens that are allowed together nearly everywhere in a string of JSON, so that they need not be walked one by one. Each
/// set costs tries of its own; these two of the library's four give nearly all of the speed for half of the memory.
const SLICES: [&str; 2] = [r#"[^"\\\x00-\x1F\x7F]{1,10}"#, r#"[^"\\\x00-\x1F\x7F]+"#];
/// The longest token that can be in a mask: the trie's depth is bounded.
const LONGEST_TOKEN: usize = 512;
/// Where a token's bytes begin with this, the trie takes it for a special one. No UTF-8 text has this byte.
const NEVER_IN_TEXT: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// The tokens of one model, for grammars.
pub(super) struct Vocabulary {
    factory: ParserFactory,
    env: TokEnv,
    /// Ids below this are tokens; this one stands for "it may end here". A model can have several end tokens or none.
    end: u32,
    /// Tokens that are text.
    text: TokenMask,
    first: Option<FirstTokens>,
}

/// For tokenizers that hide the first space of a text: tokens that begin with a space, without it, as they are seen when they
/// come first.
struct FirstTokens {
    /// Which tokens these are.
    spaced: TokenMask,
    trie: TokTrie,
}

/// What may come next.
pub(super) struct Step {
    /// Tokens of text.
    pub text: TokenMask,
    /// Whether it may end here.
    pub may_end: bool,
}

impl Vocabulary {
    /// Tokens that the tokenizer or the model does not have, that are special or end an answer, are not text.
    pub fn new(tokenizer: &Tokenizer, vocab: usize, end_token_ids: &[u32]) -> Result<Self, String> {
        let end = tokenizer.len().min(vocab) as u32;
        let mut text = TokenMask::none(end as usize + 1);
        let mut words: Vec<Vec<u8>> = (0..end).map(|id| word(tokenizer, id, end_token_ids).to_vec()).collect();
        (0..end).filter(|&id| !words[id as usize].is_empty()).for_each(|id| text.allow(id));
        if text.is_empty() {
            return Err("the model's tokenizer has no tokens of text".into());
        }
        words.push(Vec::new()); // the end
        let info = TokRxInfo::new(end + 1, end);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
        let first = tokenizer.strips_first_space().then(|| FirstTokens::new(&env, info, words));
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &SLICES.map(String::from));
        let mut factory = factory.map_err(|error| error.to_string())?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, env, end, text, first })
    }

    /// Compiles.
    pub fn parser(&self, grammar: TopLevelGrammar) -> Result<TokenParser, String> {
        let mut parser = self.factory.create_parser(grammar).map_err(|error| told(&error.to_string()))?;
        parser.start_without_prompt();
        Ok(parser)
    }

    /// What may come first.
    pub fn first_step(&self, parser: &mut TokenParser) -> Result<Step, String> {
        let mut step = self.step(parser.compute_mask())?;
        if let Some(first) = &self.first {
            let mut seen = self.env.tok_trie().alloc_token_set();
            parser.parser.with_recognizer(|recognizer| first.trie.add_bias(recognizer, &mut seen, &[]));
            if let Some(error) = parser.parser.get_error() {
                return Err(told(&error.message()));
            }
            let mut seen = TokenMask::from_words(seen.as_slice());
            seen.intersect(&first.spaced);
            step.text.subtract(&first.spaced);
            step.text.unite(&seen);
        }
        Ok(step)
    }

    /// What may come after `token`. `None`: nothing, the grammar is complete.
    pub fn next_step(&self, matcher: &mut Matcher, token: u32, is_first: bool) -> Result<Option<Step>, String> {
        match self.first.as_ref().filter(|first| is_first && first.spaced.allows(token)) {
            None => matcher.consume_token(token),
            // The matcher goes by bytes, so any tokens of the same bytes will do.
            Some(first) => matcher.consume_tokens(&self.env.tok_trie().greedy_tokenize(first.trie.token(token))),
        }
        .map_err(|error| told(&error.to_string()))?;
        if matcher.is_stopped() {
            return Ok(None);
        }
        let step = self.step(matcher.compute_mask())?;
        Ok(Some(step).filter(|step| !(step.may_end && step.text.is_empty())))
    }

    fn step(&self, allowed: Result<SimpleVob, impl Display>) -> Result<Step, String> {
        let allowed = allowed.map_err(|error| told(&error.to_string()))?;
        let may_end = allowed.is_allowed(self.end);
        let mut text = TokenMask::from_words(allowed.as_slice());
        text.intersect(&self.text);
        if text.is_empty() && !may_end {
            return Err("no token of this model can follow, and it is not complete".into());
        }
        Ok(Step { text, may_end })
    }
}

impl FirstTokens {
    fn new(env: &TokEnv, info: TokRxInfo, mut words: Vec<Vec<u8>>) -> Self {
        let mut spaced = TokenMask::none(words.len());
        for (id, word) in (0..).zip(&mut words) {
            match word.split_first() {
                Some((b' ', tail)) => {
                    spaced.allow(id);
                    let tokens = env.tok_trie().greedy_tokenize(tail);
                    let spelled = tokens.iter().map(|&token| env.tok_trie().token_len(token)).sum::<usize>();
                    *word = if spelled == tail.len() { tail.to_vec() } else { Vec::new() };
                }
                _ => word.clear(),
            }
        }
        Self { spaced, trie: TokTrie::from(&info, &words) }
    }
}

/// The bytes of a token that is text; none of another.
fn word<'a>(tokenizer: &'a Tokenizer, id: u32, end_token_ids: &[u32]) -> &'a [u8] {
    let piece = tokenizer.piece(id).unwrap_or_default();
    let is_text = tokenizer.is_text(id) && !end_token_ids.contains(&id);
    if is_text && piece.len() <= LONGEST_TOKEN && !piece.contains(&NEVER_IN_TEXT) { piece } else { &[] }
}

/// What the library says where no token can follow.
const NOTHING_FITS: &str = "NoExtensionBias";
/// Longest error that is passed on: some quote the grammar.
const LONGEST_ERROR: usize = 500;

/// What the library says, and what it means here: its options cannot be reached.
const REWORDED: [(&str, &str); 2] = [
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "a `oneOf` whose options are not told apart by a constant is not supported; use `anyOf`",
    ),
    (
        "Only absolute $ref's (#/...) are supported without 'referencing' feature; ref",
        "a `$ref` to another document is refused, it must begin with `#/`:",
    ),
];

/// An error of the library, without what is for its own makers.
fn told(error: &str) -> String {
    let error = error.split("\n<").next().unwrap_or(error).trim();
    let error = REWORDED.iter().fold(error.to_owned(), |error, (theirs, ours)| error.replace(theirs, ours));
    let error = match error.strip_prefix("panic: ") {
        Some(what) => &format!("it is beyond what can be compiled ({what})"),
        None if error == NOTHING_FITS => "no text of this model's tokens fits it",
        None => &error,
    };
    match error.char_indices().nth(LONGEST_ERROR) {
        Some((end, _)) => format!("{}…", &error[..end]),
        None => error.to_owned(),
    }
}
