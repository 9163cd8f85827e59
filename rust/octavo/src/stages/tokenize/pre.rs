//! How model families cut text into words before BPE, by the name that GGUF files carry in `tokenizer.ggml.pre`.

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior::Isolated;

use super::tokenizer::TokenizerError;

/// A family's way to cut text.
pub(super) struct PreTokenizer {
    /// The names that files use for it.
    names: &'static [&'static str],
    /// Applied one after the other, each to all parts the one before has left. Matches and what lies between become words.
    patterns: &'static [&'static str],
    /// A word that is a token is taken whole, even where merges would not lead to it.
    pub ignore_merges: bool,
    /// Whether BOS is added, where the file does not say.
    pub adds_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const CJK: &str = "[一-龥\u{0800}-一가-\u{D7FF}]+";

const fn plain(names: &'static [&'static str], patterns: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { names, patterns, ignore_merges: false, adds_bos: false }
}

const FAMILIES: &[PreTokenizer] = &[
    plain(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"],
        patterns: &[LLAMA3],
        ignore_merges: true,
        adds_bos: true,
    },
    plain(&["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], &[LLAMA3]),
    plain(&["qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"], &[QWEN2]),
    plain(&["qwen35"], &[QWEN35]),
    plain(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], &[r"\p{N}", GPT2]),
    plain(&["gpt-2", "phi-2", "olmo", "mpt", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"], &[GPT2]),
    plain(&["gpt-4o", "llama4"], &[O200K]),
    PreTokenizer { names: &["tekken"], patterns: &[TEKKEN], ignore_merges: true, adds_bos: true },
    plain(&["deepseek-coder"], &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"]),
    plain(&["deepseek-v3"], &[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK3_WORDS]),
];

/// The pre-tokenizer that files call `name`.
pub(super) fn by_name(name: &str) -> Result<&'static PreTokenizer, TokenizerError> {
    FAMILIES.iter().find(|family| family.names.contains(&name)).ok_or_else(|| TokenizerError::Unsupported {
        what: "pre-tokenizer",
        found: name.to_owned(),
        supported: FAMILIES.iter().flat_map(|family| family.names).copied().collect::<Vec<_>>().join(", "),
    })
}

impl PreTokenizer {
    /// The compiled patterns, then bytes written as letters.
    pub fn compile(&self) -> Result<PreTokenizerWrapper, TokenizerError> {
        let mut steps = Vec::with_capacity(self.patterns.len() + 1);
        for pattern in self.patterns {
            let split = Split::new(SplitPattern::Regex((*pattern).to_owned()), Isolated, false)
                .map_err(|error| TokenizerError::Malformed(format!("pattern {pattern}: {error}")))?;
            steps.push(PreTokenizerWrapper::from(split));
        }
        steps.push(ByteLevel::new(false, false, false).into());
        Ok(Sequence::new(steps).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

    fn words(name: &str, text: &str) -> Vec<String> {
        let mut string = PreTokenizedString::from(text);
        by_name(name).unwrap().compile().unwrap().pre_tokenize(&mut string).unwrap();
        let splits = string.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.iter().map(|(_, (start, end), _)| text[*start..*end].to_owned()).collect()
    }

    #[test]
    fn every_family_compiles_and_loses_nothing() {
        let text = "I'll say: 12345 héllo\r\n\n  \tdéjà-vu  中文かな한국어 <|x|> DON'T_stop\u{a0}🙂 ";
        for name in FAMILIES.iter().flat_map(|family| family.names) {
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
    }

    #[test]
    fn numbers_are_cut_as_the_family_cuts_them() {
        assert_eq!(words("llama-bpe", "x12345"), ["x", "123", "45"]);
        assert_eq!(words("qwen2", "x12345"), ["x", "1", "2", "3", "4", "5"]);
        assert_eq!(words("smollm", "x 12"), ["x", " ", "1", "2"]);
        assert_eq!(words("gpt-2", "x 12"), ["x", " 12"]);
        assert_eq!(words("default", "12345"), ["123", "45"]);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = by_name("klingon").err().unwrap().to_string();
        assert!(error.contains("klingon") && error.contains("qwen2") && error.contains("llama-bpe"), "{error}");
    }
}
