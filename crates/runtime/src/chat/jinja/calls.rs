//! Functions, and methods of values that are no texts.

use super::arguments::{Given, int_or, needed, printed_or, text_of};
use super::filter_text::escaped;
use super::meter::{Fallible, fail, spend};
use super::text_methods;
use super::value::{Dict, Range, Turns, Value, View, contains, depth_of, equal};
use std::cell::RefCell;
use std::rc::Rc;

/// Names of the functions.
pub const FUNCTIONS: &[&str] =
    &["range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now"];
/// Longest `range`, as in Jinja's sandbox.
const MOST_RANGE: i128 = 100_000;

/// Calls a function.
///
/// # Errors
/// It refuses the call; `raise_exception` always does.
pub fn call_function(name: &str, given: &Given) -> Fallible<Value> {
    spend(1)?;
    match name {
        "raise_exception" => {
            let [message] = given.bind(name, ["message"])?;
            fail(printed_or(&message, "")?)
        }
        "strftime_now" => {
            let [format] = given.bind(name, ["format"])?;
            let now = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
            match jiff::fmt::strtime::format(text_of(&format, "format")?, &now) {
                Ok(text) => Ok(Value::text(text)),
                Err(e) => fail(format!("strftime_now: {e}")),
            }
        }
        "range" => {
            let [a, b, step] = given.bind(name, ["start", "stop", "step"])?;
            needed(&a, "start")?;
            let (start, stop) = match &b {
                None => (0, int_or(&a, 0)?),
                Some(_) => (int_or(&a, 0)?, int_or(&b, 0)?),
            };
            let step = int_or(&step, 1)?;
            if step == 0 {
                return fail("range() arg 3 must not be zero");
            }
            let span = if step > 0 { stop.checked_sub(start) } else { start.checked_sub(stop) };
            let length =
                span.and_then(|span| Some(span.max(0).checked_add(step.checked_abs()? - 1)? / step.abs()));
            match length {
                Some(length) if length <= MOST_RANGE => Ok(Value::Range(Range { start, stop, step, length })),
                _ => fail(format!(
                    "Range too big. The sandbox blocks ranges larger than MAX_RANGE ({MOST_RANGE})."
                )),
            }
        }
        "dict" | "namespace" => {
            let mut dict = Dict::default();
            match &given.positional[..] {
                [] => {}
                [Value::Dict(of)] => {
                    for (key, value) in of.entries() {
                        dict.set(key.clone(), value.clone())?;
                    }
                }
                [pairs] => {
                    for pair in pairs.values()? {
                        match &pair.to_vec()?[..] {
                            [key, value] => dict.set(key.clone(), value.clone())?,
                            _ => {
                                return fail(
                                    "dictionary update sequence element has a wrong length; 2 is required",
                                );
                            }
                        }
                    }
                }
                _ => return fail("dict expected at most 1 argument"),
            }
            for (key, value) in &given.named {
                dict.set(Value::Str(key.clone()), value.clone())?;
            }
            Ok(match name {
                "dict" => Value::Dict(Rc::new(dict)),
                _ => Value::Namespace(Rc::new(RefCell::new(dict))),
            })
        }
        "cycler" if given.positional.is_empty() => fail("at least one item has to be provided"),
        "cycler" => Ok(Value::Cycler(Turns::new(given.positional.clone())?)),
        "joiner" => {
            let [separator] = given.bind(name, ["sep"])?;
            let separator = separator.unwrap_or_else(|| Value::text(", "));
            Ok(Value::Joiner(Turns::new(vec![separator])?))
        }
        _ => fail(format!("no function `{name}`")),
    }
}

