//! Expressions, written out again, with the filter where a composite value is stored or looked into.

use minijinja::Error;
use minijinja::machinery::ast::{BinOp, BinOpKind, Call, CallArg, CompareOpKind, Expr, Filter, IfExpr, UnaryOpKind};

use super::{
    BOUNDED, BOUNDED_FILTER, CHOOSING_FILTERS, COMPARING_METHODS, ITEM, NEAR, PERCENT, SHALLOW_FILTERS, SHALLOW_TESTS,
    SLICE, Use, WALKING_FILTERS, WRITTEN_FILTER, Writer,
};

impl Writer {
    pub(super) fn expression(&mut self, expression: &Expr) -> Result<(), Error> {
        match expression {
            Expr::Var(variable) => self.put(&[variable.id]),
            Expr::Const(constant) => match constant.value.as_str() {
                Some(text) => self.string(text),
                None if constant.value.is_integer() => self.put(&[&constant.value.to_string()]),
                None => match f64::try_from(constant.value.clone()) {
                    Ok(number) if constant.value.is_number() => self.put(&[&format!("{number:?}")]),
                    _ => self.put(&[&constant.value.to_string()]),
                },
            },
            Expr::List(list) => self.items("[", &list.items, "]")?,
            Expr::Tuple(tuple) if tuple.items.len() == 1 => self.items("(", &tuple.items, ",)")?,
            Expr::Tuple(tuple) => self.items("(", &tuple.items, ")")?,
            Expr::Map(map) => {
                self.put(&["{"]);
                for (n, (key, value)) in map.keys.iter().zip(&map.values).enumerate() {
                    self.put(&[if n == 0 { "" } else { ", " }]);
                    self.bounded(key, Use::Looked)?;
                    self.put(&[": "]);
                    self.expression(value)?;
                }
                self.put(&["}"]);
            }
            Expr::GetAttr(attribute) => {
                self.subject(&attribute.expr)?;
                self.put(&[".", attribute.name]);
            }
            Expr::GetItem(item) => {
                let near = is_near(&item.subscript_expr);
                self.put(&[if near { "" } else { ITEM }, if near { "" } else { "(" }]);
                self.subject(&item.expr)?;
                self.put(&[if near { "[" } else { ", " }]);
                self.bounded(&item.subscript_expr, Use::Looked)?;
                self.put(&[if near { "]" } else { ")" }]);
            }
            Expr::Slice(slice) => {
                self.put(&[SLICE, "("]);
                self.expression(&slice.expr)?;
                for part in [&slice.start, &slice.stop, &slice.step] {
                    self.put(&[", "]);
                    match part {
                        Some(part) => self.expression(part)?,
                        None => self.put(&["none"]),
                    }
                }
                self.put(&[")"]);
            }
            Expr::Call(call) => self.call(call)?,
            Expr::Filter(_) => {
                self.put(&["("]);
                self.filtered(expression)?;
                self.put(&[")"]);
            }
            Expr::Test(test) => {
                let deep = if SHALLOW_TESTS.contains(&test.name) { Use::Passed } else { Use::Looked };
                self.put(&["("]);
                self.operand(&test.expr, deep)?;
                self.put(&[" is ", test.name]);
                self.arguments(&test.args, deep)?;
                self.put(&[")"]);
            }
            Expr::UnaryOp(unary) => {
                self.put(&[match unary.op {
                    UnaryOpKind::Not => "(not ",
                    UnaryOpKind::Neg => "(-",
                }]);
                self.subject(&unary.expr)?;
                self.put(&[")"]);
            }
            Expr::BinOp(binary) => {
                self.put(&["("]);
                self.binary(binary)?;
                self.put(&[")"]);
            }
            Expr::Compare(chain) => {
                self.put(&["("]);
                self.bounded(&chain.expr, Use::Looked)?;
                for link in &chain.ops {
                    self.put(&[comparison(link.op)]);
                    self.bounded(&link.expr, Use::Looked)?;
                }
                self.put(&[")"]);
            }
            Expr::IfExpr(choice) => {
                self.put(&["("]);
                self.choice(choice)?;
                self.put(&[")"]);
            }
        }
        Ok(())
    }

    /// A chain of filters, without parentheses: the parser counts those.
    fn filtered(&mut self, expression: &Expr) -> Result<(), Error> {
        let Expr::Filter(filter) = expression else { return self.subject(expression) };
        let uses = use_by(filter);
        self.walks_contents |= WALKING_FILTERS.contains(&filter.name) && self.is_content(expression);
        if let Some(subject) = &filter.expr {
            self.filtered(subject)?;
            self.put(&[if is_scalar(subject) { "" } else { uses.filter() }, " | "]);
        }
        self.put(&[filter.name]);
        self.arguments(&filter.args, uses)
    }

