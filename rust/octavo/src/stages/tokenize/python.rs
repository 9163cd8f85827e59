//! What chat templates expect of Python and Jinja beyond what the engine has: how values are printed, `json.dumps`, and a
//! few methods and filters.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State};

use super::bounds::BOUNDED;
use super::marker::is_placeholder;

/// Deeper values are refused: printing them recurses.
pub(super) const MAX_DEPTH: usize = 100;

/// What it costs to print one item: as much as a few instructions.
const ITEM_FUEL: u64 = 8;

/// Adds all of it to an environment.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    minijinja_contrib::add_to_environment(environment);
    // Jinja has neither; the one is lazy without a bound, the other prints everything.
    environment.remove_filter("chain");
    environment.remove_global("debug");
    environment.add_filter(BOUNDED, bounded);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(print);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |state: &State, value: &Value| to_str(state, value));
    environment.add_filter("pprint", |state: &State, value: &Value| repr(state, value));
    environment.add_filter("center", center);
    environment.add_filter("wordcount", |text: &str| text.split_whitespace().count());
    environment.add_filter("truncate", truncate);
    environment.add_filter("urlencode", urlencode);
    environment.add_filter("trim", trim);
    environment.add_filter("join", join);
    // As in Python: None is not iterable, strings and what is undefined are.
    environment.add_test("iterable", |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Iterable | Map | Seq | String | Undefined)
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
        Some(text) => Ok(text.to_owned()),
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
        ValueKind::String => write_quoted(value.as_str().unwrap_or_default(), out),
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

/// A dictionary, not an object of the engine (a namespace, a macro) that merely looks like one.
fn plain_map(value: &Value) -> bool {
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
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out),
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
                self.write_string(&name, out);
            }
        }
        Ok(())
    }

    fn write_string(&self, text: &str, out: &mut String) {
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
    }
}

/// Bounds the work and the depth of walking through a value.
fn pay_for_item(state: &State, depth: usize) -> Result<(), Error> {
    state.consume_fuel(ITEM_FUEL)?;
    check_depth(depth)
}

fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("a value is nested more than {MAX_DEPTH} deep")));
    }
    Ok(())
}

/// A value whose every node has been paid for, with lists in place of what is computed only when it is walked: that would
/// be computed again each time, and each of its own parts within.
fn bounded(state: &State, value: Value) -> Result<Value, Error> {
    let settled = Walk { state, nodes: 0 }.settle(&value, 0)?;
    Ok(settled.unwrap_or(value))
}

/// A walk through a value.
struct Walk<'a> {
    state: &'a State<'a, 'a>,
    nodes: u64,
}

impl Walk<'_> {
    /// How many nodes one unit of fuel pays for.
    const NODES_PER_FUEL: u64 = 4;

    fn pay(&mut self, nodes: u64) -> Result<(), Error> {
        let before = self.nodes / Self::NODES_PER_FUEL;
        self.nodes += nodes;
        self.state.consume_fuel(self.nodes / Self::NODES_PER_FUEL - before)
    }

    /// What to put in the place of `value`, if anything.
    fn settle(&mut self, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
        self.pay(1)?;
        let kind = value.kind();
        if !matches!(kind, ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
            return Ok(None);
        }
        check_depth(depth)?;
        match kind {
            ValueKind::Map if plain_map(value) => self.settle_map(value, depth),
            ValueKind::Map => Ok(None),
            _ => self.settle_items(value, depth),
        }
    }

    fn settle_items(&mut self, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
        let mut settled = (value.kind() == ValueKind::Iterable).then(Vec::new);
        for (n, item) in value.try_iter()?.enumerate() {
            let new = self.settle(&item, depth + 1)?;
            if new.is_some() && settled.is_none() {
                settled = Some(value.try_iter()?.take(n).collect());
            }
            if let Some(settled) = &mut settled {
                self.pay(2)?;
                settled.push(new.unwrap_or(item));
            }
        }
        Ok(settled.map(|items| if value.is_tuple() { Value::from_object(Tuple::new(items)) } else { items.into() }))
    }

    fn settle_map(&mut self, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
        let (mut pairs, mut changed) = (Vec::new(), false);
        for key in value.try_iter()? {
            self.settle(&key, depth + 1)?;
            let member = value.get_item(&key)?;
            let new = self.settle(&member, depth + 1)?;
            changed |= new.is_some();
            pairs.push((key, new.unwrap_or(member)));
        }
        Ok(changed.then(|| pairs.into_iter().collect()))
    }
}

