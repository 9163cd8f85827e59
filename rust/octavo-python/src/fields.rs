//! Reads named values of Python objects. A value of the wrong kind is told by its name, what was wanted and what was found.

use std::fmt::{Arguments, Display};
use std::time::Duration;

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyMapping, PyMemoryView, PyString};

/// Why a value cannot be read.
pub enum Unread {
    /// It is another one than was wanted; the text says so.
    Wrong(String),
    /// Code of the caller's, which was asked for it, raised this.
    Raised(PyErr),
}

impl From<String> for Unread {
    fn from(what: String) -> Self {
        Self::Wrong(what)
    }
}

impl From<PyErr> for Unread {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

/// A value, or why not.
pub type Read<T> = Result<T, Unread>;

/// The attributes of an object.
pub struct Fields<'a, 'py>(pub &'a Bound<'py, PyAny>);

/// Longest value that is quoted in a message.
const MAX_QUOTE: usize = 80;

impl<'py> Fields<'_, 'py> {
    /// The attribute `name`, which must be `wanted`.
    pub fn get<T: FromPyObjectOwned<'py>>(&self, name: &str, wanted: &str) -> Read<T> {
        argument(name, wanted, &self.raw(name)?)
    }

    /// The attribute `name`, a number or `None`.
    pub fn number<T: FromPyObjectOwned<'py>>(&self, name: &str, wanted: &str) -> Read<T> {
        number(name, wanted, &self.raw(name)?)
    }

    /// A whole number from 0 up.
    pub fn whole(&self, name: &str) -> Read<usize> {
        self.number(name, "a whole number from 0 to 2**64 - 1")
    }

    /// A whole number from 1 up.
    pub fn count(&self, name: &str) -> Read<usize> {
        self.number(name, "a whole number from 1 to 2**64 - 1")
    }

    /// A whole number from 1 up, or `None`.
    pub fn count_or_none(&self, name: &str) -> Read<Option<usize>> {
        self.number(name, "a whole number from 1 to 2**64 - 1, or None")
    }

    /// A span of time, or `None`.
    pub fn seconds_or_none(&self, name: &str) -> Read<Option<Duration>> {
        let value = self.given(name)?;
        value.map(|value| seconds(name, "a finite number of seconds from 0 up, or None", &value)).transpose()
    }

    /// `True` or `False`.
    pub fn flag(&self, name: &str) -> Read<bool> {
        flag(name, &self.raw(name)?)
    }

    /// Token ids: any sequence of whole numbers, or `None`.
    pub fn token_ids(&self, name: &str) -> Read<Option<Vec<u32>>> {
        self.given(name)?.map(|value| token_ids(name, &value)).transpose()
    }

    /// Texts: a sequence of them, or `None`.
    pub fn texts(&self, name: &str, wanted: &str) -> Read<Option<Vec<String>>> {
        let Some(value) = self.given(name)? else { return Ok(None) };
        if is_raw(&value) || value.cast::<PyMapping>().is_ok() || !value.hasattr("__getitem__")? {
            return Err(mismatch(name, wanted, &value));
        }
        items(name, wanted, &value, |name, text| argument(name, TEXT, text)).map(Some)
    }

    /// Texts: one, a sequence of them, or `None`.
    pub fn text_or_texts(&self, name: &str) -> Read<Vec<String>> {
        match self.given(name)? {
            Some(value) if value.is_instance_of::<PyString>() => Ok(vec![argument(name, TEXT, &value)?]),
            _ => Ok(self.texts(name, "a str or a sequence of str")?.unwrap_or_default()),
        }
    }

    /// A mapping of token ids to numbers, or `None`.
    pub fn bias(&self, name: &str) -> Read<Vec<(u32, f32)>> {
        let Some(value) = self.given(name)? else { return Ok(Vec::new()) };
        let wanted = "a dict of token ids to numbers";
        let pairs = value.cast::<PyMapping>().map_err(|_| mismatch(name, wanted, &value))?.items()?;
        let mut found = Vec::new();
        for pair in pairs {
            let (id, bias): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair.extract()?;
            let id = number(format_args!("a key of {name}"), "a token id, a whole number from 0 up", &id)?;
            found.push((id, number(format_args!("{name}[{id}]"), "a number", &bias)?));
        }
        Ok(found)
    }

    /// Sequences of token ids, or `None`.
    pub fn words(&self, name: &str) -> Read<Vec<Vec<u32>>> {
        let Some(value) = self.given(name)? else { return Ok(Vec::new()) };
        items(name, "a sequence of words", &value, |name, word| token_ids(name, word))
    }

    fn raw(&self, name: &str) -> Read<Bound<'py, PyAny>> {
        Ok(self.0.getattr(name)?)
    }

    fn given(&self, name: &str) -> Read<Option<Bound<'py, PyAny>>> {
        Ok(Some(self.raw(name)?).filter(|value| !value.is_none()))
    }
}

