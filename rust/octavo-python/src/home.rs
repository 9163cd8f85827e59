//! Values that live in one process only. A forked child has a copy of the memory, but not of the engine thread: a lock
//! that the thread held at that moment stays locked for ever, and joining it would never return.

use pyo3::prelude::*;

use crate::errors::EngineClosedError;

/// A value of the process that made it. Elsewhere it cannot be reached, and is leaked rather than dropped.
pub struct Home<T: Send> {
    pid: u32,
    value: Option<T>,
}

impl<T: Send> Home<T> {
    pub fn new(value: T) -> Self {
        Self { pid: std::process::id(), value: Some(value) }
    }

    /// Whether this is the process that made it.
    pub fn is_here(&self) -> bool {
        self.pid == std::process::id()
    }

    /// The value, at home.
    pub fn get(&self) -> PyResult<&T> {
        match &self.value {
            Some(value) if self.is_here() => Ok(value),
            _ => Err(EngineClosedError::new_err(format!(
                "this LLM lives in process {}, and this is process {}, a fork of it: create the LLM after the fork",
                self.pid,
                std::process::id()
            ))),
        }
    }
}

impl<T: Send> Drop for Home<T> {
    fn drop(&mut self) {
        let value = self.value.take();
        if !self.is_here() {
            std::mem::forget(value);
            return;
        }
        // The last owner of an engine waits for its thread; other Python threads go on meanwhile. Python drops its objects
        // with the GIL held, so attaching costs nothing (and cannot be done while the interpreter goes away).
        let mut value = Some(value);
        Python::try_attach(|py| py.detach(|| drop(value.take())));
    }
}
