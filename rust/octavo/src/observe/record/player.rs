//! Plays a log again: the same scheduler gets the same commands at the same times, and has to decide the same.

use std::collections::HashSet;
use std::fmt;
use std::io::Read;
use std::sync::Arc;

use super::{Entry, Log, LogError, Outcome, Rows};
use crate::execute::machine::free_memory_bytes;
use crate::execute::{Batch, Drawn, EntryOutput, Executor, StepOutput};
use crate::grammar::Grammars;
use crate::request::{Request, RequestId, SessionId, Wanted};
use crate::schedule::{Command, Scheduler};

/// Where the tokens come from.
pub enum Tokens {
    /// The log. Only the schedule is put to the test.
    Recorded,
    /// A model, which has to draw those of the log.
    Model {
        /// Runs it.
        executor: Box<dyn Executor>,
        /// Compiles what its answers are held to; `None`: nothing is.
        grammars: Option<Grammars>,
    },
}

/// What a replay has found so far.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Requests that were submitted.
    pub requests: u64,
    /// Steps that were played.
    pub steps: u64,
    /// Tokens that were drawn.
    pub tokens: u64,
    /// Nanoseconds from the first entry to the last.
    pub span_ns: u64,
    /// The first difference, where the replay ended.
    pub difference: Option<Difference>,
    /// Why there is no more than this in the log, if it is not complete.
    pub incomplete: Option<String>,
}

/// The first place where a replay went another way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Number of the step, from 0.
    pub step: u64,
    /// Whose rows or token.
    pub request: Option<RequestId>,
    /// What the log has.
    pub wanted: String,
    /// What came of it this time.
    pub found: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, request, wanted, found } = self;
        write!(f, "step {step}")?;
        if let Some(request) = request {
            write!(f, ", {request}")?;
        }
        write!(f, ": wanted {wanted}, found {found}")
    }
}

/// Bookkeeping of a block and its names, at most.
const BYTES_PER_BLOCK: u64 = 300;

/// A log being played.
pub struct Player<R> {
    log: Log<R>,
    scheduler: Scheduler,
    tokens: Tokens,
    requests: HashSet<RequestId>,
    sessions: HashSet<SessionId>,
    under_way: Option<Batch>,
    /// When the log begins.
    begun: Option<u64>,
    /// Whether to prove the scheduler's invariants after every entry.
    checked: bool,
    report: Report,
}

impl<R: Read> Player<R> {
    /// Plays `log`; with `checked` it also proves the scheduler's invariants after every entry, and panics where one does
    /// not hold.
    pub fn new(log: Log<R>, tokens: Tokens, checked: bool) -> Result<Self, String> {
        // The books of the pool are taken at once, and no file stands behind their size.
        let needed = log.header.limits.blocks as u64 * BYTES_PER_BLOCK;
        if let Some(free) = free_memory_bytes().filter(|free| needed > free / 2) {
            let blocks = log.header.limits.blocks;
            return Err(format!("a KV cache of {blocks} blocks takes {needed} bytes of bookkeeping, {free} are free"));
        }
        let scheduler = Scheduler::new(log.header.limits.clone())?;
        Ok(Self {
            log,
            scheduler,
            tokens,
            requests: HashSet::new(),
            sessions: HashSet::new(),
            under_way: None,
            begun: None,
            checked,
            report: Report::default(),
        })
    }

    /// What was found so far.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Plays one entry. `false`: that was all, or there is a difference.
    pub fn advance(&mut self) -> Result<bool, LogError> {
        let at = self.log.at();
        let Some(entry) = self.log.next_entry()? else {
            let what = format!("the log ends at byte {at} without saying so: its engine did not come to its end");
            self.report.incomplete = Some(what);
            return Ok(false);
        };
        let played = self.play(entry).map_err(|what| LogError::Malformed { at, what })?;
        while self.scheduler.next_event().is_some() {}
        if self.checked {
            self.scheduler.check();
        }
        Ok(played)
    }

    fn play(&mut self, entry: Entry) -> Result<bool, String> {
        if let Entry::Told { now, .. } | Entry::Planned { now, .. } | Entry::Committed { now, .. } = entry {
            self.report.span_ns = now.0.saturating_sub(*self.begun.get_or_insert(now.0));
        }
        match entry {
            Entry::Told { now, mut command } => {
                self.admit(&mut command)?;
                self.scheduler.apply(command, now);
            }
            Entry::Planned { now, rows } => {
                if self.under_way.is_some() {
                    return Err("a step is planned while another one is under way".into());
                }
                self.under_way = self.scheduler.schedule(now);
                self.report.difference = self.compare_plan(&rows);
            }
            Entry::Committed { now, outcomes } => {
                let batch = self.under_way.take().ok_or("a step is over that was not planned")?;
                let output = self.output(&batch, &outcomes)?;
                self.report.difference = self.compare_outcomes(&batch, &output, &outcomes);
                if self.report.difference.is_none() {
                    self.report.steps += 1;
                    self.report.tokens += outcomes.iter().filter(|one| matches!(one, Outcome::Token(_))).count() as u64;
                    self.scheduler.commit(batch, output, now);
                }
            }
            Entry::End { lost } => {
                if lost > 0 {
                    let what = format!("{lost} entries after these were lost: the disk was too slow for them");
                    self.report.incomplete = Some(what);
                }
                return Ok(false);
            }
        }
        Ok(self.report.difference.is_none())
    }

