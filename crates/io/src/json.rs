//! Parses JSON whose objects have every key once, in bounded memory.
//!
//! JSON libraries silently take the last of several equal keys, and two programs may read one file differently. A text
//! of many small values takes much more memory parsed than as text.

use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;

/// Reason why a text was refused, in JSON's words: the library's words name Rust types.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonError {
    what: String,
    column: usize,
    is_eof: bool,
}

impl JsonError {
    /// Returns the column of the fault in bytes, from 1; 0 where it is not known.
    pub fn column(&self) -> usize {
        self.column
    }

    /// Tells whether the text ends too early.
    pub fn is_eof(&self) -> bool {
        self.is_eof
    }
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for JsonError {}

impl From<serde_json::Error> for JsonError {
    fn from(e: serde_json::Error) -> JsonError {
        let text = e.to_string();
        let place = format!(" at line {} column {}", e.line(), e.column());
        let what = match text.strip_suffix(&place) {
            Some(what) if e.line() > 0 => format!("{}{place}", in_words_of_json(what)),
            _ => in_words_of_json(&text),
        };
        JsonError { what, column: e.column(), is_eof: e.is_eof() }
    }
}

/// Translates a message of serde to JSON's words.
fn in_words_of_json(what: &str) -> String {
    let (kind, rest) = what.split_once(' ').unwrap_or((what, ""));
    match (kind, rest.split_once(' ')) {
        ("missing", Some(("field", key))) => format!("key {key} is missing"),
        ("duplicate", Some(("field", key))) => format!("key {key} is there twice"),
        ("unknown", Some((sort @ ("field" | "variant"), rest))) => {
            let sort = if sort == "field" { "key" } else { "value" };
            match rest
                .rsplit_once(", expected ")
                .or_else(|| Some((rest.strip_suffix(", there are no fields")?, "")))
            {
                Some((name, "")) => format!("{sort} {name} is not known"),
                Some((name, known)) => {
                    format!("{sort} {name} is not known; known is {}", known.trim_start_matches("one of "))
                }
                None => format!("{sort} {rest} is not known"),
            }
        }
        ("invalid", Some(("type" | "value" | "type:" | "value:" | "length", _))) => {
            let rest = rest.split_once(' ').map_or("", |(_, found)| found);
            match rest.rsplit_once(", expected ") {
                Some((found, wanted)) => {
                    format!("found {}, expected {}", found_words(found), wanted_words(wanted))
                }
                None => what.to_string(),
            }
        }
        ("data", _) if what.starts_with("data did not match any variant") => {
            "none of the forms that are read".into()
        }
        _ => what.to_string(),
    }
}

/// Translates serde's name of a value that it found.
fn found_words(found: &str) -> Cow<'_, str> {
    match found {
        "map" => "an object".into(),
        "sequence" => "a list".into(),
        "unit value" => "null".into(),
        _ => {
            let value = ["string ", "integer ", "floating point ", "boolean "]
                .iter()
                .find_map(|kind| found.strip_prefix(kind));
            value.map_or_else(|| found.into(), |value| value.trim_matches('`').into())
        }
    }
}

/// Translates serde's name of a value that it expected.
fn wanted_words(wanted: &str) -> Cow<'_, str> {
    let (kind, rest) = wanted.split_once(' ').unwrap_or((wanted, ""));
    let counted = || rest.rsplit_once("with ").map(|(_, n)| format!("a list of {n}"));
    match kind {
        "u8" | "u16" | "u32" | "u64" | "u128" | "usize" => "a whole number from 0 on".into(),
        "i8" | "i16" | "i32" | "i64" | "i128" | "isize" => "a whole number".into(),
        "f32" | "f64" => "a number".into(),
        "unit" | "null" => "null".into(),
        "struct" | "tuple" if counted().is_some() => counted().unwrap_or_default().into(),
        "struct" | "internally" | "adjacently" => "an object".into(),
        "enum" | "variant" => "a name".into(),
        "tuple" => "a list".into(),
        "a" => match rest {
            "map" => "an object".into(),
            "sequence" => "a list".into(),
            "boolean" => "true or false".into(),
            _ => match rest.strip_prefix("tuple of size ") {
                Some(n) => format!("a list of {n} elements").into(),
                None => wanted.into(),
            },
        },
        _ => wanted.into(),
    }
}

/// Message about a web page.
pub const WEB_PAGE: &str =
    "this is a web page (HTML), not the file; a download without a login saves such a page";
