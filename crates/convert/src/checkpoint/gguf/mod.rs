//! GGUF files of arch `gemma4`, under the names and shapes of the Hugging Face checkpoint.

mod config;
pub(super) mod dequantize;
mod header;
mod metadata;
mod tensor_names;
mod tokenizer_files;
#[cfg(test)]
#[path = "../../../tests/common/gguf.rs"]
mod writer;

use super::{Checkpoint, Dtype, SideFile, TensorInfo, TensorSource, check_finite, map_file, own_name};
use crate::{Error, Result};
use dequantize::dequantize;
use header::{GgufHead, GgufTensor};
use memmap2::Mmap;
use metadata::Metadata;
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tensor_names::Role;

/// Most elements of `rope_freqs.weight`: half a head.
const MAX_ROPE_FREQS: u64 = 1 << 20;

/// Tells whether a file is named `.gguf`, or starts as a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
        return true;
    }
    let mut magic = [0; 4];
    let opened = anemoe_io::open_input(path, u64::MAX);
    opened.is_ok_and(|mut f| f.read_exact(&mut magic).is_ok()) && magic == *header::MAGIC
}

/// Opens a GGUF file.
pub fn open(path: &Path) -> Result<Checkpoint> {
    let (source, config) = Gguf::open(path)?;
    let generation_config = config::generation_config(source.metadata())?;
    let name = own_name(path)?;
    Ok(Checkpoint {
        name,
        path: path.to_path_buf(),
        config,
        generation_config,
        source: Box::new(source),
        variants: Default::default(),
    })
}

/// Bytes of a tensor in the file.
#[derive(Clone, Debug)]
struct TensorBytes {
    dtype: Dtype,
    bytes: Range<usize>,
}

#[derive(Clone, Debug)]
enum Place {
    Whole(TensorBytes),
    /// For each expert, `elements` elements of the gate, then as many of the up projection.
    Joined {
        gate: TensorBytes,
        up: TensorBytes,
        elements: u64,
    },
}

/// A memory-mapped GGUF file.
struct Gguf {
    path: PathBuf,
    map: Mmap,
    head: GgufHead,
    tensors: Vec<TensorInfo>,
    places: Vec<Place>,
}

/// Maps a file and checks its head.
fn map(path: &Path) -> Result<(Mmap, GgufHead)> {
    let map = map_file(path)?;
    let head = header::parse(&map).map_err(|e| e.at(path))?;
    Ok((map, head))
}

impl Gguf {
    fn open(path: &Path) -> Result<(Gguf, serde_json::Value)> {
        let (map, head) = map(path)?;
        let m = Metadata { path, file: &map, values: &head.values };
        if let Some(n) = m.unsigned("split.count")?.filter(|n| *n > 1) {
            let what =
                format!("is {n}: one of {n} files; read are whole files (gguf-split --merge makes them)");
            return Err(m.unsupported("split.count", what));
        }
        let arch = m.needed("general.architecture", m.text("general.architecture")?)?;
        if arch != config::ARCH {
            let what = format!("is {}; read is {}", arch.escape_debug(), config::ARCH);
            return Err(m.unsupported("general.architecture", what));
        }
        let said = config::Tensors {
            names: head.tensors.iter().map(|t| t.name.as_str()).collect(),
            vocab_size: head.tensors.iter().find(|t| t.name == "token_embd.weight").map(|t| t.shape[0]),
            rope_freqs: rope_freqs(path, &map, &head.tensors)?,
        };
        let config = config::config(m, &said)?;
        let (tensors, places) = tensors(path, &head.tensors)?.into_iter().unzip();
        Ok((Gguf { path: path.to_path_buf(), map, head, tensors, places }, config))
    }

    fn metadata(&self) -> Metadata<'_> {
        Metadata { path: &self.path, file: &self.map, values: &self.head.values }
    }

    fn dequantize(&self, part: &TensorBytes, first: u64, out: &mut [f32]) {
        dequantize(part.dtype, &self.map[part.bytes.clone()], first as usize, out);
    }
}

/// Reads the divisors of the full layers' frequencies; none where the file has none.
fn rope_freqs(path: &Path, file: &[u8], tensors: &[GgufTensor]) -> Result<Option<Vec<f32>>> {
    let Some(t) = tensors.iter().find(|t| t.name == "rope_freqs.weight") else { return Ok(None) };
    if t.dtype != Dtype::F32 || t.shape.iter().product::<u64>() > MAX_ROPE_FREQS {
        let what =
            format!("tensor `{}`: {} {:?}, expected f32 for half a head", t.name, t.dtype.name(), t.shape);
        return Err(Error::invalid(path, what));
    }
    let mut out = vec![0f32; t.bytes.len() / 4];
    dequantize(t.dtype, &file[t.bytes.clone()], 0, &mut out);
    Ok(Some(out))
}

