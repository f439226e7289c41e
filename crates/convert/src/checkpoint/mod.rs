//! Checkpoints: named tensors that are read in pieces, and the configuration beside them.

mod derived;
mod gguf;
mod open;
mod quantized;
mod rotated;
mod rotation;
mod safetensors;
mod safetensors_header;

use crate::variants::Variants;
use crate::{Error, Result};
use anemoe_io::{open_input, read_input};
use memmap2::Mmap;
use serde_json::Value;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use derived::{DerivedTensor, TensorOrigin, derive};
pub use gguf::is_gguf;
pub use open::{open_checkpoint, open_in_ranges, open_safetensors};
pub use quantized::check_quantization;
pub use rotated::{MOST_KEPT, TensorRotation, rotated};
pub use rotation::Rotation;

/// Element types of safetensors that a weight may have, for messages.
const WEIGHT_DTYPES: &str = "BF16, F16, F32, F8_E4M3 or F8_E5M2";

/// Largest file beside the weights that is copied into a bundle; Gemma's tokenizer has 32 MB.
const MAX_SIDE_FILE_BYTES: u64 = 512 << 20;

/// Largest `config.json`, or other small file of JSON, that is read.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Files beside the weights that belong into a bundle.
pub const SIDE_FILES: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];

/// An opened checkpoint.
pub struct Checkpoint {
    /// Name that the user gave.
    pub name: String,
    /// The folder or the file, or the name of a synthetic model.
    pub path: PathBuf,
    /// `config.json`, or the same keys made from a GGUF file's metadata.
    pub config: Value,
    /// `generation_config.json`, where there is one or the metadata names tokens that end a text.
    pub generation_config: Option<Value>,
    /// The tensors.
    pub source: Box<dyn TensorSource>,
    /// Variants: readings on which the programs that run the checkpoint differ.
    pub variants: Variants,
    /// Remarks on what is read otherwise than the configuration says.
    pub remarks: Vec<String>,
}

impl Checkpoint {
    /// Computes the SHA-256 of the checkpoint: its configuration, tensor files (names and contents, of large files
    /// samples), the files beside them, and its variants. The place of the checkpoint and the spelling of its path do
    /// not count.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn fingerprint(&self) -> Result<String> {
        let mut parts = vec![self.config.to_string()];
        for file in &self.source.files() {
            // Synthetic checkpoints have no file: their name says what they hold.
            if file.is_file() {
                // The file's name counts, except for a checkpoint of one file, which may have any name.
                let name = file.file_name().filter(|_| self.path.is_dir()).unwrap_or_default();
                parts.push(format!("{} {}", name.to_string_lossy(), anemoe_bundle::sampled_sha256(file)?));
            } else {
                parts.push(file.display().to_string());
            }
        }
        for (name, file) in self.side_files()? {
            parts.push(format!("{name} {}", anemoe_bundle::sha256(&file.read()?)));
        }
        // A variant that is set to its default makes no other checkpoint.
        let skip = self.variants.zaya_skip.unwrap_or_default();
        parts.push(format!("zaya skip {}", skip.name()));
        if self.variants.is_rotated {
            parts.push("rotated".into());
        }
        Ok(anemoe_bundle::sha256(parts.join("\n").as_bytes()))
    }

    /// Returns the same checkpoint with other variants.
    #[must_use]
    pub fn with_variants(self, variants: Variants) -> Checkpoint {
        Checkpoint { variants, ..self }
    }

    /// Returns the file that [`Checkpoint::config`] is from, for messages.
    pub fn config_path(&self) -> PathBuf {
        if self.path.is_file() { self.path.clone() } else { self.path.join("config.json") }
    }

    /// Returns a file beside the weights, for instance `tokenizer.json`; none where there is no such file.
    ///
    /// # Errors
    /// The file has to be made from metadata that is wrong.
    pub fn side_file(&self, name: &str) -> Result<Option<SideFile>> {
        self.source.side_file(name)
    }

    /// Returns the files beside the weights that belong into a bundle, by their names there.
    ///
    /// # Errors
    /// A file has to be made from metadata that is wrong.
    pub fn side_files(&self) -> Result<Vec<(&'static str, SideFile)>> {
        let mut files = Vec::new();
        for name in SIDE_FILES {
            files.extend(self.side_file(name)?.map(|file| (name, file)));
        }
        Ok(files)
    }
}

/// A file that belongs into a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SideFile {
    /// A file to copy.
    Path(PathBuf),
    /// Content made from the checkpoint's metadata.
    Bytes(Vec<u8>),
}

impl SideFile {
    /// Reads the content.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self) -> Result<std::borrow::Cow<'_, [u8]>> {
        match self {
            SideFile::Path(path) => {
                Ok(read_input(path, MAX_SIDE_FILE_BYTES).map_err(|e| Error::io(path, e))?.into())
            }
            SideFile::Bytes(bytes) => Ok(bytes.into()),
        }
    }

    /// Returns the length in bytes; 0 where it is not known.
    pub fn bytes(&self) -> u64 {
        match self {
            SideFile::Path(path) => path.metadata().map_or(0, |m| m.len()),
            SideFile::Bytes(bytes) => bytes.len() as u64,
        }
    }
}