/// Most bytes of a parsed form, however short its text.
const SMALL_FORM: u64 = 64 << 20;
/// Most bytes of a parsed form for each byte of its text. Documents as people and programs write them take 5 to 12; a
/// text of nothing but `{"":0}` would take 80.
const FORM_PER_BYTE: u64 = 16;
/// Bytes of an object besides its values and keys, and of a key beside its value: entries, hashes and allocations.
const OBJECT_BYTES: u64 = 200;
const KEY_BYTES: u64 = 64;

/// Parses JSON text whose objects, at every depth, have every key once, and whose parsed form takes at most 64 MiB or
/// 16 times the text. A byte order mark before it does not count.
///
/// # Errors
/// The text is not JSON, an object has a key twice (the error names it), the parsed form would be larger, or the value
/// does not fit `T`.
pub fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T, JsonError> {
    parse_within(text, &mut form_limit(text.len() as u64))
}

/// Returns the most bytes that the parsed form of so many bytes of text takes.
pub fn form_limit(text_bytes: u64) -> u64 {
    SMALL_FORM.max(text_bytes.saturating_mul(FORM_PER_BYTE))
}

/// Parses JSON text like [`parse`]. The parsed form takes at most `left` bytes, from which it is subtracted.
///
/// # Errors
/// Fails like [`parse`].
pub fn parse_within<T: DeserializeOwned>(text: &[u8], left: &mut u64) -> Result<T, JsonError> {
    let text = crate::without_mark(text);
    let is_empty = text.trim_ascii().is_empty();
    if is_empty || crate::is_web_page(text) {
        let what = if is_empty { "the text is empty" } else { WEB_PAGE };
        return Err(JsonError { what: what.into(), column: 0, is_eof: is_empty });
    }
    let budget = Cell::new(*left);
    let mut reader = serde_json::Deserializer::from_slice(text);
    UniqueKeys(&budget).deserialize(&mut reader)?;
    reader.end()?;
    *left = budget.get();
    Ok(serde_json::from_slice(text)?)
}

/// Parses JSON text like [`parse`], without a limit of its parsed form: for types that hold no [`serde_json::Value`] and
/// little for each byte of text.
///
/// # Errors
/// Fails like [`parse`].
pub fn parse_large<T: DeserializeOwned>(text: &[u8]) -> Result<T, JsonError> {
    let mut left = u64::MAX;
    parse_within(text, &mut left)
}

/// A visitor that accepts any value, keeps nothing, and refuses repeated keys. Counts the bytes that the value would
/// take as a [`serde_json::Value`].
#[derive(Clone, Copy)]
struct UniqueKeys<'a>(&'a Cell<u64>);

impl UniqueKeys<'_> {
    fn take<E: serde::de::Error>(self, bytes: u64) -> Result<(), E> {
        let left = self.0.get().checked_sub(bytes);
        self.0.set(
            left.ok_or_else(|| E::custom("too many values: the parsed form would take too much memory"))?,
        );
        Ok(())
    }

    /// Counts a value whose content has so many bytes.
    fn value<E: serde::de::Error>(self, content: usize) -> Result<(), E> {
        self.take((size_of::<serde_json::Value>() + content) as u64)
    }
}

