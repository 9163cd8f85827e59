//! Wakes an event loop: a pipe that holds at most one byte.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use octavo::engine::Wake;
use pyo3::prelude::*;

/// What the engine thread holds.
pub struct Pipe {
    reader: PipeReader,
    writer: PipeWriter,
    /// Whether the byte is in the pipe, or about to be.
    pending: AtomicBool,
}

impl Wake for Pipe {
    fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // One byte into an empty pipe whose reader is open: it neither waits nor fails.
            let _ = (&self.writer).write(&[1]);
        }
    }
}

/// A pipe that an event loop watches. Any number of calls may share one.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct Waker(pub Arc<Pipe>);

#[pymethods]
impl Waker {
    #[new]
    fn new() -> PyResult<Self> {
        let (reader, writer) = std::io::pipe()?;
        Ok(Self(Arc::new(Pipe { reader, writer, pending: AtomicBool::new(false) })))
    }

    fn fileno(&self) -> i32 {
        self.0.reader.as_raw_fd()
    }

    /// To be called when it is readable, before looking into mailboxes: what arrives afterwards wakes again.
    fn clear(&self) -> PyResult<()> {
        (&self.0.reader).read_exact(&mut [0])?;
        // Acquires what was put into mailboxes before the byte was written.
        self.0.pending.swap(false, Ordering::AcqRel);
        Ok(())
    }
}
