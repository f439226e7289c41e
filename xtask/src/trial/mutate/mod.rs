//! Damages files, by bytes and by the structure of their format.

mod bytes;
mod json_values;
mod tensors;

pub use bytes::damage_bytes;

use super::choices::Choices;
use std::path::Path;

/// Format of a file, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileFormat {
    Json,
    JsonLines,
    Safetensors,
    Gguf,
    Npy,
    Npz,
    Weights,
    Binary,
    Other,
}

/// Returns the format of a file by its name.
pub fn format(path: &Path) -> FileFormat {
    match path.extension().and_then(|e| e.to_str()).unwrap_or_default() {
        "json" => FileFormat::Json,
        "jsonl" => FileFormat::JsonLines,
        "safetensors" => FileFormat::Safetensors,
        "gguf" => FileFormat::Gguf,
        "npy" => FileFormat::Npy,
        "npz" => FileFormat::Npz,
        "mlmodel" => FileFormat::Binary,
        "bin" if path.ends_with("weights/weight.bin") => FileFormat::Weights,
        _ => FileFormat::Other,
    }
}

/// Changes the structure of a file of this format.
pub fn structure(file: &mut Vec<u8>, format: FileFormat, r: &mut Choices) {
    match format {
        FileFormat::Json => json_values::edit(file, r),
        FileFormat::JsonLines => lines(file, r),
        FileFormat::Safetensors => tensors::safetensors(file, r),
        FileFormat::Gguf => tensors::gguf(file, r),
        FileFormat::Npy => tensors::npy(file, r),
        FileFormat::Npz => tensors::npz(file, r),
        FileFormat::Binary => damage_bytes(file, r),
        FileFormat::Weights => blobs(file, r),
        FileFormat::Other => cells(file, r),
    }
}

/// Changes a line, or the order of lines.
fn lines(file: &mut Vec<u8>, r: &mut Choices) {
    let mut lines: Vec<Vec<u8>> = file.split_inclusive(|&b| b == b'\n').map(<[u8]>::to_vec).collect();
    if lines.is_empty() {
        return damage_bytes(file, r);
    }
    let i = r.below(lines.len());
    match r.below(4) {
        0 => lines.insert(i, lines[i].clone()),
        1 => {
            lines.remove(i);
        }
        _ => {
            let mut line = lines[i].clone();
            json_values::edit(&mut line, r);
            line.push(b'\n');
            lines[i] = line;
        }
    }
    *file = lines.concat();
}

/// Changes the header of a weight file or a blob's metadata, which start at multiples of 64 bytes.
fn blobs(file: &mut [u8], r: &mut Choices) {
    let units = file.len() / 64;
    let unit = if r.once_in(4) { 0 } else { r.below(units) };
    // Fields: count and version of the file; sentinel, type, size, offset and unused bits of a blob.
    let (at, width) = *r.pick(&[(0, 4), (4, 4), (8, 8), (16, 8), (24, 8)]);
    let value = if width == 4 && r.once_in(2) { r.below(32) as u64 } else { r.edge() };
    for (to, from) in file.iter_mut().skip(unit * 64 + at).zip(&value.to_le_bytes()[..width]) {
        *to = *from;
    }
}

/// Changes a cell of a table or a word of a text.
fn cells(file: &mut Vec<u8>, r: &mut Choices) {
    let ends: Vec<usize> =
        file.iter().enumerate().filter(|(_, b)| b"\t\n ".contains(b)).map(|(i, _)| i).collect();
    if ends.len() < 2 {
        return damage_bytes(file, r);
    }
    let i = r.below(ends.len() - 1);
    let hostile: [&[u8]; 9] =
        [b"", b"-1", b"1e400", b"nan", b"18446744073709551616", b"\x1b[31m", b"\xff\xfe", b"\t\t", b"~"];
    file.splice(ends[i] + 1..ends[i + 1], r.pick(&hostile).iter().copied());
}
