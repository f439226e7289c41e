//! Names that templates written for Python's Jinja expect: `raise_exception`, `strftime_now`, the filter `tojson`, the test
//! `iterable`, methods of Python's strings and maps, and values as Python prints them.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};
use serde::Serialize;
use serde_json::Value as Json;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io;

/// Instructions that a template may run: a thousand messages take about 100,000; an endless loop is stopped.
const MOST_STEPS: u64 = 5_000_000;
/// Largest depth of macros that call each other.
const MOST_DEPTH: usize = 200;

/// Makes an environment like the one of Hugging Face transformers for chat templates.
pub fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(MOST_STEPS));
    environment.set_recursion_limit(MOST_DEPTH);
    environment.set_formatter(print_value);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment.add_test("iterable", is_iterable);
    environment
}

/// Prints a value as Python does.
fn print_value(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }).map_err(Error::from),
        ValueKind::None => out.write_str("None").map_err(Error::from),
        ValueKind::Map | ValueKind::Seq => match serde_json::to_value(value) {
            Ok(json) => out.write_str(&representation(&json)).map_err(Error::from),
            Err(_) => minijinja::escape_formatter(out, state, value),
        },
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// Returns a value as Python's `repr` writes it.
fn representation(value: &Json) -> String {
    match value {
        Json::Null => "None".into(),
        Json::Bool(true) => "True".into(),
        Json::Bool(false) => "False".into(),
        Json::Number(number) => number.to_string(),
        Json::String(text) => quoted(text),
        Json::Array(items) => {
            format!("[{}]", items.iter().map(representation).collect::<Vec<_>>().join(", "))
        }
        Json::Object(map) => {
            let pairs = map.iter().map(|(key, value)| format!("{}: {}", quoted(key), representation(value)));
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        }
    }
}

/// Returns a text in the quotes that Python's `repr` chooses.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out += "\\n",
            '\r' => out += "\\r",
            '\t' => out += "\\t",
            '\\' => out += "\\\\",
            c if c == quote => out.extend(['\\', c]),
            c if u32::from(c) < 0x20 || c == '\u{7f}' => out += &format!("\\x{:02x}", u32::from(c)),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Tells whether a loop can iterate over a value; `none` is not iterable.
fn is_iterable(value: &Value) -> bool {
    value.kind() != ValueKind::None && value.try_iter().is_ok()
}

/// Ends the template with an error whose message is `what`.
fn raise_exception(what: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, what))
}

/// Formats the current date and time, in UTC.
fn strftime_now(format: String) -> Result<String, Error> {
    let now = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
    jiff::fmt::strtime::format(&format, &now)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
}

/// Writes a value as JSON with Python's blanks behind commas and colons; `indent=N` puts each value on a line of its own.
fn to_json(value: Value, indent: Option<usize>, options: Kwargs) -> Result<String, Error> {
    let failed = |e: String| Error::new(ErrorKind::BadSerialization, format!("tojson: {e}"));
    let indent = options.get::<Option<usize>>("indent")?.or(indent);
    let is_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let is_sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    // Accepted but ignored: the usual separators are always written.
    let _ = options.get::<Option<Value>>("separators")?;
    options.assert_all_used()?;
    let mut value = serde_json::to_value(&value).map_err(|e| failed(e.to_string()))?;
    if is_sorted {
        value.sort_all_objects();
    }
    let mut out = Vec::new();
    let written = match indent {
        Some(n) => {
            let blanks = vec![b' '; n.min(16)];
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&blanks)))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, PythonFormatter)),
    };
    written.map_err(|e| failed(e.to_string()))?;
    let text = String::from_utf8(out).map_err(|e| failed(e.to_string()))?;
    Ok(if is_ascii { in_ascii(&text) } else { text })
}

/// Escapes the characters of a JSON text that are not ASCII.
fn in_ascii(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c.is_ascii() {
            true => out.push(c),
            false => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out += &format!("\\u{unit:04x}")),
        }
    }
    out
}

/// JSON on one line, as `json.dumps` writes it.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: io::Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: io::Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}
