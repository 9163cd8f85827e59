//! How Python waits: without the GIL, and with an ear for Ctrl-C.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// How long a wait goes without letting Ctrl-C through.
const SLICE: Duration = Duration::from_millis(50);

/// Asks `look` again and again, in slices and without the GIL, until it has an answer or `patience` has passed (`None`: for
/// ever). An error is what Python made of a signal.
pub fn wait_for<T: Send>(
    py: Python<'_>,
    patience: Option<Duration>,
    mut look: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    // What is there is taken with the GIL in hand: to give it away and get it back costs more.
    if let Some(found) = look(Duration::ZERO) {
        return Ok(Some(found));
    }
    if patience == Some(Duration::ZERO) {
        return Ok(None);
    }
    // An end too far to be told is none.
    let until = patience.and_then(|patience| Instant::now().checked_add(patience));
    loop {
        let left = until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()));
        if let Some(found) = py.detach(|| look(left.min(SLICE))) {
            return Ok(Some(found));
        }
        py.check_signals()?;
        if left.is_zero() {
            return Ok(None);
        }
    }
}