    /// An operation, its left side without parentheses where that is the same operation.
    fn binary(&mut self, binary: &BinOp) -> Result<(), Error> {
        // A look at a scalar is cheap, whatever it is compared with.
        let scalar = |side: &Expr| matches!(side, Expr::Const(_));
        let (left, right) = (scalar(&binary.left), scalar(&binary.right));
        let uses = match binary.op {
            BinOpKind::Concat => Use::Written,
            BinOpKind::In if left => Use::Passed,
            BinOpKind::In => Use::Looked,
            // A sum of lists refers to them; what is done with it is seen to where that is done.
            BinOpKind::Add | BinOpKind::ScAnd | BinOpKind::ScOr => Use::Passed,
            _ if left || right => Use::Passed,
            _ => Use::Looked,
        };
        let chains = matches!(binary.op, BinOpKind::Add | BinOpKind::Concat | BinOpKind::ScAnd | BinOpKind::ScOr);
        if matches!(binary.op, BinOpKind::Rem) && (is_text(&binary.left) || is_several(&binary.right)) {
            self.bounded(&binary.left, Use::Written)?;
            self.put(&[" | ", PERCENT, "("]);
            self.bounded(&binary.right, Use::Written)?;
            self.put(&[")"]);
            return Ok(());
        }
        match &binary.left {
            Expr::BinOp(first) if chains && binary_operator(first.op) == binary_operator(binary.op) => {
                self.binary(first)?;
            }
            first => self.operand(first, uses)?,
        }
        self.put(&[binary_operator(binary.op)]);
        self.operand(&binary.right, uses)
    }

    fn choice(&mut self, choice: &IfExpr) -> Result<(), Error> {
        self.expression(&choice.true_expr)?;
        self.put(&[" if "]);
        self.expression(&choice.test_expr)?;
        match &choice.false_expr {
            None => return Ok(()),
            Some(Expr::IfExpr(next)) => {
                self.put(&[" else "]);
                self.choice(next)?;
            }
            Some(other) => {
                self.put(&[" else "]);
                self.expression(other)?;
            }
        }
        Ok(())
    }

    /// What stands before a dot or a bracket, or after a sign.
    fn subject(&mut self, expression: &Expr) -> Result<(), Error> {
        // `-1 .x` is `-(1 .x)`, and `1.x` is no number.
        let number = matches!(expression, Expr::Const(constant) if constant.value.as_str().is_none());
        self.put(&[if number { "(" } else { "" }]);
        self.expression(expression)?;
        self.put(&[if number { ")" } else { "" }]);
        Ok(())
    }

    fn items(&mut self, open: &str, items: &[Expr], close: &str) -> Result<(), Error> {
        self.put(&[open]);
        for (n, item) in items.iter().enumerate() {
            self.put(&[if n == 0 { "" } else { ", " }]);
            self.expression(item)?;
        }
        self.put(&[close]);
        Ok(())
    }

    pub(super) fn call(&mut self, call: &Call) -> Result<(), Error> {
        let method = matches!(call.expr, Expr::GetAttr(_));
        match &call.expr {
            Expr::GetAttr(method) if COMPARING_METHODS.contains(&method.name) => {
                self.bounded(&method.expr, Use::Looked)?;
                self.put(&[".", method.name]);
            }
            other => self.subject(other)?,
        }
        if call.args.is_empty() {
            self.put(&["()"]);
            return Ok(());
        }
        self.put(&["("]);
        for (n, argument) in call.args.iter().enumerate() {
            self.put(&[if n == 0 { "" } else { ", " }]);
            // A macro stores what it is called with, a method looks into it.
            let value = self.argument(argument);
            if method { self.bounded(value, Use::Written)? } else { self.stored(value)? }
        }
        self.put(&[")"]);
        Ok(())
    }

    pub(super) fn arguments(&mut self, arguments: &[CallArg], uses: Use) -> Result<(), Error> {
        if arguments.is_empty() {
            return Ok(());
        }
        self.put(&["("]);
        for (n, argument) in arguments.iter().enumerate() {
            self.put(&[if n == 0 { "" } else { ", " }]);
            let value = self.argument(argument);
            self.operand(value, uses)?;
        }
        self.put(&[")"]);
        Ok(())
    }

