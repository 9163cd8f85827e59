//! OLMo 2: norms only after each sub-layer, and over all query heads and all key heads together.

use super::base::unsupported;
use super::gguf::GgufConfig;
use super::hf::HfDecoder;
use super::{Family, llama, names};
use crate::error::LoadError;
use crate::model::spec::{DecoderSpec, QkNorm};

pub(super) const FAMILY: Family = Family {
    hf_architecture: "Olmo2ForCausalLM",
    gguf_architecture: Some("olmo2"),
    from_hf,
    from_gguf,
    hf_names: &names::HF,
    gguf_names: &names::GGUF,
};

fn from_hf(config: &HfDecoder<'_>) -> Result<DecoderSpec, LoadError> {
    Ok(olmo2(llama::from_hf(config)?))
}

fn from_gguf(config: &GgufConfig<'_>) -> Result<DecoderSpec, LoadError> {
    if let Some(window) = config.window()? {
        // OLMo 3 files go by this name, and their local layers have a rotary embedding of their own.
        let found = format!("a sliding window of {window} in {}", config.architecture);
        return Err(unsupported(config.files.path(), "attention", &found, "full attention in this architecture"));
    }
    Ok(olmo2(config.decoder()?))
}

fn olmo2(spec: DecoderSpec) -> DecoderSpec {
    DecoderSpec { pre_norms: false, post_norms: true, qk_norm: QkNorm::WholeRow, ..spec }
}