/// Methods of strings, lists and dictionaries.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(state, text, name, args)?
    {
        return Ok(result);
    }
    if name == "index" && value.kind() == ValueKind::Seq {
        let (wanted,): (Value,) = from_args(args)?;
        let at = value.try_iter()?.position(|item| item == wanted);
        return at.map(Value::from).ok_or_else(|| not_found(&wanted));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// The methods that `pycompat` lacks or has in another way.
fn string_method(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let tuple = |before: &str, separator: &str, after: &str| {
        Value::from_object(Tuple::new([before, separator, after].into_iter().map(Value::from).collect()))
    };
    Ok(Some(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<String>,) = from_args(args)?;
            let inside = |letter: char| chars.as_deref().map_or(is_space(letter), |chars| chars.contains(letter));
            let text = if name == "rstrip" { text } else { text.trim_start_matches(inside) };
            Value::from(if name == "lstrip" { text } else { text.trim_end_matches(inside) })
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.split_once(separator) {
                Some((before, after)) => tuple(before, separator, after),
                None => tuple(text, "", ""),
            }
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.rsplit_once(separator) {
                Some((before, after)) => tuple(before, separator, after),
                None => tuple("", "", text),
            }
        }
        "split" => return split(text, args, Python::Split).map(Some),
        "rsplit" => return split(text, args, Python::Rsplit).map(Some),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "index" => {
            let (wanted,): (&str,) = from_args(args)?;
            let at = text.find(wanted).ok_or_else(|| not_found(&Value::from(wanted)))?;
            Value::from(text[..at].chars().count())
        }
        "find" | "rfind" => {
            let (wanted,): (&str,) = from_args(args)?;
            let at = if name == "find" { text.find(wanted) } else { text.rfind(wanted) };
            Value::from(at.map_or(-1, |at| text[..at].chars().count() as i64))
        }
        "center" => {
            let (width,): (usize,) = from_args(args)?;
            return center(state, text, Some(width)).map(|text| Some(Value::from(text)));
        }
        "ljust" | "rjust" | "zfill" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let fill = fill.unwrap_or(if name == "zfill" { "0" } else { " " });
            let missing = padding(state, text, width)?;
            let padding = fill.repeat(missing);
            Value::from(if name == "ljust" { format!("{text}{padding}") } else { format!("{padding}{text}") })
        }
        "swapcase" => {
            let swap = |letter: char| match letter.is_uppercase() {
                true => letter.to_lowercase().collect::<String>(),
                false => letter.to_uppercase().collect(),
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "format" => {
            check_format(text)?;
            return Ok(None);
        }
        "casefold" => Value::from(text.to_lowercase()),
        _ => return Ok(None),
    }))
}

