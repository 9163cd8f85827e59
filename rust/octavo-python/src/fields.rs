//! Reads named values of Python objects. A value of the wrong kind is told by its name, what was wanted and what was found.

use std::time::Duration;

use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

/// The attributes of an object.
pub struct Fields<'a, 'py>(pub &'a Bound<'py, PyAny>);

/// Longest value that is quoted in a message.
const MAX_QUOTE: usize = 80;

impl<'py> Fields<'_, 'py> {
    /// The attribute `name`, which must be `wanted`.
    pub fn get<T: FromPyObjectOwned<'py>>(&self, name: &str, wanted: &str) -> Result<T, String> {
        let value = self.raw(name)?;
        argument(name, wanted, &value)
    }

    /// A whole number from 0 up.
    pub fn whole(&self, name: &str) -> Result<usize, String> {
        self.get(name, "a whole number from 0 to 2**64 - 1")
    }

    /// A whole number from 1 up.
    pub fn count(&self, name: &str) -> Result<usize, String> {
        self.get(name, "a whole number from 1 to 2**64 - 1")
    }

    /// A whole number from 1 up, or `None`.
    pub fn count_or_none(&self, name: &str) -> Result<Option<usize>, String> {
        self.get(name, "a whole number from 1 to 2**64 - 1, or None")
    }

    /// A span of time, or `None`.
    pub fn seconds_or_none(&self, name: &str) -> Result<Option<Duration>, String> {
        let value = self.raw(name)?;
        if value.is_none() {
            return Ok(None);
        }
        seconds(name, "a finite number of seconds from 0 up, or None", &value).map(Some)
    }

    /// `True` or `False`.
    pub fn flag(&self, name: &str) -> Result<bool, String> {
        self.get(name, "True or False")
    }

    /// Token ids: any sequence of whole numbers, or `None`.
    pub fn token_ids(&self, name: &str) -> Result<Option<Vec<u32>>, String> {
        let value = self.raw(name)?;
        if value.is_none() { Ok(None) } else { token_ids(name, &value).map(Some) }
    }

    /// Texts: one, a sequence of them, or `None`.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, String> {
        let value = self.raw(name)?;
        if value.is_none() {
            return Ok(Vec::new());
        }
        if value.is_instance_of::<PyString>() {
            return Ok(vec![self.get(name, "text that is valid Unicode")?]);
        }
        self.get(name, "a str or a sequence of str")
    }

    /// A mapping of token ids to numbers, or `None`.
    pub fn bias(&self, name: &str) -> Result<Vec<(u32, f32)>, String> {
        let wanted = "a dict of token ids to numbers";
        let value = self.raw(name)?;
        if value.is_none() {
            return Ok(Vec::new());
        }
        let dict = value.cast::<PyDict>().map_err(|_| mismatch(name, wanted, &value))?;
        let pairs = dict.iter().map(|(id, bias)| Some((id.extract().ok()?, bias.extract().ok()?)));
        pairs.collect::<Option<_>>().ok_or_else(|| mismatch(name, wanted, &value))
    }

    /// Sequences of token ids, or `None`.
    pub fn words(&self, name: &str) -> Result<Vec<Vec<u32>>, String> {
        let value = self.raw(name)?;
        if value.is_none() {
            return Ok(Vec::new());
        }
        let words = value.try_iter().map_err(|_| mismatch(name, "a sequence of words", &value))?;
        words.map(|word| token_ids(name, &word.map_err(|error| error.to_string())?)).collect()
    }

    fn raw(&self, name: &str) -> Result<Bound<'py, PyAny>, String> {
        self.0.getattr(name).map_err(|error| error.to_string())
    }
}

/// The argument `name`, which must be `wanted`.
pub fn argument<'py, T: FromPyObjectOwned<'py>>(
    name: &str,
    wanted: &str,
    value: &Bound<'py, PyAny>,
) -> Result<T, String> {
    value.extract().map_err(|_| mismatch(name, wanted, value))
}

/// The argument `name`, a span of time. One that no clock will see the end of is the longest there is.
pub fn seconds(name: &str, wanted: &str, value: &Bound<'_, PyAny>) -> Result<Duration, String> {
    let seconds: f64 = argument(name, wanted, value)?;
    if !seconds.is_finite() || seconds < 0.0 {
        return Err(mismatch(name, wanted, value));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// How long to wait. `None`, also for infinity: for ever.
pub fn patience(name: &str, value: Option<&Bound<'_, PyAny>>) -> Result<Option<Duration>, String> {
    match value {
        Some(value) if value.extract().is_ok_and(|seconds: f64| seconds == f64::INFINITY) => Ok(None),
        Some(value) => seconds(name, "a number of seconds from 0 up, or None", value).map(Some),
        None => Ok(None),
    }
}

/// Token ids out of any iterable of whole numbers. The error names the first that is none.
pub fn token_ids(name: &str, ids: &Bound<'_, PyAny>) -> Result<Vec<u32>, String> {
    let wanted = "a sequence of token ids";
    let ids = ids.try_iter().map_err(|_| mismatch(name, wanted, ids))?;
    ids.enumerate()
        .map(|(i, id)| {
            let id = id.map_err(|error| error.to_string())?;
            id.extract().map_err(|_| mismatch(&format!("{name}[{i}]"), "a token id, a whole number from 0 up", &id))
        })
        .collect()
}

fn mismatch(name: &str, wanted: &str, found: &Bound<'_, PyAny>) -> String {
    let found = found.repr().map_or_else(|_| found.get_type().to_string(), |repr| repr.to_string());
    let quote: String = found.chars().take(MAX_QUOTE).collect();
    let more = if quote.len() < found.len() { "…" } else { "" };
    format!("{name} must be {wanted}, not {quote}{more}")
}
