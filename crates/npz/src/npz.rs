//! Archives of arrays: a zip file with one `.npy` file for each.

use crate::npy::{PIECE, ReadError, check, read_array, write_array, write_atomic};
use crate::header::Refused;
use crate::{Array, Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::path::Path;
use zip::result::ZipError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// All arrays of an archive may take this many bytes, or [`MAX_EXPANSION`] times the archive where that is more.
const MIN_LIMIT: u64 = 1 << 30;
/// Numbers that were computed hardly compress; a hundred times is far beyond them.
const MAX_EXPANSION: u64 = 100;

/// Reads every array of a `.npz` file, by name (without `.npy`).
///
/// # Errors
/// The file cannot be read, is no zip file, holds something that is no array or the same name twice, expands to more than
/// 1 GiB and 100 times its own length, or an array is wrong or of an element type that is not implemented.
pub fn read_npz(path: &Path) -> Result<BTreeMap<String, Array>> {
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let length = file.metadata().map_err(|e| Error::io(path, e))?.len();
    let limit = length.saturating_mul(MAX_EXPANSION).max(MIN_LIMIT);
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|e| zip_error(e).at(path, ""))?;
    let mut arrays = BTreeMap::new();
    let mut total = 0u64;
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).map_err(|e| zip_error(e).at(path, &format!("entry {i}: ")))?;
        let file_name = entry.name().to_string();
        let subject = format!("array `{}`: ", file_name.escape_debug());
        let name = file_name.strip_suffix(".npy").unwrap_or(&file_name).to_string();
        let bytes = entry.size();
        if entry.compression() == CompressionMethod::Stored && bytes != entry.compressed_size() {
            let stored = entry.compressed_size();
            return Err(invalid(format!("size: stored in {stored} bytes, but {bytes} are claimed")).at(path, &subject));
        }
        // Also several entries over the same bytes of the archive cannot add up to more.
        total = total.saturating_add(bytes);
        if total > limit {
            let what = format!("size: with it the archive expands to {total} bytes, more than {limit}");
            return Err(invalid(what).at(path, &subject));
        }
        let array = read_array(&mut entry, bytes).map_err(|e| e.at(path, &subject))?;
        if arrays.insert(name, array).is_some() {
            return Err(invalid("name: it is there twice").at(path, &subject));
        }
    }
    Ok(arrays)
}

/// Writes a `.npz` file whose arrays are stored as they are, like `numpy.savez`: beside `path` first, then renamed into
/// place. The same arrays in the same order give the same bytes.
///
/// # Errors
/// A name is empty, not usable as a file's or there twice, a shape's product is not the number of elements, or a file
/// operation fails; nothing half-written stays behind.
pub fn write_npz(path: &Path, entries: &[(String, Array)]) -> Result<()> {
    write(path, entries, CompressionMethod::Stored)
}

/// As [`write_npz`], deflated, like `numpy.savez_compressed`.
///
/// # Errors
/// As [`write_npz`].
pub fn write_npz_compressed(path: &Path, entries: &[(String, Array)]) -> Result<()> {
    write(path, entries, CompressionMethod::Deflated)
}

fn write(path: &Path, entries: &[(String, Array)], method: CompressionMethod) -> Result<()> {
    let mut names = BTreeSet::new();
    for (name, array) in entries {
        let wrong = |what| Error::Invalid { path: path.to_path_buf(), what: format!("array `{name}`: {what}") };
        if name.is_empty() || name.len() > 1024 || name.ends_with(".npy") || name.contains(['\0', '/', '\\']) {
            return Err(wrong("name: expected 1 to 1024 bytes without slashes and without `.npy`".into()));
        }
        if !names.insert(name) {
            return Err(wrong("name: it is there twice".into()));
        }
        check(array).map_err(wrong)?;
    }
    write_atomic(path, |file| {
        let mut zip = ZipWriter::new(BufWriter::with_capacity(PIECE, file));
        for (name, array) in entries {
            // An entry that may pass 4 GiB says so before it is written.
            let bytes = array.data.len() as u64 * array.data.dtype().bytes() as u64;
            let options = SimpleFileOptions::default()
                .compression_method(method)
                .last_modified_time(zip::DateTime::default())
                .unix_permissions(0o644)
                .large_file(bytes > u64::from(u32::MAX / 2));
            zip.start_file(format!("{name}.npy"), options)?;
            write_array(&mut zip, array)?;
        }
        zip.finish()?.flush()
    })
}

fn invalid(what: impl Into<String>) -> ReadError {
    ReadError::Refused(Refused::Invalid(what.into()))
}

fn zip_error(e: ZipError) -> ReadError {
    match e {
        ZipError::Io(e) => io::Error::into(e),
        ZipError::UnsupportedArchive(what) => ReadError::Refused(Refused::Unsupported(format!("zip archive: {what}"))),
        e => invalid(format!("zip archive: {e}")),
    }
}
