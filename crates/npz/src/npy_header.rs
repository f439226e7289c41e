//! The `.npy` header: magic, version, length, and a Python dictionary literal with `descr`, `fortran_order` and `shape`.

use crate::DType;
use std::fmt::Write;

/// First bytes of every `.npy` file.
pub const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// Longest header that is read, in bytes. NumPy's own limit for untrusted files is 10,000.
pub const MAX_HEADER_BYTES: usize = 64 << 10;
/// Most dimensions of an array: NumPy's limit.
const MAX_DIMENSIONS: usize = 64;
/// Bytes of whose multiple the data's offset is.
const ALIGNMENT: usize = 64;

/// Header of an array: element type, order and shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    pub dtype: DType,
    pub fortran_order: bool,
    pub shape: Vec<usize>,
}

/// Reason for which a header was refused.
#[derive(Debug, PartialEq)]
pub enum RefusedArray {
    Invalid(String),
    Unsupported(String),
}

type Parsed<T> = Result<T, RefusedArray>;

fn invalid<T>(what: impl Into<String>) -> Parsed<T> {
    Err(RefusedArray::Invalid(what.into()))
}

impl Header {
    /// Parses the dictionary of a header.
    pub fn parse(text: &[u8]) -> Parsed<Header> {
        let mut p = Parser { text, at: 0 };
        let (mut dtype, mut fortran_order, mut shape) = (None, None, None);
        p.token(b'{')?;
        while !p.try_token(b'}') {
            let key = p.string()?;
            p.token(b':')?;
            let again = match key {
                b"descr" => dtype.replace(p.descr()?).is_some(),
                b"fortran_order" => fortran_order.replace(p.bool()?).is_some(),
                b"shape" => shape.replace(p.shape()?).is_some(),
                other => return invalid(format!("header: unknown key `{}`", other.escape_ascii())),
            };
            if again {
                return invalid(format!("header: key `{}` twice", key.escape_ascii()));
            }
            if !p.try_token(b',') {
                p.token(b'}')?;
                break;
            }
        }
        p.skip_space();
        if p.at != text.len() {
            return invalid(format!("header: text after the dictionary, at byte {}", p.at));
        }
        let missing = |key| RefusedArray::Invalid(format!("header: no key `{key}`"));
        Ok(Header {
            dtype: dtype.ok_or_else(|| missing("descr"))?,
            fortran_order: fortran_order.ok_or_else(|| missing("fortran_order"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
        })
    }

    /// Returns magic, version, length and dictionary of an array in C order, padded to a multiple of 64 bytes.
    pub fn encode(dtype: DType, shape: &[usize]) -> Vec<u8> {
        let mut dict = format!("{{'descr': '{}', 'fortran_order': False, 'shape': (", dtype.descr());
        for (i, d) in shape.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = write!(dict, "{}{d}", if i == 0 { "" } else { ", " });
        }
        dict.push_str(if shape.len() == 1 { ",), }" } else { "), }" });
        let short = (MAGIC.len() + 4 + dict.len() + 1).next_multiple_of(ALIGNMENT) - MAGIC.len() - 4;
        let mut out = MAGIC.to_vec();
        let length = match u16::try_from(short) {
            Ok(n) => {
                out.extend([1, 0]);
                out.extend(n.to_le_bytes());
                short
            }
            Err(_) => {
                let long = (MAGIC.len() + 6 + dict.len() + 1).next_multiple_of(ALIGNMENT) - MAGIC.len() - 6;
                out.extend([2, 0]);
                out.extend((long as u32).to_le_bytes());
                long
            }
        };
        out.extend(dict.as_bytes());
        out.resize(out.len() + length - dict.len() - 1, b' ');
        out.push(b'\n');
        out
    }
}

/// A cursor over the dictionary's text.
struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while self.peek().is_some_and(|b| b.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    fn try_token(&mut self, wanted: u8) -> bool {
        self.skip_space();
        let found = self.peek() == Some(wanted);
        self.at += usize::from(found);
        found
    }

    fn token(&mut self, wanted: u8) -> Parsed<()> {
        match self.try_token(wanted) {
            true => Ok(()),
            false => invalid(format!("header: expected `{}` at byte {}", wanted as char, self.at)),
        }
    }

    /// Reads a quoted string. Keys and type names hold no characters that need an escape.
    fn string(&mut self) -> Parsed<&'a [u8]> {
        self.skip_space();
        let quote = match self.peek() {
            Some(q @ (b'\'' | b'"')) => q,
            _ => return invalid(format!("header: expected a string at byte {}", self.at)),
        };
        let start = self.at + 1;
        let rest = self.text.get(start..).unwrap_or_default();
        match rest.iter().position(|&b| b == quote || b == b'\\') {
            Some(n) if rest[n] == quote => {
                self.at = start + n + 1;
                Ok(&rest[..n])
            }
            _ => invalid(format!("header: the string at byte {} does not end", start - 1)),
        }
    }

    fn descr(&mut self) -> Parsed<DType> {
        self.skip_space();
        if self.peek() == Some(b'[') {
            return Err(RefusedArray::Unsupported(
                "structured dtype; implemented are plain numbers and bools".into(),
            ));
        }
        let text = self.string()?;
        let name = text.escape_ascii();
        let (order, kind) = match text {
            [order @ (b'<' | b'>' | b'|' | b'='), kind @ ..] => (*order, kind),
            _ => return invalid(format!("header: dtype `{name}` does not start with a byte order")),
        };
        match DType::ALL.iter().find(|t| t.descr().as_bytes()[1..] == *kind) {
            // A type of one byte has no byte order.
            Some(&dtype) if order == b'<' || dtype.bytes() == 1 => Ok(dtype),
            Some(_) if order == b'>' => Err(RefusedArray::Unsupported(format!("big-endian dtype `{name}`"))),
            Some(_) => invalid(format!("header: dtype `{name}` has no byte order")),
            None => Err(RefusedArray::Unsupported(format!(
                "dtype `{name}`; implemented are f2, f4, f8, i1 to i8, u1 to u8 and b1"
            ))),
        }
    }

