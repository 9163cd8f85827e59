//! The typed key-value metadata of a GGUF file.

use std::collections::BTreeMap;

/// A metadata value. Arrays keep their element type, so that a vocabulary is one vector of strings.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    UnsignedArray(Vec<u64>),
    SignedArray(Vec<i64>),
    FloatArray(Vec<f32>),
    BoolArray(Vec<bool>),
    StringArray(Vec<String>),
}

impl Value {
    /// A word for error messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "an integer",
            Self::Float(_) => "a number",
            Self::Bool(_) => "a truth value",
            Self::String(_) => "a string",
            Self::UnsignedArray(_) | Self::SignedArray(_) => "an array of integers",
            Self::FloatArray(_) => "an array of numbers",
            Self::BoolArray(_) => "an array of truth values",
            Self::StringArray(_) => "an array of strings",
        }
    }
}

/// All metadata of a file, by key. The getters' errors name the key, what was wanted and what was found.
#[derive(Clone, Debug, Default)]
pub struct Metadata(pub BTreeMap<String, Value>);

impl Metadata {
    /// The value of `key`, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// A string, if the key is there.
    pub fn string(&self, key: &str) -> Result<Option<&str>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(wrong(key, "a string", other)),
        }
    }

    /// A non-negative integer, if the key is there.
    pub fn integer(&self, key: &str) -> Result<Option<u64>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(v)) => Ok(Some(*v)),
            Some(Value::Signed(v)) if *v >= 0 => Ok(Some(*v as u64)),
            Some(other) => Err(wrong(key, "a non-negative integer", other)),
        }
    }

    /// A number, if the key is there.
    pub fn number(&self, key: &str) -> Result<Option<f64>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(v)) => Ok(Some(*v)),
            Some(Value::Unsigned(v)) => Ok(Some(*v as f64)),
            Some(Value::Signed(v)) => Ok(Some(*v as f64)),
            Some(other) => Err(wrong(key, "a number", other)),
        }
    }

    /// A truth value, if the key is there.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(v)) => Ok(Some(*v)),
            Some(other) => Err(wrong(key, "a truth value", other)),
        }
    }

    /// An array of strings, if the key is there.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::StringArray(v)) => Ok(Some(v)),
            Some(other) => Err(wrong(key, "an array of strings", other)),
        }
    }

    /// An array of numbers, if the key is there.
    pub fn numbers(&self, key: &str) -> Result<Option<&[f32]>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::FloatArray(v)) => Ok(Some(v)),
            Some(other) => Err(wrong(key, "an array of numbers", other)),
        }
    }

    /// An array of integers, if the key is there.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::SignedArray(v)) => Ok(Some(v.clone())),
            Some(Value::UnsignedArray(v)) => Ok(Some(v.iter().map(|&v| v as i64).collect())),
            Some(other) => Err(wrong(key, "an array of integers", other)),
        }
    }
}

fn wrong(key: &str, wanted: &str, found: &Value) -> String {
    format!("metadata `{key}` should be {wanted}, it is {}", found.kind())
}
