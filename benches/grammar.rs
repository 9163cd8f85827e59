//! Compiling grammars, and the masks along an answer, on one thread, for the committed tokenizers and, where
//! `OCTAVO_TEST_MODELS` names a folder with model files, for theirs.

#[allow(dead_code)]
#[path = "../tests/text/fixtures.rs"]
mod fixtures;
mod support;

use std::hint::black_box;
use std::time::{Duration, Instant};

use octavo::grammar::{Grammars, Next};
use octavo::request::Constraint;
use octavo::stages::tokenize::Special;
use support::Bench;

const SCHEMA: &str = r#"{
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 80},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"enum": ["fast", "small", "right"]}},
        "author": {"type": "object", "properties": {"name": {"type": "string"}, "email": {"type": "string", "format": "email"}}}
    },
    "required": ["title", "year", "tags", "author"],
    "additionalProperties": false
}"#;
const ANSWER: &str = r#"{"title": "A short account of where the time went", "year": 2024, "tags": ["fast", "right", "small"],
 "author": {"name": "Somebody Who Counts", "email": "somebody@example.org"}}"#;

fn main() {
    let bench = Bench::start("grammar", Some(1));
    for (name, tokenizer) in fixtures::tokenizers() {
        let ends: std::sync::Arc<[u32]> = tokenizer.end_ids().into();
        let fresh = || Grammars::new(tokenizer.clone(), tokenizer.len(), ends.clone());
        let schema = Constraint::JsonSchema(SCHEMA.into());
        let (grammars, begun) = (fresh(), Instant::now());
        grammars.compile(&Constraint::Regex("a".into())).expect("a grammar");
        let vocabulary = begun.elapsed();
        let begun = Instant::now();
        let grammar = grammars.compile(&schema).expect("a grammar");
        let compiled = begun.elapsed();
        let ids = tokenizer.encode(ANSWER, Special::AsText, false).expect("text").ids;
        let mut masks = Vec::new();
        for _ in 0..bench.size(20, 2) {
            let guide = grammars.guide(&grammar, ends.clone()).expect("a guide");
            for &id in &ids {
                let Next::Tokens(mask) = guide.next() else { break };
                if !mask.allows(id) {
                    break; // a tokenizer that puts a space first
                }
                let begun = Instant::now();
                guide.advance(id);
                black_box(guide.next());
                masks.push(begun.elapsed());
            }
        }
        masks.sort();
        let at = |part: f64| masks.get((masks.len() as f64 * part) as usize).copied().unwrap_or(Duration::ZERO);
        println!(
            "{name:30} {:6} tokens: vocabulary {vocabulary:.1?}, a schema {compiled:.1?}, a mask {:.1?}, 1 of 100 {:.1?}",
            tokenizer.len(),
            at(0.5),
            at(0.99)
        );
    }
}
