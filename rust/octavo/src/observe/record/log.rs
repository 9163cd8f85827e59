//! Entries, written and read.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use super::header::Header;
use super::wire::{Fault, Found, In, Out, wrong};
use super::{Entry, Outcome, Rows, request};
use crate::execute::{Batch, EntryOutput, StepOutput};
use crate::request::{RequestId, SessionId, Time};
use crate::schedule::Command;

const SUBMIT: u8 = 1;
const CANCEL: u8 = 2;
const STOP_STRING: u8 = 3;
const PLANNED: u8 = 4;
const COMMITTED: u8 = 5;
const END: u8 = 6;
const OPEN_SESSION: u8 = 7;
const CLOSE_SESSION: u8 = 8;

/// Makes bytes of entries.
#[derive(Debug, Default)]
pub struct LogWriter {
    out: Out,
    last: Time,
    shared: request::Shared,
}

impl LogWriter {
    /// A log begins with this.
    pub fn header(&mut self, header: &Header) {
        header.write(&mut self.out);
    }

    /// The scheduler was told this.
    pub fn command(&mut self, command: &Command, now: Time) {
        match command {
            Command::Submit(request) => {
                self.entry(SUBMIT, now);
                request::write(&mut self.out, request, &mut self.shared);
            }
            Command::Cancel(id) => {
                self.entry(CANCEL, now);
                self.out.u64(id.0);
            }
            Command::StopString { id, text } => {
                self.entry(STOP_STRING, now);
                self.out.u64(id.0);
                self.out.text(text);
            }
            Command::OpenSession { id, ttl_ns } => {
                self.entry(OPEN_SESSION, now);
                self.out.u64(id.0);
                self.out.u64(*ttl_ns);
            }
            Command::CloseSession(id) => {
                self.entry(CLOSE_SESSION, now);
                self.out.u64(id.0);
            }
        }
    }

    /// The scheduler planned this.
    pub fn planned(&mut self, batch: Option<&Batch>, now: Time) {
        self.entry(PLANNED, now);
        self.out.usize(batch.map_or(0, |batch| batch.entries.len()));
        for Rows { id, first, count } in batch.into_iter().flat_map(Rows::of) {
            self.out.u64(id.0);
            self.out.usize(first);
            self.out.usize(count);
        }
    }

    /// The step gave this.
    pub fn committed(&mut self, output: &StepOutput, now: Time) {
        self.entry(COMMITTED, now);
        self.out.list(&output.entries, |out, output| match Outcome::of(output) {
            Outcome::Nothing => out.u64(0),
            Outcome::Complete => out.u64(1),
            Outcome::Failed(why) => {
                out.u64(2);
                out.text(&why);
            }
            Outcome::Token(id) => out.u64(3 + u64::from(id)),
        });
    }

    /// There is no more.
    pub fn end(&mut self, lost: u64) {
        self.entry(END, self.last);
        self.out.u64(lost);
    }

    /// The bytes so far, which are forgotten.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out.0)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.out.0.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.out.0.is_empty()
    }

    fn entry(&mut self, kind: u8, now: Time) {
        self.out.byte(kind);
        self.out.u64(now.since(self.last));
        self.last = self.last.max(now);
    }
}

impl Rows {
    /// Of every sequence of a batch.
    pub fn of(batch: &Batch) -> impl Iterator<Item = Self> {
        let entries = batch.entries.iter().zip(&batch.segments);
        entries.map(|(entry, segment)| Self {
            id: entry.id,
            first: segment.context - segment.rows,
            count: segment.rows,
        })
    }
}

impl Outcome {
    /// What of an executor's output the scheduler goes by.
    pub fn of(output: &EntryOutput) -> Self {
        match &output.drawn {
            Some(Ok(drawn)) => Self::Token(drawn.token_id),
            Some(Err(why)) => Self::Failed(why.clone()),
            None if output.complete => Self::Complete,
            None => Self::Nothing,
        }
    }
}

/// Why a log cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The system could not read it.
    #[error("{0}")]
    Read(#[from] std::io::Error),
    /// It is not what it claims to be.
    #[error("at byte {at}: {what}")]
    Malformed {
        /// Where.
        at: u64,
        /// What was wanted, and what was found.
        what: String,
    },
}

/// A log being read, entry by entry.
#[derive(Debug)]
pub struct Log<R> {
    /// What was recorded, and on what.
    pub header: Header,
    found: In<R>,
    last: Time,
    shared: request::Shared,
}

impl Log<BufReader<File>> {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self, LogError> {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        Self::new(BufReader::new(file), len)
    }
}

impl<R: Read> Log<R> {
    /// Reads the header of a log of `len` bytes.
    pub fn new(inner: R, len: u64) -> Result<Self, LogError> {
        let mut found = In::new(inner, len);
        match Header::read(&mut found) {
            Ok(header) => Ok(Self { header, found, last: Time(0), shared: request::Shared::default() }),
            Err(fault) => Err(error(found.at(), fault)),
        }
    }

    /// Bytes read so far.
    pub fn at(&self) -> u64 {
        self.found.at()
    }

    /// The next entry. `None`: the file ends here, though no entry says so.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, LogError> {
        if self.found.left() == 0 {
            return Ok(None);
        }
        let at = self.at();
        match self.entry() {
            Ok(entry) => Ok(Some(entry)),
            Err(Fault::Truncated) => Ok(None),
            Err(fault) => Err(error(at, fault)),
        }
    }

    fn entry(&mut self) -> Found<Entry> {
        let found = &mut self.found;
        let (kind, after) = (found.byte()?, found.u64()?);
        let now = Time(self.last.0.saturating_add(after));
        let told = |command| Entry::Told { now, command };
        let entry = match kind {
            SUBMIT => told(Command::Submit(Box::new(request::read(found, &mut self.shared, self.header.vocab)?))),
            CANCEL => told(Command::Cancel(RequestId(found.u64()?))),
            STOP_STRING => told(Command::StopString { id: RequestId(found.u64()?), text: found.text()? }),
            OPEN_SESSION => told(Command::OpenSession { id: SessionId(found.u64()?), ttl_ns: found.u64()? }),
            CLOSE_SESSION => told(Command::CloseSession(SessionId(found.u64()?))),
            PLANNED => Entry::Planned { now, rows: found.list(rows)? },
            COMMITTED => {
                let vocab = self.header.vocab;
                Entry::Committed { now, outcomes: found.list(|found| outcome(found, vocab))? }
            }
            END => Entry::End { lost: found.u64()? },
            other => return wrong(format!("there are no entries of kind {other}")),
        };
        self.last = now;
        Ok(entry)
    }
}

fn rows<R: Read>(found: &mut In<R>) -> Found<Rows> {
    Ok(Rows { id: RequestId(found.u64()?), first: found.usize()?, count: found.usize()? })
}

fn outcome<R: Read>(found: &mut In<R>, vocab: usize) -> Found<Outcome> {
    Ok(match found.u64()? {
        0 => Outcome::Nothing,
        1 => Outcome::Complete,
        2 => Outcome::Failed(found.text()?),
        more => match u32::try_from(more - 3) {
            Ok(token) if (token as usize) < vocab => Outcome::Token(token),
            _ => return wrong(format!("token {} was drawn, the vocabulary has {vocab}", more - 3)),
        },
    })
}

fn error(at: u64, fault: Fault) -> LogError {
    match fault {
        Fault::Read(error) => LogError::Read(error),
        fault => LogError::Malformed { at, what: fault.to_string() },
    }
}
