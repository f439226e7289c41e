//! Head of a GGUF file: keys with values, then every tensor's name, dimensions, type and place.
//!
//! ```text
//! "GGUF", u32 version, u64 tensors, u64 keys        all little endian
//! keys:     string key, u32 kind, value
//! tensors:  string name, u32 n, u64 * n dimensions (fastest first), u32 type, u64 offset
//! padding to a multiple of `general.alignment` (32); offsets count from there
//! ```
//! A string is a u64 length and bytes; an array is a u32 kind, a u64 length and values. Every length is checked
//! against the bytes that the file still has, before memory is taken for it. Values stay in the file until they are
//! asked for. So the file's size bounds the memory.

use super::super::Dtype;
use super::super::safetensors_header::RefusedFile;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

/// First bytes of every file.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// Alignment of the data where the file does not name one.
const ALIGNMENT: u64 = 32;
/// Largest alignment in bytes, that of the largest memory page. It has a limit since all padding is looked at.
const MAX_ALIGNMENT: u64 = 64 << 10;
/// Key that names the alignment.
const ALIGNMENT_KEY: &str = "general.alignment";
/// Longest key in bytes, from the format's description.
const MAX_KEY_BYTES: usize = 65535;
/// Longest name of a tensor in bytes, from the format's description.
const MAX_NAME_BYTES: usize = 64;
/// Most dimensions of a tensor, from the format's description.
const MAX_RANK: u32 = 4;
/// Most levels of arrays in arrays; no known file nests arrays.
const MAX_DEPTH: u32 = 4;
/// Least bytes of a key with its value.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Least bytes of a tensor's description.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

type HeadResult<T> = std::result::Result<T, RefusedFile>;

fn invalid<T>(what: String) -> HeadResult<T> {
    Err(RefusedFile::Invalid(what))
}

/// Kind of a value, in the format's numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl ValueKind {
    fn from_number(n: u32) -> Option<ValueKind> {
        use ValueKind::*;
        let all = [U8, I8, U16, I16, U32, I32, F32, Bool, Text, Array, U64, I64, F64];
        all.get(n as usize).copied()
    }

    /// Returns the bytes of a value; none for strings and arrays, whose lengths differ.
    pub const fn bytes(self) -> Option<usize> {
        match self {
            ValueKind::U8 | ValueKind::I8 | ValueKind::Bool => Some(1),
            ValueKind::U16 | ValueKind::I16 => Some(2),
            ValueKind::U32 | ValueKind::I32 | ValueKind::F32 => Some(4),
            ValueKind::U64 | ValueKind::I64 | ValueKind::F64 => Some(8),
            ValueKind::Text | ValueKind::Array => None,
        }
    }

    /// Returns the name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            ValueKind::U8 => "u8",
            ValueKind::I8 => "i8",
            ValueKind::U16 => "u16",
            ValueKind::I16 => "i16",
            ValueKind::U32 => "u32",
            ValueKind::I32 => "i32",
            ValueKind::F32 => "f32",
            ValueKind::Bool => "bool",
            ValueKind::Text => "string",
            ValueKind::Array => "array",
            ValueKind::U64 => "u64",
            ValueKind::I64 => "i64",
            ValueKind::F64 => "f64",
        }
    }
}

/// Kind and place of a value in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredValue {
    /// Kind of the value, or of each value of an array.
    pub kind: ValueKind,
    /// Number of values of an array; none for a single value.
    pub array: Option<usize>,
    /// Bytes of the value, without an array's kind and length but with the lengths of the strings in it.
    pub bytes: Range<usize>,
}

/// Checked description of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    pub name: String,
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Bytes of the tensor in the file.
    pub bytes: Range<usize>,
}

/// Head of a file: metadata, and descriptions of the tensors.
#[derive(Debug)]
pub struct GgufHead {
    pub values: BTreeMap<String, StoredValue>,
    /// Tensors in the order of the file.
    pub tensors: Vec<GgufTensor>,
}

