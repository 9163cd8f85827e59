//! `value[index]` and `value[start:stop:step]`. The engine does not charge for finding a letter in a text.

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// How many bytes of a text, or items of a list, one unit of fuel looks through.
const BYTES_PER_FUEL: usize = 1024;
const ITEMS_PER_FUEL: usize = 4;

/// `value[key]`.
pub(super) fn item(state: &State, value: &Value, key: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable | ValueKind::String if key.is_number() && !key.is_integer() => {
            // Not even `1.0` is an index.
            return Ok(Value::UNDEFINED);
        }
        ValueKind::String => state.consume_fuel((value.as_str().map_or(0, str::len) / BYTES_PER_FUEL) as u64)?,
        ValueKind::Iterable => {
            let far = i64::try_from(key.clone()).map_or(0, |index| index.unsigned_abs() as usize);
            state.consume_fuel((value.len().unwrap_or(far).min(far) / ITEMS_PER_FUEL) as u64)?;
        }
        _ => {}
    }
    value.get_item(key)
}

/// `value[start:stop:step]`.
pub(super) fn slice(
    state: &State,
    value: &Value,
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
) -> Result<Value, Error> {
    let (step, refused) = (step.unwrap_or(1), |what: String| Error::new(ErrorKind::InvalidOperation, what));
    if step == 0 {
        return Err(refused("a slice cannot have steps of 0".into()));
    }
    if let Some(text) = value.as_str() {
        state.consume_fuel((text.len() / BYTES_PER_FUEL) as u64)?;
        let (first, count) = places(text.chars().count(), start, stop, step);
        let cut = match step {
            1 => text.chars().skip(first).take(count).collect(),
            2.. => text.chars().skip(first).step_by(step as usize).take(count).collect(),
            _ => {
                let back = text.chars().count().saturating_sub(first + 1);
                text.chars().rev().skip(back).step_by(step.unsigned_abs() as usize).take(count).collect::<String>()
            }
        };
        return Ok(Value::from(cut));
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        return Err(refused(format!("a value of type {} cannot be sliced", value.kind())));
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    let (first, count) = places(items.len(), start, stop, step);
    state.consume_fuel((items.len() / BYTES_PER_FUEL + count / ITEMS_PER_FUEL) as u64)?;
    let cut = (0..count as i64).filter_map(|n| items.get((first as i64 + n * step) as usize).cloned()).collect();
    Ok(if value.is_tuple() { Value::from_object(Tuple::new(cut)) } else { cut.into() })
}

/// The first place that a slice takes and how many it takes, as Python counts.
fn places(len: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> (usize, usize) {
    let len = len as i64;
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |at: i64| (if at < 0 { at.saturating_add(len) } else { at }).clamp(lowest, highest.max(lowest));
    let (first, last) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
    let (start, stop) = (start.map_or(first, clamp), stop.map_or(last, clamp));
    let distance = if step > 0 { stop - start } else { start - stop };
    let count = if distance > 0 { (distance - 1) / step.saturating_abs() + 1 } else { 0 };
    (start.max(0) as usize, count as usize)
}

#[cfg(test)]
mod tests {
    use super::places;

    #[test]
    fn slices_take_what_pythons_take() {
        for (len, start, stop, step, want) in [
            (5, None, None, 1, (0, 5)),
            (5, Some(1), Some(-1), 1, (1, 3)),
            (5, None, None, -1, (4, 5)),
            (5, None, None, -2, (4, 3)),
            (5, Some(-2), None, -1, (3, 4)),
            (5, Some(9), Some(1), -3, (4, 1)),
            (5, Some(3), Some(1), 1, (3, 0)),
            (5, Some(-9), Some(9), 3, (0, 2)),
            (0, None, None, -1, (0, 0)),
            (0, Some(2), Some(i64::MIN), i64::MIN, (0, 0)),
            (3, Some(i64::MAX), Some(i64::MIN), i64::MIN, (2, 1)),
        ] {
            assert_eq!(places(len, start, stop, step), want, "{len} {start:?} {stop:?} {step}");
        }
    }
}
