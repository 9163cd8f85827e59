//! Values that live in one process only. A forked child has a copy of the memory, but not of the engine thread: a lock
//! that the thread held at that moment stays locked for ever, and joining it would never return.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use octavo::engine::{Engine, Session, Ticket};
use octavo::observe::readers::EventReader;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::EngineClosedError;

/// Forks between the process that imported this module and this one. Asking the system which process this is would be a
/// call into the kernel for every token of a stream.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// From now on, forks are counted.
pub fn count_forks(py: Python<'_>) -> PyResult<()> {
    let os = py.import("os")?;
    if !os.hasattr("register_at_fork")? {
        return Ok(()); // a system without forks
    }
    let hooks = PyDict::new(py);
    hooks.set_item("after_in_child", wrap_pyfunction!(forked, py)?)?;
    os.call_method("register_at_fork", (), Some(&hooks)).map(drop)
}

#[pyfunction]
fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// What lives at home, and how it is given up there: with the GIL held.
pub trait Resident: Send + Sized {
    /// Gives it up.
    fn leave(self) {}
}

impl Resident for Ticket {}
impl Resident for EventReader {}
impl Resident for Arc<Session> {}

impl Resident for Arc<Engine> {
    /// The last owner of an engine waits for its thread; other Python threads go on meanwhile. (Nobody else's turn is asked
    /// for when this is not the last: that would be a handover of the GIL for every answer.)
    fn leave(self) {
        let mut last = Arc::into_inner(self);
        if last.is_some() {
            // Python drops its objects with the GIL held, so attaching costs nothing (and cannot be done while the
            // interpreter goes away).
            Python::try_attach(|py| py.detach(|| drop(last.take())));
        }
    }
}

/// A value of the process that made it. Elsewhere it cannot be reached, and is leaked rather than dropped.
pub struct Home<T: Resident> {
    pid: u32,
    forks: u64,
    value: Option<T>,
}

impl<T: Resident> Home<T> {
    pub fn new(value: T) -> Self {
        Self { pid: std::process::id(), forks: FORKS.load(Ordering::Relaxed), value: Some(value) }
    }

    /// Whether this is the process that made it.
    pub fn is_here(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// The value, at home.
    pub fn get(&self) -> PyResult<&T> {
        self.anywhere().filter(|_| self.is_here()).ok_or_else(|| {
            EngineClosedError::new_err(format!(
                "this LLM lives in process {}, and this is process {}, a fork of it: create the LLM after the fork",
                self.pid,
                std::process::id()
            ))
        })
    }

    /// The value, for what of it never changes and takes no lock to be read.
    pub fn anywhere(&self) -> Option<&T> {
        self.value.as_ref()
    }
}

impl<T: Resident> Drop for Home<T> {
    fn drop(&mut self) {
        let here = self.is_here();
        match self.value.take() {
            Some(value) if here => value.leave(),
            elsewhere => std::mem::forget(elsewhere),
        }
    }
}
