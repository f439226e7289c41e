//! Reads a template into its tree, by Jinja's grammar.

use super::ast::{
    Arguments, AssignTarget, BODY, CompareOp, Expr, Identifier, Literal, Loop, MacroBody, Operator,
    Statement, TemplateLine,
};
use super::lexer::{TemplateToken, tokens};
use super::meter::{Fallible, TemplateFault, Text};
use std::sync::Arc;

/// Deepest nesting of expressions and statements: Python's own limit lies near 100.
const MOST_DEPTH: usize = 200;
/// Most operators, attributes and filters of a statement; each may make its tree deeper by one.
const MOST_OPERATORS: usize = 2000;

/// Reads a template.
pub fn parse(template: &str) -> Fallible<Vec<TemplateLine>> {
    let mut parser =
        TemplateParser { tokens: tokens(template)?, at: 0, depth: 0, operators: 0, reads: [false; 3] };
    let body = parser.body(&[]);
    body.map_err(|what| TemplateFault { what, line: parser.line() })
}

struct TemplateParser {
    tokens: Vec<(TemplateToken, usize)>,
    at: usize,
    depth: usize,
    operators: usize,
    /// True if the innermost macro names `varargs`, `kwargs`, `caller`.
    reads: [bool; 3],
}

type Syntax<T> = Result<T, String>;

fn name(text: &str) -> Identifier {
    Text::new(text)
}

/// Describes a token for an error.
fn words(token: &TemplateToken) -> String {
    match token {
        TemplateToken::Data(_) => "text of the template".into(),
        TemplateToken::VariableBegin => "`{{`".into(),
        TemplateToken::VariableEnd => "`}}`".into(),
        TemplateToken::BlockBegin => "`{%`".into(),
        TemplateToken::BlockEnd => "`%}`".into(),
        TemplateToken::Identifier(name) => format!("`{name}`"),
        TemplateToken::Text(text) => format!("the text {text:?}"),
        TemplateToken::Int(n) => format!("`{n}`"),
        TemplateToken::Float(x) => format!("`{x}`"),
        TemplateToken::Operator(operator) => format!("`{operator}`"),
        TemplateToken::End => "the end of the template".into(),
    }
}

impl TemplateParser {
    fn token(&self) -> &TemplateToken {
        &self.tokens[self.at.min(self.tokens.len() - 1)].0
    }

    fn line(&self) -> usize {
        self.tokens[self.at.min(self.tokens.len() - 1)].1
    }

    fn is_operator(&self, operator: &str) -> bool {
        matches!(self.token(), TemplateToken::Operator(o) if *o == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.token(), TemplateToken::Identifier(n) if n == name)
    }

    fn follows_name(&self, name: &str) -> bool {
        matches!(self.tokens.get(self.at + 1), Some((TemplateToken::Identifier(n), _)) if n == name)
    }

