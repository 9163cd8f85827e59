//! A tokenizer from the `tokenizer.ggml.*` keys of a GGUF file.

use tokenizers::models::bpe::BPE;

use super::library::Library;
use super::pre;
use super::special::{SpecialToken, SpecialTokens};
use super::spm::{SPACE, Spm};
use super::tokenizer::{Decoding, Engine, Tokenizer, TokenizerError};
use super::vocabulary::{Kind, Vocabulary};
use crate::load::metadata::Metadata;

/// What the two kinds of model differ in.
struct Flavour {
    vocabulary: Vocabulary,
    engine: Engine,
    decoding: Decoding,
    /// Where the file does not say.
    adds_bos: bool,
}

pub(super) fn read(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
    let reader = Reader { metadata };
    let model = metadata.string("tokenizer.ggml.model").map_err(TokenizerError::Malformed)?;
    let flavour = match model {
        Some("gpt2") => bpe(&reader)?,
        Some("llama") => spm(&reader)?,
        Some(other) => {
            return Err(TokenizerError::Unsupported {
                what: "model",
                found: other.to_owned(),
                supported: "gpt2 (byte-level BPE), llama (SentencePiece)".to_owned(),
            });
        }
        None => return Err(TokenizerError::Malformed("the file has no `tokenizer.ggml.model`".into())),
    };
    let Flavour { vocabulary, engine, decoding, adds_bos } = flavour;
    let bos = reader.token("bos_token_id", vocabulary.len())?;
    let eos = reader.token("eos_token_id", vocabulary.len())?;
    let added = |adds: bool, id: Option<u32>| id.filter(|_| adds).into_iter().collect();
    Ok(Tokenizer {
        prefix: added(reader.bool("add_bos_token")?.unwrap_or(adds_bos), bos),
        suffix: added(reader.bool("add_eos_token")?.unwrap_or(false), eos),
        specials: SpecialTokens::new(specials(&vocabulary, reader.strips_after_control()?)),
        end_ids: end_ids(&reader, &vocabulary, eos)?,
        vocabulary,
        engine,
        decoding,
        bos,
        eos,
    })
}

/// What ends a turn in the families that have a token for it besides EOS, for files without the key.
const TURN_ENDS: [&str; 9] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|EOT|>",
    "<｜end▁of▁sentence｜>",
];

fn end_ids(reader: &Reader, vocabulary: &Vocabulary, eos: Option<u32>) -> Result<Vec<u32>, TokenizerError> {
    let mut ids: Vec<u32> = eos.into_iter().collect();
    for key in ["eot_token_id", "eom_token_id"] {
        ids.extend(reader.token(key, vocabulary.len())?);
    }
    let named = TURN_ENDS.iter().filter_map(|name| vocabulary.id_of(name.as_bytes()));
    ids.extend(named.filter(|&id| matches!(vocabulary.kind(id), Kind::Control | Kind::UserDefined)));
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// Byte-level BPE. Tokens are written in letters that stand for bytes, except those that are looked for as they are.
fn bpe(reader: &Reader) -> Result<Flavour, TokenizerError> {
    let names = reader.names()?;
    let kinds = reader.kinds(names)?;
    let pre = pre::by_name(reader.string("pre")?.unwrap_or("default"))?;
    let mut vocabulary = Vocabulary::with_capacity(names.len());
    let mut bytes = Vec::new();
    for (name, &kind) in names.iter().zip(&kinds) {
        bytes.clear();
        if kind == Kind::Normal && byte_letters(name, &mut bytes) {
            vocabulary.push(name, &bytes, kind);
        } else {
            vocabulary.push(name, name.as_bytes(), kind);
        }
    }
    let merges = reader.strings("merges")?;
    let mut model = BPE::builder()
        .vocab_and_merges(
            (0..).zip(names).map(|(id, name)| (name.clone(), id)).collect::<tokenizers::models::bpe::Vocab>(),
            merges.iter().map(|merge| merge_pair(merge)).collect::<Result<_, _>>()?,
        )
        .ignore_merges(pre.ignore_merges);
    if let Some(id) = reader.token("unknown_token_id", names.len())?.filter(|&id| kinds[id as usize] == Kind::Unknown) {
        model = model.unk_token(names[id as usize].clone());
    }
    let model = model.build().map_err(|error| TokenizerError::Malformed(format!("merges: {error}")))?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(pre.compile()?));
    Ok(Flavour {
        vocabulary,
        engine: Engine::Library(Box::new(Library::new(tokenizer))),
        decoding: Decoding::default(),
        adds_bos: pre.adds_bos,
    })
}

