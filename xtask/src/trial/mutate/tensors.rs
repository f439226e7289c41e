//! Damages tensor files: wrong types, shapes, offsets and lengths, and values that are NaN or infinite.

use super::super::choices::Choices;
use super::bytes::{damage_bytes, overwrite_number};
use super::json_values;
use crate::files::gguf::Gguf;
use crate::files::tiny::{self, as_f32, gguf_of};
use serde_json::{Value, json};
use std::io::{Cursor, Read, Write};

/// Changes the header of a safetensors file, or its length.
pub fn safetensors(file: &mut Vec<u8>, r: &mut Choices) {
    let length = file.first_chunk().map_or(0, |n| u64::from_le_bytes(*n)) as usize;
    let header = file.get(8..8usize.saturating_add(length)).map(serde_json::from_slice::<Value>);
    let Some(Ok(mut header)) = header else { return damage_bytes(file, r) };
    if r.once_in(6) {
        let value =
            if r.once_in(2) { r.edge() } else { (length as u64).wrapping_add(r.below(17) as u64) - 8 };
        file[..8].copy_from_slice(&value.to_le_bytes());
        return;
    }
    let names: Vec<String> = header.as_object().map(|o| o.keys().cloned().collect()).unwrap_or_default();
    let entry = names.get(r.below(names.len())).and_then(|name| header.get_mut(name));
    match entry {
        Some(entry) if !r.once_in(3) && entry.get("shape").is_some() => match r.below(6) {
            0 => {
                let types: Vec<&str> = "F32 F16 BF16 F64 I64 U8 BOOL F8_E4M3 \u{1b}[1m ".split(' ').collect();
                entry["dtype"] = json!(r.pick(&types));
            }
            1 => entry["shape"] = json!([r.edge(), r.edge()]),
            2 => {
                if let Some(shape) = entry["shape"].as_array_mut() {
                    shape.reverse();
                    shape.push(json!(1));
                }
            }
            3 => entry["data_offsets"] = json!([r.edge(), r.edge()]),
            4 => {
                let start = entry["data_offsets"][0].as_u64().unwrap_or(0);
                entry["data_offsets"][0] = json!(start ^ 1 << r.below(12));
            }
            _ => json_values::change(entry, r),
        },
        _ => json_values::change(&mut header, r),
    }
    let header = json_values::write(&header);
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header);
    out.extend(&file[8 + length..]);
    *file = out;
}

/// Writes the tiny model as a GGUF file with wrong counts, types, offsets, keys or values.
pub fn gguf(file: &mut Vec<u8>, r: &mut Choices) {
    if r.once_in(3) {
        let head = r.below(file.len().min(8192));
        let at = *r.pick(&[4, 8, 16, 24, head]);
        return overwrite_number(file, at, r);
    }
    let fixture = crate::task::root().join("fixtures/tiny-gemma4-moe");
    let mut g: Gguf = gguf_of(&fixture, tiny::Options { fused: r.once_in(2), encode: as_f32 });
    let (key, tensor) = (r.below(g.keys.len()), r.below(g.tensors.len()));
    let tensors = g.tensors.len();
    match r.below(10) {
        0 => g.alignment = *r.pick(&[1, 8, 64, 4096]),
        1 => g.version = *r.pick(&[0, 1, 2, 4, u32::MAX]),
        2 => {
            g.keys.remove(key);
        }
        3 => {
            let again = g.keys[key].clone();
            g.keys.push(again);
        }
        4 => {
            let value = r.edge().to_le_bytes();
            let n = g.keys[key].2.len().min(8);
            g.keys[key].2[..n].copy_from_slice(&value[..n]);
        }
        5 => g.keys[key].1 = r.below(16) as u32,
        6 => {
            let at = r.below(g.tensors[tensor].ne.len());
            g.tensors[tensor].ne[at] = r.edge();
        }
        7 => g.tensors[tensor].kind = r.below(48) as u32,
        8 => g.tensors[tensor].offset = Some(if r.once_in(2) { r.edge() } else { 32 * r.below(4096) as u64 }),
        _ => match r.below(3) {
            0 => {
                g.tensors.remove(tensor);
            }
            1 => g.tensors.swap(tensor, tensors - 1),
            _ => g.tensors[tensor].name = b"blk.0.\x1b[31m\xff.weight".to_vec(),
        },
    }
    *file = g.write();
}