/// Reader that goes forward through the file.
pub struct Cursor<'a> {
    pub file: &'a [u8],
    pub at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.file.len() - self.at) as u64
    }

    fn take(&mut self, n: u64, what: &str) -> HeadResult<&'a [u8]> {
        if n > self.left() {
            return invalid(format!(
                "{what}: {n} bytes at byte {}, but only {} follow",
                self.at,
                self.left()
            ));
        }
        let start = self.at;
        self.at += n as usize;
        Ok(&self.file[start..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> HeadResult<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> HeadResult<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> HeadResult<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads a string: its length, then its bytes, which are returned.
    pub fn string(&mut self, what: &str) -> HeadResult<&'a [u8]> {
        let n = self.u64(what)?;
        self.take(n, what)
    }

    fn name(&mut self, what: &str, max: usize) -> HeadResult<&'a str> {
        let bytes = self.string(what)?;
        if bytes.len() > max {
            return invalid(format!("{what}: a name of {} bytes, more than {max}", bytes.len()));
        }
        match std::str::from_utf8(bytes) {
            Ok(name) => Ok(name),
            Err(_) => invalid(format!("{what}: the name `{}` is not UTF-8", bytes.escape_ascii())),
        }
    }

    fn kind(&mut self, what: &str) -> HeadResult<ValueKind> {
        let n = self.u32(what)?;
        match ValueKind::from_number(n) {
            Some(kind) => Ok(kind),
            None => invalid(format!("{what}: values of kind {n}, expected 0 to 12")),
        }
    }

    /// Passes over a value and returns its kind and place.
    fn value(&mut self, kind: ValueKind, what: &str, depth: u32) -> HeadResult<StoredValue> {
        if let Some(n) = kind.bytes() {
            let start = self.at;
            self.take(n as u64, what)?;
            return Ok(StoredValue { kind, array: None, bytes: start..self.at });
        }
        if kind == ValueKind::Text {
            let n = self.string(what)?.len();
            return Ok(StoredValue { kind, array: None, bytes: self.at - n..self.at });
        }
        if depth == MAX_DEPTH {
            return invalid(format!("{what}: arrays nested more than {MAX_DEPTH} deep"));
        }
        let of = self.kind(what)?;
        let len = self.u64(what)?;
        // A string has at least its length, an array at least its kind and length.
        let least = of.bytes().unwrap_or(if of == ValueKind::Text { 8 } else { 12 }) as u64;
        if len > self.left() / least {
            let (of, left) = (of.name(), self.left());
            return invalid(format!("{what}: an array of {len} {of} values, but only {left} bytes follow"));
        }
        let start = self.at;
        if of.bytes().is_some() {
            self.take(len * least, what)?;
        } else {
            for _ in 0..len {
                self.value(of, what, depth + 1)?;
            }
        }
        Ok(StoredValue { kind: of, array: Some(len as usize), bytes: start..self.at })
    }
}

/// Checks the head of a whole file and returns it.
pub fn parse(file: &[u8]) -> HeadResult<GgufHead> {
    let mut c = Cursor { file, at: 0 };
    let magic: [u8; 4] = c.array("GGUF header")?;
    if anemoe_io::is_web_page(file) {
        return invalid(format!("GGUF header: {}", anemoe_io::json::WEB_PAGE));
    }
    if magic != *MAGIC {
        return invalid(format!("GGUF header: it starts with `{}`, expected `GGUF`", magic.escape_ascii()));
    }
    let version = c.u32("GGUF header")?;
    match version {
        2 | 3 => {}
        0 => return invalid("GGUF header: version 0".into()),
        _ if version.swap_bytes() < 1 << 16 => {
            let what = format!(
                "GGUF file: big endian, version {}; read are little endian files",
                version.swap_bytes()
            );
            return Err(RefusedFile::Unsupported(what));
        }
        _ => return Err(RefusedFile::Unsupported(format!("GGUF version {version}; read are 2 and 3"))),
    }
    let tensors = c.u64("GGUF header")?;
    let keys = c.u64("GGUF header")?;
    let least = keys.checked_mul(MIN_KEY_BYTES).zip(tensors.checked_mul(MIN_TENSOR_BYTES));
    if least.and_then(|(a, b)| a.checked_add(b)).is_none_or(|n| n > c.left()) {
        let left = c.left();
        return invalid(format!(
            "GGUF header: {tensors} tensors and {keys} keys, but only {left} bytes follow"
        ));
    }
    let values = values(&mut c, keys)?;
    let alignment = alignment(file, &values)?;
    let tensors = places(&mut c, tensors, alignment)?;
    Ok(GgufHead { values, tensors })
}

