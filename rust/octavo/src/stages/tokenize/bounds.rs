//! Rewrites a template so that whatever it builds is paid for.
//!
//! The template engine charges fuel for instructions, for bytes and for the items of a list, but not for what lies inside the
//! items, so forty lines that put a list twice into itself make something that no comparison, concatenation or filter
//! ever ends with. Here the template is parsed and written out again, with the filter [`BOUNDED`] wherever a composite value
//! is stored or looked into: it walks the value, pays for every node, and refuses what is nested too deep.
//!
//! The text that comes out means what went in did. White space is literal in it, so it is compiled with none of the
//! options that trim.

use minijinja::machinery::ast::{
    BinOp, BinOpKind, Call, CallArg, CompareOpKind, Expr, IfCond, IfExpr, Macro, Stmt, UnaryOpKind,
};
use minijinja::machinery::{Span, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};

/// The filter. No template can put something else under this name: filters are not variables.
pub(super) const BOUNDED: &str = "octavo_bounded";
const BOUNDED_FILTER: &str = " | octavo_bounded";

/// Tokens between two brackets. The parser descends for some of them, and so does whoever walks what it made.
const MAX_TAG_TOKENS: usize = 10_000;
/// Branches, for the same reason.
const MAX_ELIFS: usize = 1_000;

/// Filters that neither look into the items of their subject nor into their arguments, or pay for it themselves.
#[rustfmt::skip]
const SHALLOW_FILTERS: [&str; 23] = [
    "abs", "attr", "bool", "count", "d", "default", "first", "float", "int", "items", "join", "last", "length", "list",
    "pprint", "reverse", "round", "string", "tojson", "trim", "urlencode", "wordcount", BOUNDED,
];

/// Tests that do not either.
#[rustfmt::skip]
const SHALLOW_TESTS: [&str; 20] = [
    "boolean", "callable", "defined", "divisibleby", "even", "false", "filter", "float", "int", "integer", "iterable",
    "mapping", "none", "number", "odd", "sequence", "string", "test", "true", "undefined",
];

/// Methods that compare every item with their argument.
const COMPARING_METHODS: [&str; 2] = ["count", "index"];

/// A template, written out again.
pub(super) struct Bounded {
    pub source: String,
    /// It walks through the contents of messages, so it knows that they can be lists of parts.
    pub walks_contents: bool,
}

/// The template `source` with its bounds.
pub(super) fn add_to(source: &str, syntax: &SyntaxConfig) -> Result<Bounded, Error> {
    check_size(source, syntax)?;
    let mut writer = Writer {
        out: String::with_capacity(2 * source.len()),
        lines: 1,
        contents: vec![CONTENT.to_owned()],
        walks_contents: false,
    };
    if let Stmt::Template(template) = parse(source, "chat", syntax.clone())? {
        writer.body(&template.children)?;
    }
    Ok(Bounded { source: writer.out, walks_contents: writer.walks_contents })
}

/// What a message says, as messages and templates call it.
const CONTENT: &str = "content";
/// Filters that walk through their subject.
const WALKING_FILTERS: [&str; 5] = ["map", "select", "reject", "selectattr", "rejectattr"];

fn check_size(source: &str, syntax: &SyntaxConfig) -> Result<(), Error> {
    let (mut tag, mut elifs) = (0, 0);
    for token in tokenize(source, false, syntax.clone()) {
        match token?.0 {
            Token::VariableStart | Token::BlockStart => tag = 0,
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        tag += 1;
        if tag > MAX_TAG_TOKENS || elifs > MAX_ELIFS {
            return Err(refused(format!("more than {MAX_TAG_TOKENS} words in a tag, or {MAX_ELIFS} `elif`s")));
        }
    }
    Ok(())
}

fn refused(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::SyntaxError, what.into())
}

/// Writes statements and expressions out again. Every compound expression gets parentheses.
struct Writer {
    out: String,
    /// Line of the text so far.
    lines: usize,
    /// Variables that hold a message's content.
    contents: Vec<String>,
    walks_contents: bool,
}

