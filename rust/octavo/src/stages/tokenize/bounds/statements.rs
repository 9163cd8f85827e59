//! Statements, written out again.

use minijinja::Error;
use minijinja::machinery::Span;
use minijinja::machinery::ast::{Expr, IfCond, Macro, Stmt};

use super::expressions::use_by;
use super::{Use, Writer, refused};

impl Writer {
    pub(super) fn body(&mut self, body: &[Stmt]) -> Result<(), Error> {
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
                self.bounded(&each.iter, Use::Looked)?;
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
                self.defaults(declared)?;
                self.body(&declared.body)?;
                self.put(&["{% endmacro %}"]);
            }
            Stmt::CallBlock(block) => {
                self.open("{% call", block.span());
                self.parameters(&block.macro_decl)?;
                self.put(&[" "]);
                self.call(&block.call)?;
                self.put(&[" %}"]);
                self.defaults(&block.macro_decl)?;
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

    pub(super) fn string(&mut self, text: &str) {
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
        self.put(&["("]);
        for (n, name) in declared.args.iter().enumerate() {
            self.put(&[if n == 0 { "" } else { ", " }]);
            self.target(name)?;
        }
        self.put(&[")"]);
        Ok(())
    }

    /// Defaults, as assignments: one may name a parameter before it.
    fn defaults(&mut self, declared: &Macro) -> Result<(), Error> {
        let first = declared.args.len() - declared.defaults.len();
        for (name, default) in declared.args[first..].iter().zip(&declared.defaults) {
            self.put(&["{% if "]);
            self.target(name)?;
            self.put(&[" is undefined %}{% set "]);
            self.target(name)?;
            self.put(&[" = "]);
            self.stored(default)?;
            self.put(&[" %}{% endif %}"]);
        }
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
        self.arguments(&filter.args, use_by(filter))
    }
}
