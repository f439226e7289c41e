//! The filters behind `|`.

use super::arguments::{GivenArguments, int_or, is_set, needed, printed_or};
use super::ast::Operator;
use super::checks::check;
use super::filter_text::filter_text;
use super::items::{attribute, path, path_parts};
use super::json_text::to_json;
use super::meter::{Fallible, Text, TextOut, fail, reserve, scan};
use super::operators::operate;
use super::print::print;
use super::py_value::{DictView, PyValue, compare, equal, sort, undefined};
use std::cmp::Ordering;

/// Returns a value as comparisons without regard to case see it.
fn without_case(value: PyValue, cases: bool) -> PyValue {
    match value.as_str() {
        Some(text) if !cases => PyValue::text(text.to_lowercase()),
        _ => value,
    }
}

/// Returns the key of a value by the attribute that a filter was given.
fn key(value: &PyValue, attribute: &Option<PyValue>, cases: bool) -> Fallible<PyValue> {
    let found = match attribute {
        None => value.clone(),
        Some(attribute) => path(value, &path_parts(attribute))?,
    };
    Ok(without_case(found, cases))
}

/// Calls a filter.
pub fn filter(name: &str, value: &PyValue, given: &GivenArguments) -> Fallible<PyValue> {
    if let Some(found) = filter_text(name, value, given)? {
        return Ok(found);
    }
    match name {
        "length" | "count" => match value.length() {
            Some(n) => Ok(PyValue::Int(n as i128)),
            None => fail(format!("object of type '{}' has no len()", value.type_name())),
        },
        "default" | "d" => {
            let [other, boolean] = given.bind(name, ["default_value", "boolean"])?;
            match value.is_undefined() || is_set(&boolean) && !value.is_true() {
                true => Ok(other.unwrap_or_else(|| PyValue::text(""))),
                false => Ok(value.clone()),
            }
        }
        "tojson" => to_json(value, given),
        "list" => PyValue::list(value.to_vec()?),
        "items" => match value {
            PyValue::Undefined(_) => PyValue::stream(Vec::new()),
            PyValue::Dict(dict) => {
                let items = PyValue::DictView(DictView::Items, dict.clone()).to_vec()?;
                PyValue::stream(items)
            }
            _ => fail("Can only get item pairs from a mapping."),
        },
        "join" => {
            let [separator, attribute] = given.bind(name, ["d", "attribute"])?;
            let separator = printed_or(&separator, "")?;
            let mut out = TextOut::default();
            for (i, value) in value.values()?.enumerate() {
                out.push(if i > 0 { &separator } else { "" })?;
                print(&key(&value, &attribute, true)?, &mut out)?;
            }
            Ok(PyValue::text(out.finish()))
        }
        "first" => match value.values()?.next() {
            Some(first) => Ok(first),
            None => Ok(undefined("No first item, sequence was empty.")),
        },
        "last" => match value {
            PyValue::Iterator(_) => fail("'generator' object is not reversible"),
            PyValue::List(items) | PyValue::Tuple(items) if !items.is_empty() => {
                Ok(items[items.len() - 1].clone())
            }
            _ => Ok(value.values()?.last().unwrap_or_else(|| undefined("No last item, sequence was empty."))),
        },
        "reverse" => match value {
            PyValue::Str(text) | PyValue::Markup(text) => {
                Ok(PyValue::text(text.chars().rev().collect::<String>()))
            }
            PyValue::Iterator(_) => {
                let mut values = value.to_vec()?;
                values.reverse();
                PyValue::list(values)
            }
            _ => PyValue::stream(value.to_vec()?.into_iter().rev().collect()),
        },
        "int" => {
            let [default, base] = given.bind(name, ["default", "base"])?;
            let default = default.unwrap_or(PyValue::Int(0));
            let Some(text) = value.as_str() else {
                value.defined()?;
                return match (value.as_int(), value.as_float()) {
                    (Some(n), _) => Ok(PyValue::Int(n)),
                    (_, Some(x)) => truncated(x, default),
                    _ => Ok(default),
                };
            };
            scan(text)?;
            match (int_of_text(text, int_or(&base, 10)?), float_of_text(text)) {
                (Some(n), _) => Ok(PyValue::Int(n)),
                (_, Some(x)) => truncated(x, default),
                _ => Ok(default),
            }
        }
        "float" => {
            let [default] = given.bind(name, ["default"])?;
            value.defined()?;
            let x = value.as_float().or_else(|| float_of_text(value.as_str()?));
            Ok(x.map_or_else(|| default.unwrap_or(PyValue::Float(0.0)), PyValue::Float))
        }
        "abs" => {
            given.bind::<0>(name, [])?;
            match (value.defined()?.as_int(), value.as_float()) {
                (Some(n), _) => Ok(PyValue::Int(n.saturating_abs())),
                (_, Some(x)) => Ok(PyValue::Float(x.abs())),
                _ => fail(format!("bad operand type for abs(): '{}'", value.type_name())),
            }
        }
        "round" => round(value, given),
        "sum" => {
            let [attribute, start] = given.bind(name, ["attribute", "start"])?;
            let mut sum = start.unwrap_or(PyValue::Int(0));
            if sum.as_str().is_some() {
                return fail("sum() can't sum strings [use ''.join(seq) instead]");
            }
            for value in value.values()? {
                sum = operate(Operator::Add, &sum, &key(&value, &attribute, true)?)?;
            }
            Ok(sum)
        }
        "min" | "max" => {
            let [cases, attribute] = given.bind(name, ["case_sensitive", "attribute"])?;
            let mut best: Option<(PyValue, PyValue)> = None;
            for value in value.values()? {
                let key = key(&value, &attribute, is_set(&cases))?;
                let wins = match &best {
                    None => true,
                    Some((known, _)) if name == "min" => compare(&key, known, "<")? == Some(Ordering::Less),
                    Some((known, _)) => compare(&key, known, ">")? == Some(Ordering::Greater),
                };
                if wins {
                    best = Some((key, value));
                }
            }
            Ok(best.map_or_else(|| undefined("No aggregated item, sequence was empty."), |(_, value)| value))
        }
        "sort" => {
            let [reverse, cases, attribute] = given.bind(name, ["reverse", "case_sensitive", "attribute"])?;
            let paths = match attribute.as_ref().and_then(PyValue::as_str) {
                Some(paths) => paths.split(',').map(|path| Some(PyValue::text(path))).collect(),
                None => vec![attribute],
            };
            let pair = |value: PyValue| {
                let keys = paths.iter().map(|path| key(&value, path, is_set(&cases)));
                Ok((PyValue::list(keys.collect::<Fallible<_>>()?)?, value))
            };
            PyValue::list(sort(value.values()?.map(pair).collect::<Fallible<_>>()?, is_set(&reverse))?)
        }
        "dictsort" => {
            let [cases, by, reverse] = given.bind(name, ["case_sensitive", "by", "reverse"])?;
            let at = match &*printed_or(&by, "key")? {
                "key" => 0,
                "value" => 1,
                _ => return fail("You can only sort by either \"key\" or \"value\""),
            };
            let PyValue::Dict(dict) = value else { return fail("dictsort: a map expected") };
            let pair = |(key, value): &(PyValue, PyValue)| {
                let by = if at == 0 { key } else { value };
                Ok((
                    without_case(by.clone(), is_set(&cases)),
                    PyValue::tuple(vec![key.clone(), value.clone()])?,
                ))
            };
            PyValue::list(sort(dict.entries().iter().map(pair).collect::<Fallible<_>>()?, is_set(&reverse))?)
        }
        "unique" => {
            let [cases, attribute] = given.bind(name, ["case_sensitive", "attribute"])?;
            let mut seen = super::py_value::Dict::default();
            let mut all = Vec::new();
            for value in value.values()? {
                let key = key(&value, &attribute, is_set(&cases))?;
                if seen.get(&key)?.is_none() {
                    seen.set(key, PyValue::None)?;
                    all.push(value);
                }
            }
            PyValue::stream(all)
        }
        "groupby" => {
            let [attribute, default, cases] = given.bind(name, ["attribute", "default", "case_sensitive"])?;
            needed(&attribute, "attribute")?;
            let of = |value: &PyValue, cases: bool| {
                let found = key(value, &attribute, true)?;
                let found = if found.is_undefined() { default.clone().unwrap_or(found) } else { found };
                Ok(without_case(found, cases))
            };
            let cases = is_set(&cases);
            let pair = |value: PyValue| Ok((of(&value, cases)?, value));
            let sorted = sort(value.values()?.map(pair).collect::<Fallible<_>>()?, false)?;
            let mut groups: Vec<(PyValue, Vec<PyValue>)> = Vec::new();
            for value in sorted {
                let key = of(&value, cases)?;
                match groups.last_mut() {
                    Some((known, values)) if equal(known, &key)? => values.push(value),
                    _ => groups.push((key, vec![value])),
                }
            }
            let group = |(key, values): (PyValue, Vec<PyValue>)| {
                let key = if cases { key } else { of(&values[0], true)? };
                PyValue::group(vec![key, PyValue::list(values)?])
            };
            PyValue::list(groups.into_iter().map(group).collect::<Fallible<_>>()?)
        }
        "batch" => {
            let [count, fill] = given.bind(name, ["linecount", "fill_with"])?;
            let count = usize::try_from(int_or(&count, 0)?).unwrap_or(0);
            let fill = fill.filter(|fill| !matches!(fill, PyValue::None));
            let mut rows = Vec::new();
            let mut row = Vec::new();
            for value in value.values()? {
                if row.len() == count {
                    rows.push(PyValue::list(std::mem::take(&mut row))?);
                }
                row.push(value);
            }
            if !row.is_empty() {
                if let Some(fill) = fill {
                    let missing = count.saturating_sub(row.len());
                    reserve(missing.saturating_mul(size_of::<PyValue>()))?;
                    row.extend(std::iter::repeat_n(fill, missing));
                }
                rows.push(PyValue::list(row)?);
            }
            PyValue::stream(rows)
        }
        "slice" => {
            let [count, fill] = given.bind(name, ["slices", "fill_with"])?;
            let values = value.to_vec()?;
            let Some(count) = usize::try_from(int_or(&count, 0)?).ok().filter(|n| *n > 0) else {
                return fail("integer division or modulo by zero");
            };
            let fill = fill.filter(|fill| !matches!(fill, PyValue::None));
            reserve(count.saturating_mul(4 * size_of::<PyValue>()))?;
            let (each, extra) = (values.len() / count, values.len() % count);
            let mut rest = values.into_iter();
            let mut slices = Vec::with_capacity(count);
            for i in 0..count {
                let mut part: Vec<PyValue> = rest.by_ref().take(each + usize::from(i < extra)).collect();
                part.extend(fill.clone().filter(|_| i >= extra));
                slices.push(PyValue::list(part)?);
            }
            PyValue::stream(slices)
        }
        "attr" => {
            let wanted = given.one(name)?;
            let Some(wanted) = wanted.as_str() else {
                return fail("attr: the name of an attribute expected");
            };
            match value {
                PyValue::Dict(dict) if dict.named(wanted).is_some() => {
                    match attribute(value, &Text::new(wanted))? {
                        found @ PyValue::Method(_) => Ok(found),
                        _ => Ok(undefined(format!("'dict object' has no attribute '{wanted}'"))),
                    }
                }
                _ => attribute(value, &Text::new(wanted)),
            }
        }
        "map" => {
            if !value.is_true() {
                return PyValue::stream(Vec::new());
            }
            let mut mapped = Vec::new();
            if given.positional.is_empty() && given.named.iter().any(|(name, _)| &***name == "attribute") {
                let [attribute, default] = given.bind(name, ["attribute", "default"])?;
                let parts = attribute.as_ref().map(path_parts).unwrap_or_default();
                for mut value in value.values()? {
                    for part in &parts {
                        value = super::items::item(&value, part)?;
                        if value.is_undefined() {
                            value = default.clone().filter(|d| !matches!(d, PyValue::None)).unwrap_or(value);
                        }
                    }
                    mapped.push(value);
                }
            } else {
                let (inner, rest) = split_name(given, "map requires a filter argument")?;
                for value in value.values()? {
                    mapped.push(filter(&inner, &value, &rest)?);
                }
            }
            PyValue::stream(mapped)
        }
        "select" | "reject" | "selectattr" | "rejectattr" => {
            let mut kept = Vec::new();
            if value.is_true() {
                let mut given = given.clone();
                let mut parts = Vec::new();
                if name.ends_with("attr") {
                    if given.positional.is_empty() {
                        return fail("Missing parameter for attribute name");
                    }
                    parts = path_parts(&given.positional.remove(0));
                }
                let test = match given.positional.is_empty() {
                    true => None,
                    false => Some(split_name(&given, "")?),
                };
                for value in value.values()? {
                    let found = path(&value, &parts)?;
                    let passes = match &test {
                        None => found.is_true(),
                        Some((test, rest)) => check(test, &found, rest)?,
                    };
                    if passes == name.starts_with("select") {
                        kept.push(value);
                    }
                }
            }
            PyValue::stream(kept)
        }
        _ => fail(format!("No filter named '{name}'.")),
    }
}