    fn skip_operator(&mut self, operator: &str) -> bool {
        let found = self.is_operator(operator);
        self.at += usize::from(found);
        found
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    fn unexpected<T>(&self, wanted: &str) -> Syntax<T> {
        Err(format!("{wanted} expected, found {}", words(self.token())))
    }

    fn operator(&mut self, operator: &str) -> Syntax<()> {
        if self.skip_operator(operator) { Ok(()) } else { self.unexpected(&format!("`{operator}`")) }
    }

    fn expect(&mut self, token: TemplateToken) -> Syntax<()> {
        if *self.token() != token {
            return self.unexpected(&words(&token));
        }
        self.at += 1;
        Ok(())
    }

    fn any_name(&mut self) -> Syntax<Identifier> {
        let TemplateToken::Identifier(found) = self.token() else { return self.unexpected("a name") };
        let found = name(found);
        self.at += 1;
        Ok(found)
    }

    /// Runs `parse` one level deeper.
    fn deeper<T>(&mut self, parse: impl FnOnce(&mut TemplateParser) -> Syntax<T>) -> Syntax<T> {
        self.depth += 1;
        if self.depth > MOST_DEPTH {
            return Err(format!("nested more than {MOST_DEPTH} deep"));
        }
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    /// Counts an operator, which makes the tree of its statement deeper.
    fn count_operator(&mut self) -> Syntax<()> {
        self.operators += 1;
        match self.operators {
            n if n > MOST_OPERATORS => Err(format!("more than {MOST_OPERATORS} operators in a statement")),
            _ => Ok(()),
        }
    }

    /// Reads statements up to a tag that begins with one of `ends`, or up to the end of the template.
    fn body(&mut self, ends: &[&str]) -> Syntax<Vec<TemplateLine>> {
        let mut lines = Vec::new();
        loop {
            let line = self.line();
            self.operators = 0;
            let statement = match self.token() {
                TemplateToken::Data(text) => {
                    let text = text.as_str().into();
                    self.at += 1;
                    Statement::Text(text)
                }
                TemplateToken::VariableBegin => {
                    self.at += 1;
                    let value = self.tuple(true, &[], false)?;
                    self.expect(TemplateToken::VariableEnd)?;
                    Statement::Print(value)
                }
                TemplateToken::End if ends.is_empty() => return Ok(lines),
                TemplateToken::End => {
                    return Err(format!("`{}` expected before the end of the template", ends.join("` or `")));
                }
                _ => {
                    self.expect(TemplateToken::BlockBegin)?;
                    if ends.iter().any(|end| self.is_name(end)) {
                        return Ok(lines);
                    }
                    let statement = self.deeper(TemplateParser::statement)?;
                    self.expect(TemplateToken::BlockEnd)?;
                    statement
                }
            };
            lines.push(TemplateLine { line, statement });
        }
    }

    /// Reads the rest of a tag and the body behind it, up to and with `end`.
    fn block(&mut self, end: &str) -> Syntax<Vec<TemplateLine>> {
        let body = self.block_to(&[end])?;
        self.at += 1;
        Ok(body)
    }

    /// Reads the rest of a tag and the body behind it, up to one of `ends`.
    fn block_to(&mut self, ends: &[&str]) -> Syntax<Vec<TemplateLine>> {
        self.skip_operator(":");
        self.expect(TemplateToken::BlockEnd)?;
        self.body(ends)
    }

    fn statement(&mut self) -> Syntax<Statement> {
        let tag = self.any_name()?;
        Ok(match &**tag {
            "set" => {
                let target = self.target(&[], true)?;
                if self.skip_operator("=") {
                    Statement::Set(target, self.tuple(true, &[], false)?)
                } else {
                    let filter = match self.is_operator("|") {
                        true => Some(self.filters(Expr::Identifier(name(BODY)))?),
                        false => None,
                    };
                    Statement::SetBlock(target, filter, self.block("endset")?)
                }
            }
            "if" => {
                let mut branches = Vec::new();
                loop {
                    let condition = self.tuple(false, &[], false)?;
                    branches.push((condition, self.block_to(&["elif", "else", "endif"])?));
                    let end = self.any_name()?;
                    match &**end {
                        "elif" => {}
                        "else" => break Statement::If(branches, self.block("endif")?),
                        _ => break Statement::If(branches, Vec::new()),
                    }
                }
            }
            "for" => {
                let target = self.target(&["in"], false)?;
                if !self.skip_name("in") {
                    return self.unexpected("`in`");
                }
                let iterable = self.tuple(false, &["recursive"], false)?;
                let condition = match self.skip_name("if") {
                    true => Some(self.expression()?),
                    false => None,
                };
                let recursive = self.skip_name("recursive");
                let body = self.block_to(&["endfor", "else"])?;
                let otherwise = match self.skip_name("else") {
                    true => self.block("endfor")?,
                    false => {
                        self.at += 1;
                        Vec::new()
                    }
                };
                Statement::For(Arc::new(Loop { target, iterable, condition, recursive, body, otherwise }))
            }
            "macro" => {
                let name = self.any_name()?;
                Statement::Macro(self.macro_body(name, true, |_| Ok(()), "endmacro")?.1)
            }
            "call" => {
                let has_parameters = self.is_operator("(");
                let call = |parser: &mut TemplateParser| match parser.expression()? {
                    call @ Expr::Call(..) => Ok(call),
                    _ => Err("a call expected".into()),
                };
                let (call, body) = self.macro_body(name("caller"), has_parameters, call, "endcall")?;
                Statement::Call(call, body)
            }
            "filter" => {
                let filter = self.filter(Expr::Identifier(name(BODY)))?;
                Statement::FilterBlock(self.filters(filter)?, self.block("endfilter")?)
            }
            "with" => {
                let mut values = Vec::new();
                while *self.token() != TemplateToken::BlockEnd {
                    if !values.is_empty() {
                        self.operator(",")?;
                    }
                    let target = self.target(&[], false)?;
                    self.operator("=")?;
                    values.push((target, self.expression()?));
                }
                Statement::With(values, self.block("endwith")?)
            }
            "generation" => Statement::TemplateScope(self.block("endgeneration")?),
            "block" => {
                let name = self.any_name()?;
                while self.skip_name("scoped") || self.skip_name("required") {}
                let body = self.block("endblock")?;
                self.skip_name(&name);
                Statement::TemplateScope(body)
            }
            "autoescape" => {
                let escapes = !matches!(self.expression()?, Expr::Literal(Literal::Bool(false)));
                let body = self.block("endautoescape")?;
                match escapes {
                    true => Statement::Refused("`autoescape` has no meaning in a chat".into()),
                    false => Statement::TemplateScope(body),
                }
            }
            "print" => {
                let mut values = vec![self.expression()?];
                while self.skip_operator(",") {
                    values.push(self.expression()?);
                }
                Statement::Print(Expr::Concat(values))
            }
            "break" => Statement::Break,
            "continue" => Statement::Continue,
            "extends" | "include" | "import" | "from" => {
                while !matches!(self.token(), TemplateToken::BlockEnd | TemplateToken::End) {
                    self.at += 1;
                }
                Statement::Refused(format!("`{}`: there are no other templates", &**tag))
            }
            other => return Err(format!("unknown tag `{other}`")),
        })
    }

    /// Reads parameters, what `then` reads behind them, and a body up to `end`.
    fn macro_body<T>(
        &mut self,
        name: Identifier,
        has_parameters: bool,
        then: impl FnOnce(&mut TemplateParser) -> Syntax<T>,
        end: &str,
    ) -> Syntax<(T, Arc<MacroBody>)> {
        let mut parameters: Vec<(Identifier, Option<Expr>)> = Vec::new();
        if has_parameters {
            self.operator("(")?;
            while !self.is_operator(")") {
                if !parameters.is_empty() {
                    self.operator(",")?;
                }
                let parameter = self.any_name()?;
                let default = match self.skip_operator("=") {
                    true => Some(self.expression()?),
                    false if parameters.iter().any(|(_, default)| default.is_some()) => {
                        return Err("a parameter without a default behind one with a default".into());
                    }
                    false => None,
                };
                parameters.push((parameter, default));
            }
            self.operator(")")?;
        }
        let then = then(self)?;
        let outer = std::mem::take(&mut self.reads);
        let body = self.block(end)?;
        let reads = std::mem::replace(&mut self.reads, outer);
        // A name in a macro within a macro counts for both.
        self.reads.iter_mut().zip(reads).for_each(|(outer, inner)| *outer |= inner);
        Ok((then, Arc::new(MacroBody { name, parameters, body, reads })))
    }

    fn target(&mut self, ends: &[&str], attributes: bool) -> Syntax<AssignTarget> {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            if self.ends_tuple(ends) || self.is_operator("=") && is_tuple {
                break;
            }
            targets.push(if self.skip_operator("(") {
                let target = self.deeper(|p| p.target(&[], attributes))?;
                self.operator(")")?;
                target
            } else {
                let name = self.any_name()?;
                match attributes && self.skip_operator(".") {
                    true => AssignTarget::Attribute(name, self.any_name()?),
                    false if ["true", "false", "none", "True", "False", "None"].contains(&&**name) => {
                        return Err(format!("`{}` cannot be set", &**name));
                    }
                    false => AssignTarget::Identifier(name),
                }
            });
            if !self.skip_operator(",") {
                break;
            }
            is_tuple = true;
        }
        match targets.pop() {
            Some(target) if !is_tuple => Ok(target),
            None => self.unexpected("a name"),
            Some(last) => {
                targets.push(last);
                Ok(AssignTarget::Tuple(targets))
            }
        }
    }

    fn ends_tuple(&self, ends: &[&str]) -> bool {
        matches!(self.token(), TemplateToken::VariableEnd | TemplateToken::BlockEnd)
            || self.is_operator(")")
            || ends.iter().any(|end| self.is_name(end))
    }

    /// Reads an expression, or several with commas as a tuple.
    fn tuple(&mut self, with_condition: bool, ends: &[&str], may_be_empty: bool) -> Syntax<Expr> {
        let mut values = Vec::new();
        let mut is_tuple = may_be_empty;
        while !self.ends_tuple(ends) {
            values.push(if with_condition { self.expression()? } else { self.deeper(TemplateParser::or)? });
            if !self.skip_operator(",") {
                is_tuple &= values.len() != 1;
                break;
            }
            is_tuple = true;
        }
        match values.pop() {
            Some(value) if !is_tuple => Ok(value),
            None if !is_tuple => self.unexpected("an expression"),
            value => {
                values.extend(value);
                Ok(Expr::Tuple(values))
            }
        }
    }

    fn expression(&mut self) -> Syntax<Expr> {
        self.deeper(|parser| {
            let mut value = parser.or()?;
            while parser.skip_name("if") {
                parser.count_operator()?;
                let condition = parser.or()?;
                let other = match parser.skip_name("else") {
                    true => Some(Box::new(parser.expression()?)),
                    false => None,
                };
                value = Expr::Either(Box::new(condition), Box::new(value), other);
            }
            Ok(value)
        })
    }

    /// Reads operands with operators between them, which bind from the left.
    fn chain(
        &mut self,
        operand: fn(&mut TemplateParser) -> Syntax<Expr>,
        operator: impl Fn(&mut TemplateParser) -> Option<fn(Box<Expr>, Box<Expr>) -> Expr>,
    ) -> Syntax<Expr> {
        let mut left = operand(self)?;
        while let Some(join) = operator(self) {
            self.count_operator()?;
            left = join(Box::new(left), Box::new(operand(self)?));
        }
        Ok(left)
    }

    fn or(&mut self) -> Syntax<Expr> {
        self.chain(TemplateParser::and, |p| p.skip_name("or").then_some(Expr::Or))
    }

    fn and(&mut self) -> Syntax<Expr> {
        self.chain(TemplateParser::not, |p| p.skip_name("and").then_some(Expr::And))
    }

    fn not(&mut self) -> Syntax<Expr> {
        if self.skip_name("not") {
            return Ok(Expr::Not(Box::new(self.deeper(TemplateParser::not)?)));
        }
        self.comparison()
    }

    fn comparison(&mut self) -> Syntax<Expr> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let found = match self.token() {
                TemplateToken::Operator("==") => CompareOp::Eq,
                TemplateToken::Operator("!=") => CompareOp::Ne,
                TemplateToken::Operator("<") => CompareOp::Lt,
                TemplateToken::Operator("<=") => CompareOp::Le,
                TemplateToken::Operator(">") => CompareOp::Gt,
                TemplateToken::Operator(">=") => CompareOp::Ge,
                _ if self.is_name("in") => CompareOp::In,
                _ if self.is_name("not") && self.follows_name("in") => {
                    self.at += 1;
                    CompareOp::NotIn
                }
                _ if rest.is_empty() => return Ok(first),
                _ => return Ok(Expr::Compare(Box::new(first), rest)),
            };
            self.at += 1;
            rest.push((found, self.sum()?));
        }
    }

    fn sum(&mut self) -> Syntax<Expr> {
        self.chain(TemplateParser::concatenation, |p| match () {
            () if p.skip_operator("+") => Some(|l, r| Expr::Binary(Operator::Add, l, r)),
            () if p.skip_operator("-") => Some(|l, r| Expr::Binary(Operator::Sub, l, r)),
            () => None,
        })
    }

    fn concatenation(&mut self) -> Syntax<Expr> {
        let first = self.product()?;
        if !self.is_operator("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_operator("~") {
            parts.push(self.product()?);
        }
        Ok(Expr::Concat(parts))
    }

    fn product(&mut self) -> Syntax<Expr> {
        self.chain(TemplateParser::power, |p| match () {
            () if p.skip_operator("*") => Some(|l, r| Expr::Binary(Operator::Mul, l, r)),
            () if p.skip_operator("/") => Some(|l, r| Expr::Binary(Operator::Div, l, r)),
            () if p.skip_operator("//") => Some(|l, r| Expr::Binary(Operator::FloorDiv, l, r)),
            () if p.skip_operator("%") => Some(|l, r| Expr::Binary(Operator::Mod, l, r)),
            () => None,
        })
    }

    fn power(&mut self) -> Syntax<Expr> {
        self.chain(
            |p| p.unary(true),
            |p| match p.skip_operator("**") {
                true => Some(|l, r| Expr::Binary(Operator::Pow, l, r)),
                false => None,
            },
        )
    }

    fn unary(&mut self, with_filter: bool) -> Syntax<Expr> {
        let is_minus = self.is_operator("-");
        let value = match is_minus || self.is_operator("+") {
            true => {
                self.at += 1;
                Expr::Sign(is_minus, Box::new(self.deeper(|p| p.unary(false))?))
            }
            false => self.primary()?,
        };
        let mut value = self.postfix(value)?;
        if !with_filter {
            return Ok(value);
        }
        loop {
            value = if self.is_operator("|") {
                self.filters(value)?
            } else if self.is_name("is") {
                self.test(value)?
            } else if self.is_operator("(") {
                Expr::Call(Box::new(value), self.arguments()?)
            } else {
                return Ok(value);
            };
            self.count_operator()?;
        }
    }

    fn primary(&mut self) -> Syntax<Expr> {
        let token = self.token().clone();
        match token {
            TemplateToken::Operator("(") => {
                self.at += 1;
                let value = self.tuple(true, &[], true)?;
                self.operator(")")?;
                return Ok(value);
            }
            TemplateToken::Operator("[") => {
                self.at += 1;
                return Ok(Expr::List(self.list("]", TemplateParser::expression)?));
            }
            TemplateToken::Operator("{") => {
                self.at += 1;
                let pair = |parser: &mut TemplateParser| {
                    let key = parser.expression()?;
                    parser.operator(":")?;
                    Ok((key, parser.expression()?))
                };
                return Ok(Expr::Dict(self.list("}", pair)?));
            }
            _ => self.at += 1,
        }
        Ok(Expr::Literal(match token {
            TemplateToken::Identifier(found) => match found.as_str() {
                "true" | "True" => Literal::Bool(true),
                "false" | "False" => Literal::Bool(false),
                "none" | "None" => Literal::None,
                found => {
                    let special = ["varargs", "kwargs", "caller"].iter().position(|s| *s == found);
                    special.into_iter().for_each(|i| self.reads[i] = true);
                    return Ok(Expr::Identifier(name(found)));
                }
            },
            TemplateToken::Text(mut text) => {
                while let TemplateToken::Text(more) = self.token() {
                    text += more;
                    self.at += 1;
                }
                Literal::Text(Text::new(text))
            }
            TemplateToken::Int(n) => Literal::Int(n),
            TemplateToken::Float(x) => Literal::Float(x),
            _ => {
                self.at -= 1;
                return self.unexpected("an expression");
            }
        }))
    }

    /// Reads things with commas between them, and the operator that ends them. The operators of one of them make the tree no
    /// deeper for the others.
    fn list<T>(
        &mut self,
        end: &str,
        mut one: impl FnMut(&mut TemplateParser) -> Syntax<T>,
    ) -> Syntax<Vec<T>> {
        let mut values = Vec::new();
        let (before, mut most) = (self.operators, self.operators);
        while !self.is_operator(end) {
            if !values.is_empty() {
                self.operator(",")?;
                if self.is_operator(end) {
                    break;
                }
            }
            self.operators = before;
            values.push(one(self)?);
            most = most.max(self.operators);
        }
        self.operators = most;
        self.at += 1;
        Ok(values)
    }

    fn postfix(&mut self, mut value: Expr) -> Syntax<Expr> {
        loop {
            value = if self.skip_operator(".") {
                match self.token().clone() {
                    TemplateToken::Identifier(attribute) => {
                        self.at += 1;
                        Expr::Attribute(Box::new(value), name(&attribute))
                    }
                    TemplateToken::Int(n) => {
                        self.at += 1;
                        Expr::Item(Box::new(value), Box::new(Expr::Literal(Literal::Int(n))))
                    }
                    _ => return self.unexpected("a name or a number"),
                }
            } else if self.skip_operator("[") {
                let item = self.subscript(value)?;
                self.operator("]")?;
                item
            } else if self.is_operator("(") {
                Expr::Call(Box::new(value), self.arguments()?)
            } else {
                return Ok(value);
            };
            self.count_operator()?;
        }
    }

    fn subscript(&mut self, value: Expr) -> Syntax<Expr> {
        let value = Box::new(value);
        let mut bounds = [None, None, None];
        let mut n = 0;
        loop {
            if self.skip_operator(":") {
                n += 1;
                if n > 2 {
                    return self.unexpected("`]`");
                }
            } else if self.is_operator("]") && n > 0 {
                return Ok(Expr::Slice(value, bounds));
            } else if self.is_operator(",") && n == 0 && bounds[0].is_some() {
                let mut values: Vec<Expr> = bounds[0].take().map(|b: Box<Expr>| *b).into_iter().collect();
                while self.skip_operator(",") {
                    values.push(self.expression()?);
                }
                return Ok(Expr::Item(value, Box::new(Expr::Tuple(values))));
            } else if bounds[n].is_some() {
                return match (n, bounds) {
                    (0, [Some(item), ..]) if self.is_operator("]") => Ok(Expr::Item(value, item)),
                    _ => self.unexpected("`]`"),
                };
            } else {
                bounds[n] = Some(Box::new(self.expression()?));
            }
        }
    }

    fn arguments(&mut self) -> Syntax<Arguments> {
        self.operator("(")?;
        let mut arguments = Arguments::default();
        self.list(")", |parser| {
            let is_named = matches!(parser.token(), TemplateToken::Identifier(_))
                && matches!(parser.tokens.get(parser.at + 1), Some((TemplateToken::Operator("="), _)));
            if parser.skip_operator("*") {
                arguments.list = Some(Box::new(parser.expression()?));
            } else if parser.skip_operator("**") {
                arguments.map = Some(Box::new(parser.expression()?));
            } else if is_named {
                let name = parser.any_name()?;
                parser.at += 1;
                arguments.named.push((name, parser.expression()?));
            } else if arguments.named.is_empty() && arguments.list.is_none() && arguments.map.is_none() {
                arguments.positional.push(parser.expression()?);
            } else {
                return Err("a positional argument behind a named one".into());
            }
            Ok(())
        })?;
        Ok(arguments)
    }

    /// Reads filters, each behind its `|`.
    fn filters(&mut self, mut value: Expr) -> Syntax<Expr> {
        while self.skip_operator("|") {
            self.count_operator()?;
            value = self.filter(value)?;
        }
        Ok(value)
    }

    fn filter(&mut self, value: Expr) -> Syntax<Expr> {
        let name = self.any_name()?;
        let arguments = match self.is_operator("(") {
            true => self.arguments()?,
            false => Arguments::default(),
        };
        Ok(Expr::Filter(Box::new(value), name, arguments))
    }

    fn test(&mut self, value: Expr) -> Syntax<Expr> {
        self.at += 1;
        let negated = self.skip_name("not");
        let name = self.any_name()?;
        let begins_value = match self.token() {
            TemplateToken::Identifier(found) if found == "is" => {
                return Err("tests with `is` in a row".into());
            }
            TemplateToken::Identifier(found) => !["else", "or", "and"].contains(&found.as_str()),
            TemplateToken::Text(_)
            | TemplateToken::Int(_)
            | TemplateToken::Float(_)
            | TemplateToken::Operator("[" | "{") => true,
            _ => false,
        };
        let arguments = if self.is_operator("(") {
            self.arguments()?
        } else if begins_value {
            let value = self.primary()?;
            Arguments { positional: vec![self.postfix(value)?], ..Arguments::default() }
        } else {
            Arguments::default()
        };
        let test = Expr::Test(Box::new(value), name, arguments);
        Ok(if negated { Expr::Not(Box::new(test)) } else { test })
    }
}
