//! Rust's errors as Python's. The tree itself is `python/octavo/_errors.py`.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use octavo::engine::{ChoiceResult, Engine, SubmitError, Ticket};
use octavo::error::LoadError;
use octavo::request::{Finish, Rejection};
use octavo_kernels::BackendError;
use pyo3::exceptions::{PyKeyboardInterrupt, PyOSError};
use pyo3::prelude::*;

use crate::fields::Unread;

pyo3::import_exception!(octavo._errors, DeadlineExceededError);
pyo3::import_exception!(octavo._errors, DeviceError);
pyo3::import_exception!(octavo._errors, EngineClosedError);
pyo3::import_exception!(octavo._errors, InvalidRequestError);
pyo3::import_exception!(octavo._errors, ModelLoadError);
pyo3::import_exception!(octavo._errors, OctavoError);
pyo3::import_exception!(octavo._errors, OutOfMemoryError);
pyo3::import_exception!(octavo._errors, QueueFullError);

/// A request that makes no sense.
pub fn invalid(what: impl Into<Unread>) -> PyErr {
    match what.into() {
        Unread::Wrong(what) => InvalidRequestError::new_err(what),
        Unread::Raised(error) => error,
    }
}

/// A setting that makes no sense.
pub fn not_set(what: Unread) -> PyErr {
    match what {
        Unread::Wrong(what) => ModelLoadError::new_err(what),
        Unread::Raised(error) => error,
    }
}

/// An error of the system about a file: with its number and the file's name Python finds the class for it.
pub fn of_file(path: &Path, error: &io::Error) -> PyErr {
    // Of what we refuse ourselves.
    let ours = match error.kind() {
        ErrorKind::AlreadyExists => "EEXIST",
        ErrorKind::IsADirectory => "EISDIR",
        ErrorKind::FileTooLarge => "EFBIG",
        _ => "EINVAL",
    };
    let made = Python::attach(|py| {
        let (number, text) = match error.raw_os_error() {
            Some(number) => (number, py.import("os")?.call_method1("strerror", (number,))?.extract()?),
            None => (py.import("errno")?.getattr(ours)?.extract()?, error.to_string()),
        };
        PyResult::Ok(PyOSError::new_err((number, text, path.as_os_str().to_owned())))
    });
    made.unwrap_or_else(|other| other)
}

/// Why a call was not taken.
pub fn refused(error: SubmitError) -> PyErr {
    let text = error.to_string();
    match error {
        SubmitError::Invalid(what) => InvalidRequestError::new_err(what),
        SubmitError::QueueFull { retry_after, .. } => later(QueueFullError::new_err(text), retry_after),
        // When what is before it now would be gone as far.
        SubmitError::TooLate { deadline, expected, .. } => {
            later(DeadlineExceededError::new_err(text), expected.saturating_sub(deadline))
        }
        SubmitError::Closed(reason) => EngineClosedError::new_err(reason),
    }
}

/// An error that says when to try again.
fn later(error: PyErr, retry_after: Duration) -> PyErr {
    match Python::attach(|py| error.value(py).setattr("retry_after", retry_after.as_secs_f64())) {
        Ok(()) => error,
        Err(other) => other,
    }
}

/// Why a model could not be loaded.
pub fn not_loaded(error: LoadError) -> PyErr {
    let text = error.to_string();
    match error {
        LoadError::OutOfMemory(_) | LoadError::Backend { source: BackendError::OutOfMemory { .. }, .. } => {
            OutOfMemoryError::new_err(text)
        }
        LoadError::Backend { source: BackendError::BadWeight(_), .. } => ModelLoadError::new_err(text),
        LoadError::Backend { .. } => DeviceError::new_err(text),
        LoadError::Interrupted => PyKeyboardInterrupt::new_err(text),
        _ => ModelLoadError::new_err(text),
    }
}

/// The error that the end of a choice of `ticket` in `engine` stands for, if it is one.
pub fn failed(result: &ChoiceResult, ticket: &Ticket, engine: &Engine) -> Option<PyErr> {
    Some(match &result.finish {
        Finish::Stop(_) | Finish::Length | Finish::Cancelled => return None,
        Finish::Deadline => DeadlineExceededError::new_err(ticket.progress(result)),
        &Finish::Rejected(Rejection::QueueFull { living, most, retry_after_ns }) => {
            let retry_after = Duration::from_nanos(retry_after_ns);
            refused(SubmitError::QueueFull { live: living, kept: 0, most, retry_after })
        }
        Finish::Rejected(Rejection::Impossible(why)) => InvalidRequestError::new_err(why.clone()),
        Finish::Error(reason) if engine.device_failed() => DeviceError::new_err(reason.clone()),
        Finish::Error(reason) if !engine.is_open() => EngineClosedError::new_err(reason.clone()),
        Finish::Error(reason) => OctavoError::new_err(reason.clone()),
    })
}
