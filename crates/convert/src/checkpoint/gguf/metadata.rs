//! Typed access to the values of keys.

use super::header::{Cursor, StoredValue, ValueKind};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Key of the texts of the tokens.
pub const TOKENS: &str = "tokenizer.ggml.tokens";

/// Keys of a file. A key that is not there gives `None`; a key of another kind gives an error that names it.
#[derive(Clone, Copy)]
pub struct Metadata<'a> {
    pub path: &'a Path,
    pub file: &'a [u8],
    pub values: &'a BTreeMap<String, StoredValue>,
}

impl<'a> Metadata<'a> {
    /// Makes the error of a key with a wrong value.
    pub fn invalid(&self, key: &str, what: impl std::fmt::Display) -> Error {
        Error::invalid(self.path, format!("metadata: `{key}` {what}"))
    }

    /// Makes the error of a key that asks for a feature that is not implemented.
    pub fn unsupported(&self, key: &str, what: impl std::fmt::Display) -> Error {
        Error::unsupported(self.path, format!("metadata: `{key}` {what}"))
    }

    /// Takes a value that has to be there; its absence is an error.
    pub fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.invalid(key, "is missing"))
    }

    fn wrong<T>(&self, key: &str, found: &StoredValue, expected: &str) -> Result<T> {
        let array = if found.array.is_some() { "array of " } else { "" };
        Err(self.invalid(key, format!("is of type {array}{}, expected {expected}", found.kind.name())))
    }

    fn bytes(&self, found: &StoredValue) -> &'a [u8] {
        &self.file[found.bytes.clone()]
    }

    fn scalar(&self, key: &str) -> Option<&'a StoredValue> {
        self.values.get(key).filter(|v| v.array.is_none())
    }

    /// Reads an integer that is not negative.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        let Some(found) = self.values.get(key) else { return Ok(None) };
        match self.scalar(key).and_then(|v| integer(v.kind, self.bytes(v))) {
            Some(Ok(n)) => Ok(Some(n)),
            Some(Err(n)) => Err(self.invalid(key, format!("is {n}, expected no negative number"))),
            None => self.wrong(key, found, "an integer"),
        }
    }

    /// Reads the id of the token with a role, for instance `bos`; none where it is outside the vocabulary: negative
    /// numbers, and those with all bits set, stand for no token.
    pub fn special_token(&self, role: &str) -> Result<Option<u64>> {
        let key = format!("tokenizer.ggml.{role}_token_id");
        let count = self.array_len(TOKENS).unwrap_or(u64::MAX);
        match self.scalar(&key).and_then(|v| integer(v.kind, self.bytes(v))) {
            Some(id) => Ok(id.ok().filter(|id| *id < count)),
            None => self.unsigned(&key),
        }
    }

    /// Reads a finite floating-point number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(found) = self.values.get(key) else { return Ok(None) };
        match self.scalar(key).and_then(|v| float(v.kind, self.bytes(v))) {
            // The number goes into JSON, which has no word for others.
            Some(n) if !n.is_finite() => Err(self.invalid(key, format!("is {n}, expected a finite number"))),
            Some(n) => Ok(Some(n)),
            None => self.wrong(key, found, "f32"),
        }
    }

    /// Reads a finite number of any kind.
    pub fn any_number(&self, key: &str) -> Result<Option<f64>> {
        match self.scalar(key).and_then(|v| integer(v.kind, self.bytes(v))) {
            Some(n) => Ok(Some(n.map_or_else(|n| n as f64, |n| n as f64))),
            None => self.number(key),
        }
    }

    /// Reads a boolean.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        let Some(found) = self.values.get(key) else { return Ok(None) };
        match self.scalar(key).map(|v| (v.kind, self.bytes(v))) {
            Some((ValueKind::Bool, [b])) => self.parse_bool(key, *b).map(Some),
            _ => self.wrong(key, found, "bool"),
        }
    }

    fn parse_bool(&self, key: &str, byte: u8) -> Result<bool> {
        match byte {
            0 | 1 => Ok(byte == 1),
            _ => Err(self.invalid(key, format!("has the byte {byte}, expected 0 or 1"))),
        }
    }

    /// Reads a string.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(found) = self.values.get(key) else { return Ok(None) };
        match self.scalar(key) {
            Some(v) if v.kind == ValueKind::Text => self.utf8(key, self.bytes(v)).map(Some),
            _ => self.wrong(key, found, "string"),
        }
    }

    fn utf8(&self, key: &str, bytes: &'a [u8]) -> Result<&'a str> {
        std::str::from_utf8(bytes)
            .map_err(|_| self.invalid(key, format!("has `{}`, which is not UTF-8", bytes.escape_ascii())))
    }

    /// Reads an array of booleans.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        let Some(found) = self.values.get(key) else { return Ok(None) };
        match (found.kind, found.array) {
            (ValueKind::Bool, Some(_)) => {
                let all: Result<_> = self.bytes(found).iter().map(|&b| self.parse_bool(key, b)).collect();
                all.map(Some)
            }
            _ => self.wrong(key, found, "array of bool"),
        }
    }

    /// Reads an array of `len` integers that are not negative; a single integer stands for `len` equal ones.
    pub fn unsigneds(&self, key: &str, len: usize) -> Result<Option<Vec<u64>>> {
        let Some(found) = self.values.get(key) else { return Ok(None) };
        if found.array.is_none() {
            return Ok(self.unsigned(key)?.map(|n| vec![n; len]));
        }
        let Some(size) = found.kind.bytes().filter(|_| found.array == Some(len)) else {
            let n = found.array.unwrap_or_default();
            return Err(self.invalid(key, format!("has {n} values, expected {len}")));
        };
        let one = |b: &[u8]| match integer(found.kind, b) {
            Some(Ok(n)) => Ok(n),
            Some(Err(n)) => Err(self.invalid(key, format!("has {n}, expected no negative number"))),
            None => self.wrong(key, found, "array of integers"),
        };
        let all: Result<_> = self.bytes(found).chunks_exact(size).map(one).collect();
        all.map(Some)
    }

    /// Reads an array of `len` finite numbers of any kind.
    pub fn numbers(&self, key: &str, len: usize) -> Result<Option<Vec<f64>>> {
        let Some(found) = self.values.get(key) else { return Ok(None) };
        let (Some(n), Some(size)) = (found.array, found.kind.bytes()) else {
            return self.wrong(key, found, "array of numbers");
        };
        if n != len {
            return Err(self.invalid(key, format!("has {n} values, expected {len}")));
        }
        let one = |b: &[u8]| match integer(found.kind, b) {
            Some(n) => Ok(n.map_or_else(|n| n as f64, |n| n as f64)),
            None => match float(found.kind, b) {
                Some(n) if n.is_finite() => Ok(n),
                Some(n) => Err(self.invalid(key, format!("has {n}, expected finite numbers"))),
                None => self.wrong(key, found, "array of numbers"),
            },
        };
        let all: Result<_> = self.bytes(found).chunks_exact(size).map(one).collect();
        all.map(Some)
    }

    /// Returns the number of an array's values; none where there is no array.
    pub fn array_len(&self, key: &str) -> Option<u64> {
        self.values.get(key).and_then(|v| v.array).map(|n| n as u64)
    }

    /// Reads an array of strings.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(found) = self.values.get(key) else { return Ok(None) };
        let (ValueKind::Text, Some(len)) = (found.kind, found.array) else {
            return self.wrong(key, found, "array of string");
        };
        let mut cursor = Cursor { file: &self.file[..found.bytes.end], at: found.bytes.start };
        let mut all = Vec::new();
        for _ in 0..len {
            // The strings' lengths were checked when the head was read.
            let text = cursor.string(key).map_err(|_| self.invalid(key, "is cut off"))?;
            all.push(self.utf8(key, text)?);
        }
        Ok(Some(all))
    }
}

