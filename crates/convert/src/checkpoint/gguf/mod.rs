//! GGUF files of llama.cpp, under the names and shapes of the Hugging Face checkpoint.

mod archs;
mod config;
pub(super) mod dequantize;
mod generation;
mod header;
mod metadata;
mod placed_tensors;
mod split_files;
mod tensor_names;
mod tokenizer_files;
#[cfg(test)]
#[path = "../../../tests/common/gguf.rs"]
mod writer;

use super::{Checkpoint, Dtype, SideFile, TensorInfo, TensorSource, check_finite, own_name, place_of};
use crate::{Error, Result};
use config::StatedModel;
use dequantize::dequantize;
use metadata::Metadata;
use placed_tensors::{ROPE_FREQS, TensorPlace};
use split_files::{GgufFile, open_files};
use std::io::Read;
use std::ops::Range;
use std::path::Path;

/// Most elements of `rope_freqs.weight`: half a head.
const MAX_ROPE_FREQS: u64 = 1 << 20;
/// Most layers of a model.
const MAX_LAYERS: u64 = 1000;

/// Tells whether a file is named `.gguf`, or starts as a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
        return true;
    }
    let mut magic = [0; 4];
    let opened = anemoe_io::open_input(path, u64::MAX);
    opened.is_ok_and(|mut f| f.read_exact(&mut magic).is_ok()) && magic == *header::MAGIC
}

/// Opens a GGUF file, or the model of which it is a part.
pub fn open(path: &Path) -> Result<Checkpoint> {
    let files = open_files(path)?;
    let model = stated_model(&files)?;
    let config = config::config(&model)?;
    let head_dim = config.get("head_dim").and_then(serde_json::Value::as_u64).unwrap_or(0);
    let placed = placed_tensors::placed_tensors(model.arch, head_dim, &files)?;
    let generation_config = generation::generation_config(model.m)?;
    // Any part of a split file opens the same checkpoint.
    let path = files[0].path.clone();
    let name = own_name(&path)?;
    let (tensors, places) = placed.into_iter().unzip();
    Ok(Checkpoint {
        name,
        path,
        config: config.into(),
        generation_config,
        source: Box::new(Gguf { files, tensors, places }),
        variants: Default::default(),
        remarks: Vec::new(),
    })
}

/// Returns what the files state about the model's architecture.
fn stated_model(files: &[GgufFile]) -> Result<StatedModel<'_>> {
    let m = files[0].metadata();
    if let Some(kind) = m.text("general.type")?.filter(|kind| *kind != "model") {
        return Err(m.unsupported("general.type", format!("is {}; read are models", kind.escape_debug())));
    }
    let name = m.needed("general.architecture", m.text("general.architecture")?)?;
    let Some(arch) = archs::ARCHS.iter().find(|a| a.name == name) else {
        let known: Vec<&str> = archs::ARCHS.iter().map(|a| a.name).collect();
        let what = format!("is {}; read are {}", name.escape_debug(), known.join(", "));
        return Err(m.unsupported("general.architecture", what));
    };
    let key = format!("{name}.block_count");
    let layers = m.needed(&key, m.unsigned(&key)?)?;
    if !(1..=MAX_LAYERS).contains(&layers) {
        return Err(m.invalid(&key, format!("is {layers}, expected 1 to {MAX_LAYERS}")));
    }
    let tensors = || files.iter().flat_map(|file| &file.head.tensors);
    Ok(StatedModel {
        arch,
        m,
        layers: layers as usize,
        names: tensors().map(|t| t.name.as_str()).collect(),
        vocab_size: tensors().find(|t| t.name == "token_embd.weight").and_then(|t| t.shape.first().copied()),
        rope_freqs: rope_freqs(files)?,
    })
}

/// Reads the divisors of rotary frequencies; none where the files have none.
fn rope_freqs(files: &[GgufFile]) -> Result<Option<Vec<f32>>> {
    let found = files.iter().find_map(|file| {
        let tensor = file.head.tensors.iter().find(|t| t.name == ROPE_FREQS)?;
        Some((file, tensor))
    });
    let Some((file, t)) = found else { return Ok(None) };
    if t.dtype != Dtype::F32 || t.shape.iter().product::<u64>() > MAX_ROPE_FREQS {
        let what =
            format!("tensor `{}`: {} {:?}, expected f32 for half a head", t.name, t.dtype.name(), t.shape);
        return Err(Error::invalid(&file.path, what));
    }
    let mut out = vec![0f32; t.bytes.len() / 4];
    dequantize(t.dtype, &file.map[t.bytes.clone()], 0, &mut out);
    Ok(Some(out))
}

/// Tensors of a GGUF file, or of all parts of a split one.
struct Gguf {
    files: Vec<GgufFile>,
    tensors: Vec<TensorInfo>,
    places: Vec<TensorPlace>,
}

impl Gguf {
    fn metadata(&self) -> Metadata<'_> {
        self.files[0].metadata()
    }
}

impl TensorSource for Gguf {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn path(&self) -> &Path {
        &self.files[0].path
    }

    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let i = place_of(&self.tensors, name)
            .ok_or_else(|| Error::invalid(self.path(), format!("use: no tensor `{name}`")))?;
        let info = &self.tensors[i];
        info.check_range(&range, out.len())?;
        self.places[i].read(&self.files, range.start, out);
        check_finite(info, range.start, out)
    }

    fn side_file(&self, name: &str) -> Result<Option<SideFile>> {
        let made = match name {
            "tokenizer.json" => tokenizer_files::tokenizer(self.metadata())?,
            "tokenizer_config.json" => tokenizer_files::tokenizer_config(self.metadata())?,
            "generation_config.json" => generation::generation_config(self.metadata())?,
            _ => None,
        };
        let text = made.map(|value| serde_json::to_vec(&value)).transpose();
        let text = text.map_err(|e| Error::invalid(self.path(), format!("metadata: {name}: {e}")))?;
        Ok(text.map(SideFile::Bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf").join(name)
    }

    /// Checks that every type of a file that the `gguf` package wrote is read as that package reads it, bit by bit.
    #[test]
    fn every_type_is_read_as_the_reference_reads_it() {
        let [blocks, expected] =
            ["blocks.gguf", "expected.gguf"].map(|name| GgufFile::open(&fixture(name)).unwrap());
        assert_eq!(blocks.head.tensors.len(), 26);
        for (t, e) in blocks.head.tensors.iter().zip(&expected.head.tensors) {
            assert_eq!((&t.name, &t.shape, e.dtype), (&e.name, &e.shape, Dtype::F32));
            assert_eq!(t.name, t.dtype.name().to_lowercase());
            let n = t.shape.iter().product::<u64>() as usize;
            let (mut found, mut wanted) = (vec![0f32; n], vec![0f32; n]);
            dequantize(t.dtype, &blocks.map[t.bytes.clone()], 0, &mut found);
            dequantize(e.dtype, &expected.map[e.bytes.clone()], 0, &mut wanted);
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
