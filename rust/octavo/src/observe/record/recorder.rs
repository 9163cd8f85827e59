//! The engine's end of a recording, and the thread that writes the file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::chunks::Sealer;
use super::file;
use super::header::Header;
use super::log::LogWriter;
use crate::execute::{Batch, StepOutput};
use crate::request::Time;
use crate::schedule::Command;

/// Bytes that may wait for the disk. A busy engine writes a few hundred kilobytes a second.
const MOST_WAITING_BYTES: u64 = 64 << 20;

/// What both ends of the pipe share.
#[derive(Debug)]
struct Pipe {
    path: PathBuf,
    waiting_bytes: AtomicU64,
    most_waiting_bytes: u64,
    /// Entries that went into the pipe.
    entries: AtomicU64,
    /// Entries that did not, because the pipe was full or its other end gone.
    lost: AtomicU64,
    /// The engine took the recording up, so the file is written.
    begun: AtomicBool,
    summary: Mutex<Option<Result<Summary, Arc<io::Error>>>>,
    ended: Condvar,
}

/// What became of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Entries in the file.
    pub entries: u64,
    /// Bytes in the file.
    pub bytes: u64,
    /// Entries that the disk was too slow for. From the first of them on nothing was kept.
    pub lost: u64,
}

/// The engine's end. Dropping it ends the recording.
#[derive(Debug)]
pub struct Recorder {
    log: LogWriter,
    entries: u64,
    chunks: Sender<Vec<u8>>,
    pipe: Arc<Pipe>,
}

impl Recorder {
    /// A recording into the file at `path`, and what its caller holds. Nothing is written before [`Recorder::begin`]. A file
    /// that is there is written over if it is a log that nobody is writing, or empty.
    pub fn new(path: &Path) -> io::Result<(Self, Recording)> {
        Self::with_room(path, MOST_WAITING_BYTES)
    }

    fn with_room(path: &Path, most_waiting_bytes: u64) -> io::Result<(Self, Recording)> {
        let (file, new) = file::to_write(path)?;
        let pipe = Arc::new(Pipe {
            path: path.to_owned(),
            waiting_bytes: AtomicU64::new(0),
            most_waiting_bytes,
            entries: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            begun: AtomicBool::new(false),
            summary: Mutex::new(None),
            ended: Condvar::new(),
        });
        let (chunks, queue) = channel();
        let writer = pipe.clone();
        std::thread::Builder::new().name("octavo-record".to_owned()).spawn(move || writer.drain(file, new, queue))?;
        let recorder = Self { log: LogWriter::default(), entries: 0, chunks, pipe: pipe.clone() };
        Ok((recorder, Recording(pipe)))
    }

    /// The engine has taken it up.
    pub fn begin(&mut self, header: &Header) {
        self.pipe.begun.store(true, Ordering::Release);
        self.log.header(header);
        self.flush();
    }

    /// Where to.
    pub fn path(&self) -> &Path {
        &self.pipe.path
    }

    /// Whether it is this one.
    pub fn is(&self, recording: &Recording) -> bool {
        Arc::ptr_eq(&self.pipe, &recording.0)
    }

    /// What the caller holds.
    pub fn recording(&self) -> Recording {
        Recording(self.pipe.clone())
    }

    /// The scheduler is told this.
    pub fn command(&mut self, command: &Command, now: Time) {
        self.write(|log| log.command(command, now));
    }

    /// The scheduler planned this.
    pub fn planned(&mut self, batch: Option<&Batch>, now: Time) {
        self.write(|log| log.planned(batch, now));
    }

    /// The step gave this.
    pub fn committed(&mut self, output: &StepOutput, now: Time) {
        self.write(|log| log.committed(output, now));
    }