    fn bool(&mut self) -> Parsed<bool> {
        self.skip_space();
        let rest = self.text.get(self.at..).unwrap_or_default();
        for (text, value) in [("True", true), ("False", false)] {
            if rest.starts_with(text.as_bytes()) {
                self.at += text.len();
                return Ok(value);
            }
        }
        invalid(format!("header: expected True or False at byte {}", self.at))
    }

    fn shape(&mut self) -> Parsed<Vec<usize>> {
        self.token(b'(')?;
        let mut shape = Vec::new();
        let mut comma = true;
        while !self.try_token(b')') {
            if !comma {
                return invalid(format!("header: expected `,` or `)` in the shape at byte {}", self.at));
            }
            shape.push(self.dimension()?);
            if shape.len() > MAX_DIMENSIONS {
                return invalid(format!("header: more than {MAX_DIMENSIONS} dimensions"));
            }
            comma = self.try_token(b',');
        }
        // `(3)` is a number in Python, not a shape.
        if shape.len() == 1 && !comma {
            return invalid("header: the shape is a number, expected a tuple");
        }
        Ok(shape)
    }

    fn dimension(&mut self) -> Parsed<usize> {
        self.skip_space();
        let start = self.at;
        let mut value = Some(0usize);
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            value = value.and_then(|v| v.checked_mul(10)?.checked_add(usize::from(digit - b'0')));
            self.at += 1;
        }
        if self.at == start {
            return invalid(format!("header: expected a dimension at byte {start}"));
        }
        // Python 2 wrote long integers this way.
        self.at += usize::from(self.peek() == Some(b'L'));
        value.ok_or_else(|| {
            RefusedArray::Invalid(format!("header: the dimension at byte {start} is too large"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Parsed<Header> {
        Header::parse(text.as_bytes())
    }

    #[test]
    fn headers_as_numpy_writes_them() {
        for (text, shape) in [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }          \n", vec![3, 4]),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n", vec![]),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (7,), }\n", vec![7]),
            ("{\"shape\":(7L,2L),\"descr\":\"<f4\",\"fortran_order\":False}", vec![7, 2]),
        ] {
            assert_eq!(parse(text), Ok(Header { dtype: DType::F32, fortran_order: false, shape }), "{text}");
        }
        assert!(parse("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }").unwrap().fortran_order);
    }

    #[test]
    fn every_dtype_is_read_as_it_is_written() {
        for &dtype in DType::ALL {
            let text = format!("{{'descr': '{}', 'fortran_order': False, 'shape': (), }}", dtype.descr());
            assert_eq!(parse(&text).unwrap().dtype, dtype);
        }
    }

    #[test]
    fn the_data_is_aligned() {
        for rank in [0, 1, 2, 5, 40, 64] {
            let bytes = Header::encode(DType::F16, &vec![usize::MAX; rank]);
            assert_eq!(bytes.len() % ALIGNMENT, 0);
            assert_eq!(bytes.last(), Some(&b'\n'));
            let n = u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
            assert_eq!(n + 10, bytes.len());
            assert_eq!(Header::parse(&bytes[10..]).unwrap().shape, vec![usize::MAX; rank]);
        }
    }

    #[test]
    fn broken_headers_are_invalid() {
        for (text, says) in [
            ("", "expected `{`"),
            ("{", "expected a string"),
            ("{'descr", "does not end"),
            ("{'descr': '<f4', 'fortran_order': False}", "no key `shape`"),
            ("{'descr': '<f4', 'shape': ()}", "no key `fortran_order`"),
            ("{'fortran_order': False, 'shape': ()}", "no key `descr`"),
            ("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}", "twice"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (), 'more': 1}", "unknown key `more`"),
            ("{'descr': '<f4', 'fortran_order': 0, 'shape': ()}", "True or False"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3)}", "a number, expected a tuple"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': 3}", "expected `(`"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}", "expected a dimension"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3 4)}", "expected `,` or `)`"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (,)}", "expected a dimension"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999,)}", "too large"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)", "expected `}`"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)} import os", "text after"),
            ("{'descr': 'f4', 'fortran_order': False, 'shape': ()}", "byte order"),
            ("{'descr': '|f4', 'fortran_order': False, 'shape': ()}", "byte order"),
            ("{'descr': '', 'fortran_order': False, 'shape': ()}", "byte order"),
        ] {
            match parse(text) {
                Err(RefusedArray::Invalid(what)) => assert!(what.contains(says), "{text}: {what}"),
                other => panic!("{text}: {other:?}"),
            }
        }
        let many = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({})}}", "1,".repeat(65));
        assert!(matches!(parse(&many), Err(RefusedArray::Invalid(w)) if w.contains("64 dimensions")));
    }

    #[test]
    fn other_dtypes_are_unsupported() {
        for (descr, says) in [
            ("'>f4'", "big-endian"),
            ("'<c8'", "<c8"),
            ("'|O'", "|O"),
            ("'<U3'", "<U3"),
            ("'|V2'", "|V2"),
            ("[('a', '<f4')]", "structured"),
        ] {
            let text = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (), }}");
            match parse(&text) {
                Err(RefusedArray::Unsupported(what)) => assert!(what.contains(says), "{what}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
