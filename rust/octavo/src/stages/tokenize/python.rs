//! What chat templates expect of Python and Jinja beyond what the engine has: how values are printed, `json.dumps`, and a
//! few methods and filters.

use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State};

use super::marker::is_placeholder;
use super::{bounds, filters, format, strings, subscripts};

/// Deeper values are refused: printing them recurses.
pub(super) const MAX_DEPTH: usize = 100;

/// What it costs to print one item: as much as a few instructions.
const ITEM_FUEL: u64 = 8;
/// How many bytes one unit of fuel copies, and how many it quotes.
const COPIED_PER_FUEL: u64 = 64;
const QUOTED_PER_FUEL: u64 = 16;

/// Adds all of it to an environment.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    minijinja_contrib::add_to_environment(environment);
    // Jinja has neither; the one is lazy without a bound, the other prints everything.
    environment.remove_filter("chain");
    environment.remove_global("debug");
    environment.add_filter(bounds::BOUNDED, bounds::bounded);
    environment.add_filter(bounds::PERCENT, format::percent);
    environment.add_function(bounds::ITEM, subscripts::item);
    environment.add_function(bounds::SLICE, subscripts::slice);
    filters::add_to(environment);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(print);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |state: &State, value: &Value| to_str(state, value));
    environment.add_filter("pprint", pprint);
    // As in Python: None is not iterable, strings and what is undefined are.
    environment.add_test("iterable", |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Iterable | Map | Seq | String | Undefined)
    });
    // What has a length and items by number or name.
    environment.add_test("sequence", |value: &Value| match value.kind() {
        ValueKind::Seq | ValueKind::String | ValueKind::Undefined => true,
        ValueKind::Map => plain_map(value),
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    });
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
}

/// JSON as template values.
pub(super) fn from_json(value: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match value {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::from(number),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(values) => values.iter().map(from_json).collect(),
        Json::Object(members) => {
            Value::from_pairs(members.iter().map(|(name, value)| (name.as_str(), from_json(value))))
        }
    }
}

fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None => out.write_str(&to_str(state, value)?).map_err(Error::from),
    }
}

/// Python's `str(value)`; nothing for what is undefined.
pub(super) fn to_str(state: &State, value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => {
            pay_for_bytes(state, text.len())?;
            Ok(text.to_owned())
        }
        None if value.is_undefined() => Ok(String::new()),
        None => repr(state, value),
    }
}

fn repr(state: &State, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(state, value, 0, &mut out)?;
    Ok(out)
}