    fn write(&mut self, write: impl FnOnce(&mut LogWriter)) {
        if self.pipe.lost.load(Ordering::Relaxed) > 0 {
            // Nothing after a gap can be played.
            self.pipe.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        write(&mut self.log);
        self.entries += 1;
    }

    /// Passes on what was written. Never waits.
    pub fn flush(&mut self) {
        let (bytes, entries) = (self.log.len() as u64, std::mem::take(&mut self.entries));
        if bytes == 0 {
            return;
        }
        let chunk = self.log.take();
        let fits = self.pipe.waiting_bytes.load(Ordering::Acquire) + bytes <= self.pipe.most_waiting_bytes;
        self.pipe.waiting_bytes.fetch_add(bytes, Ordering::AcqRel);
        if fits && self.chunks.send(chunk).is_ok() {
            self.pipe.entries.fetch_add(entries, Ordering::Relaxed);
        } else {
            self.pipe.lost.fetch_add(entries.max(1), Ordering::Relaxed);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.flush();
    }
}

impl Pipe {
    /// The writer's thread.
    fn drain(&self, file: File, new: bool, chunks: Receiver<Vec<u8>>) {
        let written = self.write_all(&file, &chunks);
        // Before the end is told: what comes after it is lost, and has to count as lost.
        drop(chunks);
        if new && !self.begun.load(Ordering::Acquire) {
            // An empty file that nobody asked for; if it cannot be removed it does no harm.
            let _ = std::fs::remove_file(&self.path);
        }
        let summary = written.map(|bytes| Summary {
            entries: self.entries.load(Ordering::Relaxed),
            bytes,
            lost: self.lost.load(Ordering::Relaxed),
        });
        // Before the end is told: then the next one may have the file. A fork would keep it locked with a mere `drop`.
        let _ = file.unlock();
        drop(file);
        let summary = summary.map_err(Arc::new);
        *self.summary.lock().unwrap_or_else(PoisonError::into_inner) = Some(summary);
        self.ended.notify_all();
    }

    fn write_all(&self, file: &File, chunks: &Receiver<Vec<u8>>) -> io::Result<u64> {
        let (mut bytes, mut sealer) = (0, Sealer::default());
        let mut out = BufWriter::new(file);
        let mut next = chunks.recv().ok();
        if next.is_some() && file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        while let Some(chunk) = next {
            bytes += sealer.write(&mut out, &chunk)?;
            self.waiting_bytes.fetch_sub(chunk.len() as u64, Ordering::AcqRel);
            next = match chunks.try_recv() {
                Ok(chunk) => Some(chunk),
                Err(TryRecvError::Disconnected) => None,
                Err(TryRecvError::Empty) => {
                    // Whatever happens to this process, the file has all of it.
                    out.flush()?;
                    chunks.recv().ok()
                }
            };
        }
        if self.begun.load(Ordering::Acquire) {
            let mut end = LogWriter::default();
            end.end(self.lost.load(Ordering::Relaxed));
            bytes += sealer.write(&mut out, &end.take())?;
        }
        out.flush()?;
        Ok(bytes)
    }
}

/// A recording, as its caller holds it. Dropping it does not end the recording.
#[derive(Clone, Debug)]
pub struct Recording(Arc<Pipe>);

impl Recording {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// What became of it, once it has ended and all is in the file; waits for it up to `patience`. An error is the disk's.
    pub fn ended_within(&self, patience: Duration) -> Option<Result<Summary, Arc<io::Error>>> {
        let until = Instant::now() + patience;
        let mut summary = self.0.summary.lock().unwrap_or_else(PoisonError::into_inner);
        while summary.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            summary = self.0.ended.wait_timeout(summary, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        summary.clone()
    }

    /// Entries so far, and those that were lost.
    pub fn counts(&self) -> (u64, u64) {
        (self.0.entries.load(Ordering::Relaxed), self.0.lost.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Entry, Log, ModelIdentity};
    use super::*;
    use crate::engine::EngineConfig;
    use crate::kv::KvLayout;
    use crate::request::RequestId;
    use crate::schedule::SchedulerConfig;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("octavo-record-{}-{name}", std::process::id()))
    }

    fn header() -> Header {
        let layout = KvLayout { block_size: 16, windows: vec![None] };
        Header {
            octavo: "test".into(),
            model: ModelIdentity { path: "none".into(), architecture: "none".into(), bytes: 0, sha256: String::new() },
            device: "none".into(),
            config: EngineConfig::default(),
            kv_cache_bytes: 0,
            limits: SchedulerConfig {
                max_num_seqs: 1,
                max_num_batched_tokens: 1,
                max_queue: 1,
                max_model_len: 16,
                blocks: 1,
                layout,
                itl_target_ns: None,
            },
            vocab: 10,
        }
    }

    fn cancels(recorder: &mut Recorder, ids: std::ops::Range<u64>) {
        for id in ids {
            recorder.command(&Command::Cancel(RequestId(id)), Time(id));
            recorder.flush();
        }
    }

    fn end(recorder: Recorder, recording: &Recording) -> Result<Summary, Arc<io::Error>> {
        drop(recorder);
        recording.ended_within(Duration::from_secs(60)).expect("the thread ends")
    }

    #[test]
    fn a_pipe_that_is_full_loses_everything_after_and_says_how_much() {
        let path = scratch("full");
        let (mut recorder, recording) = Recorder::with_room(&path, 1000).expect("a file");
        recorder.begin(&header());
        // The writer has these, or will have them: three bytes each.
        cancels(&mut recorder, 0..20);
        // As if the disk had stopped.
        recorder.pipe.waiting_bytes.fetch_add(1000, Ordering::AcqRel);
        cancels(&mut recorder, 20..30);
        recorder.pipe.waiting_bytes.fetch_sub(1000, Ordering::AcqRel);
        cancels(&mut recorder, 30..40);
        let summary = end(recorder, &recording).expect("written");
        assert_eq!((summary.entries, summary.lost), (20, 20));
        assert_eq!(std::fs::metadata(&path).expect("a file").len(), summary.bytes);
        let mut log = Log::open(&path).expect("a log");
        for id in 0..20 {
            let entry = log.next_entry().expect("an entry");
            assert!(matches!(entry, Some(Entry::Told { command: Command::Cancel(found), .. }) if found.0 == id));
        }
        assert!(matches!(log.next_entry(), Ok(Some(Entry::End { lost: 20 }))));
        std::fs::remove_file(&path).expect("a file");
    }

    #[test]
    fn a_recording_that_never_began_leaves_no_trace() {
        let path = scratch("none");
        let (recorder, recording) = Recorder::new(&path).expect("a file");
        end(recorder, &recording).expect("nothing to write");
        assert!(!path.exists());
        std::fs::write(&path, "octavo log\nprecious").expect("a file");
        let (recorder, recording) = Recorder::new(&path).expect("a file");
        end(recorder, &recording).expect("nothing to write");
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), "octavo log\nprecious");
        std::fs::remove_file(&path).expect("a file");
    }

