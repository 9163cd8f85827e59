//! Whole models against the reference's expected values, and what a bad file does.
//!
//! The expected values were computed with transformers (float32, eager attention, batch 1); their folder is described in its
//! own README. Tolerances are the measured ones from there.

mod oracle; // the expected values
mod runner; // a minimal scheduler: paged blocks in shuffled order, prompts in chunks, everything in one batch
mod tiny; // tiny random models of every family, folders and GGUF files
mod convert; // the same models as other files
mod random; // random decoders, backend against backend
mod ropes; // rotary embeddings from configurations
mod types; // every type of weight, and every type that weights are run as
mod executor; // what a batch gives back
mod device; // recorded steps, failures
mod ahead; // steps that are begun before they are asked for
mod files; // what is read besides weights, and errors that say what is wrong
mod broken; // truncated and corrupt files
mod real; // real models, where their files are at hand