fn values(c: &mut Cursor<'_>, keys: u64) -> HeadResult<BTreeMap<String, StoredValue>> {
    let mut values = BTreeMap::new();
    for i in 0..keys {
        let key = c.name(&format!("key {i} of {keys}"), MAX_KEY_BYTES)?.to_string();
        let what = format!("key `{}`", key.escape_debug());
        let kind = c.kind(&what)?;
        let value = c.value(kind, &what, 0)?;
        match values.entry(key) {
            Entry::Vacant(e) => e.insert(value),
            Entry::Occupied(_) => return invalid(format!("{what} is there twice")),
        };
    }
    Ok(values)
}

fn alignment(file: &[u8], values: &BTreeMap<String, StoredValue>) -> HeadResult<u64> {
    let Some(value) = values.get(ALIGNMENT_KEY) else { return Ok(ALIGNMENT) };
    let (ValueKind::U32, None, Some(bytes)) =
        (value.kind, value.array, file[value.bytes.clone()].first_chunk::<4>())
    else {
        return invalid(format!("key `{ALIGNMENT_KEY}`: it is a {}, expected u32", value.kind.name()));
    };
    match u32::from_le_bytes(*bytes) {
        n if n.is_power_of_two() && u64::from(n) <= MAX_ALIGNMENT => Ok(u64::from(n)),
        n => invalid(format!(
            "key `{ALIGNMENT_KEY}`: it is {n}, expected a power of two up to {MAX_ALIGNMENT}"
        )),
    }
}

/// Types that are read, by their numbers in GGML.
pub const TYPES: [(u32, Dtype); 33] = [
    (0, Dtype::F32),
    (1, Dtype::F16),
    (2, Dtype::Q4_0),
    (3, Dtype::Q4_1),
    (6, Dtype::Q5_0),
    (7, Dtype::Q5_1),
    (8, Dtype::Q8_0),
    (10, Dtype::Q2K),
    (11, Dtype::Q3K),
    (12, Dtype::Q4K),
    (13, Dtype::Q5K),
    (14, Dtype::Q6K),
    (16, Dtype::Iq2Xxs),
    (17, Dtype::Iq2Xs),
    (18, Dtype::Iq3Xxs),
    (19, Dtype::Iq1S),
    (20, Dtype::Iq4Nl),
    (21, Dtype::Iq3S),
    (22, Dtype::Iq2S),
    (23, Dtype::Iq4Xs),
    (24, Dtype::I8),
    (25, Dtype::I16),
    (26, Dtype::I32),
    (27, Dtype::I64),
    (28, Dtype::F64),
    (29, Dtype::Iq1M),
    (30, Dtype::BF16),
    (34, Dtype::Tq1_0),
    (35, Dtype::Tq2_0),
    (39, Dtype::Mxfp4),
    (40, Dtype::Nvfp4),
    (41, Dtype::Q1_0),
    (42, Dtype::Q2_0),
];

/// Returns the type with this number of GGML's.
fn dtype(number: u32, what: &str) -> HeadResult<Dtype> {
    if let Some((_, dtype)) = TYPES.iter().find(|(n, _)| *n == number) {
        return Ok(*dtype);
    }
    let known: Vec<&str> = TYPES.iter().map(|(_, dtype)| dtype.name()).collect();
    let name = match number {
        9 => " (q8_1)",
        15 => " (q8_K)",
        31..=33 => " (q4_0 in another order)",
        36..=38 => " (iq4_nl in another order)",
        _ => "",
    };
    Err(RefusedFile::Unsupported(format!("{what}: GGML type {number}{name}; read are {}", known.join(", "))))
}