/// Refuses widths that would make the engine write megabytes of padding, or that are computed.
fn check_format(text: &str) -> Result<(), Error> {
    let mut specifications = text.split('{').map(|part| part.split_once(':').map_or("", |(_, rest)| rest));
    let number = |run: &str| run.len() > 4;
    let wide = specifications
        .clone()
        .any(|part| part.split('}').next().is_some_and(|part| part.split(|c: char| !c.is_ascii_digit()).any(number)));
    let computed = specifications.any(|part| !part.contains('}')) && text.contains("}}");
    match wide || computed {
        true => Err(Error::new(ErrorKind::InvalidOperation, "a width in a format has at most four digits")),
        false => Ok(()),
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Python {
    Split,
    Rsplit,
}

fn split(text: &str, args: &[Value], from: Python) -> Result<Value, Error> {
    let (separator, most, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let most = most.or(options.get::<Option<i64>>("maxsplit")?).unwrap_or(-1);
    let separator = separator.or(options.get::<Option<Value>>("sep")?).filter(|value| !value.is_none());
    options.assert_all_used()?;
    let most = usize::try_from(most).unwrap_or(usize::MAX - 1);
    let parts: Vec<&str> = match separator {
        Some(separator) => {
            let separator = separator.as_str().filter(|separator| !separator.is_empty());
            let separator = separator.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "empty separator"))?;
            match from {
                Python::Split => text.splitn(most + 1, separator).collect(),
                Python::Rsplit => {
                    let mut parts: Vec<_> = text.rsplitn(most + 1, separator).collect();
                    parts.reverse();
                    parts
                }
            }
        }
        None => split_at_spaces(text, most, from),
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

fn split_at_spaces(text: &str, most: usize, from: Python) -> Vec<&str> {
    let (mut rest, mut parts) = (text.trim_matches(is_space), Vec::new());
    while !rest.is_empty() {
        let cut = if from == Python::Split { rest.find(is_space) } else { rest.rfind(is_space) };
        let Some(cut) = cut.filter(|_| parts.len() < most) else {
            parts.push(rest);
            break;
        };
        let after = cut + rest[cut..].chars().next().map_or(0, char::len_utf8);
        match from {
            Python::Split => {
                parts.push(&rest[..cut]);
                rest = rest[after..].trim_start_matches(is_space);
            }
            Python::Rsplit => {
                parts.push(&rest[after..]);
                rest = rest[..cut].trim_end_matches(is_space);
            }
        }
    }
    if from == Python::Rsplit {
        parts.reverse();
    }
    parts
}

/// White space as Python's strings know it: Unicode's, and the four information separators.
fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
}

fn not_found(wanted: &Value) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{wanted} is not in the value"))
}

fn trim(state: &State, value: &Value, chars: Option<String>) -> Result<String, Error> {
    let inside = |letter: char| chars.as_deref().map_or(is_space(letter), |chars| chars.contains(letter));
    Ok(to_str(state, value)?.trim_matches(inside).to_owned())
}

/// Joins items as Python would print them.
fn join(
    state: &State,
    values: &Value,
    separator: Option<&str>,
    attribute: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let attribute = attribute.or(options.get::<Option<Value>>("attribute")?);
    let separator = separator.map(str::to_owned).or(options.get::<Option<String>>("d")?).unwrap_or_default();
    options.assert_all_used()?;
    let item = |value: Value| {
        pay_for_item(state, 0)?;
        match &attribute {
            Some(name) => to_str(state, &value.get_item(name)?),
            None => to_str(state, &value),
        }
    };
    let items: Vec<String> = values.try_iter()?.map(item).collect::<Result<_, _>>()?;
    Ok(items.join(&separator))
}

fn center(state: &State, text: &str, width: Option<usize>) -> Result<String, Error> {
    let missing = padding(state, text, width.unwrap_or(80))?;
    let left = missing / 2;
    Ok(format!("{}{text}{}", " ".repeat(left), " ".repeat(missing - left)))
}

/// How many letters `text` lacks, paid for in advance.
fn padding(state: &State, text: &str, width: usize) -> Result<usize, Error> {
    let missing = width.saturating_sub(text.chars().count());
    state.consume_fuel(missing as u64 / 16)?;
    Ok(missing)
}

fn truncate(state: &State, text: &str, args: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let option = |n: usize, name: &str| -> Result<Option<Value>, Error> {
        Ok(args.get(n).cloned().or(options.get::<Option<Value>>(name)?))
    };
    let length = option(0, "length")?.map_or(Ok(255), usize::try_from)?;
    let whole_words = !option(1, "killwords")?.is_some_and(|kill| kill.is_true());
    let end = option(2, "end")?.map_or(Ok("...".to_owned()), |end| to_str(state, &end))?;
    let leeway = option(3, "leeway")?.map_or(Ok(5), usize::try_from)?;
    options.assert_all_used()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let kept: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let kept = if whole_words { kept.rsplit_once(' ').map_or(kept.as_str(), |(head, _)| head) } else { &kept };
    Ok(format!("{kept}{end}"))
}

fn urlencode(state: &State, value: &Value) -> Result<String, Error> {
    let quote = |text: &str| -> String {
        let byte = |byte: u8| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' | b'/' => (byte as char).to_string(),
            other => format!("%{other:02X}"),
        };
        text.bytes().map(byte).collect()
    };
    if value.kind() != ValueKind::Map {
        return Ok(quote(&to_str(state, value)?));
    }
    let pair =
        |key: Value| Ok(format!("{}={}", quote(&to_str(state, &key)?), quote(&to_str(state, &value.get_item(&key)?)?)));
    Ok(value.try_iter()?.map(pair).collect::<Result<Vec<_>, Error>>()?.join("&"))
}
