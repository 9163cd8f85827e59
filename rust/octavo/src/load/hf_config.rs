//! `config.json` and its relatives: JSON objects whose getters' errors name the file, the key, what was wanted and what was
//! found. `null` counts as absent, as transformers writes it.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::LoadError;

/// The largest JSON file that is read: tokenizers aside, these are small.
const MAX_BYTES: u64 = 16 << 20;

/// A JSON object and the file that it came from.
#[derive(Clone, Debug)]
pub struct HfConfig {
    path: PathBuf,
    /// Keys that lead to this object inside the file, for error messages: `rope_parameters.`.
    prefix: String,
    values: Map<String, Value>,
}

impl HfConfig {
    /// Reads the object in the file at `path`.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let values = match read_json(path)? {
            Value::Object(values) => values,
            other => {
                return Err(LoadError::malformed(path, format!("should be a JSON object, it is {}", kind(&other))));
            }
        };
        Ok(Self { path: path.to_owned(), prefix: String::new(), values })
    }

    /// The same, if the file is there.
    pub fn read_if_there(path: &Path) -> Result<Option<Self>, LoadError> {
        if path.exists() { Self::read(path).map(Some) } else { Ok(None) }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole object.
    pub fn into_value(self) -> Value {
        Value::Object(self.values)
    }

    /// The value of `key`, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// A string, if the key is there.
    pub fn string(&self, key: &str) -> Result<Option<&str>, LoadError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A truth value, if the key is there.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, LoadError> {
        self.typed(key, "a truth value", Value::as_bool)
    }

    /// A finite number, if the key is there.
    pub fn number(&self, key: &str) -> Result<Option<f64>, LoadError> {
        self.typed(key, "a finite number", |value| value.as_f64().filter(|number| number.is_finite()))
    }

    /// A non-negative integer, if the key is there.
    pub fn integer(&self, key: &str) -> Result<Option<u64>, LoadError> {
        self.typed(key, "a non-negative integer", Value::as_u64)
    }

    /// A list of strings, if the key is there.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, LoadError> {
        self.typed(key, "a list of strings", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    /// A list of numbers, if the key is there.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f32>>, LoadError> {
        let number = |value: &Value| value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        self.typed(key, "a list of numbers", |value| value.as_array()?.iter().map(number).collect())
    }

    /// A list of non-negative integers, if the key is there.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<u64>>, LoadError> {
        self.typed(key, "a list of non-negative integers", |value| {
            value.as_array()?.iter().map(Value::as_u64).collect()
        })
    }

    /// One integer or a list of them; empty if the key is not there.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>, LoadError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.typed(key, "a token id or a list of them", |value| match value {
            Value::Array(ids) => ids.iter().map(id).collect(),
            one => Some(vec![id(one)?]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// An object inside this one, if the key is there.
    pub fn object(&self, key: &str) -> Result<Option<Self>, LoadError> {
        let values = self.typed(key, "an object", Value::as_object)?;
        let prefix = format!("{}{key}.", self.prefix);
        Ok(values.map(|values| Self { path: self.path.clone(), prefix, values: values.clone() }))
    }

    /// What a getter found, or an error if it must be there.
    pub fn need<T>(&self, key: &str, found: Option<T>) -> Result<T, LoadError> {
        found.ok_or_else(|| self.wrong(format!("`{}{key}` is missing", self.prefix)))
    }

    /// An error about this file.
    pub fn wrong(&self, what: impl Into<String>) -> LoadError {
        LoadError::malformed(&self.path, what)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        as_type: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match as_type(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.wrong(format!("`{}{key}` should be {wanted}, it is {}", self.prefix, shown(value)))),
        }
    }
}

/// Reads a JSON file.
pub(super) fn read_json(path: &Path) -> Result<Value, LoadError> {
    let text = read_text(path)?;
    serde_json::from_str(&text).map_err(|error| LoadError::malformed(path, error.to_string()))
}

/// Reads a small text file.
pub(super) fn read_text(path: &Path) -> Result<String, LoadError> {
    let failed = |source| LoadError::Read { path: path.to_owned(), source };
    let length = std::fs::metadata(path).map_err(failed)?.len();
    if length > MAX_BYTES {
        return Err(LoadError::malformed(path, format!("has {length} bytes, at most {MAX_BYTES} are read")));
    }
    std::fs::read_to_string(path).map_err(failed)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Short values as they are, long ones by kind.
fn shown(value: &Value) -> String {
    match value.to_string() {
        text if text.len() <= 40 => text,
        _ => kind(value).to_owned(),
    }
}