impl<'de> DeserializeSeed<'de> for UniqueKeys<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<(), E> {
        self.value(0)
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<(), E> {
        self.value(0)
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<(), E> {
        self.value(0)
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<(), E> {
        self.value(0)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        self.value(text.len())
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.value(0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        self.value(0)?;
        while values.next_element_seed(self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.value(0)?;
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if keys.contains(&key) {
                return Err(A::Error::custom(format!("key `{}` is there twice", key.escape_debug())));
            }
            self.take(KEY_BYTES + key.len() as u64 + if keys.is_empty() { OBJECT_BYTES } else { 0 })?;
            map.next_value_seed(self)?;
            keys.insert(key);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn keys_that_are_there_twice_are_named_at_every_depth() {
        for text in
            [r#"{"a": 1, "a": 2}"#, r#"[{"b": {"a": null, "c": [], "a": 1.5}}]"#, r#"{"a": 1, "\u0061": 1}"#]
        {
            let e = parse::<Value>(text.as_bytes()).unwrap_err().to_string();
            assert!(e.starts_with("key `a` is there twice at line 1"), "{e}");
        }
    }

    #[test]
    fn messages_are_about_json_and_not_about_types_of_rust() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        #[allow(dead_code)]
        struct TokenCount {
            min: usize,
            max: Option<Vec<f32>>,
            pair: Option<(u8, u8)>,
            kind: Option<Kind>,
            name: Option<String>,
            flag: Option<bool>,
        }
        #[derive(Debug, serde::Deserialize)]
        enum Kind {
            A,
            B,
        }
        for (text, says) in [
            ("3", "found 3, expected an object at line 1 column 1"),
            (r#"{"max": null}"#, "key `min` is missing at line 1 column 13"),
            (r#"{"min": -1}"#, "found -1, expected a whole number from 0 on at line 1"),
            (r#"{"min": "x, expected y"}"#, "found \"x, expected y\", expected a whole number from 0 on"),
            (r#"{"min": 1.5}"#, "found 1.5, expected a whole number"),
            (r#"{"min": {}}"#, "found an object, expected a whole number"),
            (r#"{"min": 1, "max": 1}"#, "found 1, expected a list"),
            (r#"{"min": 1, "max": ["x"]}"#, "found \"x\", expected a number"),
            (r#"{"min": 1, "pair": [1]}"#, "found 1, expected a list of 2 elements"),
            (r#"{"min": 1, "kind": "C"}"#, "value `C` is not known; known is `A` or `B`"),
            (r#"{"min": 1, "kind": 1}"#, "expected "),
            (r#"{"min": 1, "name": []}"#, "found a list, expected a string"),
            (r#"{"min": 1, "flag": null, "other": 1}"#, "key `other` is not known; known is `min`, `max`"),
            (r#"{"min": 1, "flag": 3}"#, "found 3, expected true or false"),
        ] {
            let e = parse::<TokenCount>(text.as_bytes()).unwrap_err().to_string();
            assert!(e.contains(says), "{text}: {e}");
            for leak in ["struct", "usize", "u8", "f32", "enum", "field", "sequence", "map", "variant"] {
                assert!(!e.contains(leak), "{text}: {e}");
            }
        }
    }

    #[test]
    fn other_text_is_parsed_as_by_the_library() {
        for text in [
            r#"{"a": {"b": 1}, "b": [{"a": 1}, {"a": 2}], "c": [true, null, -1, 1.5e3, "x"]}"#,
            "{",
            r#"{"a" 1}"#,
            "[1, 2",
            "1e999",
        ] {
            let (ours, library) = (parse::<Value>(text.as_bytes()), serde_json::from_str::<Value>(text));
            assert_eq!(ours.map_err(|e| e.to_string()), library.map_err(|e| e.to_string()), "{text}");
        }
        assert!(parse::<Value>("[".repeat(100_000).as_bytes()).is_err());
        let wrong = |text: &str| parse::<Value>(text.as_bytes()).unwrap_err();
        for empty in ["", " \n", "\u{feff}"] {
            assert!(wrong(empty).to_string() == "the text is empty" && wrong(empty).is_eof());
        }
        assert!(wrong("\n<!doctype HTML><html>").to_string().starts_with("this is a web page (HTML)"));
        assert_eq!(parse::<u8>("\u{feff}7".as_bytes()).unwrap(), 7);
        assert!(parse::<u8>("\u{feff}\u{feff}7".as_bytes()).is_err());
    }

    #[test]
    fn a_parsed_form_is_a_small_multiple_of_its_text() {
        let list =
            |value: &str, bytes: usize| format!("[{0}0]", format!("{value},").repeat(bytes / value.len()));
        for value in [r#"{"":0}"#, "[0]", "{\"a\":[]}", "0", "[[[[]]]]"] {
            let text = list(value, 8 << 20);
            let e = parse::<Value>(text.as_bytes()).unwrap_err().to_string();
            assert!(e.starts_with("too many values"), "{value}: {e}");
            assert!(parse_large::<serde::de::IgnoredAny>(text.as_bytes()).is_ok());
        }
        let plain = list(r#"{"name": "a value as programs write it", "count": 1234567}"#, 8 << 20);
        assert!(parse::<Value>(plain.as_bytes()).is_ok());
        let mut left = 1000;
        parse_within::<Value>(b"[1, 2]", &mut left).unwrap();
        assert_eq!(left, 1000 - 3 * size_of::<Value>() as u64);
        assert!(parse_within::<Value>(list("0", 40).as_bytes(), &mut left).is_err());
    }
}
