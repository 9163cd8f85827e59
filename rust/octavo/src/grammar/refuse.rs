//! What the library would take and not hold, or fail at only in the middle of an answer.

use serde_json::{Map, Value};

/// Bounds are 64-bit floats on their way through the library: from here on they are not exact.
const INEXACT: f64 = (1_u64 << 53) as f64;
/// Values under these keys are data, not schemas.
const DATA: [&str; 4] = ["enum", "const", "default", "examples"];
/// The keys of objects under these are names.
const NAMED: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Looks through a JSON schema.
pub(super) fn schema(schema: &Value) -> Result<(), String> {
    match schema {
        Value::Array(schemas) => schemas.iter().try_for_each(self::schema),
        Value::Object(keys) => {
            properties_that_repeat(keys)?;
            bounds_that_round(keys)?;
            keys.iter().try_for_each(|(key, value)| match value {
                _ if DATA.contains(&key.as_str()) => Ok(()),
                Value::Object(named) if NAMED.contains(&key.as_str()) => named.values().try_for_each(self::schema),
                _ => self::schema(value),
            })
        }
        _ => Ok(()),
    }
}

/// The library counts a key once for every time it is there, and does not know which were there before. One property
/// besides the required ones is surely another one; two may be the same.
fn properties_that_repeat(schema: &Map<String, Value>) -> Result<(), String> {
    let Some(least) = schema.get("minProperties").and_then(Value::as_u64) else { return Ok(()) };
    let names = schema.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let required = names.iter().enumerate().filter(|(i, name)| !names[..*i].contains(name)).count();
    if least <= required as u64 + 1 {
        return Ok(());
    }
    Err(format!(
        "minProperties is {least}, where `required` names {required}: it can ask for one property more than these, since a \
         key that comes twice would count as two; name more of them in `required`"
    ))
}

fn bounds_that_round(schema: &Map<String, Value>) -> Result<(), String> {
    for key in ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"] {
        let Some(Value::Number(bound)) = schema.get(key) else { continue };
        // The largest integer of 64 bits is a common bound, and comes out right.
        let is_largest = key == "maximum" && bound.as_i64() == Some(i64::MAX);
        if !is_largest && bound.as_f64().is_none_or(|bound| bound.abs() >= INEXACT) {
            return Err(format!("{key} is {bound}: bounds must lie between -2^53 and 2^53; leave out those beyond"));
        }
    }
    Ok(())
}

/// Looks through a Lark grammar, and the schemas in it.
pub(super) fn lark(grammar: &str) -> Result<(), String> {
    let mut rest = grammar;
    while let Some(first) = rest.chars().next() {
        let taken = match first {
            '"' => quoted(rest),
            '/' if !rest.starts_with("//") => quoted(rest),
            '/' | '#' => rest.find('\n').unwrap_or(rest.len()),
            '%' => directive(rest)?,
            '<' => special(rest)?,
            _ => first.len_utf8(),
        };
        rest = &rest[taken..];
    }
    Ok(())
}

/// The length of a string or regex, which ends with the character that it begins with.
fn quoted(text: &str) -> usize {
    let (mut escaped, bytes) = (false, text.as_bytes());
    let is_end = |&byte: &u8| {
        let ends = byte == bytes[0] && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    };
    bytes[1..].iter().position(is_end).map_or(text.len(), |end| end + 2)
}

/// The length of a directive, with the JSON that follows some.
fn directive(text: &str) -> Result<usize, String> {
    let Some(name) = ["%json", "%regex", "%llguidance"].into_iter().find(|name| text.starts_with(name)) else {
        return Ok(1);
    };
    let mut values = serde_json::Deserializer::from_str(&text[name.len()..]).into_iter::<Value>();
    // What is not JSON the library refuses.
    let Some(Ok(value)) = values.next() else { return Ok(name.len()) };
    if name == "%json" {
        schema(&value)?;
    }
    Ok(name.len() + values.byte_offset())
}

/// A token of the vocabulary by its name or number: answers are made of text.
fn special(text: &str) -> Result<usize, String> {
    match text[1..].find(|c: char| c.is_whitespace() || "<>".contains(c)) {
        Some(end) if end > 0 && text.as_bytes()[1 + end] == b'>' => {
            Err(format!("{}: special tokens cannot be written in a grammar", &text[..end + 2]))
        }
        _ => Ok(1),
    }
}
