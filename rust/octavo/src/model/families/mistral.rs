//! Mistral: Llama with a sliding window. Its GGUF files call themselves `llama`.

use super::{Family, hf::HfDecoder, llama};
use crate::error::LoadError;
use crate::model::spec::DecoderSpec;

pub(super) const FAMILY: Family =
    Family { hf_architecture: "MistralForCausalLM", gguf_architecture: None, from_hf, ..llama::FAMILY };

pub(super) fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    let mut spec = llama::from_hf(config)?;
    config.set_windows(&mut spec, |_| true)?;
    Ok(spec)
}
