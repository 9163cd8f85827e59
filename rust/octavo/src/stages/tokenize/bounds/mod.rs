//! Rewrites a template so that whatever it builds is paid for.
//!
//! The template engine charges fuel for instructions, for bytes and for the items of a list, but not for what lies inside the
//! items, so forty lines that put a list twice into itself make something that no comparison, concatenation or filter
//! ever ends with. Here the template is parsed and written out again, with the filter [`BOUNDED`] wherever a composite value
//! is stored or looked into: it walks the value, pays for every node, and refuses what is nested too deep.
//!
//! The text that comes out means what went in did. White space is literal in it, so it is compiled with none of the
//! options that trim.

use minijinja::machinery::ast::{Expr, Stmt};
use minijinja::machinery::{Span, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};

mod expressions; // where values are stored or looked into
mod statements; // what is around them
mod walk; // what pays

pub(super) use walk::{bounded, text_bytes};

/// The filter. No template can put something else under this name: filters are not variables.
pub(super) const BOUNDED: &str = "octavo_bounded";
const BOUNDED_FILTER: &str = " | octavo_bounded";
/// The same for a value whose texts will be written out.
const WRITTEN_FILTER: &str = " | octavo_bounded(true)";

/// Looks up an item. A text is paid for: finding a letter in it takes as long as it is.
pub(super) const ITEM: &str = "octavo_item";
/// Cuts out a part, for the same reason.
pub(super) const SLICE: &str = "octavo_slice";
/// Indices that need no looking for.
const NEAR: std::ops::Range<i64> = 0..1_000;

/// What formats a text, in the place of `%`: the engine's is for numbers.
pub(super) const PERCENT: &str = "octavo_percent";

/// What becomes of the value that a filter, an operator or a function gets.
#[derive(Clone, Copy, PartialEq)]
enum Use {
    /// It is passed on.
    Passed,
    /// Its items are chosen from, or compared.
    Looked,
    /// All of it is written out, or sorted.
    Written,
}

/// Tokens between two brackets. The parser descends for some of them, and so does whoever walks what it made; this many
/// fit on the stack of any thread.
const MAX_TAG_TOKENS: usize = 2_500;
/// Branches, for the same reason.
const MAX_ELIFS: usize = 500;

/// Filters that neither look into the items of their subject nor into their arguments, or pay for it themselves.
#[rustfmt::skip]
const SHALLOW_FILTERS: [&str; 23] = [
    "abs", "attr", "bool", "count", "d", "default", "first", "float", "int", "items", "join", "last", "length", "list",
    "pprint", "reverse", "round", "string", "tojson", "trim", "urlencode", "wordcount", BOUNDED,
];

/// Filters that choose among items, or compare them once.
const CHOOSING_FILTERS: [&str; 7] = ["batch", "reject", "rejectattr", "select", "selectattr", "slice", "sum"];

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
}
