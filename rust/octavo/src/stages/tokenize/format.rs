//! Texts with places for values: `%s` and `{}`. What they will hold is paid for first: every place may show every value.

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Error, ErrorKind, State};

use super::bounds;
use super::python::{pay_for_bytes, plain_map};

/// `text.format(…)`.
pub(super) fn method(state: &State, text: &str, args: &[Value]) -> Result<Value, Error> {
    format(state, FormatStyle::StrFormat, text, args)
}

/// `text | format(…)`.
pub(super) fn filter(state: &State, text: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    printf(state, text, &args.into_values())
}

/// `text % values`.
pub(super) fn percent(state: &State, text: &Value, values: Value) -> Result<Value, Error> {
    let args = match values.kind() {
        _ if values.is_tuple() => values.try_iter()?.collect(),
        ValueKind::Map if plain_map(&values) => {
            let member = |key: Value| Ok((key.to_string(), values.get_item(&key)?));
            let members = values.try_iter()?.map(member).collect::<Result<Kwargs, Error>>()?;
            vec![members.into()]
        }
        _ => vec![values],
    };
    printf(state, text, &args)
}

fn printf(state: &State, text: &Value, args: &[Value]) -> Result<Value, Error> {
    let text = text.as_str().ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "only texts are formatted"))?;
    format(state, FormatStyle::Printf, text, args)
}

fn format(state: &State, style: FormatStyle, text: &str, args: &[Value]) -> Result<Value, Error> {
    let opener = if style == FormatStyle::Printf { '%' } else { '{' };
    let widest = check_widths(style, text.split(opener).skip(1))?;
    let mut bytes = widest + 64;
    for arg in args {
        bytes += bounds::text_bytes(state, arg)? as usize;
    }
    pay_for_bytes(state, bytes.saturating_mul(text.matches(opener).count()))?;
    formatting::format(style, text, args).map(Value::from)
}

/// The widest that a place makes itself. Refuses widths that would make the engine write megabytes of padding, or that are
/// computed.
fn check_widths<'a>(style: FormatStyle, places: impl Iterator<Item = &'a str>) -> Result<usize, Error> {
    let mut widest = 0;
    for place in places {
        let specification = match style {
            FormatStyle::Printf => {
                let place =
                    if place.starts_with('(') { place.split_once(')').map_or("", |(_, rest)| rest) } else { place };
                place.split(|letter: char| letter.is_alphabetic()).next()
            }
            FormatStyle::StrFormat => place.split_once(':').map(|(_, rest)| rest.split('}').next().unwrap_or(rest)),
        };
        let specification = specification.unwrap_or_default();
        // An end of the outer place means that this one stood inside it.
        let computed = match style {
            FormatStyle::Printf => specification.contains('*'),
            FormatStyle::StrFormat => place.contains(':') && !place.contains('}'),
        };
        for number in specification.split(|letter: char| !letter.is_ascii_digit()) {
            if number.len() > 4 || computed {
                let message = "a width in a format is a number of at most four digits";
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
            widest = widest.max(number.parse().unwrap_or(0));
        }
    }
    Ok(widest)
}
