//! From a constraint to a grammar, within limits.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use llguidance::Matcher;
use llguidance::api::TopLevelGrammar;

use super::refuse;
use super::vocabulary::{Step, Vocabulary};
use crate::request::Constraint;

/// How long a caller waits for its grammar. Fuel bounds nearly all of the work at a fraction of this; time bounds the rest.
const COMPILE_TIME: Duration = Duration::from_secs(2);
/// Grammars that are compiled at a time. One that overran its time keeps its place until its fuel is spent.
const COMPILERS: usize = 4;
/// Grammars are trees, and the library walks some of them by recursion. Taken as it is used.
const COMPILER_STACK: usize = 64 << 20;

/// A compiled grammar: what every sequence begins with.
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    /// Never advanced, only copied.
    template: Mutex<Matcher>,
    first: Step,
    bytes: usize,
}

impl Grammar {
    /// Compiles, without a limit of time.
    fn new(vocabulary: &Arc<Vocabulary>, constraint: &Constraint) -> Result<Self, String> {
        let mut parser = vocabulary.parser(source(constraint)?)?;
        let first = vocabulary.first_step(&mut parser)?;
        if first.text.is_empty() {
            return Err("only the empty text fits it: there is nothing to generate".into());
        }
        // The library does not say what the rules take; it is less than the automata that read them.
        let bytes = 2 * parser.parser.lexer_stats().num_bytes + 16 * constraint.bytes() + first.text.bytes();
        Ok(Self { vocabulary: vocabulary.clone(), template: Mutex::new(Matcher::new(Ok(parser))), first, bytes })
    }

    /// A matcher at the beginning, which shares nothing that changes.
    pub(super) fn matcher(&self) -> Matcher {
        self.template.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }

    /// What may come first.
    pub(super) fn first(&self) -> &Step {
        &self.first
    }

    /// The tokens it is made of.
    pub(super) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// About how many bytes it takes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Compiles on a thread of its own: for the stack, and so that the caller gets its answer in time whatever happens there.
pub(super) fn within_limits(
    vocabulary: &Arc<Vocabulary>,
    constraint: &Constraint,
    slots: &Arc<Slots>,
) -> Result<Arc<Grammar>, String> {
    let late = || format!("it takes longer than {} s to compile; make it simpler", COMPILE_TIME.as_secs());
    let until = Instant::now() + COMPILE_TIME;
    let slot = slots.take(until).ok_or("too many grammars are being compiled; try again")?;
    let (answer, compiled) = sync_channel(1);
    let (vocabulary, constraint) = (vocabulary.clone(), constraint.clone());
    let compile = move || {
        let _slot = slot;
        // Nobody may be waiting any more.
        let _ = answer.send(Grammar::new(&vocabulary, &constraint));
    };
    let thread = std::thread::Builder::new().name("octavo-grammar".into()).stack_size(COMPILER_STACK);
    thread.spawn(compile).map_err(|error| format!("no thread can be started to compile it: {error}"))?;
    match compiled.recv_timeout(until.saturating_duration_since(Instant::now())) {
        Ok(grammar) => grammar.map(Arc::new),
        Err(RecvTimeoutError::Timeout) => Err(late()),
        Err(RecvTimeoutError::Disconnected) => Err("compiling it failed on an internal error".into()),
    }
}

/// The library's form of a constraint.
fn source(constraint: &Constraint) -> Result<TopLevelGrammar, String> {
    Ok(match constraint {
        Constraint::JsonSchema(schema) => {
            let schema = serde_json::from_str(schema).map_err(|error| format!("this is not JSON: {error}"))?;
            refuse::schema(&schema)?;
            TopLevelGrammar::from_json_schema(schema)
        }
        Constraint::Regex(regex) => {
            // The library would drop it.
            if regex.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 1 {
                return Err("the backslash at its end escapes nothing".into());
            }
            TopLevelGrammar::from_regex(regex)
        }
        Constraint::Lark(grammar) => {
            refuse::lark(grammar)?;
            TopLevelGrammar::from_lark(grammar.clone())
        }
        Constraint::Choice(choices) => {
            let quoted: Vec<String> = choices.iter().map(|choice| quoted(choice)).collect();
            TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}\n", quoted.join(" | ")))
        }
    })
}

/// A text as Lark takes it: JSON, and without the one control character that JSON leaves as it is.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\x7f', "\\u007f")
}

/// Places for compilers.
#[derive(Default)]
pub(super) struct Slots {
    taken: Mutex<usize>,
    freed: Condvar,
}

impl Slots {
    fn take(self: &Arc<Self>, until: Instant) -> Option<Slot> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = until.saturating_duration_since(Instant::now());
        let full = |taken: &mut usize| *taken == COMPILERS;
        let (mut taken, waited) =
            self.freed.wait_timeout_while(taken, patience, full).unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        *taken += 1;
        Some(Slot(self.clone()))
    }
}

struct Slot(Arc<Slots>);

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}
