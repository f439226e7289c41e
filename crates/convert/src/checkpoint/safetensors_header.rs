//! The header of a `.safetensors` file: 8 bytes of length, then JSON with every tensor's dtype, shape and place.
//!
//! Everything is checked here, once, so that reading can rely on it: names are unique, shapes and dtypes account for the
//! bytes, and the tensors cover the file without gaps and overlaps, as the format asks
//! (<https://github.com/huggingface/safetensors>).

use super::{Dtype, WEIGHT_DTYPES};
use crate::Error;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Largest header, as in Hugging Face's own reader.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the header's length field.
pub const LENGTH_BYTES: usize = 8;
/// Most dimensions of a tensor.
const MAX_RANK: usize = 8;

/// Checked description of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct HeaderTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Bytes of the tensor in the file.
    pub bytes: Range<usize>,
}

/// Reason for which a file was refused.
#[derive(Debug, PartialEq)]
pub enum RefusedFile {
    Invalid(String),
    Unsupported(String),
}

impl RefusedFile {
    /// Makes the error for the file at `path`.
    pub fn at(self, path: &Path) -> Error {
        match self {
            RefusedFile::Invalid(what) => Error::invalid(path, what),
            RefusedFile::Unsupported(what) => Error::unsupported(path, what),
        }
    }
}

fn invalid<T>(what: String) -> Result<T, RefusedFile> {
    Err(RefusedFile::Invalid(what))
}

/// Checks a whole file and returns its tensors in the order of their data.
pub fn parse(file: &[u8]) -> Result<Vec<HeaderTensor>, RefusedFile> {
    let bytes = file.len() as u64;
    let place = json_place(&file[..file.len().min(LENGTH_BYTES)], bytes)?;
    parse_json(&file[place], bytes)
}

/// Returns the place of the header's JSON in a file of `file_bytes`, from the file's first eight bytes.
pub fn json_place(first: &[u8], file_bytes: u64) -> Result<Range<usize>, RefusedFile> {
    let Some(length) = first.first_chunk::<LENGTH_BYTES>() else {
        return invalid(format!(
            "safetensors header: the file has {file_bytes} bytes, expected at least {LENGTH_BYTES}"
        ));
    };
    if anemoe_io::is_web_page(first) {
        return invalid(format!("safetensors header: {}", anemoe_io::json::WEB_PAGE));
    }
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return invalid(format!(
            "safetensors header: a length of {length} bytes, more than {MAX_HEADER_BYTES}"
        ));
    }
    let there = file_bytes.saturating_sub(LENGTH_BYTES as u64);
    if length > there {
        return invalid(format!("safetensors header: a length of {length} bytes, but only {there} follow"));
    }
    Ok(LENGTH_BYTES..LENGTH_BYTES + length as usize)
}