/// Changes the header of a NumPy array, or its values.
pub fn npy(file: &mut Vec<u8>, r: &mut Choices) {
    let length = file.get(8..10).map_or(0, |n| usize::from(n[0]) | usize::from(n[1]) << 8);
    let data = 10 + length;
    if data > file.len() || r.once_in(6) {
        let at = r.below(12);
        return overwrite_number(file, at, r);
    }
    if r.once_in(3) && data < file.len() {
        // NaN and infinity in f32 and f64; as integers, far outside any vocabulary.
        let value = *r.pick(&[f64::NAN.to_bits(), 0x7f80_0000_7f80_0000, u64::MAX, 0x7fff_ffff_7fff_ffff, 0]);
        let at = data + r.below((file.len() - data) / 8 + 1) * 8;
        let n = 8.min(file.len() - at.min(file.len()));
        let end = at + n;
        if end <= file.len() {
            file[at..end].copy_from_slice(&value.to_le_bytes()[..n]);
        }
        return;
    }
    let text = String::from_utf8_lossy(&file[10..data]).into_owned();
    let edge = r.edge();
    let edited = match r.below(7) {
        0 => text.replace(
            "'<f4'",
            r.pick::<&str>(&["'<f8'", "'<f2'", "'<i4'", "'>f4'", "'|O'", "'<c8'", "'|b1'"]),
        ),
        1 => text.replace("False", "True"),
        2 => text.replace("'shape': (", &format!("'shape': ({edge}, ")),
        3 => text.replace("'shape': (", "'shape': (0, "),
        4 => text.replace("'shape': (", "'shape': (-1, "),
        5 => text.replacen(')', ", 1)", 1),
        _ => text.replacen(char::is_numeric, &edge.to_string(), 1),
    };
    let mut header = edited.into_bytes();
    // The header's length is adjusted, except once in five times.
    let said = if r.once_in(5) { length } else { header.len() } as u16;
    let mut out = file[..8].to_vec();
    out.extend(said.to_le_bytes());
    out.append(&mut header);
    out.extend(&file[data..]);
    *file = out;
}

/// Rewrites an archive of arrays with an array that is changed, missing, or renamed.
pub fn npz(file: &mut Vec<u8>, r: &mut Choices) {
    if r.once_in(4) {
        // The directory is at the end of the archive.
        let at = file.len().saturating_sub(1 + r.below(256));
        return overwrite_number(file, at, r);
    }
    let Some(mut entries) = unzip(file).filter(|e| !e.is_empty()) else { return damage_bytes(file, r) };
    let i = r.below(entries.len());
    let j = r.below(entries.len());
    match r.below(6) {
        0 => {
            entries.remove(i);
        }
        1 => {
            let name = r.pick(&["", ".npy", "../x.npy", "a\u{1b}[31m.npy", "a/b.npy"]).to_string();
            entries[i].0 = name;
        }
        2 if i != j => {
            let (a, b) = (entries[i].1.clone(), entries[j].1.clone());
            (entries[i].1, entries[j].1) = (b, a);
        }
        _ => npy(&mut entries[i].1, r),
    }
    let deflate = r.once_in(2);
    if let Some(bytes) = zip(&entries, deflate) {
        *file = bytes;
    }
}

fn unzip(file: &[u8]) -> Option<Vec<(String, Vec<u8>)>> {
    let mut archive = zip::ZipArchive::new(Cursor::new(file)).ok()?;
    let mut entries = Vec::new();
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).ok()?;
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).ok()?;
        entries.push((entry.name().to_string(), bytes));
    }
    Some(entries)
}

fn zip(entries: &[(String, Vec<u8>)], deflate: bool) -> Option<Vec<u8>> {
    let method = if deflate { zip::CompressionMethod::Deflated } else { zip::CompressionMethod::Stored };
    let options = zip::write::SimpleFileOptions::default().compression_method(method);
    let mut out = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in entries {
        out.start_file(name, options).ok()?;
        out.write_all(bytes).ok()?;
    }
    Some(out.finish().ok()?.into_inner())
}
