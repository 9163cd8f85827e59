//! What an answer's bits depend on, besides the request.

use std::cmp::Reverse;
use std::path::PathBuf;
use std::sync::OnceLock;

use octavo_kernels::{CacheDtype, DType};

use super::config::Device;
use crate::observe::record::ModelIdentity;

/// The model that made an answer, and how it was run.
#[derive(Debug)]
pub struct Origin {
    /// Where it is.
    pub path: PathBuf,
    /// Family, as the file names it.
    pub architecture: String,
    /// Where it runs.
    pub device: Device,
    /// What its weights are run as, matrix by matrix, whatever setting led to that.
    pub run_as: Vec<DType>,
    /// How keys and values are stored.
    pub kv_cache_dtype: CacheDtype,
    /// Found out when it is first asked for: files are read for it.
    pub(super) identity: OnceLock<Result<ModelIdentity, String>>,
}

impl Origin {
    /// What this one has otherwise than `other`: each time the name, how it is here, and how it is there.
    pub fn otherwise(&self, other: &Self) -> Vec<(&'static str, String, String)> {
        if std::ptr::eq(self, other) {
            return Vec::new();
        }
        let settings = [
            ("device", self.device.name(), other.device.name()),
            ("kv_cache_dtype", self.kv_cache_dtype.name().to_owned(), other.kv_cache_dtype.name().to_owned()),
        ];
        let weights = if self.identity() != other.identity() {
            Some(("model", self.described(), other.described()))
        } else {
            (self.run_as != other.run_as).then(|| ("dtype", self.dtypes(), other.dtypes()))
        };
        weights.into_iter().chain(settings.into_iter().filter(|(_, here, there)| here != there)).collect()
    }

    /// The types that matrices are run as; where there are several, how many each is of.
    fn dtypes(&self) -> String {
        let mut counts: Vec<(String, usize)> = Vec::new();
        for name in self.run_as.iter().map(|dtype| dtype.name().to_lowercase()) {
            match counts.iter_mut().find(|(known, _)| *known == name) {
                Some((_, count)) => *count += 1,
                None => counts.push((name, 1)),
            }
        }
        counts.sort_by_key(|(_, count)| Reverse(*count));
        match &counts[..] {
            [(only, _)] => only.clone(),
            _ => counts
                .iter()
                .map(|(name, count)| format!("{name} ({count} matrices)"))
                .collect::<Vec<_>>()
                .join(" and "),
        }
    }

    /// The model, wherever it is. One whose files cannot be read any more is known by its path.
    fn identity(&self) -> Result<(u64, &str), &PathBuf> {
        let found = self
            .identity
            .get_or_init(|| ModelIdentity::of(&self.path, &self.architecture).map_err(|error| error.to_string()));
        found.as_ref().map(|model| (model.bytes, model.sha256.as_str())).map_err(|_| &self.path)
    }

    fn described(&self) -> String {
        let path = self.path.display();
        match self.identity() {
            Ok((bytes, sha256)) => format!("{path} ({bytes} bytes, sha256 {sha256:.12}…)"),
            Err(_) => format!("{path} (which cannot be read any more)"),
        }
    }
}
