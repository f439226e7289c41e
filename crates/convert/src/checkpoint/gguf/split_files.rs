//! Files of one model: a whole GGUF file, or the parts of a split one.
//!
//! Parts are named `NAME-00001-of-0000N.gguf`. Each has `split.no` (from 0), `split.count` and
//! `split.tensors.count` (of all parts together); the first has the other keys, and tensors are in any.

use super::header::{self, GgufHead};
use super::metadata::Metadata;
use crate::checkpoint::map_file;
use crate::{Error, Result};
use anemoe_io::split_parts;
use memmap2::Mmap;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const COUNT: &str = "split.count";
const NUMBER: &str = "split.no";
const TENSORS: &str = "split.tensors.count";

/// Memory-mapped GGUF file with its checked head.
pub struct GgufFile {
    pub path: PathBuf,
    pub map: Mmap,
    pub head: GgufHead,
}

impl GgufFile {
    /// Maps a file and checks its head.
    pub fn open(path: &Path) -> Result<GgufFile> {
        let map = map_file(path)?;
        let head = header::parse(&map).map_err(|e| e.at(path))?;
        Ok(GgufFile { path: path.to_path_buf(), map, head })
    }

    pub fn metadata(&self) -> Metadata<'_> {
        Metadata { path: &self.path, file: &self.map, values: &self.head.values }
    }
}

/// Opens a whole file, or all parts of the model that a part belongs to, the first part first.
pub fn open_files(path: &Path) -> Result<Vec<GgufFile>> {
    let given = GgufFile::open(path)?;
    let count = given.metadata().unsigned(COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![given]);
    }
    let names = path.file_name().and_then(|name| name.to_str()).map(split_parts).unwrap_or_default();
    if names.len() as u64 != count {
        let what = format!(
            "is {count}: this is one of {count} files, but its name does not end in \
             -00001-of-{count:05}.gguf or as another part\'s"
        );
        return Err(given.metadata().invalid(COUNT, what));
    }
    let mut files = Vec::new();
    for (i, name) in (0..count).zip(names) {
        let part = path.with_file_name(name);
        if part.symlink_metadata().is_err() {
            let what = format!("no such file: part {} of {count} of the model", i + 1);
            return Err(Error::io(&part, std::io::Error::new(std::io::ErrorKind::NotFound, what)));
        }
        let file = GgufFile::open(&part)?;
        for (key, expected) in [(COUNT, count), (NUMBER, i)] {
            let m = file.metadata();
            let found = m.needed(key, m.unsigned(key)?)?;
            if found != expected {
                let what = format!("is {found}, expected {expected} in part {} of {count}", i + 1);
                return Err(m.invalid(key, what));
            }
        }
        files.push(file);
    }
    check_tensors(&files)?;
    Ok(files)
}

/// Checks that no tensor is in two parts, and that none is missing.
fn check_tensors(files: &[GgufFile]) -> Result<()> {
    let mut found: BTreeMap<&str, &GgufFile> = BTreeMap::new();
    for file in files {
        for tensor in &file.head.tensors {
            if let Some(other) = found.insert(&tensor.name, file) {
                let what = format!("tensor `{}` is in {} too", tensor.name, other.path.display());
                return Err(Error::invalid(&file.path, what));
            }
        }
    }
    for file in files {
        let m = file.metadata();
        if let Some(n) = m.unsigned(TENSORS)?.filter(|n| *n != found.len() as u64) {
            let what = format!("is {n}, but the {} parts have {} tensors", files.len(), found.len());
            return Err(m.invalid(TENSORS, what));
        }
    }
    Ok(())
}
