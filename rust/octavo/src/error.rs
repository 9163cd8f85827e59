//! What can go wrong before a request runs, one small enum per room. What goes wrong with a running request is a
//! [`crate::request::Finish`].

use std::path::{Path, PathBuf};

/// A model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file could not be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not what it claims to be.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What was wanted, what was found, and where.
        what: String,
    },
    /// The file is sound, but octavo has no way to run it.
    #[error("{}: {what} `{found}` is not supported; supported: {supported}", path.display())]
    Unsupported {
        /// Which file.
        path: PathBuf,
        /// What kind of thing: architecture, tensor type, pre-tokenizer …
        what: &'static str,
        /// The name that was found.
        found: String,
        /// The names that would do.
        supported: String,
    },
    /// The machine has no room for it.
    #[error("{0}")]
    OutOfMemory(String),
    /// The backend refused.
    #[error("{}: {source}", path.display())]
    Backend {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: octavo_kernels::BackendError,
    },
    /// A setting makes no sense for this model.
    #[error("{0}")]
    Setting(String),
    /// The caller interrupted it.
    #[error("loading was interrupted")]
    Interrupted,
}

impl LoadError {
    /// A malformed file.
    pub fn malformed(path: &Path, what: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), what: what.into() }
    }
}
