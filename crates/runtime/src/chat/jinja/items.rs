//! Attributes, elements and slices of values.

use super::ast::Identifier;
use super::lexer::is_one_of;
use super::meter::{Fallible, Text, fail, spend};
use super::print::represented;
use super::py_value::{DictView, PyValue, Range, char_count, undefined};
use std::rc::Rc;

/// Names of the methods of texts.
const TEXT_METHODS: &str = "capitalize casefold center count encode endswith expandtabs find format format_map index isalnum \
    isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle \
    isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust \
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill";

/// Tells whether a value has a method that templates may call; those that change a list or a map are refused, as in Jinja's
/// sandbox.
fn has_method(value: &PyValue, name: &str) -> bool {
    let methods = match value {
        PyValue::Str(_) | PyValue::Markup(_) => TEXT_METHODS,
        PyValue::List(_) => "index count copy",
        PyValue::Tuple(_) | PyValue::Range(_) => "index count",
        PyValue::Dict(_) => "items keys values get copy",
        PyValue::Float(_) => "is_integer hex as_integer_ratio conjugate",
        PyValue::Int(_) | PyValue::Bool(_) => "bit_length bit_count conjugate",
        PyValue::Cycler(_) => "next reset",
        PyValue::Loop(_) => "cycle changed",
        PyValue::DictView(DictView::Keys | DictView::Items, _) => "isdisjoint",
        _ => return false,
    };
    is_one_of(methods, name)
}

/// Tells whether a method changes a list or a map.
fn changes(value: &PyValue, name: &str) -> bool {
    match value {
        PyValue::List(_) => is_one_of("append clear pop reverse insert sort extend remove", name),
        PyValue::Dict(_) => is_one_of("clear pop popitem setdefault update", name),
        _ => false,
    }
}

/// Returns what Python finds as an attribute, without a look at elements.
fn own_attribute(value: &PyValue, name: &Identifier) -> Option<PyValue> {
    if has_method(value, name) {
        return Some(PyValue::Method(Rc::new((value.clone(), name.clone()))));
    }
    let none = || {
        let what = format!("access to attribute '{}' of '{}' object is unsafe.", &***name, value.type_name());
        undefined(what)
    };
    Some(match (value, &***name) {
        (_, name) if name.starts_with("__") && name.ends_with("__") => none(),
        (value, name) if changes(value, name) => none(),
        (PyValue::Namespace(namespace), name) => namespace.borrow().named(name)?.clone(),
        (PyValue::Tuple(items), "grouper") if items.is_group => items[0].clone(),
        (PyValue::Tuple(items), "list") if items.is_group => items[1].clone(),
        (PyValue::Range(range), "start") => PyValue::Int(range.start),
        (PyValue::Range(range), "step") => PyValue::Int(range.step),
        (PyValue::Range(range), "stop") => PyValue::Int(range.stop),
        (PyValue::Int(_) | PyValue::Bool(_) | PyValue::Float(_), "real") => match value.as_int() {
            Some(n) => PyValue::Int(n),
            None => value.clone(),
        },
        (PyValue::Float(_), "imag") => PyValue::Float(0.0),
        (PyValue::Int(_) | PyValue::Bool(_), "imag") => PyValue::Int(0),
        (PyValue::Int(_) | PyValue::Bool(_), "numerator") => PyValue::Int(value.as_int()?),
        (PyValue::Int(_) | PyValue::Bool(_), "denominator") => PyValue::Int(1),
        (PyValue::Cycler(turns), "current") => turns.values[turns.at.get()].clone(),
        (PyValue::Joiner(turns), "sep") => turns.values[0].clone(),
        (PyValue::Macro(it), "name") => PyValue::Str(it.body.name.clone()),
        (PyValue::Macro(it), "arguments") => {
            let names = it.body.parameters.iter().map(|(name, _)| PyValue::Str(name.clone()));
            PyValue::tuple(names.collect()).ok()?
        }
        (PyValue::Macro(it), "catch_varargs") => PyValue::Bool(it.body.reads[0]),
        (PyValue::Macro(it), "catch_kwargs") => PyValue::Bool(it.body.reads[1]),
        (PyValue::Macro(it), "caller") => PyValue::Bool(it.body.reads[2]),
        _ => return None,
    })
}

/// Returns the value of a key or index; none where there is none, or the value has no elements.
fn own_item(value: &PyValue, key: &PyValue) -> Fallible<Option<PyValue>> {
    let at = |length: usize| {
        let i = key.as_int()?;
        usize::try_from(if i < 0 { i + length as i128 } else { i }).ok().filter(|i| *i < length)
    };
    Ok(match value {
        PyValue::Dict(dict) => dict.get(key).ok().flatten().cloned(),
        PyValue::List(items) | PyValue::Tuple(items) => at(items.len()).map(|i| items[i].clone()),
        PyValue::Str(text) | PyValue::Markup(text) => {
            if key.as_int().is_none() {
                return Ok(None);
            }
            let length = char_count(text);
            spend(text.len() as u64 / 1024)?;
            let c = at(length).and_then(|i| match length == text.len() {
                true => Some(char::from(text.as_bytes()[i])),
                false => text.chars().nth(i),
            });
            c.map(|c| PyValue::text(String::from(c)))
        }
        PyValue::Range(range) => at(range.length as usize).map(|i| range.at(i as i128)),
        _ => None,
    })
}