/// Splits arguments into the name of a filter or test and what that is called with.
fn split_name(given: &GivenArguments, missing: &str) -> Fallible<(String, GivenArguments)> {
    let mut rest = given.clone();
    if rest.positional.is_empty() {
        return fail(missing);
    }
    let name = rest.positional.remove(0);
    match name.as_str() {
        Some(name) => Ok((name.to_string(), rest)),
        None => fail(format!("a name expected, not {}", name.type_name())),
    }
}

fn truncated(x: f64, default: PyValue) -> Fallible<PyValue> {
    match x.is_finite() {
        true if x.abs() < 1e38 => Ok(PyValue::Int(x as i128)),
        true => fail("a number that is too large"),
        false => Ok(default),
    }
}

/// Returns the whole number of a text, as Python's `int` reads it.
fn int_of_text(text: &str, base: i128) -> Option<i128> {
    let text = text.trim_matches(super::lexer::is_blank);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_ascii_lowercase();
    let marked = [("0x", 16), ("0o", 8), ("0b", 2)]
        .into_iter()
        .find(|(mark, radix)| lower.starts_with(mark) && (base == 0 || base == i128::from(*radix)));
    let (digits, radix) = match marked {
        Some((_, radix)) => (lower[2..].strip_prefix('_').unwrap_or(&lower[2..]), radix),
        None => (
            &*lower,
            u32::try_from(base).ok().filter(|b| (2..=36).contains(b)).or((base == 0).then_some(10))?,
        ),
    };
    if digits.starts_with(['_', '+', '-']) || digits.ends_with('_') || digits.contains("__") {
        return None;
    }
    let n = i128::from_str_radix(&digits.replace('_', ""), radix).ok()?;
    Some(if negative { -n } else { n })
}

