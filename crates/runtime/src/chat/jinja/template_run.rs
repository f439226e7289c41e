//! Runs the tree of a template.

use super::arguments::GivenArguments;
use super::ast::{
    Arguments, AssignTarget, BODY, CompareOp, Expr, Identifier, Loop, MacroBody, Statement, TemplateLine,
};
use super::calls::{FUNCTIONS, call_function, call_method};
use super::checks::check;
use super::filters::filter;
use super::items::{attribute, item, slice};
use super::meter::{Fallible, TemplateFault, Text, TextOut, fail, hold, release, spend};
use super::operators::{holds, operate};
use super::print::print;
use super::py_value::{Dict, LoopState, Macro, PyValue, PyValues, TemplateScope, depth_of, undefined};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Deepest nesting of running expressions, statements and macros.
const MOST_DEPTH: usize = 3000;
/// Bytes of a variable beside its value.
const VARIABLE_BYTES: usize = 96;

/// Bytes of a scope or a namespace beside its variables.
const SCOPE_BYTES: usize = 256;

/// Effect of a statement on the loop around it.
enum Next {
    Statement,
    Break,
    Continue,
}

/// A running template.
pub struct TemplateRun {
    out: Vec<TextOut>,
    line: usize,
    depth: usize,
    /// Scopes and namespaces that may hold themselves; they are emptied at the end.
    scopes: Vec<Rc<TemplateScope>>,
    namespaces: Vec<Rc<RefCell<Dict>>>,
}

/// Returns a variable of a scope, or of one around it.
fn lookup(scope: &Rc<TemplateScope>, name: &str) -> Option<PyValue> {
    let mut scope = Some(scope);
    while let Some(here) = scope {
        let variables = here.variables.borrow();
        if let Some((_, value)) = variables.iter().find(|(known, _)| &***known == name) {
            return Some(value.clone());
        }
        drop(variables);
        scope = here.outer.as_ref();
    }
    None
}

fn set(scope: &Rc<TemplateScope>, name: &Identifier, value: PyValue) {
    let mut variables = scope.variables.borrow_mut();
    let old = match variables.iter_mut().find(|(known, _)| ***known == ***name) {
        Some((_, known)) => Some(std::mem::replace(known, value)),
        None => {
            variables.push((name.clone(), value));
            hold(VARIABLE_BYTES);
            None
        }
    };
    // A value that goes may hold this scope.
    drop(variables);
    drop(old);
}

impl Drop for TemplateScope {
    fn drop(&mut self) {
        release(VARIABLE_BYTES * self.variables.get_mut().len());
    }
}

fn inner(scope: &Rc<TemplateScope>) -> Rc<TemplateScope> {
    Rc::new(TemplateScope { variables: RefCell::default(), outer: Some(scope.clone()) })
}

/// Runs a template with its variables, and returns its text.
pub fn run(body: &[TemplateLine], variables: Vec<(Identifier, PyValue)>) -> Fallible<String> {
    let mut it = TemplateRun {
        out: vec![TextOut::default()],
        line: 0,
        depth: 0,
        scopes: Vec::new(),
        namespaces: Vec::new(),
    };
    let globals = Rc::new(TemplateScope { variables: RefCell::new(variables), outer: None });
    let done = it.body(body, &inner(&globals));
    for scope in &it.scopes {
        drop(scope.variables.take());
    }
    for namespace in &it.namespaces {
        drop(namespace.take());
    }
    match done {
        Ok(_) => Ok(it.out.swap_remove(0).finish()),
        Err(fault) => Err(TemplateFault { line: if fault.line > 0 { fault.line } else { it.line }, ..fault }),
    }
}

impl TemplateRun {
    fn write(&mut self, value: &PyValue) -> Fallible<()> {
        self.out.last_mut().map_or(Ok(()), |out| print(value, out))
    }

    /// Keeps a scope that a macro sees up to the end.
    fn keep(&mut self, scope: &Rc<TemplateScope>) {
        if self.scopes.last().is_none_or(|last| !Rc::ptr_eq(last, scope)) {
            self.scopes.push(scope.clone());
            hold(SCOPE_BYTES);
        }
    }

    /// Runs `f` and returns what it writes.
    fn captured(&mut self, f: impl FnOnce(&mut TemplateRun) -> Fallible<()>) -> Fallible<PyValue> {
        self.out.push(TextOut::default());
        let done = f(self);
        let text = self.out.pop().map(TextOut::finish).unwrap_or_default();
        done?;
        Ok(PyValue::text(text))
    }

