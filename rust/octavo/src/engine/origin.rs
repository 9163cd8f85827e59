//! What an answer's bits depend on, besides the request.

use std::path::PathBuf;
use std::sync::OnceLock;

use octavo_kernels::CacheDtype;

use super::config::Device;
use crate::load::WeightDtype;
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
    /// What its weights are run as.
    pub dtype: WeightDtype,
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
            ("dtype", self.dtype.name().to_owned(), other.dtype.name().to_owned()),
            ("kv_cache_dtype", self.kv_cache_dtype.name().to_owned(), other.kv_cache_dtype.name().to_owned()),
        ];
        let model = (self.identity() != other.identity()).then(|| ("model", self.described(), other.described()));
        model.into_iter().chain(settings.into_iter().filter(|(_, here, there)| here != there)).collect()
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
