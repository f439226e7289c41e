//! Parses JSON whose objects have every key once.
//!
//! JSON libraries silently take the last of several equal keys, and two programs may read one file differently.

use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
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

/// Parses JSON text whose objects, at every depth, have every key once; a byte order mark before it does not count.
///
/// # Errors
/// The text is not JSON, an object has a key twice (the error names it), or the value does not fit `T`.
pub fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T, JsonError> {
    let text = crate::without_mark(text);
    serde_json::from_slice::<UniqueKeys>(text)?;
    Ok(serde_json::from_slice(text)?)
}

/// A visitor that accepts any value, keeps nothing, and refuses repeated keys.
struct UniqueKeys;

impl<'de> serde::Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueKeys)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = UniqueKeys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_i64<E>(self, _: i64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_u64<E>(self, _: u64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_f64<E>(self, _: f64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_str<E>(self, _: &str) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_unit<E>(self) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<UniqueKeys, A::Error> {
        while values.next_element::<UniqueKeys>()?.is_some() {}
        Ok(UniqueKeys)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueKeys, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if keys.contains(&key) {
                return Err(A::Error::custom(format!("key `{}` is there twice", key.escape_debug())));
            }
            map.next_value::<UniqueKeys>()?;
            keys.insert(key);
        }
        Ok(UniqueKeys)
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
            "",
        ] {
            let (ours, library) = (parse::<Value>(text.as_bytes()), serde_json::from_str::<Value>(text));
            assert_eq!(ours.map_err(|e| e.to_string()), library.map_err(|e| e.to_string()), "{text}");
        }
        assert!(parse::<Value>("[".repeat(100_000).as_bytes()).is_err());
        assert_eq!(parse::<u8>("\u{feff}7".as_bytes()).unwrap(), 7);
        assert!(parse::<u8>("\u{feff}\u{feff}7".as_bytes()).is_err());
    }
}