/// Checks the JSON of a header against the length of its file, and returns the tensors in the order of their data.
pub fn parse_json(json: &[u8], file_bytes: u64) -> Result<Vec<HeaderTensor>, RefusedFile> {
    let data_start = LENGTH_BYTES + json.len();
    let header: HeaderJson = match anemoe_io::json::parse_large(json) {
        Ok(header) => header,
        Err(e) => return invalid(format!("safetensors header: {e}")),
    };

    let data_bytes = file_bytes.saturating_sub(data_start as u64);
    let mut tensors = Vec::with_capacity(header.0.len());
    for (name, entry) in header.0 {
        let (start, end) = entry.data_offsets;
        if end < start {
            return invalid(format!("tensor `{name}`: it starts at byte {start} and ends at byte {end}"));
        }
        if end > data_bytes {
            return invalid(format!(
                "tensor `{name}`: it ends at byte {end} of {data_bytes} bytes of data: the file is cut off"
            ));
        }
        let Some(dtype) = dtype(&entry.dtype) else {
            let what =
                format!("tensor `{name}`: dtype {}, expected {WEIGHT_DTYPES}", entry.dtype.escape_debug());
            return Err(RefusedFile::Unsupported(what));
        };
        if entry.shape.len() > MAX_RANK {
            return invalid(format!(
                "tensor `{name}`: {} dimensions, more than {MAX_RANK}",
                entry.shape.len()
            ));
        }
        let expected = dtype.tensor_bytes(&entry.shape);
        if expected != Some(end - start) {
            let expected = expected.map_or("more than 64 bits count".to_string(), |n| n.to_string());
            return invalid(format!(
                "tensor `{name}`: {} bytes for shape {:?} of {}, expected {expected}",
                end - start,
                entry.shape,
                entry.dtype
            ));
        }
        // Both offsets are within the file.
        let bytes = data_start + start as usize..data_start + end as usize;
        tensors.push(HeaderTensor { name, dtype, shape: entry.shape, bytes });
    }

    // An empty tensor comes before the tensor that starts at the same byte.
    tensors.sort_by_key(|t| (t.bytes.start, t.bytes.end));
    let mut end = data_start;
    let mut before = "the header";
    for tensor in &tensors {
        let start = tensor.bytes.start;
        if start < end {
            return invalid(format!(
                "tensor `{}`: it overlaps `{before}` by {} bytes",
                tensor.name,
                end - start
            ));
        }
        if start > end {
            return invalid(format!(
                "tensor `{}`: {} bytes between it and `{before}`",
                tensor.name,
                start - end
            ));
        }
        end = tensor.bytes.end;
        before = &tensor.name;
    }
    let behind = file_bytes.saturating_sub(end as u64);
    if behind > 0 {
        return invalid(format!("file: {behind} bytes behind the last tensor `{before}`"));
    }
    Ok(tensors)
}

/// Returns the type of this name. Types without weights have a size too: a file may hold tensors that nobody reads.
fn dtype(name: &str) -> Option<Dtype> {
    Some(match name {
        "F32" => Dtype::F32,
        "F16" => Dtype::F16,
        "BF16" => Dtype::BF16,
        "F8_E4M3" => Dtype::F8E4M3,
        "F8_E5M2" => Dtype::F8E5M2,
        "U8" => Dtype::U8,
        "BOOL" => Dtype::Raw { name: "bool", bytes: 1 },
        "I8" => Dtype::Raw { name: "i8", bytes: 1 },
        "F8_E8M0" => Dtype::Raw { name: "f8_e8m0", bytes: 1 },
        "I16" => Dtype::Raw { name: "i16", bytes: 2 },
        "U16" => Dtype::Raw { name: "u16", bytes: 2 },
        "I32" => Dtype::Raw { name: "i32", bytes: 4 },
        "U32" => Dtype::Raw { name: "u32", bytes: 4 },
        "I64" => Dtype::Raw { name: "i64", bytes: 8 },
        "U64" => Dtype::Raw { name: "u64", bytes: 8 },
        "F64" => Dtype::Raw { name: "f64", bytes: 8 },
        _ => return None,
    })
}

#[derive(Deserialize)]
struct TensorEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The JSON of the header. `__metadata__` is free text, which nothing here needs.
struct HeaderJson(BTreeMap<String, TensorEntry>);