    /// Writes how an argument is passed; gives its value.
    fn argument<'a>(&mut self, argument: &'a CallArg<'a>) -> &'a Expr<'a> {
        match argument {
            CallArg::Pos(value) => value,
            CallArg::Kwarg(name, value) => {
                self.put(&[name, "="]);
                value
            }
            CallArg::PosSplat(values) => {
                self.put(&["*"]);
                values
            }
            CallArg::KwargSplat(values) => {
                self.put(&["**"]);
                values
            }
        }
    }

    fn operand(&mut self, expression: &Expr, uses: Use) -> Result<(), Error> {
        if uses == Use::Passed { self.expression(expression) } else { self.bounded(expression, uses) }
    }

    /// A value that gets a name. One that had a name or a place already is no deeper than it was.
    pub(super) fn stored(&mut self, expression: &Expr) -> Result<(), Error> {
        if is_path(expression) { self.expression(expression) } else { self.bounded(expression, Use::Looked) }
    }

    /// A value that is looked into.
    pub(super) fn bounded(&mut self, expression: &Expr, uses: Use) -> Result<(), Error> {
        if is_scalar(expression) {
            return self.expression(expression);
        }
        self.put(&["("]);
        self.filtered(expression)?;
        self.put(&[uses.filter(), ")"]);
        Ok(())
    }
}

impl Use {
    fn filter(self) -> &'static str {
        match self {
            Self::Passed => "",
            Self::Looked => BOUNDED_FILTER,
            Self::Written => WRITTEN_FILTER,
        }
    }
}

pub(super) fn use_by(filter: &Filter) -> Use {
    let by_attribute = |argument: &CallArg| matches!(argument, CallArg::Kwarg("attribute", _));
    match filter.name {
        name if SHALLOW_FILTERS.contains(&name) => Use::Passed,
        name if CHOOSING_FILTERS.contains(&name) => Use::Looked,
        "map" if filter.args.iter().any(by_attribute) => Use::Looked,
        _ => Use::Written,
    }
}

/// Whether this subscript is a name, or an index close to the beginning.
fn is_near(subscript: &Expr) -> bool {
    let Expr::Const(constant) = subscript else { return false };
    let index = || i64::try_from(constant.value.clone()).is_ok_and(|index| NEAR.contains(&index));
    constant.value.as_str().is_some() || constant.value.is_integer() && index()
}

fn is_text(expression: &Expr) -> bool {
    matches!(expression, Expr::Const(constant) if constant.value.as_str().is_some())
}

/// Whether this is what only a text can be formatted with.
fn is_several(expression: &Expr) -> bool {
    matches!(expression, Expr::Tuple(_) | Expr::Map(_)) || is_text(expression)
}

/// Whether this names a variable or something in it.
fn is_path(expression: &Expr) -> bool {
    match expression {
        Expr::Var(_) | Expr::Const(_) => true,
        Expr::GetAttr(attribute) => is_path(&attribute.expr),
        Expr::GetItem(item) => is_path(&item.expr) && is_path(&item.subscript_expr),
        _ => false,
    }
}

/// Whether the result can have no items.
fn is_scalar(expression: &Expr) -> bool {
    match expression {
        Expr::Const(_) | Expr::Compare(_) | Expr::Test(_) | Expr::UnaryOp(_) => true,
        Expr::BinOp(binary) => {
            !matches!(binary.op, BinOpKind::Add | BinOpKind::Mul | BinOpKind::ScAnd | BinOpKind::ScOr)
        }
        Expr::Filter(filter) => {
            matches!(
                filter.name,
                "tojson" | "trim" | "string" | "length" | "count" | "join" | "upper" | "lower" | BOUNDED
            )
        }
        _ => false,
    }
}

fn binary_operator(operator: BinOpKind) -> &'static str {
    match operator {
        BinOpKind::Eq => " == ",
        BinOpKind::Ne => " != ",
        BinOpKind::Lt => " < ",
        BinOpKind::Lte => " <= ",
        BinOpKind::Gt => " > ",
        BinOpKind::Gte => " >= ",
        BinOpKind::ScAnd => " and ",
        BinOpKind::ScOr => " or ",
        BinOpKind::Add => " + ",
        BinOpKind::Sub => " - ",
        BinOpKind::Mul => " * ",
        BinOpKind::Div => " / ",
        BinOpKind::FloorDiv => " // ",
        BinOpKind::Rem => " % ",
        BinOpKind::Pow => " ** ",
        BinOpKind::Concat => " ~ ",
        BinOpKind::In => " in ",
    }
}

fn comparison(operator: CompareOpKind) -> &'static str {
    match operator {
        CompareOpKind::Eq => " == ",
        CompareOpKind::Ne => " != ",
        CompareOpKind::Lt => " < ",
        CompareOpKind::Lte => " <= ",
        CompareOpKind::Gt => " > ",
        CompareOpKind::Gte => " >= ",
        CompareOpKind::In => " in ",
        CompareOpKind::NotIn => " not in ",
    }
}