impl Writer {
    fn put(&mut self, parts: &[&str]) {
        for part in parts {
            self.lines += part.bytes().filter(|&byte| byte == b'\n').count();
            self.out.push_str(part);
        }
    }

    /// Begins a tag on the line that it is on in the original, so that errors name that.
    fn open(&mut self, tag: &str, span: Span) {
        self.put(&[tag]);
        let behind = usize::from(span.start_line).saturating_sub(self.lines);
        self.put(&[&"\n".repeat(behind), " "]);
    }

    /// Whether this is a message's content.
    fn is_content(&self, expression: &Expr) -> bool {
        match expression {
            Expr::Var(variable) => self.contents.iter().any(|name| name == variable.id),
            Expr::GetAttr(attribute) => attribute.name == CONTENT,
            Expr::GetItem(item) => {
                matches!(&item.subscript_expr, Expr::Const(name) if name.value.as_str() == Some(CONTENT))
            }
            Expr::Filter(filter) => filter.expr.as_ref().is_some_and(|subject| self.is_content(subject)),
            _ => false,
        }
    }

    fn body(&mut self, body: &[Stmt]) -> Result<(), Error> {
        body.iter().try_for_each(|statement| self.statement(statement))
    }

    fn statement(&mut self, statement: &Stmt) -> Result<(), Error> {
        match statement {
            Stmt::EmitRaw(raw) => self.raw(raw.raw),
            Stmt::EmitExpr(emit) => {
                self.open("{{", emit.span());
                self.expression(&emit.expr)?;
                self.put(&[" }}"]);
            }
            Stmt::Set(set) => {
                if let (Expr::Var(variable), true) = (&set.target, self.is_content(&set.expr)) {
                    self.contents.push(variable.id.to_owned());
                }
                self.open("{% set", set.span());
                self.target(&set.target)?;
                self.put(&[" = "]);
                self.stored(&set.expr)?;
                self.put(&[" %}"]);
            }
            Stmt::SetBlock(set) => {
                self.open("{% set", set.span());
                self.target(&set.target)?;
                if let Some(filter) = &set.filter {
                    self.put(&[" | "]);
                    self.filter_chain(filter)?;
                }
                self.put(&[" %}"]);
                self.body(&set.body)?;
                self.put(&["{% endset %}"]);
            }
            Stmt::IfCond(condition) => {
                self.branches("{% if", condition, condition.span())?;
                self.put(&["{% endif %}"]);
            }
            Stmt::ForLoop(each) => {
                self.walks_contents |= self.is_content(&each.iter);
                self.open("{% for", each.span());
                self.target(&each.target)?;
                self.put(&[" in "]);
                self.stored(&each.iter)?;
                if let Some(filter) = &each.filter_expr {
                    self.put(&[" if "]);
                    self.expression(filter)?;
                }
                self.put(&[if each.recursive { " recursive %}" } else { " %}" }]);
                self.body(&each.body)?;
                if !each.else_body.is_empty() {
                    self.put(&["{% else %}"]);
                    self.body(&each.else_body)?;
                }
                self.put(&["{% endfor %}"]);
            }
            Stmt::WithBlock(with) => {
                self.open("{% with", with.span());
                for (n, (target, value)) in with.assignments.iter().enumerate() {
                    self.put(&[if n == 0 { "(" } else { ", (" }]);
                    self.target(target)?;
                    self.put(&[") = "]);
                    self.stored(value)?;
                }
                self.put(&[" %}"]);
                self.body(&with.body)?;
                self.put(&["{% endwith %}"]);
            }
            Stmt::Macro(declared) => {
                self.open("{% macro", declared.span());
                self.put(&[declared.name]);
                self.parameters(declared)?;
                self.put(&[" %}"]);
                self.body(&declared.body)?;
                self.put(&["{% endmacro %}"]);
            }
            Stmt::CallBlock(block) => {
                self.open("{% call", block.span());
                self.parameters(&block.macro_decl)?;
                self.put(&[" "]);
                self.call(&block.call)?;
                self.put(&[" %}"]);
                self.body(&block.macro_decl.body)?;
                self.put(&["{% endcall %}"]);
            }
            Stmt::FilterBlock(block) => {
                self.open("{% filter", block.span());
                self.filter_chain(&block.filter)?;
                self.put(&[" %}"]);
                self.body(&block.body)?;
                self.put(&["{% endfilter %}"]);
            }
            Stmt::AutoEscape(block) => {
                self.open("{% autoescape", block.span());
                self.expression(&block.enabled)?;
                self.put(&[" %}"]);
                self.body(&block.body)?;
                self.put(&["{% endautoescape %}"]);
            }
            Stmt::Block(block) => {
                self.put(&["{% block ", block.name, " %}"]);
                self.body(&block.body)?;
                self.put(&["{% endblock %}"]);
            }
            Stmt::Do(action) => {
                self.open("{% do", action.span());
                self.call(&action.call)?;
                self.put(&[" %}"]);
            }
            Stmt::Continue(_) => self.put(&["{% continue %}"]),
            Stmt::Break(_) => self.put(&["{% break %}"]),
            Stmt::Template(template) => self.body(&template.children)?,
            Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
                return Err(refused("there are no other templates to include, import or extend"));
            }
        }
        Ok(())
    }

    fn branches(&mut self, tag: &str, condition: &IfCond, span: Span) -> Result<(), Error> {
        self.open(tag, span);
        self.expression(&condition.expr)?;
        self.put(&[" %}"]);
        self.body(&condition.true_body)?;
        match &condition.false_body[..] {
            [] => Ok(()),
            [Stmt::IfCond(next)] => self.branches("{% elif", next, next.span()),
            other => {
                self.put(&["{% else %}"]);
                self.body(other)
            }
        }
    }

    /// Text between tags; what looks like a tag as an expression.
    fn raw(&mut self, text: &str) {
        if ["{{", "{%", "{#"].iter().any(|open| text.contains(open)) || text.ends_with('{') {
            self.put(&["{{ "]);
            self.string(text);
            self.put(&[" }}"]);
        } else {
            self.put(&[text]);
        }
    }

    fn string(&mut self, text: &str) {
        self.put(&["\"", &text.replace('\\', "\\\\").replace('"', "\\\""), "\""]);
    }

    /// What is assigned to: names, attributes, and lists of them.
    fn target(&mut self, target: &Expr) -> Result<(), Error> {
        match target {
            Expr::Var(variable) => self.put(&[variable.id]),
            Expr::GetAttr(attribute) => {
                self.target(&attribute.expr)?;
                self.put(&[".", attribute.name]);
            }
            Expr::List(list) => {
                for (n, item) in list.items.iter().enumerate() {
                    self.put(&[if n == 0 { "(" } else { ", " }]);
                    self.target(item)?;
                }
                self.put(&[if list.items.len() == 1 { ",)" } else { ")" }]);
            }
            other => return Err(refused(format!("cannot assign to a {}", other.description()))),
        }
        Ok(())
    }

    fn parameters(&mut self, declared: &Macro) -> Result<(), Error> {
        let first_default = declared.args.len() - declared.defaults.len();
        self.put(&["("]);
        for (n, name) in declared.args.iter().enumerate() {
            self.put(&[if n == 0 { "" } else { ", " }]);
            self.target(name)?;
            if let Some(default) = n.checked_sub(first_default).and_then(|n| declared.defaults.get(n)) {
                self.put(&["="]);
                self.stored(default)?;
            }
        }
        self.put(&[")"]);
        Ok(())
    }

    /// Filters without a subject, as after `{% filter`.
    fn filter_chain(&mut self, filter: &Expr) -> Result<(), Error> {
        let Expr::Filter(filter) = filter else {
            return Err(refused(format!("a {} is no filter", filter.description())));
        };
        if let Some(before) = &filter.expr {
            self.filter_chain(before)?;
            self.put(&[" | "]);
        }
        self.put(&[filter.name]);
        self.arguments(&filter.args, !SHALLOW_FILTERS.contains(&filter.name))
    }

    fn expression(&mut self, expression: &Expr) -> Result<(), Error> {
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
                    self.bounded(key)?;
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
                self.subject(&item.expr)?;
                self.put(&["["]);
                self.bounded(&item.subscript_expr)?;
                self.put(&["]"]);
            }
            Expr::Slice(slice) => {
                self.subject(&slice.expr)?;
                self.put(&["["]);
                for (n, part) in [&slice.start, &slice.stop, &slice.step].into_iter().enumerate() {
                    self.put(&[if n == 0 { "" } else { ":" }]);
                    part.as_ref().map_or(Ok(()), |part| self.expression(part))?;
                }
                self.put(&["]"]);
            }
            Expr::Call(call) => self.call(call)?,
            Expr::Filter(_) => {
                self.put(&["("]);
                self.filtered(expression)?;
                self.put(&[")"]);
            }
            Expr::Test(test) => {
                let deep = !SHALLOW_TESTS.contains(&test.name);
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
                self.bounded(&chain.expr)?;
                for link in &chain.ops {
                    self.put(&[comparison(link.op)]);
                    self.bounded(&link.expr)?;
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
        let deep = !SHALLOW_FILTERS.contains(&filter.name);
        self.walks_contents |= WALKING_FILTERS.contains(&filter.name) && self.is_content(expression);
        if let Some(subject) = &filter.expr {
            self.filtered(subject)?;
            self.put(&[if deep && !is_scalar(subject) { BOUNDED_FILTER } else { "" }, " | "]);
        }
        self.put(&[filter.name]);
        self.arguments(&filter.args, deep)
    }

    /// An operation, its left side without parentheses where that is the same operation.
    fn binary(&mut self, binary: &BinOp) -> Result<(), Error> {
        // A look at a scalar is cheap, whatever it is compared with.
        let scalar = |side: &Expr| matches!(side, Expr::Const(_));
        let (left, right) = (scalar(&binary.left), scalar(&binary.right));
        let deep = match binary.op {
            BinOpKind::In => !left,
            BinOpKind::Concat => true,
            // A sum of lists refers to them; what is done with it is seen to where that is done.
            BinOpKind::Add | BinOpKind::ScAnd | BinOpKind::ScOr => false,
            _ => !(left || right),
        };
        let chains = matches!(binary.op, BinOpKind::Add | BinOpKind::Concat | BinOpKind::ScAnd | BinOpKind::ScOr);
        match &binary.left {
            Expr::BinOp(first) if chains && binary_operator(first.op) == binary_operator(binary.op) => {
                self.binary(first)?;
            }
            first => self.operand(first, deep)?,
        }
        self.put(&[binary_operator(binary.op)]);
        self.operand(&binary.right, deep)
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

    fn call(&mut self, call: &Call) -> Result<(), Error> {
        let method = matches!(call.expr, Expr::GetAttr(_));
        match &call.expr {
            Expr::GetAttr(method) if COMPARING_METHODS.contains(&method.name) => {
                self.bounded(&method.expr)?;
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
            if method { self.bounded(value)? } else { self.stored(value)? }
        }
        self.put(&[")"]);
        Ok(())
    }

    fn arguments(&mut self, arguments: &[CallArg], deep: bool) -> Result<(), Error> {
        if arguments.is_empty() {
            return Ok(());
        }
        self.put(&["("]);
        for (n, argument) in arguments.iter().enumerate() {
            self.put(&[if n == 0 { "" } else { ", " }]);
            let value = self.argument(argument);
            self.operand(value, deep)?;
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

    fn operand(&mut self, expression: &Expr, deep: bool) -> Result<(), Error> {
        if deep { self.bounded(expression) } else { self.expression(expression) }
    }

    /// A value that gets a name. One that had a name or a place already is no deeper than it was.
    fn stored(&mut self, expression: &Expr) -> Result<(), Error> {
        if is_path(expression) { self.expression(expression) } else { self.bounded(expression) }
    }

    /// A value that is looked into.
    fn bounded(&mut self, expression: &Expr) -> Result<(), Error> {
        if is_scalar(expression) {
            return self.expression(expression);
        }
        self.put(&["("]);
        self.filtered(expression)?;
        self.put(&[BOUNDED_FILTER, ")"]);
        Ok(())
    }
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
