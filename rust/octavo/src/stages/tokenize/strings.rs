//! Python's methods of strings.

use minijinja::value::{Kwargs, Tuple, Value, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::format;
use super::python::not_found;

/// The methods of strings that `pycompat` lacks or has in another way.
pub(super) fn method(state: &mut State, text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
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
        "split" => return split(state, text, args, Python::Split).map(Some),
        "rsplit" => return split(state, text, args, Python::Rsplit).map(Some),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let found = part(text, start, end).and_then(|(before, part)| {
                let at = if name.starts_with('r') { part.rfind(wanted) } else { part.find(wanted) };
                at.map(|at| before + part[..at].chars().count())
            });
            match found {
                None if name.ends_with("index") => return Err(not_found()),
                found => Value::from(found.map_or(-1, |at| at as i64)),
            }
        }
        "startswith" | "endswith" | "count" if args.len() > 1 => {
            let (wanted, start, end): (Value, Option<i64>, Option<i64>) = from_args(args)?;
            match part(text, start, end) {
                Some((_, part)) => {
                    return unknown_method_callback(state, &Value::from(part), name, &[wanted]).map(Some);
                }
                None if name == "count" => Value::from(0),
                None => Value::from(false),
            }
        }
        "center" => {
            let (width,): (usize,) = from_args(args)?;
            return center(state, text, Some(width)).map(|text| Some(Value::from(text)));
        }
        "ljust" | "rjust" | "zfill" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let fill = fill.unwrap_or(if name == "zfill" { "0" } else { " " });
            if fill.chars().count() != 1 {
                return Err(Error::new(ErrorKind::InvalidOperation, "what fills up must be one letter"));
            }
            let missing = padding(state, text, width)?;
            let padding = fill.repeat(missing);
            Value::from(if name == "ljust" { format!("{text}{padding}") } else { format!("{padding}{text}") })
        }
        "swapcase" => {
            let mut out = String::with_capacity(text.len());
            for letter in text.chars() {
                match letter.is_uppercase() {
                    true => out.extend(letter.to_lowercase()),
                    false => out.extend(letter.to_uppercase()),
                }
            }
            Value::from(out)
        }
        "format" => return format::method(state, text, args).map(Some),
        "casefold" => {
            let mut out = String::with_capacity(text.len());
            for letter in text.chars() {
                match letter {
                    // Its upper case does not lead back to it.
                    'ı' => out.push(letter),
                    _ => out.extend(letter.to_uppercase().flat_map(char::to_lowercase)),
                }
            }
            Value::from(out)
        }
        "title" => Value::from(title(text)),
        "istitle" => Value::from(text.chars().any(char::is_alphabetic) && title(text) == text),
        "isdecimal" => Value::from(!text.is_empty() && text.chars().all(char::is_numeric)),
        "isidentifier" => {
            let letter = |letter: char| letter.is_alphabetic() || letter == '_';
            Value::from(text.starts_with(letter) && text.chars().all(|c| letter(c) || c.is_numeric()))
        }
        "expandtabs" => {
            let (size,): (Option<usize>,) = from_args(args)?;
            return expand_tabs(state, text, size.unwrap_or(8)).map(|text| Some(Value::from(text)));
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            pay_for_parts(state, text.chars().filter(|&letter| ends_line(letter)).count())?;
            lines(text, keep.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        _ => return Ok(None),
    }))
}

pub(super) fn center(state: &State, text: &str, width: Option<usize>) -> Result<String, Error> {
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

#[derive(Clone, Copy, PartialEq)]
enum Python {
    Split,
    Rsplit,
}

fn split(state: &State, text: &str, args: &[Value], from: Python) -> Result<Value, Error> {
    let (separator, most, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let most = most.or(options.get::<Option<i64>>("maxsplit")?).unwrap_or(-1);
    let separator = separator.or(options.get::<Option<Value>>("sep")?).filter(|value| !value.is_none());
    options.assert_all_used()?;
    let most = usize::try_from(most).unwrap_or(usize::MAX - 1);
    let parts: Vec<&str> = match separator {
        Some(separator) => {
            let separator = separator.as_str().filter(|separator| !separator.is_empty());
            let separator = separator.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "empty separator"))?;
            pay_for_parts(state, text.matches(separator).count().min(most))?;
            match from {
                Python::Split => text.splitn(most + 1, separator).collect(),
                Python::Rsplit => {
                    let mut parts: Vec<_> = text.rsplitn(most + 1, separator).collect();
                    parts.reverse();
                    parts
                }
            }
        }
        None => {
            pay_for_parts(state, text.chars().filter(|&letter| is_space(letter)).count().min(most))?;
            split_at_spaces(text, most, from)
        }
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

fn pay_for_parts(state: &State, parts: usize) -> Result<(), Error> {
    state.consume_fuel(parts as u64 / 2)
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

/// `text[start:end]`, and how many letters are before it; nothing where it would begin after the end.
fn part(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    if start.is_none() && end.is_none() {
        return Some((0, text));
    }
    let len = text.chars().count();
    let from_end = |at: i64| usize::try_from(if at < 0 { (at + len as i64).max(0) } else { at }).unwrap_or(0);
    let (start, end) = (from_end(start.unwrap_or(0)), from_end(end.unwrap_or(i64::MAX)).min(len));
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    (start <= end).then(|| (start, &text[byte(start)..byte(end)]))
}

/// Capitals after everything that is no letter.
fn title(text: &str) -> String {
    let mut after_letter = false;
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        if after_letter {
            out.extend(letter.to_lowercase())
        } else {
            out.extend(letter.to_uppercase())
        }
        after_letter = letter.is_alphabetic();
    }
    out
}

fn expand_tabs(state: &State, text: &str, size: usize) -> Result<String, Error> {
    state.consume_fuel((text.matches('\t').count() as u64).saturating_mul(size as u64) / 16)?;
    let (mut out, mut column) = (String::with_capacity(text.len()), 0);
    for letter in text.chars() {
        match letter {
            '\t' => {
                let missing = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', missing));
                column += missing;
            }
            '\n' | '\r' => {
                out.push(letter);
                column = 0;
            }
            _ => {
                out.push(letter);
                column += 1;
            }
        }
    }
    Ok(out)
}

/// What ends a line in Python's strings.
pub(super) fn ends_line(letter: char) -> bool {
    matches!(letter, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Lines as Python's strings know them.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let (mut rest, mut lines) = (text, Vec::new());
    while !rest.is_empty() {
        let line = rest.find(ends_line).unwrap_or(rest.len());
        let end =
            if rest[line..].starts_with("\r\n") { 2 } else { rest[line..].chars().next().map_or(0, char::len_utf8) };
        lines.push(&rest[..if keep_ends { line + end } else { line }]);
        rest = &rest[line + end..];
    }
    lines
}

/// White space as Python's strings know it: Unicode's, and the four information separators.
pub(super) fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
}