    fn deeper<T>(&mut self, f: impl FnOnce(&mut TemplateRun) -> Fallible<T>) -> Fallible<T> {
        spend(1)?;
        self.depth += 1;
        if self.depth > MOST_DEPTH {
            return fail(format!("nested more than {MOST_DEPTH} deep"));
        }
        let done = f(self);
        self.depth -= 1;
        done
    }

    fn body(&mut self, lines: &[TemplateLine], scope: &Rc<TemplateScope>) -> Fallible<Next> {
        for TemplateLine { line, statement } in lines {
            self.line = *line;
            match self.deeper(|it| it.statement(statement, scope))? {
                Next::Statement => {}
                next => return Ok(next),
            }
        }
        Ok(Next::Statement)
    }

    fn statement(&mut self, statement: &Statement, scope: &Rc<TemplateScope>) -> Fallible<Next> {
        match statement {
            Statement::Text(text) => {
                self.out.last_mut().map_or(Ok(()), |out| out.push(text))?;
            }
            Statement::Print(value) => {
                let value = self.value(value, scope)?;
                self.write(&value)?;
            }
            Statement::Set(target, value) => {
                let value = self.value(value, scope)?;
                self.assign(target, value, scope)?;
            }
            Statement::SetBlock(target, filter, body) => {
                let text = self.filtered(filter.as_ref(), body, scope)?;
                self.assign(target, text, scope)?;
            }
            Statement::FilterBlock(filter, body) => {
                let text = self.filtered(Some(filter), body, scope)?;
                self.write(&text)?;
            }
            Statement::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.value(condition, scope)?.is_true() {
                        return self.body(body, scope);
                    }
                }
                return self.body(otherwise, scope);
            }
            Statement::For(of) => {
                let iterable = self.value(&of.iterable, scope)?;
                self.for_loop(of, iterable, scope, 0)?;
            }
            Statement::Macro(body) => {
                self.keep(scope);
                set(
                    scope,
                    &body.name,
                    PyValue::Macro(Rc::new(Macro { body: body.clone(), scope: scope.clone() })),
                );
            }
            Statement::Call(call, body) => {
                self.keep(scope);
                let caller = PyValue::Macro(Rc::new(Macro { body: body.clone(), scope: scope.clone() }));
                let Expr::Call(callee, arguments) = call else { return fail("a call expected") };
                let callee = self.value(callee, scope)?;
                let mut given = self.given(arguments, scope)?;
                given.named.push((Text::new("caller"), caller));
                let text = self.call(&callee, &given)?;
                self.write(&text)?;
            }
            Statement::With(values, body) => {
                let within = inner(scope);
                for (target, value) in values {
                    let value = self.value(value, scope)?;
                    self.assign(target, value, &within)?;
                }
                return self.body(body, &within);
            }
            Statement::TemplateScope(body) => return self.body(body, &inner(scope)),
            Statement::Break => return Ok(Next::Break),
            Statement::Continue => return Ok(Next::Continue),
            Statement::Refused(what) => return fail(what),
        }
        Ok(Next::Statement)
    }

    /// Returns the text of a body, through a filter.
    fn filtered(
        &mut self,
        filter: Option<&Expr>,
        body: &[TemplateLine],
        scope: &Rc<TemplateScope>,
    ) -> Fallible<PyValue> {
        let within = inner(scope);
        let text = self.captured(|it| it.body(body, &within).map(|_| ()))?;
        let Some(filter) = filter else { return Ok(text) };
        let within = inner(scope);
        set(&within, &Text::new(BODY), text);
        self.value(filter, &within)
    }

    fn assign(&mut self, target: &AssignTarget, value: PyValue, scope: &Rc<TemplateScope>) -> Fallible<()> {
        match target {
            AssignTarget::Identifier(name) => set(scope, name, value),
            AssignTarget::Attribute(name, attribute) => match lookup(scope, name) {
                Some(PyValue::Namespace(namespace)) => {
                    if attribute.starts_with('_') {
                        return fail(format!("a namespace has no attribute `{}`", &***attribute));
                    }
                    namespace.borrow_mut().set(PyValue::Str(attribute.clone()), value)?;
                }
                _ => return fail("cannot assign attribute on non-namespace object"),
            },
            AssignTarget::Tuple(targets) => {
                let values = value.to_vec()?;
                if values.len() != targets.len() {
                    let (wanted, found) = (targets.len(), values.len());
                    return fail(format!("{wanted} values to unpack expected, found {found}"));
                }
                for (target, value) in targets.iter().zip(values) {
                    self.assign(target, value, scope)?;
                }
            }
        }
        Ok(())
    }

    fn for_loop(
        &mut self,
        of: &Arc<Loop>,
        iterable: PyValue,
        scope: &Rc<TemplateScope>,
        depth: usize,
    ) -> Fallible<()> {
        let length = iterable.length().filter(|_| of.condition.is_none());
        let state = Rc::new(LoopState {
            of: of.clone(),
            scope: scope.clone(),
            rest: RefCell::new(iterable.values()?),
            length: Cell::new(length),
            index: Cell::new(0),
            depth,
            before: RefCell::default(),
            current: RefCell::default(),
            after: RefCell::default(),
            changed: RefCell::default(),
            nesting: Cell::new(depth_of(&iterable)? + 1),
        });
        let name = Text::new("loop");
        loop {
            let next = match state.after.take() {
                Some(next) => Some(next),
                None => self.next_of(&state)?,
            };
            let Some(next) = next else { break };
            state.index.set(state.index.get() + 1);
            let before = state.current.replace(Some(next.clone()));
            state.before.replace(before);
            let within = inner(scope);
            set(&within, &name, PyValue::Loop(state.clone()));
            self.assign(&of.target, next, &within)?;
            if let Next::Break = self.body(&of.body, &within)? {
                return Ok(());
            }
        }
        if state.index.get() == 0 {
            self.body(&of.otherwise, &inner(scope))?;
        }
        Ok(())
    }

    /// Returns the next element that passes the loop's condition.
    fn next_of(&mut self, state: &LoopState) -> Fallible<Option<PyValue>> {
        loop {
            // An iteration makes a scope with two variables.
            spend(4)?;
            let next = state.rest.borrow_mut().next();
            let (Some(next), Some(condition)) = (&next, &state.of.condition) else { return Ok(next) };
            let within = inner(&state.scope);
            self.assign(&state.of.target, next.clone(), &within)?;
            if self.value(condition, &within)?.is_true() {
                return Ok(Some(next.clone()));
            }
        }
    }

    /// Returns an attribute of `loop`; none where it has no such one.
    fn of_loop(&mut self, state: &Rc<LoopState>, name: &str) -> Fallible<Option<PyValue>> {
        let int = |n: usize| Ok(Some(PyValue::Int(n as i128)));
        let index = state.index.get();
        match name {
            "index" => int(index),
            "index0" => int(index.saturating_sub(1)),
            "first" => Ok(Some(PyValue::Bool(index == 1))),
            "depth" => int(state.depth + 1),
            "depth0" => int(state.depth),
            "last" | "nextitem" => {
                if state.after.borrow().is_none() {
                    let next = self.next_of(state)?;
                    state.after.replace(next);
                }
                let next = state.after.borrow().clone();
                Ok(Some(match name {
                    "last" => PyValue::Bool(next.is_none()),
                    _ => next.unwrap_or_else(|| undefined("there is no next item")),
                }))
            }
            "previtem" => {
                let before = state.before.borrow().clone();
                Ok(Some(before.unwrap_or_else(|| undefined("there is no previous item"))))
            }
            "length" | "revindex" | "revindex0" => {
                if state.length.get().is_none() {
                    let mut rest = Vec::new();
                    while let Some(next) = self.next_of(state)? {
                        rest.push(next);
                    }
                    let after = usize::from(state.after.borrow().is_some());
                    state.length.set(Some(index + after + rest.len()));
                    // They have passed the condition; a second pass gives the same.
                    state.rest.replace(PyValues::Own(rest.into_iter()));
                }
                let length = state.length.get().unwrap_or(0);
                int(match name {
                    "length" => length,
                    "revindex" => length + 1 - index,
                    _ => length - index,
                })
            }
            _ => Ok(None),
        }
    }

    fn given(&mut self, arguments: &Arguments, scope: &Rc<TemplateScope>) -> Fallible<GivenArguments> {
        let mut given = GivenArguments::default();
        for value in &arguments.positional {
            given.positional.push(self.value(value, scope)?);
        }
        for (name, value) in &arguments.named {
            given.named.push((name.clone(), self.value(value, scope)?));
        }
        if let Some(list) = &arguments.list {
            given.positional.extend(self.value(list, scope)?.to_vec()?);
        }
        if let Some(map) = &arguments.map {
            match self.value(map, scope)? {
                PyValue::Dict(dict) => {
                    for (name, value) in dict.entries() {
                        let PyValue::Str(name) = name else { return fail("keywords must be strings") };
                        given.named.push((name.clone(), value.clone()));
                    }
                }
                other => {
                    return fail(format!("argument after ** must be a mapping, not {}", other.type_name()));
                }
            }
        }
        Ok(given)
    }

    fn call(&mut self, callee: &PyValue, given: &GivenArguments) -> Fallible<PyValue> {
        match callee {
            PyValue::Method(method) => call_method(&method.0, &method.1, given),
            PyValue::Function(name) => {
                let value = call_function(name, given)?;
                if let PyValue::Namespace(namespace) = &value {
                    self.namespaces.push(namespace.clone());
                    hold(SCOPE_BYTES);
                }
                Ok(value)
            }
            PyValue::Macro(called) => self.call_macro(called, given),
            PyValue::Joiner(turns) => {
                given.bind::<0>("joiner", [])?;
                Ok(if turns.at.replace(1) == 1 { turns.values[0].clone() } else { PyValue::text("") })
            }
            PyValue::Loop(state) if state.of.recursive => {
                let of = given.one("loop")?;
                let (state, scope) = (state.clone(), state.scope.clone());
                self.captured(|it| it.deeper(|it| it.for_loop(&state.of, of, &scope, state.depth + 1)))
            }
            PyValue::Loop(_) => fail("The loop must have the 'recursive' marker to be called recursively."),
            other => {
                other.defined()?;
                fail(format!("'{}' object is not callable", other.type_name()))
            }
        }
    }

    fn call_macro(&mut self, called: &Macro, given: &GivenArguments) -> Fallible<PyValue> {
        let MacroBody { name, parameters, body, reads } = &*called.body;
        let scope = inner(&called.scope);
        let mut named = given.named.clone();
        let mut take = |name: &str| {
            let at = named.iter().position(|(known, _)| &***known == name)?;
            Some(named.remove(at).1)
        };
        let mut defaults = Vec::new();
        for (i, (parameter, default)) in parameters.iter().enumerate() {
            match (given.positional.get(i).cloned().or_else(|| take(parameter)), default) {
                (Some(value), _) => set(&scope, parameter, value),
                (None, Some(default)) => defaults.push((parameter, default)),
                (None, None) => {
                    let what = format!("parameter '{}' was not provided", &***parameter);
                    set(&scope, parameter, undefined(what));
                }
            }
        }
        let [varargs, kwargs, caller] = *reads;
        if caller && !parameters.iter().any(|(name, _)| &***name == "caller") {
            let caller = take("caller").unwrap_or_else(|| undefined("No caller defined"));
            set(&scope, &Text::new("caller"), caller);
        }
        let rest = given.positional.get(parameters.len()..).unwrap_or_default();
        if varargs {
            set(&scope, &Text::new("varargs"), PyValue::tuple(rest.to_vec())?);
        } else if !rest.is_empty() {
            return fail(format!(
                "macro '{}' takes not more than {} argument(s)",
                &***name,
                parameters.len()
            ));
        }
        if kwargs {
            let pairs = named.into_iter().map(|(name, value)| (PyValue::Str(name), value));
            set(&scope, &Text::new("kwargs"), PyValue::dict(pairs)?);
        } else if let Some((wrong, _)) = named.first() {
            return fail(format!("macro '{}' takes no keyword argument '{}'", &***name, &***wrong));
        }
        for (parameter, default) in defaults {
            let value = self.value(default, &scope)?;
            set(&scope, parameter, value);
        }
        let line = self.line;
        let text = self.captured(|it| it.body(body, &scope).map(|_| ()))?;
        self.line = line;
        Ok(text)
    }

    fn value(&mut self, expr: &Expr, scope: &Rc<TemplateScope>) -> Fallible<PyValue> {
        self.deeper(|it| match expr {
            Expr::Literal(literal) => Ok(PyValue::literal(literal)),
            Expr::Identifier(name) => Ok(lookup(scope, name).unwrap_or_else(|| {
                match FUNCTIONS.iter().find(|known| **known == &***name) {
                    Some(function) => PyValue::Function(function),
                    None => undefined(format!("'{}' is undefined", &***name)),
                }
            })),
            Expr::List(values) => PyValue::list(it.all(values, scope)?),
            Expr::Tuple(values) => PyValue::tuple(it.all(values, scope)?),
            Expr::Dict(pairs) => {
                let mut dict = Dict::default();
                for (key, value) in pairs {
                    dict.set(it.value(key, scope)?, it.value(value, scope)?)?;
                }
                Ok(PyValue::Dict(Rc::new(dict)))
            }
            Expr::Attribute(of, name) => {
                let of = it.value(of, scope)?;
                if let PyValue::Loop(state) = &of
                    && let Some(found) = it.of_loop(state, name)?
                {
                    return Ok(found);
                }
                attribute(&of, name)
            }
            Expr::Item(of, key) => {
                let of = it.value(of, scope)?;
                let key = it.value(key, scope)?;
                if let (PyValue::Loop(state), Some(name)) = (&of, key.as_str())
                    && let Some(found) = it.of_loop(state, name)?
                {
                    return Ok(found);
                }
                item(&of, &key)
            }
            Expr::Slice(of, bounds) => {
                let of = it.value(of, scope)?;
                let mut values = [None, None, None];
                for (value, bound) in values.iter_mut().zip(bounds) {
                    *value = bound.as_ref().map(|bound| it.value(bound, scope)).transpose()?;
                }
                slice(&of, &values)
            }
            Expr::Call(callee, arguments) => {
                let callee = it.value(callee, scope)?;
                let given = it.given(arguments, scope)?;
                it.call(&callee, &given)
            }
            Expr::Filter(value, name, arguments) => {
                let value = it.value(value, scope)?;
                let given = it.given(arguments, scope)?;
                filter(name, &value, &given)
            }
            Expr::Test(value, name, arguments) => {
                let value = it.value(value, scope)?;
                let given = it.given(arguments, scope)?;
                check(name, &value, &given).map(PyValue::Bool)
            }
            Expr::Not(value) => Ok(PyValue::Bool(!it.value(value, scope)?.is_true())),
            Expr::Sign(is_minus, value) => {
                let value = it.value(value, scope)?;
                match (value.defined()?.as_int(), value.as_float()) {
                    (Some(n), _) if *is_minus => n
                        .checked_neg()
                        .map_or_else(|| fail("a number that is too large"), |n| Ok(PyValue::Int(n))),
                    (Some(n), _) => Ok(PyValue::Int(n)),
                    (_, Some(x)) => Ok(PyValue::Float(if *is_minus { -x } else { x })),
                    _ => {
                        let (sign, kind) = (if *is_minus { '-' } else { '+' }, value.type_name());
                        fail(format!("bad operand type for unary {sign}: '{kind}'"))
                    }
                }
            }
            Expr::And(a, b) => {
                let a = it.value(a, scope)?;
                if a.is_true() { it.value(b, scope) } else { Ok(a) }
            }
            Expr::Or(a, b) => {
                let a = it.value(a, scope)?;
                if a.is_true() { Ok(a) } else { it.value(b, scope) }
            }
            Expr::Either(condition, value, otherwise) => {
                match (it.value(condition, scope)?.is_true(), otherwise) {
                    (true, _) => it.value(value, scope),
                    (false, Some(otherwise)) => it.value(otherwise, scope),
                    (false, None) => Ok(undefined(
                        "the inline if-expression evaluated to false and no else section was defined.",
                    )),
                }
            }
            Expr::Binary(operator, a, b) => {
                let a = it.value(a, scope)?;
                let b = it.value(b, scope)?;
                operate(*operator, &a, &b)
            }
            Expr::Concat(parts) => {
                let parts = it.all(parts, scope)?;
                let mut out = TextOut::default();
                parts.iter().try_for_each(|part| print(part, &mut out))?;
                Ok(PyValue::text(out.finish()))
            }
            Expr::Compare(first, rest) => it.comparison(first, rest, scope),
        })
    }

    fn all(&mut self, exprs: &[Expr], scope: &Rc<TemplateScope>) -> Fallible<Vec<PyValue>> {
        exprs.iter().map(|expr| self.value(expr, scope)).collect()
    }

    fn comparison(
        &mut self,
        first: &Expr,
        rest: &[(CompareOp, Expr)],
        scope: &Rc<TemplateScope>,
    ) -> Fallible<PyValue> {
        let mut left = self.value(first, scope)?;
        for (comparison, right) in rest {
            let right = self.value(right, scope)?;
            if !holds(*comparison, &left, &right)? {
                return Ok(PyValue::Bool(false));
            }
            left = right;
        }
        Ok(PyValue::Bool(true))
    }
}