    #[test]
    fn only_a_log_that_nobody_writes_is_written_over() {
        let path = scratch("taken");
        let refused = |path: &Path| Recorder::new(path).expect_err("refused");
        std::fs::write(&path, "precious").expect("a file");
        assert_eq!(refused(&path).kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), "precious");
        std::fs::write(&path, "").expect("a file");
        for _ in 0..2 {
            let (mut recorder, recording) = Recorder::new(&path).expect("empty, or a log");
            recorder.begin(&header());
            assert!(refused(&path).to_string().contains("another recording"));
            end(recorder, &recording).expect("written");
            assert!(Log::open(&path).is_ok(), "written from the beginning");
        }
        std::fs::remove_file(&path).expect("a file");
        assert_eq!(refused(&std::env::temp_dir()).kind(), io::ErrorKind::IsADirectory);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_an_error_and_the_engine_goes_on() {
        let (mut recorder, recording) = Recorder::new(Path::new("/dev/full")).expect("a device");
        recorder.begin(&header());
        cancels(&mut recorder, 0..10);
        let failed = recording.ended_within(Duration::from_secs(60)).expect("the thread ends");
        assert!(failed.is_err(), "{failed:?}");
        cancels(&mut recorder, 10..20);
        assert!(recording.counts().1 >= 10);
    }

    #[test]
    fn what_is_no_log_is_refused() {
        let refused = |bytes: &[u8]| Log::new(bytes, bytes.len() as u64).expect_err("no log").to_string();
        assert_eq!(refused(b""), "at byte 0: this is no octavo log");
        assert!(refused(b"GGUF and something long enough").contains("no octavo log"));
        assert!(refused(b"octavo log\n\x01\0\0\0\x02\0\0\0{}").contains("version 1;"));
        assert!(refused(b"octavo log\n\x03\0\0\0\xff\xff\0\0").contains("ends"));
        assert!(refused(b"octavo log\n\x03\0\0\0\x02\0\0\0sum!{}sum!").contains("damaged at byte 15"));
        let mut log = Vec::new();
        Sealer::default().write(&mut log, b"{}").expect("room");
        assert!(refused(&log).contains("model is missing"));
        assert!(refused(&log[..log.len() - 1]).contains("ends"));
        log[24] ^= 1;
        assert!(refused(&log).contains("damaged at byte 23"));
    }
}
