//! A tokenizer from a Hugging Face folder: `tokenizer.json`, and what `tokenizer_config.json` and
//! `special_tokens_map.json` say about the beginning and the end of a text.

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::tokenizer::{Encoding, PostProcessor, Token};

use super::gguf::{byte_letters, byte_token};
use super::library::Library;
use super::special::{SpecialToken, SpecialTokens};
use super::spm::SPACE;
use super::tokenizer::{Decoding, Engine, Tokenizer, TokenizerError};
use super::vocabulary::{Kind, Vocabulary};

pub(super) fn read(tokenizer: &[u8], beside: [Value; 2]) -> Result<Tokenizer, TokenizerError> {
    let library = tokenizers::Tokenizer::from_bytes(tokenizer)
        .map_err(|error| TokenizerError::Malformed(format!("tokenizer.json: {error}")))?;
    build(library, &Config { files: beside })
}

fn build(library: tokenizers::Tokenizer, config: &Config) -> Result<Tokenizer, TokenizerError> {
    let decoder = serde_json::to_value(library.get_decoder())
        .map_err(|error| TokenizerError::Malformed(format!("decoder: {error}")))?;
    let spelling = Spelling::of(&decoder)?;
    let unknown = match library.get_model() {
        ModelWrapper::BPE(model) => model.get_unk_token().clone(),
        _ => config.token("unk_token"),
    };
    let vocabulary = vocabulary(&library, &spelling, unknown.as_deref())?;
    let id_of = |name: Option<String>| vocabulary.id_of(name?.as_bytes());
    let (bos, eos) = (id_of(config.token("bos_token")), id_of(config.token("eos_token")));
    let (mut prefix, mut suffix) = around(&library)?;
    adjust(&mut prefix, bos, config.flag("add_bos_token"));
    adjust(&mut suffix, eos, config.flag("add_eos_token"));
    Ok(Tokenizer {
        specials: SpecialTokens::new(specials(&library)),
        engine: Engine::Library(Box::new(Library::new(library))),
        decoding: spelling.decoding,
        vocabulary,
        end_ids: eos.into_iter().collect(),
        bos,
        eos,
        prefix,
        suffix,
    })
}

fn vocabulary(
    library: &tokenizers::Tokenizer,
    spelling: &Spelling,
    unknown: Option<&str>,
) -> Result<Vocabulary, TokenizerError> {
    let mut tokens: Vec<(u32, String)> = library.get_vocab(true).into_iter().map(|(name, id)| (id, name)).collect();
    tokens.sort_unstable();
    let len = tokens.last().map_or(0, |(id, _)| *id as usize + 1);
    // Holes cost a few bytes each, so a file must not be able to ask for billions of them.
    if tokens.is_empty() || len > 4 * tokens.len() + 65_536 {
        return Err(TokenizerError::Malformed(format!("{} tokens with ids below {len}", tokens.len())));
    }
    let added = library.get_added_tokens_decoder();
    let mut vocabulary = Vocabulary::with_capacity(len);
    for (id, name) in &tokens {
        while vocabulary.len() < *id as usize {
            vocabulary.push("", b"", Kind::Unused);
        }
        if vocabulary.len() > *id as usize {
            return Err(TokenizerError::Malformed(format!("two tokens have the id {id}")));
        }
        let kind = match added.get(id) {
            _ if Some(name.as_str()) == unknown => Kind::Unknown,
            Some(token) if token.special => Kind::Control,
            Some(_) => Kind::UserDefined,
            None if spelling.decoding.byte_runs && byte_token(name).is_some() => Kind::Byte,
            None => Kind::Normal,
        };
        vocabulary.push(name, &spelling.bytes(name), kind);
    }
    Ok(vocabulary)
}