fn places(c: &mut Cursor<'_>, tensors: u64, alignment: u64) -> HeadResult<Vec<GgufTensor>> {
    let mut found: BTreeMap<String, ()> = BTreeMap::new();
    // Offsets are collected first: the data starts behind the last description.
    let mut placed = Vec::new();
    for i in 0..tensors {
        let name = c.name(&format!("tensor {i} of {tensors}"), MAX_NAME_BYTES)?.to_string();
        let what = format!("tensor `{}`", name.escape_debug());
        let rank = c.u32(&what)?;
        if rank > MAX_RANK {
            return invalid(format!("{what}: {rank} dimensions, more than {MAX_RANK}"));
        }
        let mut shape = (0..rank).map(|_| c.u64(&what)).collect::<HeadResult<Vec<u64>>>()?;
        shape.reverse();
        if shape.contains(&0) {
            return invalid(format!("{what}: shape {shape:?} has no elements"));
        }
        let dtype = dtype(c.u32(&what)?, &what)?;
        let offset = c.u64(&what)?;
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(dtype.block_elements() as u64) {
            return invalid(format!(
                "{what}: rows of {row} elements, expected a multiple of the {} in a block of {}",
                dtype.block_elements(),
                dtype.name()
            ));
        }
        let Some(bytes) = dtype.tensor_bytes(&shape) else {
            return invalid(format!("{what}: shape {shape:?} has more bytes than 64 bits count"));
        };
        if !offset.is_multiple_of(alignment) {
            return invalid(format!(
                "{what}: it starts at byte {offset}, expected a multiple of {alignment}"
            ));
        }
        if found.insert(name.clone(), ()).is_some() {
            return invalid(format!("{what} is there twice"));
        }
        placed.push((name, dtype, shape, offset, bytes));
    }
    // The sum cannot overflow: a file's length is below 2^63, and the alignment is a u32.
    let start = (c.at as u64).next_multiple_of(alignment);
    let data = (c.file.len() as u64).saturating_sub(start);
    let mut out = Vec::new();
    for (name, dtype, shape, offset, bytes) in placed {
        match offset.checked_add(bytes) {
            Some(end) if end <= data => {
                let from = (start + offset) as usize;
                out.push(GgufTensor { name, dtype, shape, bytes: from..from + bytes as usize });
            }
            _ => {
                return invalid(format!(
                    "tensor `{name}`: {bytes} bytes at byte {offset} of {data} bytes of data: the file is cut off"
                ));
            }
        }
    }
    // Tensors have to cover the data, as in GGML's own reader: a wrong type or shape leaves a gap. A gap shorter than
    // the alignment leaves values in the padding, which llama.cpp and gguf-py fill with zeros.
    let padding = |from: u64, to: u64, before: &str| {
        // A file without tensors may end before its data would begin.
        let bytes = c.file.get((start + from) as usize..(start + to) as usize).unwrap_or_default();
        match bytes.iter().position(|b| *b != 0) {
            None => Ok(()),
            Some(i) => invalid(format!(
                "tensor `{before}`: byte {i} of the {} of padding behind it is {:#04x}, expected 0: its type or its shape is \
                 another one",
                bytes.len(),
                bytes[i]
            )),
        }
    };
    let mut order: Vec<&GgufTensor> = out.iter().collect();
    order.sort_by_key(|t| t.bytes.start);
    let (mut end, mut before) = (0u64, "the header");
    for tensor in order {
        let (at, next) = (tensor.bytes.start as u64 - start, end.next_multiple_of(alignment));
        let name = &tensor.name;
        if at < end {
            let by = end - at;
            return invalid(format!("tensor `{name}`: it overlaps `{before}` by {by} bytes"));
        }
        if at != next {
            let (gap, padding) = (at - end, next - end);
            return invalid(format!(
                "tensor `{name}`: {gap} bytes between it and `{before}`, expected {padding} of padding"
            ));
        }
        padding(end, at, before)?;
        (end, before) = (tensor.bytes.end as u64 - start, name);
    }
    // Bytes behind the padding of the last tensor belong to no tensor; llama.cpp does not look at them either.
    padding(end, data.min(end.next_multiple_of(alignment)), before)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::writer::Gguf;
    use super::*;
    use proptest::prelude::*;

    /// Makes a file with keys of several kinds and three tensors; the data ends where the file does.
    fn example() -> Gguf {
        let mut g = Gguf::new();
        g.text("general.architecture", "none");
        g.u32("a.number", 7);
        g.f32("a.float", 0.5);
        g.bool("a.flag", true);
        g.i32s("a.numbers", &[1, -2]);
        g.texts("a.texts", &["x", "", "yz"]);
        g.raw("a.nested", 9, &nested(2));
        g.tensor("one", &[4, 2], 0, vec![0; 32]);
        g.tensor("two", &[32, 3], 8, vec![1; 96 + 6]);
        g.tensor("end", &[16], 0, vec![0; 64]);
        g
    }

    /// Makes an array of two numbers, inside `depth` arrays of one value.
    fn nested(depth: u32) -> Vec<u8> {
        let mut out = Vec::new();
        for _ in 0..depth {
            out.extend(9u32.to_le_bytes());
            out.extend(1u64.to_le_bytes());
        }
        out.extend([0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 5, 6]);
        out
    }

    fn refused(g: &Gguf) -> String {
        refused_bytes(&g.write())
    }

    fn refused_bytes(file: &[u8]) -> String {
        match parse(file).unwrap_err() {
            RefusedFile::Invalid(what) => what,
            RefusedFile::Unsupported(what) => panic!("unsupported {what}"),
        }
    }

    fn unsupported(file: &[u8]) -> String {
        match parse(file).unwrap_err() {
            RefusedFile::Unsupported(what) => what,
            RefusedFile::Invalid(what) => panic!("invalid {what}"),
        }
    }

    #[test]
    fn keys_and_tensors_are_placed() {
        for version in [2, 3] {
            let mut g = example();
            g.version = version;
            let file = g.write();
            let head = parse(&file).unwrap();
            assert_eq!(head.values.len(), 7);
            let text = &head.values["general.architecture"];
            assert_eq!((text.kind, &file[text.bytes.clone()]), (ValueKind::Text, &b"none"[..]));
            let numbers = &head.values["a.numbers"];
            assert_eq!((numbers.kind, numbers.array, numbers.bytes.len()), (ValueKind::I32, Some(2), 8));
            let two = &head.tensors[1];
            assert_eq!((two.name.as_str(), two.dtype, &two.shape[..]), ("two", Dtype::Q8_0, &[3, 32][..]));
            assert_eq!(file[two.bytes.clone()], vec![1; 102]);
            assert_eq!(head.tensors[2].bytes.end, file.len());
        }
    }

    #[test]
    fn a_file_cut_off_anywhere() {
        let file = example().write();
        for n in 0..file.len() {
            assert!(parse(&file[..n]).is_err(), "{n} of {}", file.len());
        }
    }

    #[test]
    fn a_file_of_something_else() {
        assert!(refused_bytes(b"PK\x03\x04 and more").contains("expected `GGUF`"));
        assert!(refused_bytes(b"GGU").contains("only 3 follow"));
    }

    proptest! {
        /// Checks that a file with any wrong bytes gives an error, or tensors inside the file.
        #[test]
        fn a_file_with_wrong_bytes(changes in prop::collection::vec((0usize..420, any::<u8>()), 1..6)) {
            let mut file = example().write();
            for (at, byte) in changes {
                file[at] = byte;
            }
            for t in parse(&file).iter().flat_map(|head| &head.tensors) {
                prop_assert!(t.bytes.start <= t.bytes.end && t.bytes.end <= file.len());
                prop_assert_eq!(Some(t.bytes.len() as u64), t.dtype.tensor_bytes(&t.shape));
            }
        }
    }

    #[test]
    fn versions_that_are_not_read() {
        for (version, says) in
            [(1, "version 1"), (4, "version 4"), (3u32.swap_bytes(), "big endian, version 3")]
        {
            let mut g = example();
            g.version = version;
            assert!(unsupported(&g.write()).contains(says), "{version}");
        }
        let mut g = example();
        g.version = 0;
        assert!(refused(&g).contains("version 0"));
    }

    #[test]
    fn a_count_that_lies() {
        for at in [8, 16] {
            for count in [u64::MAX, u64::MAX / 24, 1 << 40, 1000] {
                let mut file = example().write();
                file[at..at + 8].copy_from_slice(&count.to_le_bytes());
                assert!(refused_bytes(&file).contains(&count.to_string()), "{at} {count}");
            }
            // One more than there are: the reader takes the next thing in the file for one.
            let mut file = example().write();
            file[at] += 1;
            parse(&file).unwrap_err();
        }
    }

    #[test]
    fn a_string_that_lies_about_its_length() {
        for length in [u64::MAX, 1 << 62, 100_000] {
            // The first key's own length, and that of its value.
            for at in [24, 24 + 8 + "general.architecture".len() + 4] {
                let mut file = example().write();
                file[at..at + 8].copy_from_slice(&length.to_le_bytes());
                assert!(refused_bytes(&file).contains(&length.to_string()), "{at} {length}");
            }
        }
    }

    #[test]
    fn an_array_that_lies_about_its_length() {
        for kind in 0..13u32 {
            for length in [u64::MAX, u64::MAX / 8, 1 << 40, 10_000] {
                let mut g = Gguf::new();
                let value = [&kind.to_le_bytes()[..], &length.to_le_bytes()].concat();
                g.raw("some.list", 9, &value);
                let what = refused(&g);
                assert!(what.contains("`some.list`") && what.contains(&length.to_string()), "{what}");
            }
        }
    }

    #[test]
    fn an_array_nested_too_deep() {
        let mut g = Gguf::new();
        g.raw("deep", 9, &nested(3));
        parse(&g.write()).unwrap();
        for depth in [4, 100_000] {
            let mut g = Gguf::new();
            g.raw("deep", 9, &nested(depth));
            assert!(refused(&g).contains("key `deep`: arrays nested"), "{depth}");
        }
    }

    #[test]
    fn a_kind_of_value_that_does_not_exist() {
        let mut g = Gguf::new();
        g.raw("strange", 13, &[0; 8]);
        assert!(refused(&g).contains("key `strange`: values of kind 13"));
    }

    #[test]
    fn dimensions_that_overflow() {
        for ne in [vec![1 << 32, 1 << 32], vec![u64::MAX], vec![1 << 40, 1 << 10, 1 << 10, 1 << 10]] {
            let mut g = Gguf::new();
            g.tensor("huge", &ne, 0, vec![0; 32]);
            let what = refused(&g);
            assert!(what.contains("tensor `huge`") && what.contains("64 bits"), "{what}");
        }
        let mut g = Gguf::new();
        g.tensor("large", &[1 << 40], 0, vec![0; 32]);
        assert!(refused(&g).contains("tensor `large`: 4398046511104 bytes"));
    }

    #[test]
    fn dimensions_that_are_not_dimensions() {
        let mut g = Gguf::new();
        g.tensor("none", &[3, 0], 0, vec![]);
        assert!(refused(&g).contains("tensor `none`: shape [0, 3] has no elements"));
        let mut g = Gguf::new();
        g.tensor("deep", &[1; 5], 0, vec![0; 4]);
        assert!(refused(&g).contains("tensor `deep`: 5 dimensions"));
    }

    #[test]
    fn an_offset_beyond_the_end() {
        for offset in [192, 1 << 40, u64::MAX - 31] {
            let mut g = example();
            g.tensors[2].offset = Some(offset);
            let what = refused(&g);
            assert!(what.contains("tensor `end`") && what.contains("cut off"), "{what}");
        }
    }

    #[test]
    fn an_offset_that_is_not_aligned() {
        let mut g = example();
        g.tensors[1].offset = Some(33);
        assert!(refused(&g).contains("tensor `two`: it starts at byte 33, expected a multiple of 32"));
    }

    #[test]
    fn tensors_that_overlap() {
        let mut g = example();
        g.tensors[2].offset = Some(64);
        assert!(refused(&g).contains("tensor `end`: it overlaps `two` by 70 bytes"));
    }

    #[test]
    fn tensors_that_leave_a_gap() {
        // A tensor of f32 that is said to be f16.
        let mut g = Gguf::new();
        g.tensor("one", &[16], 0, vec![0; 64]);
        g.tensor("two", &[32], 8, vec![1; 34]);
        parse(&g.write()).unwrap();
        g.tensors[0].kind = 1;
        let what = refused_bytes(&g.write());
        assert!(
            what.contains("tensor `two`: 32 bytes between it and `one`, expected 0 of padding"),
            "{what}"
        );
        let mut g = example();
        g.tensors[0].offset = Some(32);
        g.tensors[1].offset = Some(64);
        g.tensors[2].offset = Some(192);
        let mut file = g.write();
        file.resize(file.len() + 64, 0);
        assert!(refused_bytes(&file).contains("tensor `one`: 32 bytes between it and `the header`"));
        // Padding behind the last tensor, which other writers add, and bytes behind that.
        let mut g = example();
        g.tensors[2].data.truncate(60);
        g.tensors[2].ne = vec![15];
        let mut file = g.write();
        parse(&file).unwrap();
        file.resize(file.len() + 4, 0);
        parse(&file).unwrap();
        file.extend(b"signature");
        assert_eq!(parse(&file).unwrap().tensors.len(), 3);
    }

    #[test]
    fn padding_that_holds_values() {
        // One f32 that is said to be f16: before another tensor, and as the last.
        for (at, name) in [(0, "one"), (1, "end")] {
            let mut g = Gguf::new();
            g.tensor("one", &[1], 0, 1f32.to_le_bytes().to_vec());
            g.tensor("end", &[1], 0, 1f32.to_le_bytes().to_vec());
            for len in [0, 32] {
                let mut file = g.write();
                file.resize(file.len().next_multiple_of(len.max(1)), 0);
                parse(&file).unwrap();
                g.tensors[at].kind = 1;
                let mut file = g.write();
                file.resize(file.len().next_multiple_of(len.max(1)), 0);
                let what = refused_bytes(&file);
                let says = format!("tensor `{name}`: byte 0 of the ");
                assert!(what.contains(&says) && what.contains("is 0x80, expected 0"), "{what}");
                g.tensors[at].kind = 0;
            }
        }
    }

    #[test]
    fn a_type_that_is_not_read() {
        for (number, says) in [(9, "9 (q8_1)"), (4, "4;"), (99, "99;"), (u32::MAX, "4294967295;")] {
            let mut g = example();
            g.tensors[0].kind = number;
            let what = unsupported(&g.write());
            assert!(what.contains("tensor `one`: GGML type") && what.contains(says), "{what}");
        }
    }

    #[test]
    fn rows_that_are_not_whole_blocks() {
        let mut g = Gguf::new();
        g.tensor("odd", &[48, 2], 8, vec![0; 102]);
        assert!(refused(&g).contains("tensor `odd`: rows of 48 elements, expected a multiple of the 32"));
    }

    #[test]
    fn names_that_are_not_text() {
        let mut g = Gguf::new();
        g.tensor("name", &[1], 0, vec![0; 4]);
        g.tensors[0].name = b"a\xff".to_vec();
        assert!(refused(&g).contains("tensor 0 of 1: the name `a\\xff` is not UTF-8"));
        let mut g = Gguf::new();
        g.u32("key", 1);
        g.keys[0].0 = b"\xfe".to_vec();
        assert!(refused(&g).contains("key 0 of 1: the name `\\xfe` is not UTF-8"));
        let mut g = Gguf::new();
        g.tensor(&"n".repeat(65), &[1], 0, vec![0; 4]);
        assert!(refused(&g).contains("65 bytes, more than 64"));
    }

    #[test]
    fn names_that_are_there_twice() {
        let mut g = example();
        g.tensor("one", &[4], 0, vec![0; 16]);
        assert!(refused(&g).contains("tensor `one` is there twice"));
        let mut g = example();
        g.u32("a.number", 8);
        assert!(refused(&g).contains("key `a.number` is there twice"));
    }

    #[test]
    fn an_alignment_that_is_none() {
        for n in [0, 3, 48, 1 << 17, 1 << 31, u32::MAX] {
            let mut g = example();
            g.u32("general.alignment", n);
            let what = refused(&g);
            assert!(what.contains("`general.alignment`") && what.contains(&n.to_string()), "{what}");
        }
        let mut g = example();
        g.text("general.alignment", "32");
        assert!(refused(&g).contains("it is a string, expected u32"));
        let mut g = example();
        g.alignment = 1 << 16;
        g.u32("general.alignment", 1 << 16);
        for tensor in &mut g.tensors {
            tensor.offset = Some(0);
        }
        assert!(refused_bytes(&g.head()).contains("cut off"));
    }

    #[test]
    fn other_alignments() {
        for n in [1, 8, 256] {
            let mut g = example();
            g.alignment = n;
            g.u32("general.alignment", n as u32);
            let file = g.write();
            assert_eq!(file[parse(&file).unwrap().tensors[1].bytes.clone()], vec![1; 102]);
        }
    }
}