/// Calls a method of a text that was escaped: what comes in is escaped, and what comes out is.
fn call_markup(text: &str, name: &str, given: &Given) -> Fallible<Value> {
    const KEEPS: &[&str] = &[
        "split",
        "rsplit",
        "splitlines",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "startswith",
        "endswith",
    ];
    let escape = |value: &Value| match value {
        Value::Str(text) if !KEEPS.contains(&name) => Ok(Value::text(escaped(text)?)),
        value => Ok(value.clone()),
    };
    let mut given = given.clone();
    for value in &mut given.positional {
        *value = match (name, &value) {
            ("join", _) => {
                Value::list(value.values()?.map(|value| escape(&value)).collect::<Fallible<_>>()?)?
            }
            _ => escape(value)?,
        };
    }
    let mark = |value: &Value| match value {
        Value::Str(text) => Value::Markup(text.clone()),
        value => value.clone(),
    };
    match text_methods::call(text, name, &given)? {
        Value::List(parts) => Value::list(parts.iter().map(mark).collect()),
        Value::Tuple(parts) => Value::tuple(parts.iter().map(mark).collect()),
        value => Ok(mark(&value)),
    }
}

/// Calls a method of a value.
///
/// # Errors
/// Python refuses the call.
pub fn call_method(of: &Value, name: &str, given: &Given) -> Fallible<Value> {
    match (of, name) {
        (Value::Str(text), _) => text_methods::call(text, name, given),
        (Value::Markup(text), _) => call_markup(text, name, given),
        (Value::Dict(dict), "items" | "keys" | "values") => {
            given.bind::<0>(name, [])?;
            let view = match name {
                "items" => View::Items,
                "keys" => View::Keys,
                _ => View::Values,
            };
            Ok(Value::View(view, dict.clone()))
        }
        (Value::Dict(dict), "get") => {
            let [key, default] = given.bind(name, ["key", "default"])?;
            Ok(dict.get(needed(&key, "key")?)?.cloned().or(default).unwrap_or(Value::None))
        }
        (Value::Dict(_) | Value::List(_), "copy") => Ok(of.clone()),
        (Value::View(_, _), "isdisjoint") => {
            for value in given.one(name)?.values()? {
                if contains(of, &value)? {
                    return Ok(Value::Bool(false));
                }
            }
            Ok(Value::Bool(true))
        }
        (Value::List(_) | Value::Tuple(_) | Value::Range(_), "index" | "count") => {
            let [value, start, end] = given.bind(name, ["value", "start", "stop"])?;
            let value = needed(&value, "value")?;
            let all = of.to_vec()?;
            let range = super::items::slice_range(&[start, end, None], all.len())?;
            let mut count = 0;
            for i in range.start..range.start + range.length {
                if equal(&all[i as usize], value)? {
                    if name == "index" {
                        return Ok(Value::Int(i));
                    }
                    count += 1;
                }
            }
            if name == "index" { fail("the value is not in the list") } else { Ok(Value::Int(count)) }
        }
        (Value::Float(x), "is_integer") => Ok(Value::Bool(x.is_finite() && x.fract() == 0.0)),
        (Value::Int(_) | Value::Bool(_), "bit_length" | "bit_count") => {
            let n = of.as_int().unwrap_or(0).unsigned_abs();
            Ok(Value::Int(i128::from(if name == "bit_count" {
                n.count_ones()
            } else {
                128 - n.leading_zeros()
            })))
        }
        (Value::Int(_) | Value::Float(_) | Value::Bool(_), "conjugate") => Ok(of.clone()),
        (Value::Cycler(turns), "next") => {
            let i = turns.at.get();
            turns.at.set((i + 1) % turns.values.len());
            Ok(turns.values[i].clone())
        }
        (Value::Cycler(turns), "reset") => {
            turns.at.set(0);
            Ok(Value::None)
        }
        (Value::Loop(state), "cycle") => match &given.positional[..] {
            [] => fail("no items for cycling given"),
            values => Ok(values[(state.index.get() - 1) % values.len()].clone()),
        },
        (Value::Loop(state), "changed") => {
            let now = Value::tuple(given.positional.clone())?;
            state.nesting.set(state.nesting.get().max(depth_of(&now)? + 1));
            let before = state.changed.replace(Some(now.clone()));
            Ok(Value::Bool(match before {
                Some(before) => !equal(&before, &now)?,
                None => true,
            }))
        }
        _ => fail(format!("'{}' object has no attribute '{name}'", of.type_name())),
    }
}
