//! The only reader of model files. [`ModelFiles`] is a `.gguf` file or a Hugging Face folder, opened: its configuration, its
//! tensors by name as views into the mapped files, its chat template and its end tokens. What the numbers mean is
//! [`crate::model`]'s business.

pub mod files; // open, and what both formats offer
pub mod dtype; // the type that weights are run as
pub mod tensors; // where every tensor lies, checked against its file
pub mod hf_config; // config.json and its relatives
pub mod safetensors; // safetensors headers
pub mod gguf; // GGUF headers
pub mod metadata; // their typed key-value pairs
pub mod ggml_type; // ggml's numbers for tensor types
pub mod inspect; // what is in the files, for people

pub use dtype::WeightDtype;
pub use files::{Config, ModelFiles, folder_tokenizer, tokenizer};
pub use hf_config::HfConfig;
pub use inspect::{Inspection, inspect};