/// Reads a small file of JSON.
fn read_json(path: &Path) -> Result<Value> {
    let text = read_input(path, MAX_CONFIG_BYTES).map_err(|e| Error::io(path, e))?;
    anemoe_io::json::parse(&text).map_err(|e| Error::invalid(path, format!("JSON: {e}")))
}

/// Returns the last part of a path: a bundle does not say where on a disk its checkpoint was.
fn own_name(path: &Path) -> Result<String> {
    let full = std::fs::canonicalize(path).map_err(|e| Error::io(path, e))?;
    let name = full.file_name().map(|n| n.to_string_lossy().into_owned());
    Ok(name.unwrap_or_else(|| path.display().to_string()))
}

/// Maps a regular file into memory.
fn map_file(path: &Path) -> Result<Mmap> {
    let file = open_input(path, u64::MAX).map_err(|e| Error::io(path, e))?;
    // SAFETY: the map is only read. A file that another process shortens meanwhile ends this one with a signal, as for
    // every program that maps its weights.
    #[allow(unsafe_code)]
    let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
    Ok(map)
}

/// Element type of a checkpoint tensor. The types of GGML keep a fixed number of consecutive elements of a row in a block
/// of a fixed number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    /// A type of safetensors whose values are no weights, by its name there in lower case.
    Raw {
        name: &'static str,
        bytes: usize,
    },
    F64,
    I8,
    I16,
    I32,
    I64,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq1S,
    Iq1M,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq4Nl,
    Iq4Xs,
    Tq1_0,
    Tq2_0,
    Mxfp4,
    Nvfp4,
    Q1_0,
    Q2_0,
}

impl Dtype {
    /// Bytes, for instance those of MXFP4 blocks.
    pub const U8: Dtype = Dtype::Raw { name: "u8", bytes: 1 };

    /// Returns the name, and the elements and bytes of one block.
    const fn layout(self) -> (&'static str, usize, usize) {
        match self {
            Dtype::F8E4M3 => ("f8_e4m3", 1, 1),
            Dtype::F8E5M2 => ("f8_e5m2", 1, 1),
            Dtype::Raw { name, bytes } => (name, 1, bytes),
            Dtype::F32 => ("f32", 1, 4),
            Dtype::F16 => ("f16", 1, 2),
            Dtype::BF16 => ("bf16", 1, 2),
            Dtype::F64 => ("f64", 1, 8),
            Dtype::I8 => ("i8", 1, 1),
            Dtype::I16 => ("i16", 1, 2),
            Dtype::I32 => ("i32", 1, 4),
            Dtype::I64 => ("i64", 1, 8),
            Dtype::Q4_0 => ("q4_0", 32, 2 + 16),
            Dtype::Q4_1 => ("q4_1", 32, 2 + 2 + 16),
            Dtype::Q5_0 => ("q5_0", 32, 2 + 4 + 16),
            Dtype::Q5_1 => ("q5_1", 32, 2 + 2 + 4 + 16),
            Dtype::Q8_0 => ("q8_0", 32, 2 + 32),
            Dtype::Q2K => ("q2_K", 256, 16 + 64 + 2 + 2),
            Dtype::Q3K => ("q3_K", 256, 32 + 64 + 12 + 2),
            Dtype::Q4K => ("q4_K", 256, 2 + 2 + 12 + 128),
            Dtype::Q5K => ("q5_K", 256, 2 + 2 + 12 + 32 + 128),
            Dtype::Q6K => ("q6_K", 256, 128 + 64 + 16 + 2),
            Dtype::Iq1S => ("iq1_s", 256, 2 + 32 + 16),
            Dtype::Iq1M => ("iq1_m", 256, 32 + 16 + 8),
            Dtype::Iq2Xxs => ("iq2_xxs", 256, 2 + 64),
            Dtype::Iq2Xs => ("iq2_xs", 256, 2 + 64 + 8),
            Dtype::Iq2S => ("iq2_s", 256, 2 + 32 + 32 + 8 + 8),
            Dtype::Iq3Xxs => ("iq3_xxs", 256, 2 + 64 + 32),
            Dtype::Iq3S => ("iq3_s", 256, 2 + 64 + 8 + 32 + 4),
            Dtype::Iq4Nl => ("iq4_nl", 32, 2 + 16),
            Dtype::Iq4Xs => ("iq4_xs", 256, 2 + 2 + 4 + 128),
            Dtype::Tq1_0 => ("tq1_0", 256, 48 + 4 + 2),
            Dtype::Tq2_0 => ("tq2_0", 256, 64 + 2),
            Dtype::Mxfp4 => ("mxfp4", 32, 1 + 16),
            Dtype::Nvfp4 => ("nvfp4", 64, 4 + 32),
            Dtype::Q1_0 => ("q1_0", 128, 2 + 16),
            Dtype::Q2_0 => ("q2_0", 64, 2 + 16),
        }
    }

