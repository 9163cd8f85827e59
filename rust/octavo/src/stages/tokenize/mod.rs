//! Text or messages → token ids, and the table for the way back.
//!
//! A [`Tokenizer`] is read from a GGUF file's metadata or from a Hugging Face folder and is shared by all requests. A
//! [`ChatTemplate`] turns messages into a prompt.
//!
//! Always true: text that a user wrote never becomes a control token, unless the caller says `Special::Parse`. Everything
//! is compiled while loading, so the first request pays for nothing.
//!
//! Not here: ids → text as they are generated (see [`super::stream`]).

mod tokenizer; // the public face: encode, decode, look up
mod vocabulary; // names and bytes of every token
mod special; // finds special tokens in text
mod gguf; // a tokenizer from GGUF metadata
mod folder; // a tokenizer from a Hugging Face folder
mod library; // plain text → ids by the `tokenizers` crate
mod pre; // how model families cut text into words
mod spm; // plain text → ids by SentencePiece scores
mod chat; // messages → prompt
mod content; // messages whose content is a list of parts
mod bounds; // what templates build is paid for
mod civil; // the date, as templates may ask for it
mod marker; // keeps what users wrote from turning into special tokens
mod python; // what templates expect of Python
mod strings; // its methods of strings
mod subscripts; // its indices and slices
mod format; // its ways to fill in a text
mod filters; // what they expect of Jinja beyond the engine

pub use chat::{ChatError, ChatTemplate, RenderInput, Rendered};
pub use civil::LocalTime;
pub use content::ContentFormat;
pub(crate) use tokenizer::settle_byte_run;
pub use tokenizer::{Encoding, Special, Tokenizer, TokenizerError};
