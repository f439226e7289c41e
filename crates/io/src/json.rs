//! JSON whose objects have every key once.
//!
//! JSON libraries take the last of several equal keys without a word, and two programs may read one file differently.

use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::collections::HashSet;
use std::fmt;

/// Parses JSON text whose objects, at every depth, have every key once.
///
/// # Errors
/// The text is not JSON, an object has a key twice (the error names it), or `T` does not take what is there.
pub fn parse<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice::<Unique>(text)?;
    serde_json::from_slice(text)
}

/// Any value, of which nothing is kept.
struct Unique;

impl<'de> serde::Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Unique)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Unique;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_str<E>(self, _: &str) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_unit<E>(self) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Unique, A::Error> {
        while values.next_element::<Unique>()?.is_some() {}
        Ok(Unique)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if keys.contains(&key) {
                return Err(A::Error::custom(format!("key `{}` is there twice", key.escape_debug())));
            }
            map.next_value::<Unique>()?;
            keys.insert(key);
        }
        Ok(Unique)
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
    }
}
