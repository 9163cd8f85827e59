//! Grammars without a model: whatever is drawn from the masks, the text that a reader sees fits.

#[allow(dead_code)]
#[path = "../text/fixtures.rs"]
mod fixtures;

use std::sync::Arc;
use std::time::{Duration, Instant};

use octavo::grammar::{Grammars, Guide, Next};
use octavo::request::{Constraint, SamplingParams};
use octavo::sample::TokenMask;
use octavo::stages::stream::{StreamParams, TextStream};
use octavo::stages::tokenize::Tokenizer;
use serde_json::{Value, json};

/// splitmix64.
struct Coins(u64);

impl Coins {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// All tokenizers, each with grammars for a model that has a few more logits than the tokenizer has tokens.
fn worlds() -> Vec<(String, Arc<Tokenizer>, Vec<u32>, Grammars)> {
    let world = |(name, tokenizer): (String, Arc<Tokenizer>)| {
        let ends = match tokenizer.end_ids() {
            [] => vec![tokenizer.len() as u32 - 1],
            ends => ends.to_vec(),
        };
        let grammars = Grammars::new(tokenizer.clone(), tokenizer.len() + 17, ends.clone().into());
        (name, tokenizer, ends, grammars)
    };
    fixtures::tokenizers().into_iter().map(world).collect()
}

fn members(mask: &TokenMask, vocab: usize) -> Vec<u32> {
    (0..vocab as u32 + 100).filter(|&id| mask.allows(id)).collect()
}

/// How a walk ended.
#[derive(Debug, PartialEq)]
enum End {
    /// An end token was drawn.
    Token,
    /// Nothing could follow.
    Complete,
    /// It was long enough.
    Cut,
}

/// Draws at random from what is allowed, ending readily once it is long.
fn walk(guide: &Arc<Guide>, tokenizer: &Tokenizer, ends: &[u32], coins: &mut Coins) -> (Vec<u32>, End) {
    let mut ids = Vec::new();
    for step in 0..300 {
        let mask = match guide.next() {
            Next::Tokens(mask) => mask,
            Next::Complete => return (ids, End::Complete),
            Next::Failed(why) => panic!("after {ids:?}: {why}"),
        };
        let allowed = members(&mask, tokenizer.len());
        assert!(!allowed.is_empty(), "a mask allows something");
        let may_end = allowed.iter().any(|id| ends.contains(id));
        if may_end && (step > 60 || coins.below(4) == 0) {
            return (ids, End::Token);
        }
        let text: Vec<u32> = allowed.into_iter().filter(|id| !ends.contains(id)).collect();
        assert!(!text.is_empty(), "where nothing but the end can follow, it is complete");
        for &id in &text {
            assert!((id as usize) < tokenizer.len() && !tokenizer.is_special(id), "token {id} is no text");
        }
        let id = text[coins.below(text.len())];
        ids.push(id);
        guide.advance(id);
    }
    (ids, End::Cut)
}

fn seen(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> String {
    let mut stream = TextStream::new(tokenizer.clone(), StreamParams { skip_special: true, ..Default::default() });
    let mut text = String::new();
    ids.iter().for_each(|&id| _ = stream.push(id, true, &mut text));
    stream.finish(true, &mut text);
    assert_eq!(text, tokenizer.decode(ids, true));
    text
}

type Fits = fn(&str) -> bool;

fn all(text: &str, of: &str) -> bool {
    text.chars().all(|c| of.contains(c))
}

fn is_code(text: &str) -> bool {
    let Some((letters, digits)) = text.split_once('-') else { return false };
    (2..=5).contains(&letters.len())
        && letters.bytes().all(|b| b.is_ascii_lowercase())
        && (1..=3).contains(&digits.len())
        && digits.bytes().all(|b| b.is_ascii_digit())
}

fn is_padded(text: &str) -> bool {
    text.starts_with(' ') && text.ends_with(' ') && (4..=6).contains(&text.len()) && all(text.trim(), "ab")
}

fn is_person(text: &str) -> bool {
    let Ok(Value::Object(person)) = serde_json::from_str(text) else { return false };
    // -0 is a whole number too.
    let whole = |age: f64| age.fract() == 0.0 && (-3.0..=120.0).contains(&age);
    let age = person.get("age").and_then(Value::as_f64).is_some_and(whole);
    let kind = matches!(person.get("kind").and_then(Value::as_str), Some("a \"quoted\" one" | "é"));
    let tags = person.get("tags").is_none_or(|tags| tags.as_array().is_some_and(|tags| tags.len() <= 2));
    age && kind && tags && person.len() <= 3
}

fn is_json(text: &str) -> bool {
    // JSON has no largest number, its reader has.
    serde_json::from_str::<Value>(text).map_or_else(|why| why.to_string().contains("number out of range"), |_| true)
}

/// Whether a text is a sum of numbers in parentheses.
fn is_sum(text: &str) -> bool {
    fn term(text: &[u8]) -> Option<&[u8]> {
        if let Some(rest) = text.strip_prefix(b"(") {
            return sum(rest)?.strip_prefix(b")");
        }
        let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
        (1..=2).contains(&digits).then(|| &text[digits..])
    }
    fn sum(text: &[u8]) -> Option<&[u8]> {
        let mut rest = term(text)?;
        while let Some(after) = rest.strip_prefix(b"+") {
            rest = term(after)?;
        }
        Some(rest)
    }
    sum(text.as_bytes()).is_some_and(<[u8]>::is_empty)
}

const CHOICES: [&str; 6] = ["yes", "yes please", " no", "a\"\\\n/\u{7f}\0", "文字🙂", "<|im_end|>"];

fn cases() -> Vec<(Constraint, Fits)> {
    let person = json!({
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": -3, "maximum": 120},
            "kind": {"enum": ["a \"quoted\" one", "é"]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["age", "kind"],
        "additionalProperties": false,
    });
    let sum = "start: term (\"+\" term)*\nterm: NUMBER | \"(\" start \")\"\nNUMBER: /[0-9]{1,2}/\n";
    vec![
        (Constraint::Choice(CHOICES.map(String::from).to_vec()), |text| CHOICES.contains(&text)),
        (Constraint::Regex("[a-z]{2,5}-[0-9]{1,3}".into()), is_code),
        (Constraint::Regex(" [ab]{2,4} ".into()), is_padded),
        (Constraint::Regex("a*".into()), |text| all(text, "a")),
        (Constraint::Regex("[é🙂文]{1,4}".into()), |text| {
            all(text, "é🙂文") && (1..=4).contains(&text.chars().count())
        }),
        (Constraint::JsonSchema(person.to_string()), is_person),
        (Constraint::JsonSchema("{}".into()), is_json),
        (Constraint::Lark(sum.into()), is_sum),
    ]
}

#[test]
fn what_is_seen_fits() {
    for (name, tokenizer, ends, grammars) in worlds() {
        let mut finished = 0;
        for (number, (constraint, fits)) in cases().into_iter().enumerate() {
            let grammar = match grammars.compile(&constraint) {
                Ok(grammar) => grammar,
                // A vocabulary without byte tokens has not every character.
                Err(why) => {
                    assert!(why.contains("no text of this model's tokens"), "{name}: {why}");
                    continue;
                }
            };
            for seed in 0..25 {
                let mut coins = Coins((number * 1000 + seed) as u64);
                // Now and then nothing is to end it but the grammar.
                let ends = if seed % 5 == 4 { &[][..] } else { &ends };
                let guide = grammars.guide(&grammar, ends.into()).expect("a guide");
                let (ids, end) = walk(&guide, &tokenizer, ends, &mut coins);
                let text = seen(&tokenizer, &ids);
                assert!(end == End::Cut || fits(&text), "{name}, {constraint:?}, seed {seed}: {text:?} {end:?}");
                finished += usize::from(end != End::Cut);
            }
        }
        assert!(finished > 60, "{name}: only {finished} walks came to an end");
    }
}

#[test]
fn it_may_end_exactly_where_it_fits() {
    for (name, tokenizer, ends, grammars) in worlds() {
        let grammar = grammars.compile(&Constraint::Regex("(ab){1,3}c?".into())).expect("a grammar");
        for seed in 0..20 {
            let guide = grammars.guide(&grammar, ends.clone().into()).expect("a guide");
            let (mut ids, mut coins) = (Vec::new(), Coins(seed));
            while let Next::Tokens(mask) = guide.next() {
                let text = seen(&tokenizer, &ids);
                let fits = ["ab", "abab", "ababab"].contains(&&*text);
                assert_eq!(ends.iter().all(|&end| mask.allows(end)), fits, "{name}: {text:?}");
                assert_eq!(ends.iter().any(|&end| mask.allows(end)), fits, "{name}: {text:?}");
                let allowed = members(&mask, tokenizer.len());
                let text: Vec<u32> = allowed.into_iter().filter(|id| !ends.contains(id)).collect();
                ids.push(text[coins.below(text.len())]);
                guide.advance(ids[ids.len() - 1]);
            }
            assert!(seen(&tokenizer, &ids).ends_with('c'), "{name}: only then can nothing follow");
        }
    }
}

#[test]
fn sequences_share_nothing_that_changes() {
    let (_, tokenizer, ends, grammars) = worlds().swap_remove(0);
    let grammar = grammars.compile(&Constraint::JsonSchema("{}".into())).expect("a grammar");
    let masks = |guide: &Arc<Guide>, ids: &[u32]| -> Vec<Option<Arc<TokenMask>>> {
        let mask = |next| if let Next::Tokens(mask) = next { Some(mask) } else { None };
        let mut masks = vec![mask(guide.next())];
        for &id in ids {
            guide.advance(id);
            masks.push(mask(guide.next()));
        }
        masks
    };
    let guide = || grammars.guide(&grammar, ends.clone().into()).expect("a guide");
    let walks: Vec<_> = (0..8).map(|seed| walk(&guide(), &tokenizer, &ends, &mut Coins(seed)).0).collect();
    let alone: Vec<_> = walks.iter().map(|ids| masks(&guide(), ids)).collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = walks.iter().map(|ids| scope.spawn(|| masks(&guide(), ids))).collect();
        threads.into_iter().map(|thread| thread.join().expect("masks")).collect()
    });
    assert_eq!(alone, together);
    // One that is given up while its mask is computed bothers nobody.
    for ids in &walks {
        let given_up = guide();
        given_up.advance(ids[0]);
    }
    assert_eq!(masks(&guide(), &walks[0]), alone[0]);
}

#[test]
fn what_would_not_be_held_is_refused_by_name() {
    let (_, _, _, grammars) = worlds().swap_remove(0);
    let schema = |schema: Value| Constraint::JsonSchema(schema.to_string());
    let lark = |text: &str| Constraint::Lark(text.into());
    let object = |least: usize, required: &[&str]| {
        let any = json!({"^[a-c]$": {"type": "null"}});
        json!({"type": "object", "patternProperties": any, "additionalProperties": false, "minProperties": least,
               "required": required})
    };
    let integer = |key: &str, bound: Value| json!({"type": "integer", key: bound});
    let refused = [
        (schema(object(2, &[])), "minProperties is 2, where `required` names 0"),
        (schema(object(4, &["a", "b", "a"])), "minProperties is 4, where `required` names 2"),
        (schema(json!({"$defs": {"const": object(2, &[])}, "$ref": "#/$defs/const"})), "minProperties is 2"),
        (schema(json!({"properties": {"default": {"anyOf": [{"items": object(3, &["a"])}]}}})), "minProperties is 3"),
        (lark(&format!("start: \"a\" obj\nobj: %json {}", object(2, &[]))), "minProperties is 2"),
        (schema(integer("minimum", json!(-1e30))), "minimum is -1e+30: bounds must lie between -2^53 and 2^53"),
        (schema(json!({"items": integer("maximum", json!(1e30))})), "maximum is 1e+30: bounds"),
        (schema(integer("exclusiveMinimum", json!((1_u64 << 53) + 1))), "exclusiveMinimum is 9007199254740993: bounds"),
        (schema(integer("minimum", json!(i64::MIN))), "minimum is -9223372036854775808: bounds"),
        (schema(integer("maximum", json!(u64::MAX))), "maximum is 18446744073709551615: bounds"),
        (schema(json!({"oneOf": [{"minimum": 1}, {"maximum": 5}], "type": "number"})), "use `anyOf`"),
        (
            schema(json!({"$ref": "other.json"})),
            "to another document is refused, it must begin with `#/`: 'other.json'",
        ),
        (lark("start: <[2]>"), "<[2]>: special tokens cannot be written in a grammar"),
        (lark("start: \"<a>\" /<b>\\/\\\\/ x // <c>\nx: <|im_end|>"), "<|im_end|>: special tokens cannot"),
        (lark("start: %lark { start: %json {\"const\": \"<d>\"} <e> }"), "<e>: special tokens cannot"),
    ];
    for (constraint, message) in refused {
        let Err(error) = grammars.compile(&constraint) else { panic!("{constraint:?} was compiled") };
        assert!(error.starts_with(constraint.name()) && error.contains(message), "{constraint:?}: {error}");
    }
    let held = [
        schema(object(1, &[])),
        schema(object(3, &["a", "b"])),
        schema(json!({"enum": [{"minProperties": 9}], "default": object(2, &[]), "examples": [object(2, &[])]})),
        schema(json!({"type": "object", "properties": {"minProperties": integer("maximum", json!(i64::MAX))}})),
        schema(integer("minimum", json!((1_u64 << 53) - 1))),
        lark(
            "start: \"<\" /<[2]>\\/</ x // <c> \"\n# <d> /\nx: %json {\"const\": \"<e>\"} \"\\\"<f>\" %regex {\"substring_chars\": \"<g>\"}",
        ),
    ];
    for constraint in held {
        assert!(grammars.compile(&constraint).is_ok(), "{constraint:?}: {:?}", grammars.compile(&constraint).err());
    }
}

/// One property more than the required ones cannot be a repeated one.
#[test]
fn the_least_number_of_properties_is_held() {
    let (_, tokenizer, ends, grammars) = worlds().swap_remove(0);
    for required in [&[][..], &["a"], &["a", "b"]] {
        let least = required.len() + 1;
        let schema = json!({
            "type": "object", "patternProperties": {"^[abc]$": {"type": "null"}}, "additionalProperties": false,
            "minProperties": least, "required": required,
        });
        let grammar = grammars.compile(&Constraint::JsonSchema(schema.to_string())).expect("a grammar");
        let mut finished = 0;
        for seed in 0..60 {
            let guide = grammars.guide(&grammar, ends.clone().into()).expect("a guide");
            let (ids, end) = walk(&guide, &tokenizer, &ends, &mut Coins(seed));
            let text = seen(&tokenizer, &ids);
            let count = |value: &Value| value.as_object().map_or(0, |object| object.len());
            let held = serde_json::from_str(&text).is_ok_and(|value| count(&value) >= least);
            assert!(end == End::Cut || held, "{required:?}, seed {seed}: {text}");
            finished += usize::from(end != End::Cut);
        }
        assert!(finished > 20, "{required:?}: only {finished} walks came to an end");
    }
}

#[test]
fn hostile_grammars_end_in_errors_in_time() {
    let (_, tokenizer, ends, grammars) = worlds().swap_remove(0);
    let nested = |depth| (0..depth).fold(json!(true), |inner, _| json!({"items": inner, "type": "array"})).to_string();
    let rules = |count: usize| {
        let rule = |i| format!("r{i}: r{} r{} | r{}\n", i + 1, i + 1, i + 1);
        (0..count).map(rule).collect::<String>() + &format!("r{count}: \"a\"\nstart: r0\n")
    };
    let values: Vec<String> = (0..100_000).map(|i| format!("value {i}")).collect();
    let refused = [
        Constraint::JsonSchema("{\"type\": \"strin\"}".into()),
        Constraint::JsonSchema("{nope".into()),
        Constraint::JsonSchema("false".into()),
        Constraint::JsonSchema("[1]".into()),
        Constraint::JsonSchema("{\"$ref\": \"#\"}".into()),
        Constraint::JsonSchema("{\"$ref\": \"https://example.org/schema\"}".into()),
        Constraint::JsonSchema("{\"type\": \"integer\", \"minimum\": 5, \"maximum\": 3}".into()),
        Constraint::JsonSchema("{\"type\": \"number\", \"maximum\": 1e300}".into()),
        Constraint::JsonSchema(nested(500)),
        Constraint::Regex("(".into()),
        Constraint::Regex("a\\".into()),
        Constraint::Regex("(?=a)b".into()),
        Constraint::Regex("(".repeat(1000) + "a" + &")".repeat(1000)),
        Constraint::Lark("nope".into()),
        Constraint::Lark("start: missing".into()),
        Constraint::Lark("start: <|im_end|>".into()),
        Constraint::Lark(format!("start: {}\"a\"{}", "(".repeat(100), ")".repeat(100))),
        Constraint::Lark("start: \"\"".into()),
    ];
    for constraint in refused {
        let begun = Instant::now();
        let Err(error) = grammars.compile(&constraint) else { panic!("{constraint:?} was compiled") };
        assert!(begun.elapsed() < Duration::from_secs(3), "{constraint:?}: {:?}", begun.elapsed());
        assert!(error.starts_with(constraint.name()) && error.len() < 2200, "{error}");
    }
    for constraint in [Constraint::Choice(values), Constraint::Regex("a".repeat(1 << 20))] {
        let params = SamplingParams { constraint: Some(constraint), ..SamplingParams::default() };
        assert!(params.validate(1000).expect_err("too long").contains("bytes"));
    }
    // These are possible up to a point. Whichever it is, it comes in time.
    let hard = [
        Constraint::Regex("(a{1,5000}){1,5000}".into()),
        Constraint::Regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}".into()),
        Constraint::Regex("(.*[ab]){30}.*[^x]{400}".into()),
        Constraint::Regex(".*[ab][^x]{40}".into()),
        Constraint::JsonSchema(nested(60)),
        Constraint::JsonSchema("{\"type\": \"array\", \"minItems\": 100000000}".into()),
        Constraint::JsonSchema("{\"type\": \"string\", \"minLength\": 1000000000}".into()),
        Constraint::Lark(rules(40)),
        Constraint::Lark("start: start start | \"a\"".into()),
    ];
    for (seed, constraint) in hard.into_iter().enumerate() {
        let begun = Instant::now();
        let Ok(grammar) = grammars.compile(&constraint) else { continue };
        let guide = grammars.guide(&grammar, ends.clone().into()).expect("a guide");
        let mut coins = Coins(seed as u64);
        let mut slowest = Duration::ZERO;
        assert!(begun.elapsed() < Duration::from_secs(3), "{constraint:?}: {:?}", begun.elapsed());
        for _ in 0..50 {
            let begun = Instant::now();
            let Next::Tokens(mask) = guide.next() else { break };
            slowest = slowest.max(begun.elapsed());
            let allowed = members(&mask, tokenizer.len());
            let text: Vec<u32> = allowed.into_iter().filter(|id| !ends.contains(id)).collect();
            guide.advance(text[coins.below(text.len())]);
        }
        assert!(slowest < Duration::from_secs(1), "{constraint:?}: a mask took {slowest:?}");
    }
    assert!(grammars.compile(&Constraint::Regex("still here".into())).is_ok());
}