/// Reads an integer of any kind; `Err` for an integer below zero, none for other kinds.
fn integer(kind: ValueKind, bytes: &[u8]) -> Option<std::result::Result<u64, i64>> {
    let n = match (kind, bytes) {
        (ValueKind::U8, [b]) => i64::from(*b),
        (ValueKind::I8, [b]) => i64::from(*b as i8),
        (ValueKind::U16, [a, b]) => i64::from(u16::from_le_bytes([*a, *b])),
        (ValueKind::I16, [a, b]) => i64::from(i16::from_le_bytes([*a, *b])),
        (ValueKind::U32, _) => i64::from(u32::from_le_bytes(*bytes.first_chunk()?)),
        (ValueKind::I32, _) => i64::from(i32::from_le_bytes(*bytes.first_chunk()?)),
        (ValueKind::U64, _) => return Some(Ok(u64::from_le_bytes(*bytes.first_chunk()?))),
        (ValueKind::I64, _) => i64::from_le_bytes(*bytes.first_chunk()?),
        _ => return None,
    };
    Some(u64::try_from(n).map_err(|_| n))
}

fn float(kind: ValueKind, bytes: &[u8]) -> Option<f64> {
    match kind {
        ValueKind::F32 => bytes.first_chunk().map(|b| f64::from(f32::from_le_bytes(*b))),
        ValueKind::F64 => bytes.first_chunk().map(|b| f64::from_le_bytes(*b)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::header;
    use super::super::writer::Gguf;
    use super::*;

    fn with<T>(g: &Gguf, check: impl FnOnce(Metadata<'_>) -> T) -> T {
        let file = g.write();
        let head = header::parse(&file).unwrap();
        check(Metadata { path: Path::new("m.gguf"), file: &file, values: &head.values })
    }

    #[test]
    fn values_of_every_kind() {
        let mut g = Gguf::new();
        for (i, (kind, bytes)) in [
            (0, vec![7]),
            (1, vec![7]),
            (2, vec![7, 0]),
            (3, vec![7, 0]),
            (4, vec![7, 0, 0, 0]),
            (5, vec![7, 0, 0, 0]),
            (10, 7u64.to_le_bytes().to_vec()),
            (11, 7u64.to_le_bytes().to_vec()),
        ]
        .into_iter()
        .enumerate()
        {
            g.raw(&format!("n{i}"), kind, &bytes);
        }
        g.raw("double", 12, &0.25f64.to_le_bytes());
        g.f32("float", 0.25);
        g.bool("flag", true);
        g.bools("flags", &[true, false]);
        g.i32s("numbers", &[3, 4]);
        g.texts("texts", &["a", "", "ü"]);
        with(&g, |m| {
            for i in 0..8 {
                assert_eq!(m.unsigned(&format!("n{i}")).unwrap(), Some(7));
                assert_eq!(m.any_number(&format!("n{i}")).unwrap(), Some(7.0));
            }
            assert_eq!((m.number("float").unwrap(), m.number("double").unwrap()), (Some(0.25), Some(0.25)));
            assert_eq!(m.flag("flag").unwrap(), Some(true));
            assert_eq!(m.flags("flags").unwrap(), Some(vec![true, false]));
            assert_eq!(m.unsigneds("numbers", 2).unwrap(), Some(vec![3, 4]));
            assert_eq!(m.unsigneds("n4", 3).unwrap(), Some(vec![7, 7, 7]));
            assert_eq!(m.texts("texts").unwrap(), Some(vec!["a", "", "ü"]));
            assert_eq!((m.unsigned("none").unwrap(), m.texts("none").unwrap()), (None, None));
        });
    }

    #[test]
    fn a_value_of_another_kind() {
        let mut g = Gguf::new();
        g.text("text", "7");
        g.i32s("list", &[7, -7]);
        g.raw("low", 5, &(-1i32).to_le_bytes());
        g.raw("truth", 7, &[2]);
        g.raw("bytes", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]);
        g.f32s("floats", &[1.0]);
        with(&g, |m| {
            for (error, says) in [
                (m.unsigned("text").err(), "`text` is of type string, expected an integer"),
                (m.unsigned("list").err(), "`list` is of type array of i32"),
                (m.unsigned("low").err(), "`low` is -1"),
                (m.number("text").err(), "expected f32"),
                (m.flag("truth").err(), "`truth` has the byte 2"),
                (m.flag("low").err(), "expected bool"),
                (m.text("bytes").err(), "`bytes` has `\\xff`, which is not UTF-8"),
                (m.text("low").err(), "expected string"),
                (m.flags("list").err(), "expected array of bool"),
                (m.texts("list").err(), "expected array of string"),
                (m.unsigneds("list", 3).err(), "`list` has 2 values, expected 3"),
                (m.unsigneds("list", 2).err(), "`list` has -7"),
                (m.unsigneds("floats", 1).err(), "expected array of integers"),
            ] {
                let error = error.unwrap().to_string();
                assert!(error.starts_with("m.gguf: invalid metadata: ") && error.contains(says), "{error}");
            }
        });
    }
}