    /// Returns the name as in safetensors or GGML: `bf16`, `q4_K`.
    pub const fn name(self) -> &'static str {
        self.layout().0
    }

    /// Returns the elements of one block; 1 where every element stands alone.
    pub const fn block_elements(self) -> usize {
        self.layout().1
    }

    /// Returns the bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.layout().2
    }

    /// Returns the bytes of a tensor of this shape (outermost first). None where its rows are not whole blocks, or 64
    /// bits cannot count its bytes.
    pub fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let (elements, bytes) = (self.block_elements() as u64, self.block_bytes() as u64);
        if !shape.last().copied().unwrap_or(1).is_multiple_of(elements) {
            return None;
        }
        let all = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
        (all / elements).checked_mul(bytes)
    }
}

/// Name, element type and shape of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Name in the checkpoint.
    pub name: String,
    /// Element type as stored.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Bytes as stored.
    pub bytes: u64,
    /// File that holds the tensor.
    pub file: PathBuf,
}

impl TensorInfo {
    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Refuses a tensor whose element type is not that of a weight.
    ///
    /// # Errors
    /// The elements are integers, doubles or the like.
    pub fn check_weight(&self) -> Result<()> {
        let Dtype::Raw { name, .. } = self.dtype else { return Ok(()) };
        let name = name.to_uppercase();
        let what = format!("tensor `{}`: dtype {name}, expected {WEIGHT_DTYPES}", self.name);
        Err(Error::unsupported(&self.file, what))
    }

    /// Refuses a range that is not within the tensor, or not as long as the buffer for it.
    pub(crate) fn check_range(&self, range: &Range<u64>, buffer: usize) -> Result<()> {
        let within = range.start <= range.end && range.end <= self.elements();
        if within && range.end - range.start == buffer as u64 {
            return Ok(());
        }
        Err(Error::invalid(&self.file, format!("use: elements {range:?} of tensor `{}`", self.name)))
    }
}

/// Refuses values that are NaN or infinite; the first value is element `start` of the tensor.
fn check_finite(info: &TensorInfo, start: u64, values: &[f32]) -> Result<()> {
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => {
            let at = start + i as u64;
            Err(Error::invalid(&info.file, format!("tensor `{}`: element {at} is {}", info.name, values[i])))
        }
    }
}

/// Returns the index of the tensor named `name` among tensors that are sorted by name.
fn place_of(tensors: &[TensorInfo], name: &str) -> Option<usize> {
    tensors.binary_search_by(|t| t.name.as_str().cmp(name)).ok()
}

/// Named tensors that can be read in pieces, so that no tensor ever has to fit in memory whole.
pub trait TensorSource: Send + Sync {
    /// Returns all tensors, sorted by name.
    fn tensors(&self) -> &[TensorInfo];

    /// Reads elements `range` (row-major, in elements) of tensor `name` as f32 into `out`, which is as long as the range.
    ///
    /// # Errors
    /// The name is unknown, the range is outside the tensor, or a value is NaN or infinite (the error names the tensor
    /// and the element).
    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()>;

    /// Reads elements `range` of tensor `name`, which has the type [`Dtype::U8`].
    ///
    /// # Errors
    /// The name is unknown, the range is outside the tensor, or its elements are not bytes.
    fn read_bytes(&self, name: &str, _range: Range<u64>, _out: &mut [u8]) -> Result<()> {
        Err(Error::invalid(self.path(), format!("use: bytes of tensor `{name}`")))
    }

    /// Reads all elements of tensor `name`, which are integers.
    ///
    /// # Errors
    /// The name is unknown, or its elements are no integers of 32 or 64 bits.
    fn read_integers(&self, name: &str) -> Result<Vec<i64>> {
        Err(Error::unsupported(
            self.path(),
            format!("tensor `{name}`: integers in a checkpoint of this format"),
        ))
    }

    /// Returns the tensor named `name`; none where there is no such tensor.
    fn info(&self, name: &str) -> Option<&TensorInfo> {
        let all = self.tensors();
        place_of(all, name).map(|i| &all[i])
    }

    /// Returns the path that the tensors come from, for messages.
    fn path(&self) -> &Path;

    /// Returns the files that hold the tensors.
    fn files(&self) -> BTreeSet<PathBuf> {
        self.tensors().iter().map(|t| t.file.clone()).collect()
    }

    /// Returns the file that holds an element of a tensor, and the tensor's name there.
    fn origin(&self, name: &str, _element: u64) -> (PathBuf, String) {
        let file = self.info(name).map_or_else(|| self.path().to_path_buf(), |info| info.file.clone());
        (file, name.to_string())
    }

    /// Returns the tensors before their rotation, where they are rotated.
    fn unrotated(&self) -> Option<&dyn TensorSource> {
        None
    }

    /// Returns a file that comes with the tensors, for instance `tokenizer.json`; none where there is no such file.
    ///
    /// # Errors
    /// The file has to be made from metadata that is wrong.
    fn side_file(&self, _name: &str) -> Result<Option<SideFile>> {
        Ok(None)
    }
}