/// Returns the value of `value.name`: the attribute, else the element.
pub fn attribute(value: &PyValue, name: &Identifier) -> Fallible<PyValue> {
    value.defined()?;
    if let Some(found) = own_attribute(value, name) {
        return Ok(found);
    }
    if let PyValue::Dict(dict) = value
        && let Some(found) = dict.named(name)
    {
        return Ok(found.clone());
    }
    Ok(missing(value, &PyValue::Str(name.clone())))
}

/// Returns the value of `value[key]`: the element, else the attribute.
pub fn item(value: &PyValue, key: &PyValue) -> Fallible<PyValue> {
    value.defined()?;
    if let Some(found) = own_item(value, key)? {
        return Ok(found);
    }
    if let PyValue::Str(name) | PyValue::Markup(name) = key
        && let Some(found) = own_attribute(value, name)
    {
        return Ok(found);
    }
    Ok(missing(value, key))
}

/// Returns the undefined value of an element that is not there.
fn missing(value: &PyValue, key: &PyValue) -> PyValue {
    let of = match value {
        PyValue::None => "None".to_string(),
        PyValue::Namespace(_) => "jinja2.utils.Namespace object".into(),
        other => format!("{} object", other.type_name()),
    };
    undefined(match key.as_str() {
        Some(name) => format!("'{of}' has no attribute '{}'", name.chars().take(100).collect::<String>()),
        None => format!("{of} has no element {}", represented(key).unwrap_or_default()),
    })
}

/// Returns the value of a path such as `function.name` or `0.text`, as the filters take it.
pub fn path(value: &PyValue, parts: &[PyValue]) -> Fallible<PyValue> {
    let mut value = value.clone();
    for part in parts {
        value = item(&value, part)?;
    }
    Ok(value)
}

/// Splits a path at its dots; numbers are indices.
pub fn path_parts(path: &PyValue) -> Vec<PyValue> {
    let part = |part: &str| match part.parse::<u32>() {
        Ok(n) if part.bytes().all(|b| b.is_ascii_digit()) => PyValue::Int(i128::from(n)),
        _ => PyValue::text(part),
    };
    match path {
        PyValue::None => Vec::new(),
        PyValue::Str(text) | PyValue::Markup(text) => text.split('.').map(part).collect(),
        other => vec![other.clone()],
    }
}

/// Returns the indices of a slice of `length` elements: the first, the step, and how many.
pub fn slice_range(bounds: &[Option<PyValue>; 3], length: usize) -> Fallible<Range> {
    let bound = |i: usize| match &bounds[i] {
        None | Some(PyValue::None) => Ok(None),
        Some(value) => match value.defined()?.as_int() {
            Some(n) => Ok(Some(n)),
            None => fail("slice indices must be integers or None or have an __index__ method"),
        },
    };
    let length = length as i128;
    let step = bound(2)?.unwrap_or(1).clamp(-i128::from(i64::MAX), i128::from(i64::MAX));
    if step == 0 {
        return fail("slice step cannot be zero");
    }
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |bound: Option<i128>, default: i128| match bound {
        None => default,
        Some(n) if n < 0 => n.saturating_add(length).max(low),
        Some(n) => n.min(high),
    };
    let (start, stop) = match step > 0 {
        true => (place(bound(0)?, 0), place(bound(1)?, length)),
        false => (place(bound(0)?, length - 1), place(bound(1)?, -1)),
    };
    let count = if step > 0 { (stop - start + step - 1) / step } else { (stop - start + step + 1) / step };
    Ok(Range { start, stop, step, length: count.max(0) })
}

/// Returns the value of `value[first:end:step]`.
pub fn slice(value: &PyValue, bounds: &[Option<PyValue>; 3]) -> Fallible<PyValue> {
    match value.defined()? {
        PyValue::Str(text) | PyValue::Markup(text) => {
            let range = slice_range(bounds, char_count(text))?;
            spend(text.len() as u64 / 256)?;
            let part = if range.step == 1 {
                let byte = |i: i128| match text.is_ascii() {
                    true => i as usize,
                    false => text.char_indices().nth(i as usize).map_or(text.len(), |(at, _)| at),
                };
                if range.length == 0 {
                    String::new()
                } else {
                    text[byte(range.start)..byte(range.start + range.length)].into()
                }
            } else {
                let chars: Vec<char> = text.chars().collect();
                (0..range.length).map(|i| chars[(range.start + i * range.step) as usize]).collect()
            };
            Ok(match value {
                PyValue::Markup(_) => PyValue::Markup(Text::new(part)),
                _ => PyValue::text(part),
            })
        }
        PyValue::List(items) | PyValue::Tuple(items) => {
            let range = slice_range(bounds, items.len())?;
            let part =
                (0..range.length).map(|i| items[(range.start + i * range.step) as usize].clone()).collect();
            if matches!(value, PyValue::List(_)) { PyValue::list(part) } else { PyValue::tuple(part) }
        }
        PyValue::Range(whole) => {
            let range = slice_range(bounds, whole.length as usize)?;
            let start = whole.start + whole.step * range.start;
            let stop = whole.start + whole.step * range.stop;
            Ok(PyValue::Range(Range { start, stop, step: whole.step * range.step, length: range.length }))
        }
        // Jinja refuses some of these, and makes others undefined.
        other => Ok(undefined(format!("'{}' object is not subscriptable", other.type_name()))),
    }
}
