//! Jinja's filters and functions, where the engine lacks one or has it in another way.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters, functions};

use super::format;
use super::python::{pay_for_bytes, pay_for_item, to_str};
use super::strings::{self, is_space};

/// Adds all of them to an environment.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.add_filter("attr", attr);
    environment.add_filter("center", strings::center);
    environment.add_filter("float", float);
    environment.add_filter("forceescape", |state: &mut State, value: &Value| {
        let text = Value::from(to_str(state, value)?);
        filters::escape(state, &text)
    });
    environment.add_filter("format", format::filter);
    environment.add_filter("indent", indent);
    environment.add_filter("int", int);
    environment.add_filter("join", join);
    environment.add_filter("map", map);
    environment.add_filter("sum", sum);
    environment.add_filter("trim", trim);
    environment.add_filter("truncate", truncate);
    environment.add_filter("urlencode", urlencode);
    environment.add_filter("wordcount", |text: &str| text.split_whitespace().count());
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    environment.add_function("dict", dict);
    environment.add_function("namespace", |first: Option<Value>, named: Kwargs| {
        functions::namespace(Some(dict(first, named)?.into()))
    });
}

/// An attribute. The members of a dictionary are none; those of the engine's own objects, which look like one, are.
fn attr(value: &Value, name: &Value) -> Result<Value, Error> {
    let own = |kind: &str| kind.ends_with("::Namespace") || kind.ends_with("::Loop");
    let dictionary = value.kind() == ValueKind::Map && !value.as_object().is_some_and(|object| own(object.type_name()));
    if dictionary { Ok(Value::UNDEFINED) } else { value.get_item(name) }
}

fn dict(first: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let pairs = first.as_ref().filter(|first| matches!(first.kind(), ValueKind::Seq | ValueKind::Iterable));
    let Some(pairs) = pairs else { return functions::dict(first, named) };
    let pairs: Vec<_> = pairs.try_iter()?.map(pair).collect::<Result<_, _>>()?;
    functions::dict(Some(Value::from_pairs(pairs)), named)
}

fn pair(value: Value) -> Result<(Value, Value), Error> {
    let mut items = value.try_iter()?;
    match (items.next(), items.next(), items.next()) {
        (Some(first), Some(second), None) => Ok((first, second)),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "wanted pairs of a name and a value")),
    }
}