/// Returns the number of a text, as Python's `float` reads it.
fn float_of_text(text: &str) -> Option<f64> {
    let text = text.trim_matches(super::lexer::is_blank);
    let is_digit = |b: Option<&u8>| b.is_some_and(u8::is_ascii_digit);
    for (i, _) in text.match_indices('_') {
        if i == 0 || !is_digit(text.as_bytes().get(i - 1)) || !is_digit(text.as_bytes().get(i + 1)) {
            return None;
        }
    }
    text.replace('_', "").parse().ok()
}

fn round(value: &PyValue, given: &GivenArguments) -> Fallible<PyValue> {
    let [precision, method] = given.bind("round", ["precision", "method"])?;
    let precision = int_or(&precision, 0)?.clamp(-400, 400);
    let method = printed_or(&method, "common")?;
    let Some(x) = value.defined()?.as_float() else {
        return fail(format!("type {} doesn't define __round__ method", value.type_name()));
    };
    match &*method {
        "common" => match value.as_int() {
            Some(n) if precision >= 0 => Ok(PyValue::Int(n)),
            Some(n) => {
                let Some(unit) = u32::try_from(-precision).ok().and_then(|p| 10i128.checked_pow(p)) else {
                    return Ok(PyValue::Int(0));
                };
                // The nearest multiple; of two, the one that is even.
                let (whole, rest) = (n.div_euclid(unit), n.rem_euclid(unit));
                let up = rest * 2 > unit || rest * 2 == unit && whole % 2 != 0;
                Ok(PyValue::Int((whole + i128::from(up)) * unit))
            }
            None if !x.is_finite() => Ok(PyValue::Float(x)),
            None if precision >= 0 => {
                let rounded = format!("{x:.*}", precision as usize).parse();
                Ok(PyValue::Float(rounded.unwrap_or(x)))
            }
            None => {
                let unit = 10f64.powi(-precision as i32);
                Ok(PyValue::Float(if unit.is_finite() {
                    (x / unit).round_ties_even() * unit
                } else {
                    0.0 * x
                }))
            }
        },
        "ceil" | "floor" => {
            let rounded = |x: f64| if method == "ceil" { x.ceil() } else { x.floor() };
            if precision < 0 {
                let unit = 10f64.powi(precision as i32);
                return Ok(PyValue::Float(rounded(x * unit) / unit));
            }
            let unit = 10i128.checked_pow(precision as u32).map_or(f64::INFINITY, |n| n as f64);
            Ok(PyValue::Float(rounded(x * unit) / unit))
        }
        _ => fail("method must be common, ceil or floor"),
    }
}
