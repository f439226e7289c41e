//! Attributes, elements and slices of values.

use super::ast::Name;
use super::meter::{Fallible, Text, fail, spend};
use super::print::represented;
use super::value::{Range, Value, View, char_count, undefined};
use std::rc::Rc;

/// Names of the methods of texts.
const TEXT_METHODS: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

/// Tells whether a value has a method that templates may call; those that change a list or a map are refused, as in Jinja's
/// sandbox.
fn has_method(value: &Value, name: &str) -> bool {
    match value {
        Value::Str(_) | Value::Markup(_) => TEXT_METHODS.contains(&name),
        Value::List(_) => ["index", "count", "copy"].contains(&name),
        Value::Tuple(_) | Value::Range(_) => ["index", "count"].contains(&name),
        Value::Dict(_) => ["items", "keys", "values", "get", "copy"].contains(&name),
        Value::Float(_) => ["is_integer", "hex", "as_integer_ratio", "conjugate"].contains(&name),
        Value::Int(_) | Value::Bool(_) => ["bit_length", "bit_count", "conjugate"].contains(&name),
        Value::Cycler(_) => ["next", "reset"].contains(&name),
        Value::Loop(_) => ["cycle", "changed"].contains(&name),
        Value::View(View::Keys | View::Items, _) => name == "isdisjoint",
        _ => false,
    }
}

/// Tells whether a method changes a list or a map.
fn changes(value: &Value, name: &str) -> bool {
    match value {
        Value::List(_) => {
            ["append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"].contains(&name)
        }
        Value::Dict(_) => ["clear", "pop", "popitem", "setdefault", "update"].contains(&name),
        _ => false,
    }
}

/// Returns what Python finds as an attribute, without a look at elements.
fn own_attribute(value: &Value, name: &Name) -> Option<Value> {
    if has_method(value, name) {
        return Some(Value::Method(Rc::new((value.clone(), name.clone()))));
    }
    let none = || {
        let what = format!("access to attribute '{}' of '{}' object is unsafe.", &***name, value.type_name());
        undefined(what)
    };
    Some(match (value, &***name) {
        (_, name) if name.starts_with("__") && name.ends_with("__") => none(),
        (value, name) if changes(value, name) => none(),
        (Value::Namespace(namespace), name) => namespace.borrow().named(name)?.clone(),
        (Value::Tuple(items), "grouper") if items.is_group => items[0].clone(),
        (Value::Tuple(items), "list") if items.is_group => items[1].clone(),
        (Value::Range(range), "start") => Value::Int(range.start),
        (Value::Range(range), "step") => Value::Int(range.step),
        (Value::Range(range), "stop") => Value::Int(range.stop),
        (Value::Int(_) | Value::Bool(_) | Value::Float(_), "real") => match value.as_int() {
            Some(n) => Value::Int(n),
            None => value.clone(),
        },
        (Value::Float(_), "imag") => Value::Float(0.0),
        (Value::Int(_) | Value::Bool(_), "imag") => Value::Int(0),
        (Value::Int(_) | Value::Bool(_), "numerator") => Value::Int(value.as_int()?),
        (Value::Int(_) | Value::Bool(_), "denominator") => Value::Int(1),
        (Value::Cycler(turns), "current") => turns.values[turns.at.get()].clone(),
        (Value::Joiner(turns), "sep") => turns.values[0].clone(),
        (Value::Macro(it), "name") => Value::Str(it.body.name.clone()),
        (Value::Macro(it), "arguments") => {
            let names = it.body.parameters.iter().map(|(name, _)| Value::Str(name.clone()));
            Value::tuple(names.collect()).ok()?
        }
        (Value::Macro(it), "catch_varargs") => Value::Bool(it.body.reads[0]),
        (Value::Macro(it), "catch_kwargs") => Value::Bool(it.body.reads[1]),
        (Value::Macro(it), "caller") => Value::Bool(it.body.reads[2]),
        _ => return None,
    })
}

