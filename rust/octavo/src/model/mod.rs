//! One decoder, many families. A family is a row of data: how its configuration becomes a [`DecoderSpec`], and what its
//! weights are called. The [`Decoder`] runs any spec over any backend, and knows no family.

pub mod spec; // what a decoder may vary in
pub mod groups; // which layers share block tables
pub mod families; // from a model's files to a spec, a row per family
pub mod rope; // rotary frequencies and their scalings
pub mod weights; // from files into a backend
pub mod centre; // what all keys of a head have in common
pub mod decoder; // the one forward pass

pub use decoder::Decoder;
pub use families::Model;
pub use groups::LayerGroups;
pub use spec::DecoderSpec;
pub use weights::Weights;