fn specials(library: &tokenizers::Tokenizer) -> Vec<SpecialToken> {
    let added = library.get_added_tokens_decoder();
    let special = |(id, token): (&u32, &tokenizers::AddedToken)| SpecialToken {
        id: *id,
        text: token.content.clone(),
        control: token.special,
        lstrip: token.lstrip,
        rstrip: token.rstrip,
        single_word: token.single_word,
    };
    added.iter().map(special).collect()
}

/// What the post-processor puts before and after a text.
fn around(library: &tokenizers::Tokenizer) -> Result<(Vec<u32>, Vec<u32>), TokenizerError> {
    let Some(processor) = library.get_post_processor() else { return Ok(Default::default()) };
    const TEXT: u32 = u32::MAX;
    let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
    let encoding = processor
        .process(text, None, true)
        .map_err(|error| TokenizerError::Malformed(format!("post-processor: {error}")))?;
    let mut parts = encoding.get_ids().split(|&id| id == TEXT).map(<[u32]>::to_vec);
    Ok((parts.next().unwrap_or_default(), parts.next().unwrap_or_default()))
}

/// The configuration has the last word on whether a token is added.
fn adjust(added: &mut Vec<u32>, token: Option<u32>, wanted: Option<bool>) {
    let Some(token) = token else { return };
    match wanted {
        Some(true) if !added.contains(&token) => added.push(token),
        Some(false) => added.retain(|&id| id != token),
        _ => {}
    }
}

/// How token names spell bytes: what the file's decoder undoes.
#[derive(Debug, Default)]
struct Spelling {
    byte_level: bool,
    /// Replacements, in order.
    replace: Vec<(String, String)>,
    decoding: Decoding,
}

impl Spelling {
    fn of(decoder: &Value) -> Result<Self, TokenizerError> {
        let mut spelling = Self::default();
        spelling.add(decoder)?;
        Ok(spelling)
    }

    fn add(&mut self, decoder: &Value) -> Result<(), TokenizerError> {
        match decoder["type"].as_str() {
            Some("Sequence") => {
                decoder["decoders"].as_array().into_iter().flatten().try_for_each(|step| self.add(step))?;
            }
            Some("ByteLevel") => self.byte_level = true,
            Some("ByteFallback") => self.decoding.byte_runs = true,
            Some("Fuse") => {}
            Some("Replace") if decoder["pattern"]["String"].is_string() => {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                self.replace.push((text(&decoder["pattern"]["String"]), text(&decoder["content"])));
            }
            Some("Strip") if decoder["content"] == " " && decoder["stop"] == 0 => {
                self.decoding.strips_first_space = decoder["start"] != 0;
            }
            Some("Metaspace") => {
                let space = decoder["replacement"].as_str().unwrap_or(SPACE);
                self.replace.push((space.to_owned(), " ".to_owned()));
                self.decoding.strips_first_space = decoder["prepend_scheme"] != "never";
            }
            other => {
                return Err(TokenizerError::Unsupported {
                    what: "decoder",
                    found: other.unwrap_or("none").to_owned(),
                    supported: "ByteLevel, ByteFallback, Fuse, Metaspace, Replace and Strip of spaces".to_owned(),
                });
            }
        }
        Ok(())
    }

    /// The bytes of the token `name`.
    fn bytes(&self, name: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self.byte_level && byte_letters(name, &mut bytes) {
            return bytes;
        }
        if let Some(byte) = byte_token(name).filter(|_| self.decoding.byte_runs) {
            return vec![byte];
        }
        let replaced = self.replace.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to));
        replaced.into_bytes()
    }
}

/// The small files beside `tokenizer.json`, the more telling one first.
struct Config {
    files: [Value; 2],
}

impl Config {
    /// The name of a token, written as a string or as `{"content": …}`.
    fn token(&self, key: &str) -> Option<String> {
        let name = |file: &Value| file[key].as_str().or(file[key]["content"].as_str()).map(str::to_owned);
        self.files.iter().find_map(name)
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.files.iter().find_map(|file| file[key].as_bool())
    }
}
