//! Python's methods of strings.

use minijinja::value::{Kwargs, Tuple, Value, from_args};
use minijinja::{Error, ErrorKind, State};

use super::python::{center, not_found, padding};

/// The methods of strings that `pycompat` lacks or has in another way.
pub(super) fn method(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
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
pub(super) fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
}
