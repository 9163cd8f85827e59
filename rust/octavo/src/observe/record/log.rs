//! Entries, written and read.

use std::fs::File;
use std::io::{BufReader, Cursor, Read};
use std::path::Path;

use super::chunks::{Chunk, Chunks};
use super::header::Header;
use super::wire::{Found, In, Out, wrong};
use super::{Entry, Outcome, Rows, file, request};
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

/// Makes bytes of entries, which a [`Sealer`](super::Sealer) puts into the file.
#[derive(Debug, Default)]
pub struct LogWriter {
    out: Out,
    last: Time,
    shared: request::Shared,
}

impl LogWriter {
    /// A log's first chunk is this, alone.
    pub fn header(&mut self, header: &Header) {
        self.out.0 = header.write();
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
    /// It has changed since it was written.
    #[error("damaged at byte {at}: {what}")]
    Damaged {
        /// Where.
        at: u64,
        /// What was wanted, and what was found.
        what: String,
    },
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
    chunks: Chunks<R>,
    /// The chunk that is being read, and where in the file it begins.
    found: In<Cursor<Vec<u8>>>,
    begin: u64,
    last: Time,
    shared: request::Shared,
}

impl Log<BufReader<File>> {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self, LogError> {
        let (file, len) = file::to_read(path)?;
        Self::new(BufReader::new(file), len)
    }
}

impl<R: Read> Log<R> {
    /// Reads the header of a log of `len` bytes.
    pub fn new(inner: R, len: u64) -> Result<Self, LogError> {
        let (mut chunks, begin) = (Chunks::begin(inner, len)?, 0);
        let Some(Chunk { begin: at, bytes }) = chunks.next()? else {
            return Err(LogError::Malformed {
                at: chunks.at(),
                what: "the file ends in the middle of its header".into(),
            });
        };
        let header = Header::read(&bytes).map_err(|what| LogError::Malformed { at, what })?;
        let found = In::new(Cursor::new(Vec::new()), 0);
        Ok(Self { header, chunks, found, begin, last: Time(0), shared: request::Shared::default() })
    }

    /// Where the next entry is; at the end of a chunk, where the next chunk is.
    pub fn at(&self) -> u64 {
        if self.found.left() == 0 { self.chunks.at() } else { self.begin + self.found.at() }
    }

    /// The next entry. `None`: the file ends here, though no entry says so.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, LogError> {
        while self.found.left() == 0 {
            let Some(Chunk { begin, bytes }) = self.chunks.next()? else { return Ok(None) };
            let len = bytes.len() as u64;
            (self.begin, self.found) = (begin, In::new(Cursor::new(bytes), len));
        }
        let at = self.at();
        let entry = self.entry().map_err(|fault| LogError::Malformed { at, what: fault.to_string() })?;
        let after = self.found.left() + self.chunks.left();
        if matches!(entry, Entry::End { .. }) && after > 0 {
            let what = format!("the recording ended before, and {after} bytes follow");
            return Err(LogError::Damaged { at: self.at(), what });
        }
        Ok(Some(entry))
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