/// Returns the value of a key or index; none where there is none, or the value has no elements.
fn own_item(value: &Value, key: &Value) -> Fallible<Option<Value>> {
    let at = |length: usize| {
        let i = key.as_int()?;
        usize::try_from(if i < 0 { i + length as i128 } else { i }).ok().filter(|i| *i < length)
    };
    Ok(match value {
        Value::Dict(dict) => dict.get(key).ok().flatten().cloned(),
        Value::List(items) | Value::Tuple(items) => at(items.len()).map(|i| items[i].clone()),
        Value::Str(text) | Value::Markup(text) => {
            if key.as_int().is_none() {
                return Ok(None);
            }
            let length = char_count(text);
            spend(text.len() as u64 / 1024)?;
            let c = at(length).and_then(|i| match length == text.len() {
                true => Some(char::from(text.as_bytes()[i])),
                false => text.chars().nth(i),
            });
            c.map(|c| Value::text(String::from(c)))
        }
        Value::Range(range) => at(range.length as usize).map(|i| range.at(i as i128)),
        _ => None,
    })
}

/// Returns the value of `value.name`: the attribute, else the element.
///
/// # Errors
/// `value` is undefined.
pub fn attribute(value: &Value, name: &Name) -> Fallible<Value> {
    value.defined()?;
    if let Some(found) = own_attribute(value, name) {
        return Ok(found);
    }
    if let Value::Dict(dict) = value
        && let Some(found) = dict.named(name)
    {
        return Ok(found.clone());
    }
    Ok(missing(value, &Value::Str(name.clone())))
}

/// Returns the value of `value[key]`: the element, else the attribute.
///
/// # Errors
/// `value` is undefined.
pub fn item(value: &Value, key: &Value) -> Fallible<Value> {
    value.defined()?;
    if let Some(found) = own_item(value, key)? {
        return Ok(found);
    }
    if let Value::Str(name) | Value::Markup(name) = key
        && let Some(found) = own_attribute(value, name)
    {
        return Ok(found);
    }
    Ok(missing(value, key))
}

/// Returns the undefined value of an element that is not there.
fn missing(value: &Value, key: &Value) -> Value {
    let of = match value {
        Value::None => "None".to_string(),
        Value::Namespace(_) => "jinja2.utils.Namespace object".into(),
        other => format!("{} object", other.type_name()),
    };
    undefined(match key.as_str() {
        Some(name) => format!("'{of}' has no attribute '{}'", name.chars().take(100).collect::<String>()),
        None => format!("{of} has no element {}", represented(key).unwrap_or_default()),
    })
}

/// Returns the value of a path such as `function.name` or `0.text`, as the filters take it.
///
/// # Errors
/// A part of the path but the last is undefined.
pub fn path(value: &Value, parts: &[Value]) -> Fallible<Value> {
    let mut value = value.clone();
    for part in parts {
        value = item(&value, part)?;
    }
    Ok(value)
}

/// Splits a path at its dots; numbers are indices.
pub fn path_parts(path: &Value) -> Vec<Value> {
    let part = |part: &str| match part.parse::<u32>() {
        Ok(n) if part.bytes().all(|b| b.is_ascii_digit()) => Value::Int(i128::from(n)),
        _ => Value::text(part),
    };
    match path {
        Value::None => Vec::new(),
        Value::Str(text) | Value::Markup(text) => text.split('.').map(part).collect(),
        other => vec![other.clone()],
    }
}

/// Returns the indices of a slice of `length` elements: the first, the step, and how many.
pub fn slice_range(bounds: &[Option<Value>; 3], length: usize) -> Fallible<Range> {
    let bound = |i: usize| match &bounds[i] {
        None | Some(Value::None) => Ok(None),
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
///
/// # Errors
/// The value has no slices, or the bounds are wrong.
pub fn slice(value: &Value, bounds: &[Option<Value>; 3]) -> Fallible<Value> {
    match value.defined()? {
        Value::Str(text) | Value::Markup(text) => {
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
                Value::Markup(_) => Value::Markup(Text::new(part)),
                _ => Value::text(part),
            })
        }
        Value::List(items) | Value::Tuple(items) => {
            let range = slice_range(bounds, items.len())?;
            let part =
                (0..range.length).map(|i| items[(range.start + i * range.step) as usize].clone()).collect();
            if matches!(value, Value::List(_)) { Value::list(part) } else { Value::tuple(part) }
        }
        Value::Range(whole) => {
            let range = slice_range(bounds, whole.length as usize)?;
            let start = whole.start + whole.step * range.start;
            let stop = whole.start + whole.step * range.stop;
            Ok(Value::Range(Range { start, stop, step: whole.step * range.step, length: range.length }))
        }
        // Jinja refuses some of these, and makes others undefined.
        other => Ok(undefined(format!("'{}' object is not subscriptable", other.type_name()))),
    }
}
