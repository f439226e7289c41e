//! Values as Python's `str` and `repr` write them.

use super::meter::{Fallible, TextOut};
use super::py_value::PyValue;

/// Writes a value as `str` does.
pub fn print(value: &PyValue, out: &mut TextOut) -> Fallible<()> {
    match value {
        PyValue::Undefined(_) => Ok(()),
        PyValue::Str(text) | PyValue::Markup(text) => out.push(text),
        other => represent(other, out),
    }
}

/// Returns a value as `str` gives it.
pub fn printed(value: &PyValue) -> Fallible<String> {
    let mut out = TextOut::default();
    print(value, &mut out)?;
    Ok(out.finish())
}

/// Returns a value as `repr` gives it.
pub fn represented(value: &PyValue) -> Fallible<String> {
    let mut out = TextOut::default();
    represent(value, &mut out)?;
    Ok(out.finish())
}

/// Writes a value as `repr` does.
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
pub fn quote(text: &str, out: &mut TextOut) -> Fallible<()> {
    let quote = if text.contains('\'') && !text.contains('"') { "\"" } else { "'" };
    out.push(quote)?;
    let is_plain = |c: char| (' '..='~').contains(&c) && c != '\\' && !quote.contains(c);
    escape(text, is_plain, out, |c, out| match c {
        '\n' => out.push("\\n"),
        '\r' => out.push("\\r"),
        '\t' => out.push("\\t"),
        '\\' => out.push("\\\\"),
        c if quote.contains(c) => out.push(&format!("\\{c}")),
        c if is_printable(c) => out.push(c.encode_utf8(&mut [0; 4])),
        c => match u32::from(c) {
            code @ ..0x100 => out.push(&format!("\\x{code:02x}")),
            code @ ..0x10000 => out.push(&format!("\\u{code:04x}")),
            code => out.push(&format!("\\U{code:08x}")),
        },
    })?;
    out.push(quote)
}

/// Writes a text whose characters that are not plain `write` writes.
pub fn escape(
    text: &str,
    is_plain: impl Fn(char) -> bool,
    out: &mut TextOut,
    write: impl Fn(char, &mut TextOut) -> Fallible<()>,
) -> Fallible<()> {
    let mut rest = text;
    while let Some(at) = rest.find(|c| !is_plain(c)) {
        out.push(&rest[..at])?;
        let mut behind = rest[at..].chars();
        behind.next().map_or(Ok(()), |c| write(c, out))?;
        rest = behind.as_str();
    }
    out.push(rest)
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
