//! Hugging Face folders: one `model.safetensors`, or many behind an index.

use super::{Dtype, TensorInfo, TensorSource};
use crate::{Error, Result};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::SafeTensors;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Memory-mapped tensors of a folder.
pub struct Folder {
    path: PathBuf,
    files: Vec<Mmap>,
    tensors: Vec<TensorInfo>,
    /// Of each tensor: its file, and where its data starts there.
    places: Vec<(usize, usize)>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Folder {
    /// Maps every file and checks every header.
    pub fn open(folder: &Path) -> Result<Folder> {
        let index_path = folder.join(INDEX);
        let (names, index) = if index_path.exists() {
            let len = std::fs::metadata(&index_path).map_err(|e| Error::io(&index_path, e))?.len();
            if len > MAX_INDEX_BYTES {
                return Err(Error::invalid(&index_path, format!("index: {len} bytes, more than {MAX_INDEX_BYTES}")));
            }
            let text = std::fs::read(&index_path).map_err(|e| Error::io(&index_path, e))?;
            let index: Index =
                serde_json::from_slice(&text).map_err(|e| Error::invalid(&index_path, format!("index: {e}")))?;
            let names: BTreeSet<String> = index.weight_map.values().cloned().collect();
            (names, Some(index))
        } else {
            (BTreeSet::from([SINGLE.to_string()]), None)
        };
        let mut files = Vec::new();
        let mut found: BTreeMap<String, (TensorInfo, usize, usize)> = BTreeMap::new();
        for name in &names {
            if !Path::new(name).components().all(|c| matches!(c, Component::Normal(_))) {
                return Err(Error::invalid(&index_path, format!("index: file name `{name}` leaves the folder")));
            }
            let path = folder.join(name);
            let (map, tensors) = map(&path)?;
            for (info, start) in tensors {
                if let Some(index) = &index
                    && index.weight_map.get(&info.name) != Some(name)
                {
                    return Err(Error::invalid(&path, format!("tensor `{}`: the index does not place it here", info.name)));
                }
                let key = info.name.clone();
                if let Some((other, ..)) = found.insert(key, (info, files.len(), start)) {
                    return Err(Error::invalid(&path, format!("tensor `{}`: it is in another file too", other.name)));
                }
            }
            files.push(map);
        }
        if let Some(index) = &index
            && let Some((tensor, file)) = index.weight_map.iter().find(|(t, _)| !found.contains_key(*t))
        {
            return Err(Error::invalid(folder.join(file), format!("file: tensor `{tensor}` of the index is not in it")));
        }
        let (mut tensors, mut places) = (Vec::new(), Vec::new());
        for (info, file, start) in found.into_values() {
            tensors.push(info);
            places.push((file, start));
        }
        Ok(Folder { path: folder.to_path_buf(), files, tensors, places })
    }
}

type Mapped = (Mmap, Vec<(TensorInfo, usize)>);

fn map(path: &Path) -> Result<Mapped> {
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    // SAFETY: the map is only read. A file that another process shortens meanwhile ends this one with a signal, as for
    // every program that maps its weights.
    #[allow(unsafe_code)]
    let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
    // Checks the header's length, its JSON, and that the tensors cover the rest without gaps and overlaps.
    let (header, metadata) = SafeTensors::read_metadata(&map)
        .map_err(|e| Error::invalid(path, format!("safetensors header or tensor table: {e}")))?;
    // 8 bytes of length come before the header.
    let data = header + 8;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        use safetensors::Dtype as D;
        let dtype = match info.dtype {
            D::F32 => Some(Dtype::F32),
            D::F16 => Some(Dtype::F16),
            D::BF16 => Some(Dtype::BF16),
            _ => None,
        };
        let Some(dtype) = dtype else {
            return Err(Error::unsupported(path, format!("tensor `{name}`: dtype {:?}, expected BF16, F16 or F32", info.dtype)));
        };
        let shape: Vec<u64> = info.shape.iter().map(|&n| n as u64).collect();
        let (start, end) = info.data_offsets;
        let bytes = shape.iter().try_fold(dtype.bytes() as u64, |n, &d| n.checked_mul(d));
        let length = end.checked_sub(start).map(|n| n as u64);
        if bytes.is_none() || bytes != length || data.checked_add(end).is_none_or(|end| end > map.len()) {
            return Err(Error::invalid(path, format!("tensor `{name}`: bytes {start}..{end} for shape {shape:?} of {dtype:?}")));
        }
        tensors.push((TensorInfo { name, dtype, shape, file: path.to_path_buf() }, data + start));
    }
    Ok((map, tensors))
}

impl TensorSource for Folder {
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
        if range.start > range.end || range.end > info.elements() || range.end - range.start != out.len() as u64 {
            return Err(Error::invalid(&info.file, format!("use: elements {range:?} of tensor `{name}`")));
        }
        let (file, start) = self.places[i];
        let size = info.dtype.bytes();
        let from = start + range.start as usize * size;
        let bytes = &self.files[file][from..from + out.len() * size];
        match info.dtype {
            Dtype::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Dtype::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            Dtype::BF16 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = bf16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
        }
        match out.iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(i) => {
                let at = range.start + i as u64;
                Err(Error::invalid(&info.file, format!("tensor `{name}`: element {at} is {}", out[i])))
            }
        }
    }
}
