//! The only reader of model files.

pub mod gguf; // GGUF headers
pub mod metadata; // their typed key-value pairs