fn write_repr(state: &State, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    pay_for_item(state, depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            state.consume_fuel(text.len() as u64 / QUOTED_PER_FUEL)?;
            write_quoted(text, out);
        }
        ValueKind::Number if !value.is_integer() => out.push_str(&float(f64::try_from(value.clone())?, "inf", "nan")),
        ValueKind::Map if plain_map(value) => {
            out.push('{');
            for (n, key) in value.try_iter()?.enumerate() {
                out.push_str(if n == 0 { "" } else { ", " });
                write_repr(state, &key, depth + 1, out)?;
                out.push_str(": ");
                write_repr(state, &value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            for (n, item) in value.try_iter()?.enumerate() {
                out.push_str(if n == 0 { "" } else { ", " });
                write_repr(state, &item, depth + 1, out)?;
            }
            out.push_str(match (tuple, value.len()) {
                (true, Some(1)) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            });
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// What `pprint` shows, on one line: the keys of dictionaries are sorted.
fn pprint(state: &State, value: &Value) -> Result<String, Error> {
    repr(state, &sorted(state, value, 0)?)
}

fn sorted(state: &State, value: &Value, depth: usize) -> Result<Value, Error> {
    pay_for_item(state, depth)?;
    match value.kind() {
        ValueKind::Map if plain_map(value) => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            keys.sort();
            let pair = |key: Value| Ok((key.clone(), sorted(state, &value.get_item(&key)?, depth + 1)?));
            Ok(Value::from_pairs(keys.into_iter().map(pair).collect::<Result<Vec<_>, Error>>()?))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.map(|item| sorted(state, &item, depth + 1)).collect::<Result<Vec<_>, _>>()?;
            Ok(if value.is_tuple() { Value::from_object(Tuple::new(items)) } else { items.into() })
        }
        _ => Ok(value.clone()),
    }
}

/// A dictionary, not an object of the engine (a namespace, a macro) that merely looks like one.
pub(super) fn plain_map(value: &Value) -> bool {
    value.try_iter().is_ok()
}

/// A string as Python shows it inside a list.
fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for letter in text.chars() {
        match letter {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            letter if letter == quote => out.extend(['\\', letter]),
            letter if printable(letter) => out.push(letter),
            letter if (letter as u32) < 0x100 => out.push_str(&format!("\\x{:02x}", letter as u32)),
            letter if (letter as u32) < 0x1_0000 => out.push_str(&format!("\\u{:04x}", letter as u32)),
            letter => out.push_str(&format!("\\U{:08x}", letter as u32)),
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable`, for the letters that matter. Our placeholders must come through.
fn printable(letter: char) -> bool {
    let space = letter.is_whitespace() && letter != ' ';
    let format = matches!(letter as u32,
        0xAD | 0x600..=0x605 | 0x61C | 0x6DD | 0x70F | 0x180E | 0x200B..=0x200F | 0x2028..=0x202E | 0x2060..=0x206F
        | 0xE000..=0xF8FF | 0xFEFF | 0xFFF0..=0xFFFB | 0xFFFE..=0xFFFF | 0xE0000..=0xE0FFF | 0xF0000..=0xFFFFF);
    is_placeholder(letter) || !(space || letter.is_control() || format)
}

/// The shortest digits that read back as this number, as Python writes them.
fn float(value: f64, infinity: &str, nan: &str) -> String {
    if value.is_nan() {
        return nan.to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { infinity.to_owned() } else { format!("-{infinity}") };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// `tojson` as in transformers: `json.dumps` without HTML escapes.
fn tojson(state: &State, value: &Value, indent: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let indent = indent.or(options.get::<Option<Value>>("indent")?).filter(|indent| !indent.is_none());
    let indent = match &indent {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(width) => Some(" ".repeat(usize::try_from(width.clone())?.min(64))),
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let (comma, colon) = match separators.as_deref() {
        Some([comma, colon]) => (comma.clone(), colon.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators are a pair")),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = Style {
        state,
        indent,
        comma,
        colon,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(Value::from(out))
}

/// How JSON is laid out.
struct Style<'a> {
    state: &'a State<'a, 'a>,
    indent: Option<String>,
    comma: String,
    colon: String,
    ascii: bool,
    sorted: bool,
}

impl Style<'_> {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        pay_for_item(self.state, depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?, "Infinity", "NaN")),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out)?,
            ValueKind::Map if plain_map(value) => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.write_items("{", "}", keys.len(), depth, out, |style, n, out| {
                    style.write_key(&keys[n], out)?;
                    out.push_str(&style.colon);
                    style.write(&value.get_item(&keys[n])?, depth + 1, out)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items("[", "]", items.len(), depth, out, |style, n, out| {
                    style.write(&items[n], depth + 1, out)
                })?;
            }
            other => {
                return Err(Error::new(ErrorKind::InvalidOperation, format!("{other} is not JSON serializable")));
            }
        }
        Ok(())
    }

    fn write_items(
        &self,
        open: &str,
        close: &str,
        len: usize,
        depth: usize,
        out: &mut String,
        write: impl Fn(&Self, usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push_str(open);
        for n in 0..len {
            let indent = self.indent.as_ref().map_or(0, |indent| indent.len() * (depth + 1));
            pay_for_bytes(self.state, self.comma.len() + self.colon.len() + indent)?;
            out.push_str(if n == 0 { "" } else { &self.comma });
            self.new_line(depth + 1, out);
            write(self, n, out)?;
        }
        if len > 0 {
            self.new_line(depth, out);
        }
        out.push_str(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_key(&self, key: &Value, out: &mut String) -> Result<(), Error> {
        match key.as_str() {
            Some(name) => self.write_string(name, out),
            None => {
                let mut name = String::new();
                self.write(key, 0, &mut name)?;
                self.write_string(&name, out)
            }
        }
    }

    fn write_string(&self, text: &str, out: &mut String) -> Result<(), Error> {
        self.state.consume_fuel(text.len() as u64 / QUOTED_PER_FUEL)?;
        out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                letter if (letter as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", letter as u32)),
                letter if self.ascii && !letter.is_ascii() && !is_placeholder(letter) => {
                    for unit in letter.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                letter => out.push(letter),
            }
        }
        out.push('"');
        Ok(())
    }
}

/// Pays for text that is about to be copied.
pub(super) fn pay_for_bytes(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / COPIED_PER_FUEL)
}

/// Bounds the work and the depth of walking through a value.
pub(super) fn pay_for_item(state: &State, depth: usize) -> Result<(), Error> {
    state.consume_fuel(ITEM_FUEL)?;
    check_depth(depth)
}

pub(super) fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("a value is nested more than {MAX_DEPTH} deep")));
    }
    Ok(())
}

/// Methods of strings, lists and dictionaries.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = strings::method(state, text, name, args)?
    {
        return Ok(result);
    }
    if name == "copy" && (value.kind() == ValueKind::Seq || plain_map(value)) {
        let () = from_args(args)?;
        return Ok(value.clone());
    }
    if name == "index" && value.kind() == ValueKind::Seq {
        let (wanted,): (Value,) = from_args(args)?;
        let at = value.try_iter()?.position(|item| item == wanted);
        return at.map(Value::from).ok_or_else(not_found);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// It does not name what was looked for: that can be long.
pub(super) fn not_found() -> Error {
    Error::new(ErrorKind::InvalidOperation, "what `index` looks for is not there")
}