/// `a b` → (a, b). A part may itself hold a space in its middle only if it begins with one, so the cut is at the first
/// space that is not at the start.
fn merge_pair(merge: &str) -> Result<(String, String), TokenizerError> {
    let cut = merge.char_indices().skip(1).find(|&(_, letter)| letter == ' ');
    cut.map(|(at, _)| (merge[..at].to_owned(), merge[at + 1..].to_owned()))
        .ok_or_else(|| TokenizerError::Malformed(format!("merge `{merge}` is not a pair")))
}

/// SentencePiece with scores.
fn spm(reader: &Reader) -> Result<Flavour, TokenizerError> {
    let names = reader.names()?;
    let kinds = reader.kinds(names)?;
    let scores = reader.metadata.numbers("tokenizer.ggml.scores").map_err(TokenizerError::Malformed)?;
    let scores = scores.ok_or_else(|| TokenizerError::Malformed("the file has no `tokenizer.ggml.scores`".into()))?;
    if scores.len() != names.len() {
        return Err(TokenizerError::Malformed(format!("{} scores for {} tokens", scores.len(), names.len())));
    }
    let mut vocabulary = Vocabulary::with_capacity(names.len());
    let mut bytes = Box::new([None; 256]);
    for (id, (name, &kind)) in (0..).zip(names.iter().zip(&kinds)) {
        match (kind, byte_token(name)) {
            (Kind::Byte, Some(byte)) => {
                bytes[byte as usize] = Some(id);
                vocabulary.push(name, &[byte], kind);
            }
            (Kind::Normal, _) => vocabulary.push(name, name.replace(SPACE, " ").as_bytes(), kind),
            _ => vocabulary.push(name, name.as_bytes(), kind),
        }
    }
    let adds_space_prefix = reader.bool("add_space_prefix")?.unwrap_or(true);
    let unknown = reader.token("unknown_token_id", names.len())?;
    Ok(Flavour {
        vocabulary,
        engine: Engine::Spm(Spm { scores: scores.to_vec(), bytes, unknown, adds_space_prefix }),
        decoding: Decoding { strips_first_space: adds_space_prefix, byte_runs: false },
        adds_bos: true,
    })
}

/// The tokens to look for in text.
fn specials(vocabulary: &Vocabulary, strips_after_control: bool) -> Vec<SpecialToken> {
    let special = |id: u32| {
        let control = match vocabulary.kind(id) {
            Kind::Control | Kind::Unknown => true,
            Kind::UserDefined => false,
            Kind::Normal | Kind::Byte | Kind::Unused => return None,
        };
        let mut token = SpecialToken::new(id, vocabulary.name(id)?, control);
        token.rstrip = strips_after_control && control && !["<s>", "<unk>", "<|endoftext|>"].contains(&&*token.text);
        Some(token)
    };
    (0..vocabulary.len() as u32).filter_map(special).collect()
}

/// The value of a byte token's name, `<0x0A>`.
pub(super) fn byte_token(name: &str) -> Option<u8> {
    let digits = name.strip_prefix("<0x")?.strip_suffix('>')?;
    let hexadecimal = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    hexadecimal.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Appends the bytes that a byte-level token's letters stand for; `false` if a letter stands for none.
///
/// GPT-2 wrote printable bytes as themselves and the 68 others as the letters from U+0100 on, in order.
pub(super) fn byte_letters(name: &str, bytes: &mut Vec<u8>) -> bool {
    for letter in name.chars() {
        bytes.push(match letter as u32 {
            code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => code as u8,
            code @ 0x100..=0x120 => (code - 0x100) as u8,
            code @ 0x121..=0x142 => (code - 0x121 + 0x7F) as u8,
            0x143 => 0xAD,
            _ => return false,
        });
    }
    true
}

/// Getters for `tokenizer.ggml.*` with this room's errors.
struct Reader<'a> {
    metadata: &'a Metadata,
}