impl<'de> Deserialize<'de> for HeaderJson {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct TensorsVisitor;
        impl<'de> Visitor<'de> for TensorsVisitor {
            type Value = HeaderJson;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with one entry for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderJson, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<Option<BTreeMap<String, String>>>()?;
                    } else {
                        tensors.insert(name, map.next_value()?);
                    }
                }
                Ok(HeaderJson(tensors))
            }
        }
        d.deserialize_map(TensorsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Makes a file with this header and `data` bytes of zeros.
    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut out = (json.len() as u64).to_le_bytes().to_vec();
        out.extend(json.as_bytes());
        out.resize(out.len() + data, 0);
        out
    }

    fn refused(json: &str, data: usize) -> String {
        match parse(&file(json, data)).unwrap_err() {
            RefusedFile::Invalid(what) => what,
            RefusedFile::Unsupported(what) => panic!("unsupported {what}"),
        }
    }

    #[test]
    fn tensors_are_placed_behind_the_header() {
        assert!(parse(&file(r#"{"__metadata__":null}"#, 0)).is_ok());
        let json = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]},
            "a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"none":{"dtype":"F16","shape":[0,7],"data_offsets":[4,4]}}   "#;
        let tensors = parse(&file(json, 12)).unwrap();
        let at = 8 + json.len();
        let names: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), t.bytes.clone())).collect();
        assert_eq!(names, [("a", at..at + 4), ("none", at + 4..at + 4), ("b", at + 4..at + 12)]);
        assert_eq!((tensors[2].dtype, &tensors[2].shape[..]), (Dtype::F32, &[1, 2][..]));
    }

    #[test]
    fn a_file_too_short_for_a_header() {
        let err = |bytes: &[u8]| format!("{:?}", parse(bytes).unwrap_err());
        assert!(err(&[]).contains("the file has 0 bytes"));
        assert!(err(&[1; 7]).contains("the file has 7 bytes"));
        assert!(err(&100u64.to_le_bytes()).contains("only 0 follow"));
        assert!(err(b"<!DOCTYPE html><html></html>").contains("header: this is a web page (HTML)"));
    }

    #[test]
    fn a_header_that_claims_four_gigabytes() {
        for length in [4u64 << 30, u64::MAX, MAX_HEADER_BYTES + 1] {
            let mut bytes = file("{}", 0);
            bytes[..8].copy_from_slice(&length.to_le_bytes());
            let Err(RefusedFile::Invalid(what)) = parse(&bytes) else { panic!("{length}") };
            assert!(what.contains("header") && what.contains(&length.to_string()), "{what}");
        }
    }

    #[test]
    fn a_header_that_is_not_json() {
        for json in ["", "hello", "{\"a\":", "[1]", "\u{fffd}{"] {
            assert!(refused(json, 0).starts_with("safetensors header: "), "{json}");
        }
        assert!(matches!(
            parse(&[&2u64.to_le_bytes()[..], b"\xff\xfe"].concat()),
            Err(RefusedFile::Invalid(_))
        ));
    }

    #[test]
    fn an_entry_without_its_keys() {
        assert!(refused(r#"{"a":{"shape":[2],"data_offsets":[0,4]}}"#, 4).contains("dtype"));
        assert!(refused(r#"{"a":{"dtype":"F32","data_offsets":[0,4]}}"#, 4).contains("shape"));
        assert!(refused(r#"{"a":{"dtype":"F32","shape":[1]}}"#, 4).contains("data_offsets"));
        assert!(refused(r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, 4).contains("-1"));
        assert!(refused(r#"{"__metadata__":{"a":1}}"#, 0).contains("string"));
    }

    #[test]
    fn a_name_that_is_there_twice() {
        let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        assert!(refused(&format!(r#"{{"a":{entry},"a":{entry}}}"#), 4).contains("key `a` is there twice"));
    }

    #[test]
    fn offsets_that_overlap() {
        let json = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
        assert!(refused(json, 8).contains("tensor `b`: it overlaps `a` by 4 bytes"));
        let json = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        assert!(refused(json, 4).contains("overlaps"));
    }

    #[test]
    fn offsets_that_leave_a_gap() {
        let json = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
        assert!(refused(json, 8).contains("tensor `a`: 4 bytes between it and `the header`"));
        let json = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        assert!(refused(json, 5).contains("1 bytes behind the last tensor `a`"));
    }

    #[test]
    fn offsets_outside_the_file() {
        let at = |offsets: &str| {
            refused(&format!(r#"{{"a":{{"dtype":"F32","shape":[1],"data_offsets":{offsets}}}}}"#), 4)
        };
        assert!(at("[0,8]").contains("cut off"));
        assert!(at("[4,0]").contains("starts at byte 4 and ends at byte 0"));
        assert!(at("[18446744073709551612,18446744073709551615]").contains("cut off"));
        assert!(at("[0,18446744073709551616]").contains("header"));
    }

    #[test]
    fn a_shape_that_is_not_the_bytes() {
        let of = |shape: &str| {
            refused(&format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,4]}}}}"#), 4)
        };
        assert!(of("[2]").contains("4 bytes for shape [2] of F32, expected 8"));
        assert!(of("[4611686018427387904,4]").contains("64 bits"));
        assert!(of("[1,1,1,1,1,1,1,1,1]").contains("9 dimensions"));
    }

    #[test]
    fn bytes_count_for_every_dtype() {
        for (dtype, bytes) in
            [("F8_E4M3", 3), ("F8_E5M2", 3), ("U8", 3), ("BOOL", 3), ("I16", 6), ("I64", 24)]
        {
            let json =
                |end: usize| format!(r#"{{"a":{{"dtype":"{dtype}","shape":[3],"data_offsets":[0,{end}]}}}}"#);
            let tensors = parse(&file(&json(bytes), bytes)).unwrap();
            assert_eq!(tensors[0].dtype.name(), dtype.to_lowercase());
            assert!(refused(&json(bytes + 1), bytes + 1).contains(&format!("of {dtype}, expected {bytes}")));
        }
    }

    #[test]
    fn other_dtypes_are_unsupported() {
        for dtype in ["F4", "C64", "nonsense"] {
            let json = format!(r#"{{"a":{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,4]}}}}"#);
            let Err(RefusedFile::Unsupported(what)) = parse(&file(&json, 4)) else { panic!("{dtype}") };
            assert!(what.contains("`a`") && what.contains(dtype), "{what}");
        }
    }

    proptest! {
        /// Checks that files of Hugging Face's own writer are read.
        #[test]
        fn what_the_safetensors_crate_writes_is_read(
            shapes in proptest::collection::btree_map("[a-z.]{1,12}", (0usize..7, proptest::collection::vec(0usize..5, 0..4)), 0..6),
        ) {
            use safetensors::tensor::TensorView;
            let types = [
                (safetensors::Dtype::F32, Dtype::F32),
                (safetensors::Dtype::F16, Dtype::F16),
                (safetensors::Dtype::BF16, Dtype::BF16),
                (safetensors::Dtype::F8_E4M3, Dtype::F8E4M3),
                (safetensors::Dtype::F8_E5M2, Dtype::F8E5M2),
                (safetensors::Dtype::U8, Dtype::U8),
                (safetensors::Dtype::I64, Dtype::Raw { name: "i64", bytes: 8 }),
            ];
            let zeros = [0u8; 2048];
            let views: Vec<(String, TensorView<'_>)> = shapes
                .iter()
                .map(|(name, (dtype, shape))| {
                    let bytes = shape.iter().product::<usize>() * types[*dtype].1.block_bytes();
                    (name.clone(), TensorView::new(types[*dtype].0, shape.clone(), &zeros[..bytes]).unwrap())
                })
                .collect();
            let file = safetensors::serialize(views, None).unwrap();
            let mut found: Vec<_> = parse(&file).unwrap().into_iter().map(|t| (t.name, t.dtype, t.shape)).collect();
            found.sort_by(|a, b| a.0.cmp(&b.0));
            let expected: Vec<_> = shapes
                .into_iter()
                .map(|(name, (dtype, shape))| (name, types[dtype].1, shape.iter().map(|&n| n as u64).collect::<Vec<_>>()))
                .collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn damaged_headers_never_panic(at in 8usize..140, byte: u8) {
            let json = r#"{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"bc":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}}"#;
            let mut bytes = file(json, 14);
            if let Some(b) = bytes.get_mut(at) {
                *b = byte;
            }
            if let Ok(tensors) = parse(&bytes) {
                prop_assert!(tensors.iter().all(|t| t.bytes.end <= bytes.len()));
            }
        }
    }
}