/// What a text must be.
pub const TEXT: &str = "a str that is valid Unicode";

/// The argument `name`, which must be `wanted`.
pub fn argument<'py, T: FromPyObjectOwned<'py>>(
    name: impl Display,
    wanted: &str,
    value: &Bound<'py, PyAny>,
) -> Read<T> {
    value.extract().map_err(|error: T::Error| {
        let (error, py): (PyErr, _) = (error.into(), value.py());
        let says_no = |error: &PyErr| {
            error.is_instance_of::<PyTypeError>(py)
                || error.is_instance_of::<PyValueError>(py)
                || error.is_instance_of::<PyOverflowError>(py)
        };
        if says_no(&error) { mismatch(name, wanted, value) } else { Unread::Raised(error) }
    })
}

/// The argument `name`, a number. `True` and `False` are none here, though Python counts with them: whoever gives one means
/// something else.
pub fn number<'py, T: FromPyObjectOwned<'py>>(name: impl Display, wanted: &str, value: &Bound<'py, PyAny>) -> Read<T> {
    if value.is_instance_of::<PyBool>() {
        return Err(mismatch(name, wanted, value));
    }
    argument(name, wanted, value)
}

/// The argument `name`, `True` or `False`.
pub fn flag(name: &str, value: &Bound<'_, PyAny>) -> Read<bool> {
    argument(name, "True or False", value)
}

/// The argument `name`, a span of time. One that no clock will see the end of is the longest there is.
pub fn seconds(name: &str, wanted: &str, value: &Bound<'_, PyAny>) -> Read<Duration> {
    let seconds: f64 = number(name, wanted, value)?;
    if !seconds.is_finite() || seconds < 0.0 {
        return Err(mismatch(name, wanted, value));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// How long to wait. `None`, also for infinity: for ever.
pub fn patience(name: &str, value: Option<&Bound<'_, PyAny>>) -> Read<Option<Duration>> {
    match value {
        Some(value) if value.extract().is_ok_and(|seconds: f64| seconds == f64::INFINITY) => Ok(None),
        Some(value) => seconds(name, "a number of seconds from 0 up, or None", value).map(Some),
        None => Ok(None),
    }
}

/// Token ids out of any iterable of whole numbers. The error names the first that is none.
pub fn token_ids(name: impl Display, ids: &Bound<'_, PyAny>) -> Read<Vec<u32>> {
    let wanted = "a sequence of token ids";
    if is_raw(ids) {
        return Err(mismatch(name, wanted, ids));
    }
    items(name, wanted, ids, |name, id| number(name, "a token id, a whole number from 0 up", id))
}

/// Text or bytes. One could walk over them, and find what nobody meant.
fn is_raw(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>()
        || value.is_instance_of::<PyMemoryView>()
}

/// What `read` makes of every item of an iterable, each with its name.
fn items<T>(
    name: impl Display,
    wanted: &str,
    all: &Bound<'_, PyAny>,
    read: impl Fn(Arguments<'_>, &Bound<'_, PyAny>) -> Read<T>,
) -> Read<Vec<T>> {
    let iterator = all.try_iter().map_err(|_| mismatch(&name, wanted, all))?;
    let mut found = Vec::new();
    // Not `collect`: it would import a module of Python's to ask how many there are.
    for item in iterator {
        let at = found.len();
        found.push(read(format_args!("{name}[{at}]"), &item?)?);
    }
    Ok(found)
}

fn mismatch(name: impl Display, wanted: &str, found: &Bound<'_, PyAny>) -> Unread {
    let found = found.repr().map_or_else(|_| found.get_type().to_string(), |repr| repr.to_string());
    let quote: String = found.chars().take(MAX_QUOTE).collect();
    let more = if quote.len() < found.len() { "…" } else { "" };
    Unread::Wrong(format!("{name} must be {wanted}, not {quote}{more}"))
}
