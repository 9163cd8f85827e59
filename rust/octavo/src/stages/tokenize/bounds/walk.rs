//! The walk that pays for a value.

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Error, State};

use super::super::python::{check_depth, plain_map};

/// A value whose every node has been paid for, with lists in place of what is computed only when it is walked: that would
/// be computed again each time, and each of its own parts within. Texts are paid for by their length, as often as they
/// are there: many places may share one. `written` says that they are going to be written out, not merely looked at.
pub(in super::super) fn bounded(state: &State, value: Value, written: Option<bool>) -> Result<Value, Error> {
    let per_byte = if written == Some(true) { Walk::WRITTEN_BYTE } else { Walk::BYTE };
    let settled = Walk { state, per_byte, units: 0, bytes: 0 }.settle(&value, 0)?;
    Ok(settled.unwrap_or(value))
}

/// How many bytes of text there are in a value, paid for as above.
pub(in super::super) fn text_bytes(state: &State, value: &Value) -> Result<u64, Error> {
    let mut walk = Walk { state, per_byte: Walk::BYTE, units: 0, bytes: 0 };
    walk.settle(value, 0)?;
    Ok(walk.bytes)
}

/// A walk through a value.
struct Walk<'a> {
    state: &'a State<'a, 'a>,
    per_byte: u64,
    units: u64,
    bytes: u64,
}

impl Walk<'_> {
    const UNITS_PER_FUEL: u64 = 1024;
    const NODE: u64 = 256;
    /// To compare it, say.
    const BYTE: u64 = 1;
    const WRITTEN_BYTE: u64 = 64;

    fn pay(&mut self, units: u64) -> Result<(), Error> {
        let before = self.units / Self::UNITS_PER_FUEL;
        self.units = self.units.saturating_add(units);
        self.state.consume_fuel(self.units / Self::UNITS_PER_FUEL - before)
    }

    /// What to put in the place of `value`, if anything.
    fn settle(&mut self, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
        self.pay(Self::NODE)?;
        if let Some(text) = value.as_str() {
            self.bytes = self.bytes.saturating_add(text.len() as u64);
            // A text by itself is paid for where it is used.
            let inside = if depth > 0 { text.len() as u64 } else { 0 };
            self.pay(self.per_byte * inside)?;
        }
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
                self.pay(2 * Self::NODE)?;
                settled.push(new.unwrap_or(item));
            }
        }
        // What `groupby` makes has names for its two items.
        if value.get_attr("grouper").is_ok_and(|grouper| !grouper.is_undefined()) {
            return Ok(None);
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
        Ok(changed.then(|| Value::from_pairs(pairs)))
    }
}
