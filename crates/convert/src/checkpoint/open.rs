//! Opens what a path names: a folder, a GGUF file, or one `.safetensors` file.

use super::quantized::{Quantization, quantization, scaled};
use super::{Checkpoint, TensorSource, gguf, own_name, read_json, safetensors};
use crate::path_kind::{self, PathKind};
use crate::variants::Variants;
use crate::{Error, Result};
use anemoe_io::RangedFiles;
use std::path::Path;

/// File that makes a folder an adapter (LoRA).
const ADAPTER: &str = "adapter_config.json";

/// Opens a Hugging Face folder, whose tensors keep their names, or a GGUF file, whose tensors get Hugging Face names.
///
/// # Errors
/// A file is missing or wrong.
pub fn open_checkpoint(path: &Path) -> Result<Checkpoint> {
    open_in_ranges(path, &RangedFiles::new())
}

/// Opens a Hugging Face folder, some of whose weight files are elsewhere.
///
/// # Errors
/// A file is missing or wrong, or cannot be fetched.
pub fn open_in_ranges(path: &Path, elsewhere: &RangedFiles) -> Result<Checkpoint> {
    if !path.is_dir() && gguf::is_gguf(path) {
        return gguf::open(path);
    }
    if !path.join("config.json").exists() {
        return Err(not_a_checkpoint(path));
    }
    let config = read_json(&path.join("config.json"))?;
    let generation = path.join("generation_config.json");
    let generation_config =
        generation.symlink_metadata().is_ok().then(|| read_json(&generation)).transpose()?;
    // Before the weights: files of another quantization are nothing to look at.
    let quantization = quantization(&config, &path.join("config.json"))?;
    let source: Box<dyn TensorSource> = Box::new(safetensors::Folder::open(path, elsewhere)?);
    let source = match quantization {
        Quantization::None => source,
        Quantization::Fp8 { block } => scaled(source, block)?,
    };
    let (name, path) = (own_name(path)?, path.to_path_buf());
    let (variants, remarks) = (Variants::default(), Vec::new());
    Ok(Checkpoint { name, path, config, generation_config, source, variants, remarks })
}

/// Makes the error for a path without a checkpoint: the kind of thing that lies there, and what to do next.
fn not_a_checkpoint(path: &Path) -> Error {
    let place = PathKind::at(path);
    if place == PathKind::Folder
        && let Err(e) = std::fs::read_dir(path)
    {
        return Error::io(path, e);
    }
    if path.join(ADAPTER).exists() {
        let what =
            format!("checkpoint: this is an adapter ({ADAPTER}); give a model that it was merged into");
        return Error::unsupported(path, what);
    }
    let next = match &place {
        PathKind::Nothing => {
            let what = "no such file or folder; a checkpoint is a Hugging Face folder, a .gguf file, hf:OWNER/NAME or synthetic:NAME";
            let what = format!("{what}{}", path_kind::hub_hint(path));
            return Error::io(path, std::io::Error::new(std::io::ErrorKind::NotFound, what));
        }
        PathKind::Bundle | PathKind::Unfinished => {
            "a bundle is what `anemoe build` writes; give its checkpoint".into()
        }
        PathKind::Package => "give the checkpoint, or look at the package with `anemoe inspect`".into(),
        PathKind::Safetensors => "give the folder that holds it beside config.json".into(),
        PathKind::Checkpoints(found) => {
            format!("give one of the checkpoints in it: {}", path_kind::list(found))
        }
        // A configuration has appeared by now, or it cannot be read.
        PathKind::Checkpoint | PathKind::Gguf => "it cannot be read".into(),
        PathKind::File => {
            "a checkpoint is a Hugging Face folder, a .gguf file, hf:OWNER/NAME or synthetic:NAME".into()
        }
        PathKind::EmptyFolder | PathKind::Folder => {
            "a checkpoint in the Hugging Face layout has a config.json; there is none".into()
        }
    };
    Error::invalid(path, format!("checkpoint: this is {}; {next}", place.name()))
}

/// Opens one `.safetensors` file by itself.
///
/// # Errors
/// The file cannot be read or breaks the format.
pub fn open_safetensors(path: &Path) -> Result<Box<dyn TensorSource>> {
    Ok(Box::new(safetensors::Folder::single(path)?))
}