/// Lists every tensor under its Hugging Face name, sorted by that name.
fn tensors(path: &Path, placed: &[GgufTensor]) -> Result<Vec<(TensorInfo, Place)>> {
    let invalid = |what: String| Error::invalid(path, what);
    let mut found: BTreeMap<String, (TensorInfo, Place)> = BTreeMap::new();
    let mut halves: BTreeMap<String, [Option<&GgufTensor>; 2]> = BTreeMap::new();
    let part = |t: &GgufTensor| TensorBytes { dtype: t.dtype, bytes: t.bytes.clone() };
    let info = |name: &str, t: &GgufTensor, shape: Vec<u64>, bytes: usize| TensorInfo {
        name: name.into(),
        dtype: t.dtype,
        shape,
        bytes: bytes as u64,
        file: path.to_path_buf(),
    };
    for t in placed {
        match t.name.as_str() {
            "rope_freqs.weight" => continue,
            "output.weight" => {
                let what =
                    "tensor `output.weight`: a head of its own; implemented is the embedding as the head";
                return Err(Error::unsupported(path, what));
            }
            _ => {}
        }
        match tensor_names::role(&t.name) {
            None => {
                let what = format!("tensor `{}`: this model has none of that name", t.name.escape_debug());
                return Err(invalid(what));
            }
            Some(Role::Whole(name)) => {
                let whole = (info(&name, t, t.shape.clone(), t.bytes.len()), Place::Whole(part(t)));
                found.insert(name, whole);
            }
            Some(Role::Gate(name)) => halves.entry(name).or_default()[0] = Some(t),
            Some(Role::Up(name)) => halves.entry(name).or_default()[1] = Some(t),
        }
    }
    for (name, pair) in halves {
        let (gate, up) = match pair {
            [Some(gate), Some(up)] => (gate, up),
            [Some(one), None] | [None, Some(one)] => {
                return Err(invalid(format!("tensor `{}`: the other half of `{name}` is missing", one.name)));
            }
            [None, None] => continue,
        };
        if found.contains_key(&name) {
            return Err(invalid(format!("tensor `{}`: `{name}` is there already as one tensor", gate.name)));
        }
        let [experts, rows, columns] = gate.shape[..] else {
            return Err(invalid(format!(
                "tensor `{}`: shape {:?}, expected three dimensions",
                gate.name, gate.shape
            )));
        };
        if up.shape != gate.shape {
            let (a, b) = (&up.shape, &gate.shape);
            return Err(invalid(format!(
                "tensor `{}`: shape {a:?}, expected {b:?} as `{}`",
                up.name, gate.name
            )));
        }
        // Both tensors are in the file and do not overlap, so twice the elements of one are below 2^64.
        let info = info(&name, gate, vec![experts, 2 * rows, columns], gate.bytes.len() + up.bytes.len());
        let place = Place::Joined { gate: part(gate), up: part(up), elements: rows * columns };
        found.insert(name, (info, place));
    }
    Ok(found.into_values().collect())
}

impl TensorSource for Gguf {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let i = self
            .tensors
            .binary_search_by(|t| t.name.as_str().cmp(name))
            .map_err(|_| Error::invalid(&self.path, format!("use: no tensor `{name}`")))?;
        let info = &self.tensors[i];
        if range.start > range.end
            || range.end > info.elements()
            || range.end - range.start != out.len() as u64
        {
            return Err(Error::invalid(&info.file, format!("use: elements {range:?} of tensor `{name}`")));
        }
        match &self.places[i] {
            Place::Whole(part) => self.dequantize(part, range.start, out),
            Place::Joined { gate, up, elements } => {
                let (mut at, mut rest) = (range.start, &mut *out);
                while !rest.is_empty() {
                    let (piece, within) = (at / elements, at % elements);
                    let n = (rest.len() as u64).min(elements - within) as usize;
                    let (now, later) = rest.split_at_mut(n);
                    let half = if piece % 2 == 0 { gate } else { up };
                    self.dequantize(half, piece / 2 * elements + within, now);
                    at += n as u64;
                    rest = later;
                }
            }
        }
        check_finite(info, range.start, out)
    }

    fn side_file(&self, name: &str) -> Result<Option<SideFile>> {
        let made = match name {
            "tokenizer.json" => tokenizer_files::tokenizer(self.metadata())?,
            "tokenizer_config.json" => tokenizer_files::tokenizer_config(self.metadata())?,
            "generation_config.json" => config::generation_config(self.metadata())?,
            _ => None,
        };
        let text = made.map(|value| serde_json::to_vec(&value)).transpose();
        let text = text.map_err(|e| Error::invalid(&self.path, format!("metadata: {name}: {e}")))?;
        Ok(text.map(SideFile::Bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf").join(name)
    }

    /// Checks that every type of a file that the `gguf` package wrote is read as that package reads it, bit by bit.
    #[test]
    fn every_type_is_read_as_the_reference_reads_it() {
        let (blocks, head) = map(&fixture("blocks.gguf")).unwrap();
        let (expected, expected_head) = map(&fixture("expected.gguf")).unwrap();
        assert_eq!(head.tensors.len(), 13);
        for (t, e) in head.tensors.iter().zip(&expected_head.tensors) {
            assert_eq!((&t.name, &t.shape, e.dtype), (&e.name, &e.shape, Dtype::F32));
            assert_eq!(t.name, t.dtype.name().to_lowercase());
            let n = t.shape.iter().product::<u64>() as usize;
            let (mut found, mut wanted) = (vec![0f32; n], vec![0f32; n]);
            dequantize(t.dtype, &blocks[t.bytes.clone()], 0, &mut found);
            dequantize(e.dtype, &expected[e.bytes.clone()], 0, &mut wanted);
            let wrong = found.iter().zip(&wanted).position(|(a, b)| a.to_bits() != b.to_bits());
            if let Some(i) = wrong {
                panic!("{} element {i}: {:e}, expected {:e}", t.name, found[i], wanted[i]);
            }
        }
    }

    #[test]
    fn the_right_files_are_taken_for_gguf() {
        assert!(is_gguf(Path::new("no/such/model.GGUF")));
        assert!(!is_gguf(Path::new("no/such/model")));
        assert!(!is_gguf(&fixture("make_blocks.py")));
        let dir = tempfile::tempdir().unwrap();
        let renamed = dir.path().join("model");
        std::fs::copy(fixture("blocks.gguf"), &renamed).unwrap();
        assert!(is_gguf(&renamed));
        let err = open(&renamed).err().unwrap().to_string();
        assert!(err.contains("unsupported metadata: `general.architecture` is none"), "{err}");
    }
}
