//! Text ↔ token ids.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use octavo::stages::tokenize::{self, Special};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::errors::{invalid, not_loaded};
use crate::fields::token_ids;
use crate::prompt::text;

/// The tokenizer of a model file or folder.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct Tokenizer(Arc<tokenize::Tokenizer>);

#[pymethods]
impl Tokenizer {
    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let tokenizer = py.detach(|| octavo::load::tokenizer(&path)).map_err(not_loaded)?;
        Ok(Self(Arc::new(tokenizer)))
    }

    #[pyo3(signature = (text, *, special, add_special_tokens))]
    fn tokenize(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyString>,
        special: bool,
        add_special_tokens: bool,
    ) -> PyResult<Encoding> {
        Encoding::of(py, &self.0, text, special, add_special_tokens)
    }

    #[pyo3(signature = (token_ids, *, skip_special_tokens))]
    fn detokenize(&self, py: Python<'_>, token_ids: &Bound<'_, PyAny>, skip_special_tokens: bool) -> PyResult<String> {
        let ids = self.known(token_ids)?;
        Ok(py.detach(|| self.0.decode(&ids, skip_special_tokens)))
    }

    fn detokenize_bytes<'py>(&self, py: Python<'py>, token_ids: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let ids = self.known(token_ids)?;
        Ok(PyBytes::new(py, &py.detach(|| self.0.decode_bytes(&ids))))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}

impl Tokenizer {
    fn known(&self, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        known(ids, self.0.len(), "the tokenizer")
    }
}

/// Token ids that `who` has, who has `count` of them.
pub fn known(ids: &Bound<'_, PyAny>, count: usize, who: &str) -> PyResult<Vec<u32>> {
    let ids = token_ids("token_ids", ids).map_err(invalid)?;
    match ids.iter().position(|&id| id as usize >= count) {
        None => Ok(ids),
        Some(at) => Err(invalid(format!("token_ids[{at}] is {}, {who} has {count} tokens", ids[at]))),
    }
}

/// Token ids of a text.
#[pyclass(module = "octavo", frozen)]
pub struct Encoding {
    #[pyo3(get)]
    ids: Vec<u32>,
    pieces: Vec<Vec<u8>>,
    /// For each token its bytes in the UTF-8 of the text, as ``(start, end)``; empty for tokens that were added. Of
    /// tokens that share a character each has its own bytes of it; where the tokenizer normalises the character to
    /// another one first, each has all of it.
    #[pyo3(get)]
    offsets: Vec<(usize, usize)>,
    /// For each token its characters: ``text[start:end]``. A character that several tokens share belongs to each.
    #[pyo3(get)]
    char_offsets: Vec<(usize, usize)>,
}

impl Encoding {
    pub fn of(
        py: Python<'_>,
        tokenizer: &tokenize::Tokenizer,
        text: &Bound<'_, PyString>,
        special: bool,
        add_special_tokens: bool,
    ) -> PyResult<Self> {
        let text = self::text("the text", text)?;
        let special = if special { Special::Parse } else { Special::AsText };
        let pairs = |ranges: &[Range<usize>]| ranges.iter().map(|range| (range.start, range.end)).collect();
        py.detach(|| {
            let encoding = tokenizer.encode(&text, special, add_special_tokens);
            let encoding = encoding.map_err(|error| invalid(error.to_string()))?;
            Ok(Self {
                pieces: encoding.ids.iter().map(|&id| tokenizer.piece(id).unwrap_or_default().to_vec()).collect(),
                offsets: pairs(&encoding.offsets),
                char_offsets: pairs(&encoding.char_offsets(&text)),
                ids: encoding.ids,
            })
        })
    }
}

#[pymethods]
impl Encoding {
    /// The bytes each token stands for.
    #[getter]
    fn pieces<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.pieces.iter().map(|piece| PyBytes::new(py, piece)).collect()
    }

    fn __len__(&self) -> usize {
        self.ids.len()
    }

    fn __repr__(&self) -> String {
        format!("Encoding(ids={:?})", self.ids)
    }
}