fn indent(state: &State, text: &Value, args: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let option = |n: usize, name: &str| -> Result<Option<Value>, Error> {
        Ok(args.get(n).cloned().or(options.get::<Option<Value>>(name)?))
    };
    let width = option(0, "width")?.unwrap_or_else(|| Value::from(4));
    let first = option(1, "first")?.is_some_and(|first| first.is_true());
    let blank = option(2, "blank")?.is_some_and(|blank| blank.is_true());
    options.assert_all_used()?;
    let text = to_str(state, text)? + "\n";
    let (wide, times) = match width.as_str() {
        Some(width) => (width, 1),
        None => (" ", usize::try_from(width.clone())?),
    };
    let ends = text.chars().filter(|&letter| strings::ends_line(letter)).count();
    pay_for_bytes(state, ends.saturating_mul(wide.len().saturating_mul(times) + 64))?;
    let (indent, mut out) = (wide.repeat(times), String::new());
    for (n, line) in strings::lines(&text, false).into_iter().enumerate() {
        out.push_str(if n == 0 { "" } else { "\n" });
        if if n == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(out)
}

fn int(
    state: &State,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    options: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(options.get::<Option<Value>>("default")?).unwrap_or_else(|| Value::from(0));
    let endless = |text: &str| text.trim_matches(is_space).parse::<f64>().is_ok_and(|number| !number.is_finite());
    if value.as_str().is_some_and(endless) {
        return Ok(default);
    }
    filters::int(state, &numeral(value), Some(default), base, options)
}

fn float(state: &State, value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = default.or(options.get::<Option<Value>>("default")?).unwrap_or_else(|| Value::from(0.0));
    filters::float(state, &numeral(value), Some(default), options)
}

/// A text without what Python allows around and inside a number.
fn numeral(value: &Value) -> Value {
    let Some(text) = value.as_str().map(|text| text.trim_matches(is_space)) else { return value.clone() };
    let inside = |parts: &[&str]| {
        parts.len() > 1
            && parts[..parts.len() - 1].iter().all(|part| part.ends_with(|last: char| last.is_ascii_alphanumeric()))
            && parts[1..].iter().all(|part| part.starts_with(|first: char| first.is_ascii_alphanumeric()))
    };
    let parts: Vec<&str> = text.split('_').collect();
    Value::from(if inside(&parts) { parts.concat() } else { text.to_owned() })
}

/// The engine's, and with named arguments for the filter that it applies.
fn map(state: &mut State, values: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (positional, named): (&[Value], Kwargs) = from_args(&args)?;
    let name = positional.first().and_then(Value::as_str);
    let (Some(name), false) = (name, named.has("attribute") || named.args().next().is_none()) else {
        return filters::map(state, values, Rest(args.into_iter().map(Into::into).collect())).map(Value::from);
    };
    let mut mapped = Vec::new();
    for value in values.try_iter()? {
        pay_for_item(state, 0)?;
        pay_for_bytes(state, value.as_str().map_or(0, str::len))?;
        let args: Vec<Value> = [value].into_iter().chain(args[1..].iter().cloned()).collect();
        let value = state.apply_filter(name, &args)?;
        pay_for_bytes(state, value.as_str().map_or(0, str::len))?;
        mapped.push(value);
    }
    Ok(mapped.into())
}

/// The sum of numbers or lists: Python, too, adds no texts.
fn sum(
    state: &State,
    values: Value,
    attribute: Option<&str>,
    start: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let start = start.or(options.get::<Option<Value>>("start")?).unwrap_or_else(|| Value::from(0));
    match start.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let attribute = attribute.map(str::to_owned).or(options.get::<Option<String>>("attribute")?);
            options.assert_all_used()?;
            let mut items: Vec<Value> = start.try_iter()?.collect();
            for value in values.try_iter()? {
                let value = attribute.as_ref().map_or(Ok(value.clone()), |name| value.get_attr(name))?;
                for item in value.try_iter()? {
                    pay_for_item(state, 0)?;
                    items.push(item);
                }
            }
            Ok(if start.is_tuple() { Value::from_object(Tuple::new(items)) } else { items.into() })
        }
        ValueKind::Number | ValueKind::Bool => filters::sum(state, values, attribute, Some(start), options),
        other => Err(Error::new(ErrorKind::InvalidOperation, format!("can only sum numbers and lists, not a {other}"))),
    }
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
    let mut joined = String::new();
    for (n, value) in values.try_iter()?.enumerate() {
        if n > 0 {
            pay_for_bytes(state, separator.len())?;
            joined.push_str(&separator);
        }
        joined.push_str(&item(value)?);
    }
    Ok(joined)
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
    let pairs: Vec<(Value, Value)> = match value.kind() {
        ValueKind::Map => {
            value.try_iter()?.map(|key| Ok((key.clone(), value.get_item(&key)?))).collect::<Result<_, Error>>()?
        }
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.map(pair).collect::<Result<_, _>>()?,
        _ => return Ok(quote(&to_str(state, value)?, "/")),
    };
    let in_query =
        |value: &Value| -> Result<String, Error> { Ok(quote(&to_str(state, value)?, "").replace("%20", "+")) };
    let member = |(name, value): &(Value, Value)| Ok(format!("{}={}", in_query(name)?, in_query(value)?));
    Ok(pairs.iter().map(member).collect::<Result<Vec<_>, Error>>()?.join("&"))
}

/// `text` with everything in hexadecimal but what may stand in an address, and `safe`.
fn quote(text: &str, safe: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte as char {
            letter if letter.is_ascii_alphanumeric() || "_.-~".contains(letter) || safe.contains(letter) => {
                out.push(letter);
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}
