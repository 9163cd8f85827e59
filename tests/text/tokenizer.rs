//! Tokenizers against llama.cpp's (GGUF) and Hugging Face's (folders).

use std::path::Path;
use std::time::Instant;

use octavo::stages::tokenize::{Special, Tokenizer};
use serde_json::Value;

use crate::fixtures::{self, ids, text};

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
                assert!(source.is_char_boundary(range.start) || range.start <= range.end, "{name} {source:?} {range:?}");
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

#[test]
fn gguf_files_tokenize_as_llama_cpp_does() {
    let mut failures = Vec::new();
    let Some(oracle) = fixtures::oracle() else { return println!("skipped: no reference fixtures") };
    let expected = |name: &str| fixtures::json(&oracle.join(format!("tokenizer/gguf/{name}.json")));
    for name in ["deepseek-coder", "llama-spm"] {
        let path = oracle.join(format!("tokenizer/gguf/vocab/ggml-vocab-{name}.gguf"));
        check(&fixtures::gguf(&path), &expected(name), &mut failures);
    }
    for (name, file) in [("smollm2-135m", "smollm2.gguf"), ("qwen2.5", "qwen.gguf"), ("gemma3-270m", "gemma.gguf")] {
        let Some(path) = fixtures::model(file) else {
            println!("skipped {name}: no OCTAVO_TEST_MODELS/{file}");
            continue;
        };
        let bytes = std::fs::read(&path).unwrap();
        let gguf = octavo::load::gguf::Gguf::parse(&bytes).unwrap();
        let start = Instant::now();
        let tokenizer = Tokenizer::from_gguf(&gguf.metadata).unwrap();
        println!("{name}: {} tokens in {:?}", tokenizer.len(), start.elapsed());
        check(&tokenizer, &expected(name), &mut failures);
    }
    report(failures);
}
