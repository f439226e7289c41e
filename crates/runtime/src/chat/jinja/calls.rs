//! Functions, and methods of values that are no texts.

use super::arguments::{GivenArguments, int_or, needed, printed_or, text_of};
use super::filter_text::escaped;
use super::lexer::is_one_of;
use super::meter::{Fallible, fail, spend};
use super::py_value::{Dict, DictView, PyValue, Range, Turns, contains, depth_of, equal};
use super::text_methods;
use std::cell::RefCell;
use std::rc::Rc;

/// Names of the functions.
pub const FUNCTIONS: &[&str] =
    &["range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now"];
/// Longest `range`, as in Jinja's sandbox.
const MOST_RANGE: i128 = 100_000;

/// Calls a function.
pub fn call_function(name: &str, given: &GivenArguments) -> Fallible<PyValue> {
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
                Ok(text) => Ok(PyValue::text(text)),
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
                Some(length) if length <= MOST_RANGE => {
                    Ok(PyValue::Range(Range { start, stop, step, length }))
                }
                _ => fail(format!(
                    "Range too big. The sandbox blocks ranges larger than MAX_RANGE ({MOST_RANGE})."
                )),
            }
        }
        "dict" | "namespace" => {
            let mut dict = Dict::default();
            match &given.positional[..] {
                [] => {}
                [PyValue::Dict(of)] => {
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
                dict.set(PyValue::Str(key.clone()), value.clone())?;
            }
            Ok(match name {
                "dict" => PyValue::Dict(Rc::new(dict)),
                _ => PyValue::Namespace(Rc::new(RefCell::new(dict))),
            })
        }
        "cycler" if given.positional.is_empty() => fail("at least one item has to be provided"),
        "cycler" => Ok(PyValue::Cycler(Turns::new(given.positional.clone())?)),
        "joiner" => {
            let [separator] = given.bind(name, ["sep"])?;
            let separator = separator.unwrap_or_else(|| PyValue::text(", "));
            Ok(PyValue::Joiner(Turns::new(vec![separator])?))
        }
        _ => fail(format!("no function `{name}`")),
    }
}

/// Calls a method of a text that was escaped: what comes in is escaped, and what comes out is.
fn call_markup(text: &str, name: &str, given: &GivenArguments) -> Fallible<PyValue> {
    let keeps = "split rsplit splitlines find rfind index rindex count startswith endswith";
    let escape = |value: &PyValue| match value {
        PyValue::Str(text) if !is_one_of(keeps, name) => Ok(PyValue::text(escaped(text)?)),
        value => Ok(value.clone()),
    };
    let mut given = given.clone();
    for value in &mut given.positional {
        *value = match (name, &value) {
            ("join", _) => {
                PyValue::list(value.values()?.map(|value| escape(&value)).collect::<Fallible<_>>()?)?
            }
            _ => escape(value)?,
        };
    }
    let mark = |value: &PyValue| match value {
        PyValue::Str(text) => PyValue::Markup(text.clone()),
        value => value.clone(),
    };
    match text_methods::call(text, name, &given)? {
        PyValue::List(parts) => PyValue::list(parts.iter().map(mark).collect()),
        PyValue::Tuple(parts) => PyValue::tuple(parts.iter().map(mark).collect()),
        value => Ok(mark(&value)),
    }
}

/// Calls a method of a value.
pub fn call_method(of: &PyValue, name: &str, given: &GivenArguments) -> Fallible<PyValue> {
    match (of, name) {
        (PyValue::Str(text), _) => text_methods::call(text, name, given),
        (PyValue::Markup(text), _) => call_markup(text, name, given),
        (PyValue::Dict(dict), "items" | "keys" | "values") => {
            given.bind::<0>(name, [])?;
            let view = match name {
                "items" => DictView::Items,
                "keys" => DictView::Keys,
                _ => DictView::PyValues,
            };
            Ok(PyValue::DictView(view, dict.clone()))
        }
        (PyValue::Dict(dict), "get") => {
            let [key, default] = given.bind(name, ["key", "default"])?;
            Ok(dict.get(needed(&key, "key")?)?.cloned().or(default).unwrap_or(PyValue::None))
        }
        (PyValue::Dict(_) | PyValue::List(_), "copy") => Ok(of.clone()),
        (PyValue::DictView(_, _), "isdisjoint") => {
            for value in given.one(name)?.values()? {
                if contains(of, &value)? {
                    return Ok(PyValue::Bool(false));
                }
            }
            Ok(PyValue::Bool(true))
        }
        (PyValue::List(_) | PyValue::Tuple(_) | PyValue::Range(_), "index" | "count") => {
            let [value, start, end] = given.bind(name, ["value", "start", "stop"])?;
            let value = needed(&value, "value")?;
            let all = of.to_vec()?;
            let range = super::items::slice_range(&[start, end, None], all.len())?;
            let mut count = 0;
            for i in range.start..range.start + range.length {
                if equal(&all[i as usize], value)? {
                    if name == "index" {
                        return Ok(PyValue::Int(i));
                    }
                    count += 1;
                }
            }
            if name == "index" { fail("the value is not in the list") } else { Ok(PyValue::Int(count)) }
        }
        (PyValue::Float(x), "is_integer") => Ok(PyValue::Bool(x.is_finite() && x.fract() == 0.0)),
        (PyValue::Int(_) | PyValue::Bool(_), "bit_length" | "bit_count") => {
            let n = of.as_int().unwrap_or(0).unsigned_abs();
            Ok(PyValue::Int(i128::from(if name == "bit_count" {
                n.count_ones()
            } else {
                128 - n.leading_zeros()
            })))
        }
        (PyValue::Int(_) | PyValue::Float(_) | PyValue::Bool(_), "conjugate") => Ok(of.clone()),
        (PyValue::Cycler(turns), "next") => {
            let i = turns.at.get();
            turns.at.set((i + 1) % turns.values.len());
            Ok(turns.values[i].clone())
        }
        (PyValue::Cycler(turns), "reset") => {
            turns.at.set(0);
            Ok(PyValue::None)
        }
        (PyValue::Loop(state), "cycle") => match &given.positional[..] {
            [] => fail("no items for cycling given"),
            values => Ok(values[(state.index.get() - 1) % values.len()].clone()),
        },
        (PyValue::Loop(state), "changed") => {
            let now = PyValue::tuple(given.positional.clone())?;
            state.nesting.set(state.nesting.get().max(depth_of(&now)? + 1));
            let before = state.changed.replace(Some(now.clone()));
            Ok(PyValue::Bool(match before {
                Some(before) => !equal(&before, &now)?,
                None => true,
            }))
        }
        _ => fail(format!("'{}' object has no attribute '{name}'", of.type_name())),
    }
}
