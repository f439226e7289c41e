//! Checkpoints: named tensors that are read in pieces, and the configuration beside them.

mod header;
mod safetensors;
mod synthetic;

use crate::{Error, Result};
use serde_json::Value;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Largest `config.json` or `generation_config.json` that is read.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// An opened checkpoint.
pub struct Checkpoint {
    /// As it was named.
    pub name: String,
    /// The folder, or the name of a synthetic model.
    pub path: PathBuf,
    /// `config.json`.
    pub config: Value,
    /// `generation_config.json`, where there is one.
    pub generation_config: Option<Value>,
    /// The tensors.
    pub source: Box<dyn TensorSource>,
}

impl Checkpoint {
    /// Opens a Hugging Face folder, or `synthetic:NAME?seed=N&layers=N`.
    ///
    /// # Errors
    /// A file is missing or wrong, or there is no such synthetic model.
    pub fn open(spec: &str) -> Result<Checkpoint> {
        if let Some(name) = spec.strip_prefix("synthetic:") {
            return synthetic::open(spec, name);
        }
        let path = PathBuf::from(spec);
        if !path.is_dir() {
            let e = std::io::Error::new(
                std::io::ErrorKind::NotFound,
                "no such folder; a checkpoint is a Hugging Face folder",
            );
            return Err(Error::io(path, e));
        }
        let config = read_json(&path.join("config.json"))?;
        let generation = path.join("generation_config.json");
        let generation_config = generation.exists().then(|| read_json(&generation)).transpose()?;
        let source = Box::new(safetensors::Folder::open(&path)?);
        // The folder's own name: a bundle does not say where on a disk it was made.
        let full = std::fs::canonicalize(&path).map_err(|e| Error::io(&path, e))?;
        let name = full.file_name().map_or_else(|| spec.to_string(), |n| n.to_string_lossy().into_owned());
        Ok(Checkpoint { name, path, config, generation_config, source })
    }

    /// Names, lengths and times of the files that hold tensors.
    pub fn fingerprint(&self) -> String {
        let files: std::collections::BTreeSet<&Path> =
            self.source.tensors().iter().map(|t| t.file.as_path()).collect();
        let one = |file: &&Path| match std::fs::metadata(file) {
            Ok(meta) => format!("{} {} {:?}", file.display(), meta.len(), meta.modified().ok()),
            Err(_) => file.display().to_string(),
        };
        files.iter().map(one).collect::<Vec<_>>().join("; ")
    }

    /// Files beside the weights that belong into a bundle.
    pub fn side_files(&self) -> Vec<(PathBuf, &'static str)> {
        ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
            .into_iter()
            .map(|name| (self.path.join(name), name))
            .filter(|(path, _)| path.is_file())
            .collect()
    }
}

/// Opens one `.safetensors` file by itself.
///
/// # Errors
/// The file cannot be read or breaks the format.
pub fn open_safetensors(path: &Path) -> Result<Box<dyn TensorSource>> {
    Ok(Box::new(safetensors::Folder::single(path)?))
}

fn read_json(path: &Path) -> Result<Value> {
    let len = std::fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    if len > MAX_CONFIG_BYTES {
        return Err(Error::invalid(path, format!("file: {len} bytes, more than {MAX_CONFIG_BYTES}")));
    }
    let text = std::fs::read(path).map_err(|e| Error::io(path, e))?;
    serde_json::from_slice(&text).map_err(|e| Error::invalid(path, format!("JSON: {e}")))
}

/// Element type of a checkpoint tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Dtype {
    F32,
    F16,
    BF16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
        }
    }
}

/// Name, element type and shape of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// As in the checkpoint.
    pub name: String,
    /// Element type as stored.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// The file that holds it.
    pub file: PathBuf,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Named tensors that can be read in pieces, so that no tensor ever has to fit in memory whole.
pub trait TensorSource: Send + Sync {
    /// All tensors, sorted by name.
    fn tensors(&self) -> &[TensorInfo];

    /// Reads elements `range` (row-major, in elements) of tensor `name` as f32 into `out`, which is as long as the range.
    ///
    /// # Errors
    /// The name is unknown, the range is outside the tensor, or a value is NaN or infinite (the error names the tensor
    /// and the element).
    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()>;

    /// The tensor named `name`.
    fn info(&self, name: &str) -> Option<&TensorInfo> {
        let all = self.tensors();
        all.binary_search_by(|t| t.name.as_str().cmp(name)).ok().map(|i| &all[i])
    }

    /// Where the tensors come from, for messages.
    fn path(&self) -> &Path;
}