impl<'a> Reader<'a> {
    fn string(&self, key: &str) -> Result<Option<&'a str>, TokenizerError> {
        self.metadata.string(&format!("tokenizer.ggml.{key}")).map_err(TokenizerError::Malformed)
    }

    fn bool(&self, key: &str) -> Result<Option<bool>, TokenizerError> {
        self.metadata.bool(&format!("tokenizer.ggml.{key}")).map_err(TokenizerError::Malformed)
    }

    fn strings(&self, key: &str) -> Result<&'a [String], TokenizerError> {
        let key = format!("tokenizer.ggml.{key}");
        let found = self.metadata.strings(&key).map_err(TokenizerError::Malformed)?;
        found.ok_or_else(|| TokenizerError::Malformed(format!("the file has no `{key}`")))
    }

    fn names(&self) -> Result<&'a [String], TokenizerError> {
        let names = self.strings("tokens")?;
        if names.is_empty() || names.len() >= u32::MAX as usize {
            return Err(TokenizerError::Malformed(format!("a vocabulary of {} tokens", names.len())));
        }
        Ok(names)
    }

    /// A token id that must be in the vocabulary.
    fn token(&self, key: &str, vocabulary_len: usize) -> Result<Option<u32>, TokenizerError> {
        let key = format!("tokenizer.ggml.{key}");
        match self.metadata.integer(&key).map_err(TokenizerError::Malformed)? {
            None => Ok(None),
            Some(id) if id < vocabulary_len as u64 => Ok(Some(id as u32)),
            // Files that lack such a token say so with -1.
            Some(id) if id == u32::MAX as u64 => Ok(None),
            Some(id) => Err(TokenizerError::Malformed(format!("`{key}` is {id}, there are {vocabulary_len} tokens"))),
        }
    }

    fn kinds(&self, names: &[String]) -> Result<Vec<Kind>, TokenizerError> {
        let found = self.metadata.integers("tokenizer.ggml.token_type").map_err(TokenizerError::Malformed)?;
        let Some(types) = found else { return Ok(vec![Kind::Normal; names.len()]) };
        if types.len() != names.len() {
            return Err(TokenizerError::Malformed(format!("{} token types for {} tokens", types.len(), names.len())));
        }
        let kind = |number: i64| match number {
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => Kind::Normal,
        };
        Ok(types.into_iter().map(kind).collect())
    }

    /// Phi-3 was trained with control tokens that swallow the white space after them; the file has no key for it.
    fn strips_after_control(&self) -> Result<bool, TokenizerError> {
        let architecture = self.metadata.string("general.architecture").map_err(TokenizerError::Malformed)?;
        Ok(architecture == Some("phi3") && self.string("model")? == Some("llama"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_letters_cover_every_byte_once() {
        let mut seen = [0; 256];
        for code in 0..0x200 {
            let letter = char::from_u32(code).unwrap().to_string();
            let mut bytes = Vec::new();
            if byte_letters(&letter, &mut bytes) {
                seen[bytes[0] as usize] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        let mut bytes = Vec::new();
        assert!(byte_letters("ĠhÃ©Ċ", &mut bytes));
        assert_eq!(bytes, " hé\n".as_bytes());
        assert!(!byte_letters("a b", &mut Vec::new()));
    }

    #[test]
    fn names_of_bytes() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0xfF>"), Some(255));
        for other in ["<0x0A", "<0x>", "<0x00A>", "0x0A", "<0x+1>"] {
            assert_eq!(byte_token(other), None, "{other}");
        }
    }

    #[test]
    fn merges_are_cut_between_their_parts() {
        assert_eq!(merge_pair("a bc").unwrap(), ("a".into(), "bc".into()));
        assert_eq!(merge_pair("  a").unwrap(), (" ".into(), "a".into()));
        assert!(merge_pair("abc").is_err());
        assert!(merge_pair("").is_err());
    }
}
