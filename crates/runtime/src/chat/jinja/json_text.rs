//! The filter `tojson`, as `json.dumps` writes values.

use super::arguments::GivenArguments;
use super::meter::{Fallible, TextOut, fail};
use super::print::{escape, float, printed};
use super::py_value::{PyValue, sort};

struct Style {
    is_ascii: bool,
    /// Blanks of a level, where each value has its line.
    indent: Option<String>,
    between: String,
    behind_key: String,
    is_sorted: bool,
}

/// Returns a value as JSON. The parameters are those of Hugging Face transformers.
pub fn to_json(value: &PyValue, given: &GivenArguments) -> Fallible<PyValue> {
    let [ascii, indent, separators, sorted] =
        given.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match indent {
        None | Some(PyValue::None) => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_int()) {
            (Some(text), _) => text.to_string(),
            (_, Some(n)) if n <= 1000 => " ".repeat(usize::try_from(n).unwrap_or(0)),
            _ => return fail("tojson: a wrong indent"),
        }),
    };
    let (between, behind_key) = match separators {
        None | Some(PyValue::None) => {
            (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string())
        }
        Some(pair) => match &pair.to_vec()?[..] {
            [a, b] if a.as_str().is_some() && b.as_str().is_some() => (printed(a)?, printed(b)?),
            _ => return fail("tojson: separators are two texts"),
        },
    };
    let is_set = |given: &Option<PyValue>| given.as_ref().is_some_and(PyValue::is_true);
    let style = Style { is_ascii: is_set(&ascii), indent, between, behind_key, is_sorted: is_set(&sorted) };
    let mut out = TextOut::default();
    write(value, &style, 1, &mut out)?;
    Ok(PyValue::text(out.finish()))
}

fn new_line(style: &Style, level: usize, out: &mut TextOut) -> Fallible<()> {
    let Some(indent) = &style.indent else { return Ok(()) };
    out.push("\n")?;
    super::meter::reserve(indent.len().saturating_mul(level))?;
    out.push(&indent.repeat(level))
}

fn write(value: &PyValue, style: &Style, level: usize, out: &mut TextOut) -> Fallible<()> {
    match value {
        PyValue::None => out.push("null"),
        PyValue::Bool(b) => out.push(if *b { "true" } else { "false" }),
        PyValue::Int(n) => out.push(&n.to_string()),
        PyValue::Float(x) => out.push(&json_float(*x)),
        PyValue::Str(text) | PyValue::Markup(text) => quote(text, style.is_ascii, out),
        PyValue::List(items) | PyValue::Tuple(items) => {
            if items.is_empty() {
                return out.push("[]");
            }
            out.push("[")?;
            for (i, item) in items.iter().enumerate() {
                out.push(if i > 0 { &style.between } else { "" })?;
                new_line(style, level, out)?;
                write(item, style, level + 1, out)?;
            }
            new_line(style, level - 1, out)?;
            out.push("]")
        }
        PyValue::Dict(dict) => {
            let mut entries = dict.entries().to_vec();
            if entries.is_empty() {
                return out.push("{}");
            }
            if style.is_sorted {
                let pair =
                    |(key, value): (PyValue, PyValue)| Ok((key.clone(), PyValue::tuple(vec![key, value])?));
                let sorted = sort(entries.into_iter().map(pair).collect::<Fallible<_>>()?, false)?;
                entries = Vec::new();
                for pair in sorted {
                    if let [key, value] = &pair.to_vec()?[..] {
                        entries.push((key.clone(), value.clone()));
                    }
                }
            }
            out.push("{")?;
            for (i, (key, value)) in entries.iter().enumerate() {
                out.push(if i > 0 { &style.between } else { "" })?;
                new_line(style, level, out)?;
                let key = match key {
                    PyValue::Str(text) | PyValue::Markup(text) => text.to_string(),
                    PyValue::None => "null".into(),
                    PyValue::Bool(b) => b.to_string(),
                    PyValue::Int(n) => n.to_string(),
                    PyValue::Float(x) => json_float(*x),
                    other => {
                        return fail(format!(
                            "keys must be str, int, float, bool or None, not {}",
                            other.type_name()
                        ));
                    }
                };
                quote(&key, style.is_ascii, out)?;
                out.push(&style.behind_key)?;
                write(value, style, level + 1, out)?;
            }
            new_line(style, level - 1, out)?;
            out.push("}")
        }
        other => fail(format!("Object of type {} is not JSON serializable", other.type_name())),
    }
}

fn json_float(x: f64) -> String {
    match float(x).as_str() {
        "nan" => "NaN".into(),
        "inf" => "Infinity".into(),
        "-inf" => "-Infinity".into(),
        text => text.into(),
    }
}

fn quote(text: &str, is_ascii: bool, out: &mut TextOut) -> Fallible<()> {
    out.push("\"")?;
    let is_plain = |c: char| c >= ' ' && c != '"' && c != '\\' && (!is_ascii || c <= '~');
    escape(text, is_plain, out, |c, out| match c {
        '"' => out.push("\\\""),
        '\\' => out.push("\\\\"),
        '\n' => out.push("\\n"),
        '\r' => out.push("\\r"),
        '\t' => out.push("\\t"),
        '\u{8}' => out.push("\\b"),
        '\u{c}' => out.push("\\f"),
        c => {
            let mut units = [0; 2];
            c.encode_utf16(&mut units).iter().try_for_each(|unit| out.push(&format!("\\u{unit:04x}")))
        }
    })?;
    out.push("\"")
}