    /// What the door does: names are new, and a request gets what leads it through its grammar.
    fn admit(&mut self, command: &mut Command) -> Result<(), String> {
        match command {
            Command::Submit(request) => {
                if !self.requests.insert(request.id) {
                    return Err(format!("{} is submitted twice", request.id));
                }
                self.report.requests += 1;
                self.guide(request)
            }
            Command::OpenSession { id, .. } if !self.sessions.insert(*id) => Err(format!("{id:?} is opened twice")),
            _ => Ok(()),
        }
    }

    fn guide(&self, request: &mut Request) -> Result<(), String> {
        if let Tokens::Model { grammars: Some(grammars), .. } = &self.tokens
            && let Some(constraint) = request.params.constraint.as_ref().filter(|_| request.wanted == Wanted::Tokens)
        {
            let grammar = grammars.compile(constraint)?;
            let ends: Arc<[u32]> =
                request.end_token_ids.iter().chain(&request.params.stop_token_ids).copied().collect();
            request.guide = Some(grammars.guide(&grammar, ends)?);
        }
        Ok(())
    }

    fn compare_plan(&self, wanted: &[Rows]) -> Option<Difference> {
        let found: Vec<Rows> = self.under_way.iter().flat_map(Rows::of).collect();
        let index = (0..wanted.len().max(found.len())).find(|&index| wanted.get(index) != found.get(index))?;
        let (wanted, found) = (wanted.get(index), found.get(index));
        Some(self.difference(wanted.or(found).map(|rows| rows.id), describe_rows(wanted), describe_rows(found)))
    }

    fn output(&mut self, batch: &Batch, outcomes: &[Outcome]) -> Result<StepOutput, String> {
        if batch.entries.len() != outcomes.len() {
            return Err(format!("{} outcomes of a step of {} sequences", outcomes.len(), batch.entries.len()));
        }
        match &mut self.tokens {
            Tokens::Model { executor, .. } => {
                executor.launch(batch)?;
                executor.collect()
            }
            Tokens::Recorded => {
                for (entry, outcome) in batch.entries.iter().zip(outcomes) {
                    let drew = matches!(outcome, Outcome::Token(_) | Outcome::Complete);
                    if !matches!(outcome, Outcome::Failed(_)) && drew != entry.draw.is_some() {
                        return Err(format!("{}: {} where a draw should be, or none", entry.id, describe(outcome)));
                    }
                }
                Ok(StepOutput { entries: outcomes.iter().map(recorded).collect() })
            }
        }
    }

    fn compare_outcomes(&self, batch: &Batch, output: &StepOutput, wanted: &[Outcome]) -> Option<Difference> {
        let found = output.entries.iter().map(Outcome::of);
        let mut pairs = batch.entries.iter().zip(wanted.iter().zip(found));
        let (entry, (wanted, found)) = pairs.find(|(_, (wanted, found))| *wanted != found)?;
        Some(self.difference(Some(entry.id), describe(wanted), describe(&found)))
    }

    fn difference(&self, request: Option<RequestId>, wanted: String, found: String) -> Difference {
        Difference { step: self.report.steps, request, wanted, found }
    }
}

fn recorded(outcome: &Outcome) -> EntryOutput {
    EntryOutput {
        drawn: match outcome {
            Outcome::Token(token_id) => Some(Ok(Drawn { token_id: *token_id, logprobs: None })),
            Outcome::Failed(why) => Some(Err(why.clone())),
            Outcome::Nothing | Outcome::Complete => None,
        },
        complete: *outcome == Outcome::Complete,
        ..EntryOutput::default()
    }
}

fn describe_rows(rows: Option<&Rows>) -> String {
    match rows {
        None => "nobody more in the step".into(),
        Some(Rows { id, first, count }) => format!("positions {first} to {} of {id}", first.saturating_add(*count)),
    }
}

fn describe(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Nothing => "no token".into(),
        Outcome::Token(id) => format!("token {id}"),
        Outcome::Complete => "the end of the grammar".into(),
        Outcome::Failed(why) => format!("the error {why:?}"),
    }
}
