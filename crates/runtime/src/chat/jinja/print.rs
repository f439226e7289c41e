//! Values as Python's `str` and `repr` write them.

use super::meter::{Fallible, TextOut};
use super::py_value::PyValue;

/// Writes a value as `str` does.
///
/// # Errors
/// The text does not fit.
pub fn print(value: &PyValue, out: &mut TextOut) -> Fallible<()> {
    match value {
        PyValue::Undefined(_) => Ok(()),
        PyValue::Str(text) | PyValue::Markup(text) => out.push(text),
        other => represent(other, out),
    }
}

/// Returns a value as `str` gives it.
///
/// # Errors
/// The text does not fit.
pub fn printed(value: &PyValue) -> Fallible<String> {
    let mut out = TextOut::default();
    print(value, &mut out)?;
    Ok(out.finish())
}

/// Returns a value as `repr` gives it.
///
/// # Errors
/// The text does not fit.
pub fn represented(value: &PyValue) -> Fallible<String> {
    let mut out = TextOut::default();
    represent(value, &mut out)?;
    Ok(out.finish())
}

/// Writes a value as `repr` does.
///
/// # Errors
/// The text does not fit.
pub fn represent(value: &PyValue, out: &mut TextOut) -> Fallible<()> {
    let list = |out: &mut TextOut, open: &str, values: &[PyValue], close: &str| {
        out.push(open)?;
        for (i, value) in values.iter().enumerate() {
            out.push(if i > 0 { ", " } else { "" })?;
            represent(value, out)?;
        }
        out.push(close)
    };
    let pairs = |out: &mut TextOut, entries: &[(PyValue, PyValue)]| {
        out.push("{")?;
        for (i, (key, value)) in entries.iter().enumerate() {
            out.push(if i > 0 { ", " } else { "" })?;
            represent(key, out)?;
            out.push(": ")?;
            represent(value, out)?;
        }
        out.push("}")
    };
    match value {
        PyValue::Undefined(_) => out.push("Undefined"),
        PyValue::None => out.push("None"),
        PyValue::Bool(true) => out.push("True"),
        PyValue::Bool(false) => out.push("False"),
        PyValue::Int(n) => out.push(&n.to_string()),
        PyValue::Float(x) => out.push(&float(*x)),
        PyValue::Str(text) => quote(text, out),
        PyValue::Markup(text) => {
            out.push("Markup(")?;
            quote(text, out)?;
            out.push(")")
        }
        PyValue::List(items) => list(out, "[", items, "]"),
        PyValue::Tuple(items) => list(out, "(", items, if items.len() == 1 { ",)" } else { ")" }),
        PyValue::Dict(dict) => pairs(out, dict.entries()),
        PyValue::DictView(..) => {
            out.push(value.type_name())?;
            list(out, "([", &value.to_vec()?, "])")
        }
        PyValue::Range(range) => match range.step {
            1 => out.push(&format!("range({}, {})", range.start, range.stop)),
            step => out.push(&format!("range({}, {}, {step})", range.start, range.stop)),
        },
        PyValue::Namespace(namespace) => match namespace.try_borrow_mut() {
            // A namespace may hold itself: it is taken while its values are written.
            Ok(namespace) => {
                out.push("<Namespace ")?;
                pairs(out, namespace.entries())?;
                out.push(">")
            }
            Err(_) => out.push("<Namespace {...}>"),
        },
        PyValue::Macro(it) => {
            out.push("<Macro ")?;
            quote(&it.body.name, out)?;
            out.push(">")
        }
        PyValue::Loop(state) => {
            let length = state.length.get().unwrap_or(0);
            out.push(&format!("<LoopContext {}/{length}>", state.index.get()))
        }
        other => out.push(&format!("<{}>", other.type_name())),
    }
}

/// Tells whether `repr` writes a character as it is.
pub fn is_printable(c: char) -> bool {
    // Rust escapes the same characters; behind another one it leaves those that combine.
    matches!(c, '"' | '\'' | '\\') || ["a", &String::from(c)].concat().escape_debug().skip(1).eq([c])
}

/// Writes a text in the quotes that `repr` chooses.
///
/// # Errors
/// The text does not fit.
pub fn quote(text: &str, out: &mut TextOut) -> Fallible<()> {
    let quote = if text.contains('\'') && !text.contains('"') { "\"" } else { "'" };
    out.push(quote)?;
    let is_plain = |c: char| (' '..='~').contains(&c) && c != '\\' && !quote.contains(c);
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c| !is_plain(c)).unwrap_or(rest.len());
        out.push(&rest[..end])?;
        rest = &rest[end..];
        let Some(c) = rest.chars().next() else { break };
        rest = &rest[c.len_utf8()..];
        let code = u32::from(c);
        match c {
            '\n' => out.push("\\n")?,
            '\r' => out.push("\\r")?,
            '\t' => out.push("\\t")?,
            '\\' => out.push("\\\\")?,
            c if quote.contains(c) => out.push(&format!("\\{c}"))?,
            c if is_printable(c) => out.push(c.encode_utf8(&mut [0; 4]))?,
            _ if code < 0x100 => out.push(&format!("\\x{code:02x}"))?,
            _ if code < 0x10000 => out.push(&format!("\\u{code:04x}"))?,
            _ => out.push(&format!("\\U{code:08x}"))?,
        }
    }
    out.push(quote)
}

/// Returns a number as `repr` writes it: the shortest digits that give it back.
pub fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let text = format!("{x:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..=15 if x.fract() == 0.0 => format!("{x:.1}"),
        -4..=15 => format!("{x}"),
        exponent => format!("{digits}{}", exponent_text(exponent)),
    }
}

/// Returns an exponent with its sign and at least two digits.
pub fn exponent_text(exponent: i32) -> String {
    format!("e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
