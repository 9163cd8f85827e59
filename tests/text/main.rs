//! Text in, text out: tokenizers, chat templates and streams, against what other implementations say.
//!
//! Small fixtures are in `tests/fixtures/tokenizer`; larger ones are used where they lie beside the repository.

mod chat;
mod hostile;
mod jinja;
mod fixtures;
mod stream;
mod tokenizer;
