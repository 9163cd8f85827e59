//! The walk that pays for a value.

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Error, State};

use super::super::python::{check_depth, plain_map};

/// A value whose every node has been paid for, with lists in place of what is computed only when it is walked: that would
/// be computed again each time, and each of its own parts within.
pub(in super::super) fn bounded(state: &State, value: Value) -> Result<Value, Error> {
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
