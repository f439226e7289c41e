//! Values that a function, method, filter or test is called with.

use super::ast::Identifier;
use super::meter::{Fallible, fail};
use super::print::printed;
use super::py_value::PyValue;

/// Evaluated arguments.
#[derive(Clone, Default)]
pub struct GivenArguments {
    pub positional: Vec<PyValue>,
    pub named: Vec<(Identifier, PyValue)>,
}

impl GivenArguments {
    /// Returns the value of each parameter in `names`; none where it was not given.
    pub fn bind<const N: usize>(&self, function: &str, names: [&str; N]) -> Fallible<[Option<PyValue>; N]> {
        let mut bound = [const { None }; N];
        if self.positional.len() > N {
            return fail(format!(
                "{function}() takes {N} arguments but {} were given",
                self.positional.len()
            ));
        }
        for (slot, value) in bound.iter_mut().zip(&self.positional) {
            *slot = Some(value.clone());
        }
        for (name, value) in &self.named {
            match names.iter().position(|known| *known == &***name) {
                Some(i) if bound[i].is_none() => bound[i] = Some(value.clone()),
                Some(_) => {
                    return fail(format!("{function}() got multiple values for argument '{}'", &***name));
                }
                None => {
                    return fail(format!("{function}() got an unexpected keyword argument '{}'", &***name));
                }
            }
        }
        Ok(bound)
    }

    /// Returns the single value that `function` takes.
    pub fn one(&self, function: &str) -> Fallible<PyValue> {
        match (&self.positional[..], self.named.is_empty()) {
            ([value], true) => Ok(value.clone()),
            _ => fail(format!("{function}() takes exactly one argument")),
        }
    }
}

/// Returns a whole number that was given, or the default.
pub fn int_or(given: &Option<PyValue>, default: i128) -> Fallible<i128> {
    match given {
        None => Ok(default),
        Some(value) => match value.defined()?.as_int() {
            Some(n) => Ok(n),
            None => fail(format!("'{}' object cannot be interpreted as an integer", value.type_name())),
        },
    }
}

/// Returns a text that was given; none where `None` or nothing was.
pub fn text_or_none(given: &Option<PyValue>) -> Fallible<Option<&str>> {
    match given {
        None | Some(PyValue::None) => Ok(None),
        Some(value) => match value.defined()?.as_str() {
            Some(text) => Ok(Some(text)),
            None => fail(format!("a text expected, not {}", value.type_name())),
        },
    }
}

/// Returns a text that must be given.
pub fn text_of<'a>(given: &'a Option<PyValue>, name: &str) -> Fallible<&'a str> {
    text_or_none(given)?.map_or_else(|| fail(format!("argument `{name}` must be a text")), Ok)
}

/// Returns a value that must be given.
pub fn needed<'a>(given: &'a Option<PyValue>, name: &str) -> Fallible<&'a PyValue> {
    given.as_ref().map_or_else(|| fail(format!("argument `{name}` is missing")), Ok)
}

/// Tells whether a value that is true was given.
pub fn is_set(given: &Option<PyValue>) -> bool {
    given.as_ref().is_some_and(PyValue::is_true)
}

/// Returns a value that was given as `str` writes it.
pub fn printed_or(given: &Option<PyValue>, default: &str) -> Fallible<String> {
    given.as_ref().map_or_else(|| Ok(default.into()), printed)
}
