//! Text → token ids and back, on one thread, for the committed tokenizers and, where `OCTAVO_TEST_MODELS` names a folder
//! with model files, for theirs. Floor: the text is read once.

#[allow(dead_code)]
#[path = "../tests/text/fixtures.rs"]
mod fixtures;
mod support;

use octavo::stages::stream::{StreamParams, TextStream};
use octavo::stages::tokenize::Special;
use support::{Bench, Work};

/// Prose, code, numbers, other scripts, emoji.
const PARAGRAPH: &str = "The quick brown fox doesn't jump over 1,234 lazy dogs; it's 3.14159 times too tired.\n\
    fn main() { let total: u64 = (1..=100).filter(|n| n % 3 == 0).sum(); println!(\"{total}\"); }\n\
    Съешь же ещё этих мягких французских булок. 我能吞下玻璃而不伤身体。 नमस्ते दुनिया 👩‍🚀🚀\n\n";

fn main() {
    let bench = Bench::start("tokenize", Some(1));
    let long = PARAGRAPH.repeat(bench.size(256, 2));
    for (name, tokenizer) in fixtures::tokenizers() {
        for (size, text) in [("a paragraph", PARAGRAPH), ("long", &long)] {
            let encode = || tokenizer.encode(text, Special::AsText, false).expect("any text can be encoded");
            let ids = encode().ids;
            // A tokenizer without byte tokens cannot say everything; what it can say comes back.
            let back = tokenizer.decode(&ids, true);
            let again = tokenizer.encode(&back, Special::AsText, false).expect("any text can be encoded").ids;
            assert_eq!(tokenizer.decode(&again, true), back, "{name}");

            let (shape, work) = (format!("{size}: {} bytes, {} ids", text.len(), ids.len()), Work::cache(text.len()));
            bench.line(&format!("encode {name}"), &shape, work, encode);
            bench.line(&format!("decode {name}"), &shape, work, || tokenizer.decode(&ids, true));
            let params = StreamParams { stop: vec!["\n\nUser:".into(), "</answer>".into()], ..StreamParams::default() };
            let stream = || {
                let mut stream = TextStream::new(tokenizer.clone(), params.clone());
                let mut text = String::new();
                ids.iter().for_each(|&id| _ = stream.push(id, true, &mut text));
                stream.finish(true, &mut text);
                text
            };
            assert_eq!(stream(), tokenizer.decode(&ids, params.skip_special), "{name}: streamed");
            bench.line(&format!("stream {name}"), &shape, work, stream);
        }
    }
}
