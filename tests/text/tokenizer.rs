//! Tokenizers against llama.cpp's (GGUF) and Hugging Face's (folders).

use std::path::Path;
use std::time::Instant;

use octavo::stages::tokenize::{Special, Tokenizer};
use serde_json::Value;

use crate::fixtures::{self, Random, ids, text};

/// Compares all cases; what differs is collected, so that one run shows everything.
fn check(tokenizer: &Tokenizer, expected: &Value, failures: &mut Vec<String>) {
    let name = text(&expected["tokenizer"]);
    for case in expected["cases"].as_array().unwrap() {
        for (key, special, add_special, other) in [
            ("ids", Special::AsText, false, "original_definition_ids_plain"),
            ("ids_parsed", Special::Parse, false, "original_definition_ids"),
            ("ids_full", Special::Parse, true, "original_definition_ids"),
        ] {
            let source = text(&case["text"]);
            let encoding = tokenizer.encode(source, special, add_special).unwrap();
            let want = ids(&case[key]);
            // Where llama.cpp and the family's own definition differ, both are right.
            let lead = want.len() - ids(&case["ids_parsed"]).len().min(want.len());
            let accepted = case.get(other).map(|other| {
                let lead = if add_special { &want[..lead] } else { &[] };
                [lead, &ids(other)].concat()
            });
            if encoding.ids != want && Some(&encoding.ids) != accepted.as_ref() {
                failures.push(format!("{name} {} {source:?} {key}: {:?}, expected {want:?}", case["i"], encoding.ids));
            } else if encoding.ids != want {
                println!("disputed: {name} {} {source:?} {key}", case["i"]);
            }
            assert_eq!(encoding.offsets.len(), encoding.ids.len());
            for range in &encoding.offsets {
                assert!(
                    source.is_char_boundary(range.start) || range.start <= range.end,
                    "{name} {source:?} {range:?}"
                );
                assert!(range.end <= source.len(), "{name} {source:?} {range:?}");
            }
        }
        let decoded_from = if expected.get("folder").is_some() { "ids_parsed" } else { "ids" };
        let decoded = tokenizer.decode(&ids(&case[decoded_from]), false);
        if decoded != text(&case["decoded"]) {
            failures.push(format!("{name} {}: decoded {decoded:?}, expected {}", case["i"], case["decoded"]));
        }
        if let Some(want) = case["decoded_skip_special"].as_str() {
            let decoded = tokenizer.decode(&ids(&case["ids_full"]), true);
            if decoded != want {
                failures.push(format!("{name} {}: decoded without special {decoded:?}, expected {want:?}", case["i"]));
            }
        }
    }
    for case in expected["decode"].as_array().unwrap() {
        let ids = ids(&case["ids"]);
        let (got, want) = match case["bytes_hex"].as_str() {
            Some(want) => (hex(&tokenizer.decode_bytes(&ids)), want),
            None => (tokenizer.decode(&ids, false), text(&case["decoded"])),
        };
        if got != want {
            failures.push(format!("{name} decode {ids:?}: {got:?}, expected {want:?}"));
        }
        if let Some(want) = case["decoded_skip_special"].as_str() {
            let got = tokenizer.decode(&ids, true);
            if got != want {
                failures.push(format!("{name} decode without special {ids:?}: {got:?}, expected {want:?}"));
            }
        }
        for (id, want) in ids.iter().zip(case["pieces_hex"].as_array().into_iter().flatten()) {
            let got = hex(tokenizer.piece(*id).unwrap());
            if got != text(want) {
                failures.push(format!("{name} piece {id} {:?}: {got}, expected {want}", tokenizer.token(*id)));
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn report(failures: Vec<String>) {
    let shown: Vec<_> = failures.iter().take(40).cloned().collect();
    assert!(failures.is_empty(), "{} differences\n{}", failures.len(), shown.join("\n"));
}

fn check_folders(root: &Path, failures: &mut Vec<String>) {
    for path in fixtures::listed(&root.join("tiny")).iter().filter(|path| path.is_dir()) {
        check(&fixtures::folder(path), &fixtures::json(&path.with_extension("json")), failures);
    }
}

#[test]
fn folders_tokenize_as_hugging_face_does() {
    let mut failures = Vec::new();
    check_folders(&fixtures::committed(), &mut failures);
    if let Some(oracle) = fixtures::oracle() {
        check_folders(&oracle.join("tokenizer"), &mut failures);
    }
    report(failures);
}

/// The vocabulary-only files.
fn check_vocabularies(root: &Path, failures: &mut Vec<String>) {
    for name in ["deepseek-coder", "llama-spm"] {
        let tokenizer = fixtures::gguf(&root.join(format!("gguf/vocab/ggml-vocab-{name}.gguf")));
        check(&tokenizer, &fixtures::json(&root.join(format!("gguf/{name}.json"))), failures);
    }
}

#[test]
fn gguf_files_tokenize_as_llama_cpp_does() {
    let mut failures = Vec::new();
    check_vocabularies(&fixtures::committed(), &mut failures);
    if let Some(oracle) = fixtures::oracle() {
        check_vocabularies(&oracle.join("tokenizer"), &mut failures);
        for (name, file) in fixtures::MODELS {
            let Some(path) = fixtures::model(file) else {
                println!("skipped {name}: no $OCTAVO_TEST_MODELS/{file}");
                continue;
            };
            let gguf = octavo::load::gguf::Gguf::parse(&std::fs::read(&path).unwrap()).unwrap();
            let start = Instant::now();
            let tokenizer = Tokenizer::from_gguf(&gguf.metadata).unwrap();
            println!("{name}: {} tokens in {:?}", tokenizer.len(), start.elapsed());
            check(&tokenizer, &fixtures::json(&oracle.join(format!("tokenizer/gguf/{name}.json"))), &mut failures);
        }
    }
    report(failures);
}

/// Whether a token's piece is what stands in its range: the very bytes, or these after a space that was put before them.
fn spells(piece: &[u8], found: &[u8]) -> bool {
    piece == found || piece.strip_prefix(b" ") == Some(found)
}

#[test]
fn offsets_say_where_tokens_come_from() {
    let mut texts = fixtures::strings();
    for seed in 0..200 {
        let mut random = Random(seed);
        const LETTERS: [&str; 14] =
            ["a", " ", "  ", "\n", "é", "e\u{301}", "ﬁ", "🙂", "👩\u{200d}👩", "中", "\0", "<s>", "ab", "\u{fffd}"];
        texts.push((0..random.below(30)).map(|_| *random.pick(&LETTERS)).collect());
    }
    for (name, tokenizer) in fixtures::tokenizers() {
        let (mut tokens, mut exact) = (0, 0);
        for text in &texts {
            for special in [Special::AsText, Special::Parse] {
                let encoding = tokenizer.encode(text, special, true).unwrap();
                assert_eq!(encoding.ids.len(), encoding.offsets.len(), "{name}: {text:?}");
                let chars = encoding.char_offsets(text);
                let mut covered = vec![false; text.len()];
                for ((&id, range), chars) in encoding.ids.iter().zip(&encoding.offsets).zip(&chars) {
                    let context = format!("{name}: {text:?}: token {id} {:?} {range:?}", tokenizer.token(id));
                    assert!(range.start <= range.end && range.end <= text.len(), "{context}");
                    covered[range.clone()].fill(true);
                    let whole = text.floor_char_boundary(range.start)..text.ceil_char_boundary(range.end);
                    let count = |end: usize| text[..end].chars().count();
                    assert_eq!(*chars, count(whole.start)..count(whole.end), "{context}");
                    if !range.is_empty() && !tokenizer.is_special(id) {
                        tokens += 1;
                        exact += usize::from(spells(tokenizer.piece(id).unwrap(), &text.as_bytes()[range.clone()]));
                    }
                }
                assert!(covered.iter().all(|&byte| byte), "{name}: {text:?}: not every byte has a token: {encoding:?}");
            }
        }
        // The rest is what normalisers change: composed letters, mostly.
        assert!(exact * 100 > tokens * 95, "{name}: only {exact} of {tokens} tokens have exactly their bytes");
        println!("{name}: {exact} of {tokens} tokens have exactly their bytes");
    }
}

#[test]
fn tokens_of_one_character_share_it() {
    let text = "a🙂";
    let mut shared = 0;
    for (name, tokenizer) in fixtures::tokenizers() {
        let encoding = tokenizer.encode(text, Special::AsText, false).unwrap();
        let inside: Vec<_> = encoding.offsets.iter().filter(|range| range.start >= 1 && !range.is_empty()).collect();
        if inside.len() > 1 {
            shared += 1;
            assert!(inside.windows(2).all(|pair| pair[0].end == pair[1].start), "{name}: {inside:?}");
            let chars = encoding.char_offsets(text);
            assert!(chars[chars.len() - inside.len()..].iter().all(|chars| *chars == (1..2)), "{name}: {chars:?}");
        }
    }
    assert!(shared > 2, "no tokenizer splits the character");
}

#[test]
fn text_never_becomes_a_control_token() {
    for (name, tokenizer) in fixtures::tokenizers() {
        let control: Vec<u32> = (0..tokenizer.len() as u32).filter(|&id| tokenizer.is_special(id)).collect();
        assert!(!control.is_empty(), "{name}");
        for &id in control.iter().take(50) {
            let look_alike = tokenizer.token(id).unwrap();
            for text in [look_alike.to_owned(), format!("a {look_alike}{look_alike}\n"), format!("<{look_alike}>")] {
                let encoding = tokenizer.encode(&text, Special::AsText, false).unwrap();
                assert!(!encoding.ids.contains(&id), "{name}: {text:?} gives {:?}", encoding.ids);
            }
            assert!(
                tokenizer.encode(look_alike, Special::Parse, false).unwrap().ids.contains(&id),
                "{name}: {look_alike}"
            );
        }
    }
}

#[test]
fn broken_metadata_is_answered_not_followed() {
    use octavo::load::metadata::{Metadata, Value as Gguf};
    let strings = |texts: &[&str]| Gguf::StringArray(texts.iter().map(|text| text.to_string()).collect());
    let base = |model: &str| -> Vec<(&str, Gguf)> {
        vec![
            ("model", Gguf::String(model.into())),
            ("tokens", strings(&["a", "b", "ab"])),
            ("merges", strings(&["a b"])),
            ("scores", Gguf::FloatArray(vec![0.0, 0.0, 1.0])),
        ]
    };
    let read = |pairs: Vec<(&str, Gguf)>| {
        let named = pairs.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value));
        Tokenizer::from_gguf(&Metadata(named.collect())).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(read(base("gpt2")), Ok(()));
    assert_eq!(read(base("llama")), Ok(()));
    for (model, key, value, wanted) in [
        ("bert", "eos_token_id", Gguf::Unsigned(0), "supported: gpt2"),
        ("gpt2", "pre", Gguf::String("klingon".into()), "klingon"),
        ("gpt2", "bos_token_id", Gguf::Unsigned(3), "bos_token_id"),
        ("gpt2", "token_type", Gguf::SignedArray(vec![1]), "token types"),
        ("gpt2", "merges", strings(&["a c"]), "merges"),
        ("gpt2", "merges", strings(&["ab"]), "not a pair"),
        ("gpt2", "tokens", strings(&[]), "0 tokens"),
        ("gpt2", "tokens", Gguf::Bool(true), "tokens"),
        ("llama", "scores", Gguf::FloatArray(vec![1.0]), "scores"),
    ] {
        let mut pairs = base(model);
        pairs.retain(|(name, _)| *name != key);
        pairs.push((key, value));
        let error = read(pairs).unwrap_err();
        assert!(error.contains(wanted), "{key}: {error}");
    }
    assert!(Tokenizer::from_gguf(&Metadata::default()).is_err());
}

/// Long and monotonous texts are where clever code turns quadratic or gives up.
#[test]
fn long_texts_go_there_and_back() {
    for (name, tokenizer) in fixtures::tokenizers() {
        for part in ["a", " ", "\n", "\n ", "🙂", "ab ", "1", "-", "</s>", "I'll be 42, 中文\r\n"] {
            let text = part.repeat(50_000 / part.len());
            let start = Instant::now();
            let ids = tokenizer.encode(&text, Special::AsText, false).unwrap().ids;
            assert!(tokenizer.decode(&ids, false) == text, "{name}: {part:?} repeated does not come back");
            let elapsed = start.elapsed();
            assert!(elapsed.as_secs() < 10, "{name}: {part:?} repeated took {elapsed:?}");
        }
    }
}

#[test]
fn turns_end_where_the_family_ends_them() {
    let names = |tokenizer: &Tokenizer| -> Vec<String> {
        tokenizer.end_ids().iter().map(|&id| tokenizer.token(id).unwrap().to_owned()).collect()
    };
    let root = fixtures::committed();
    assert_eq!(names(&fixtures::folder(&root.join("tiny/bpeq"))), ["<|im_end|>"]);
    assert_eq!(names(&fixtures::gguf(&root.join("gguf/vocab/ggml-vocab-llama-spm.gguf"))), ["</s>"]);
    let coder = fixtures::gguf(&root.join("gguf/vocab/ggml-vocab-deepseek-coder.gguf"));
    assert_eq!(names(&coder), ["<｜end▁of▁sentence｜>", "<|EOT|>"]);
}
