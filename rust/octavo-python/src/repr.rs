//! Texts as Python shows them.

use pyo3::prelude::*;
use pyo3::types::PyString;

/// A text in quotes, what cannot be printed as an escape: Python's, so that it can be pasted.
pub fn quoted(py: Python<'_>, text: &str) -> PyResult<String> {
    PyString::new(py, text).repr().map(|repr| repr.to_string())
}
