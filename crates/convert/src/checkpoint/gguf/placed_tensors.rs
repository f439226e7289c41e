//! Tensors under their Hugging Face names, and how to read them from the files.

use super::config::Arch;
use super::dequantize::dequantize;
use super::header::GgufTensor;
use super::split_files::GgufFile;
use super::tensor_names::{Role, hf_name};
use crate::checkpoint::{Dtype, TensorInfo};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Tensor that configures the rope, and is no weight.
pub const ROPE_FREQS: &str = "rope_freqs.weight";

/// Bytes of a tensor in one of the files.
#[derive(Clone, Debug)]
pub struct TensorBytes {
    file: usize,
    dtype: Dtype,
    bytes: Range<usize>,
    /// Factors, one for each `elements` elements; none of a tensor without.
    scales: Vec<f32>,
    elements: u64,
}

impl TensorBytes {
    fn dequantize(&self, files: &[GgufFile], first: u64, out: &mut [f32]) {
        dequantize(self.dtype, &files[self.file].map[self.bytes.clone()], first as usize, out);
        if !self.scales.is_empty() {
            in_pieces(first, self.elements, out, |piece, _, out| {
                out.iter_mut().for_each(|w| *w *= self.scales[piece as usize]);
            });
        }
    }
}

/// Way to get a tensor's values from the files.
#[derive(Clone, Debug)]
pub enum TensorPlace {
    Whole(TensorBytes),
    /// Weights that are one more than the checkpoint's.
    LessOne(TensorBytes),
    /// Rows of `columns` elements. Of the `head` rows of each head, row r of the first half is row 2r in the file, and
    /// row r of the second half is row 2r + 1.
    PairedRows {
        rows: TensorBytes,
        head: u64,
        columns: u64,
    },
    /// For each expert, `elements` elements of the gate, then as many of the up projection.
    Joined {
        gate: TensorBytes,
        up: TensorBytes,
        elements: u64,
    },
}

impl TensorPlace {
    /// Reads the elements from `start` on.
    pub fn read(&self, files: &[GgufFile], start: u64, out: &mut [f32]) {
        match self {
            TensorPlace::Whole(bytes) => bytes.dequantize(files, start, out),
            TensorPlace::LessOne(bytes) => {
                bytes.dequantize(files, start, out);
                out.iter_mut().for_each(|w| *w -= 1.0);
            }
            TensorPlace::PairedRows { rows, head, columns } => {
                in_pieces(start, *columns, out, |row, within, out| {
                    let (first, r) = (row / head * head, row % head);
                    let (half, pair) = (r / (head / 2), r % (head / 2));
                    rows.dequantize(files, (first + 2 * pair + half) * columns + within, out);
                });
            }
            TensorPlace::Joined { gate, up, elements } => {
                in_pieces(start, *elements, out, |piece, within, out| {
                    let half = if piece % 2 == 0 { gate } else { up };
                    half.dequantize(files, piece / 2 * elements + within, out);
                });
            }
        }
    }
}

/// Cuts the elements from `start` on at multiples of `size`, and calls `read` with a piece's number, the place in the
/// piece, and where its elements go.
fn in_pieces(start: u64, size: u64, mut out: &mut [f32], mut read: impl FnMut(u64, u64, &mut [f32])) {
    let mut at = start;
    while !out.is_empty() {
        let (piece, within) = (at / size, at % size);
        let n = (out.len() as u64).min(size - within) as usize;
        let (now, later) = out.split_at_mut(n);
        read(piece, within, now);
        at += n as u64;
        out = later;
    }
}

/// Lists every tensor under its Hugging Face name, sorted by that name. Heads have `head_dim` rows of q and k.
pub fn placed_tensors(
    arch: &Arch,
    head_dim: u64,
    files: &[GgufFile],
) -> Result<Vec<(TensorInfo, TensorPlace)>> {
    let mut found: BTreeMap<String, (TensorInfo, TensorPlace)> = BTreeMap::new();
    let mut halves: BTreeMap<String, [Option<FileTensor<'_>>; 2]> = BTreeMap::new();
    let all = || {
        files.iter().enumerate().flat_map(|(index, file)| {
            file.head.tensors.iter().map(move |tensor| FileTensor { tensor, path: &file.path, file: index })
        })
    };
    let names: BTreeMap<&str, FileTensor<'_>> = all().map(|t| (t.tensor.name.as_str(), t)).collect();
    let scales = |t: FileTensor<'_>| -> Result<Vec<f32>> {
        let name = t.tensor.name.strip_suffix(".weight").map(|name| format!("{name}.scale"));
        let of_weight = name.filter(|name| hf_name(arch, name).is_none());
        let factors = of_weight.and_then(|name| names.get(name.as_str()));
        factors.map_or(Ok(Vec::new()), |factors| factors.as_scales(&t.tensor.shape, files))
    };
    for t in all().filter(|t| t.tensor.name != ROPE_FREQS) {
        let Some((name, role)) = hf_name(arch, &t.tensor.name) else {
            // The converter writes both beside NVFP4's weights. Inputs are not rounded here.
            let of = [".scale", ".input_scale"].iter().find_map(|end| t.tensor.name.strip_suffix(end));
            if of.is_some_and(|of| names.contains_key(&*format!("{of}.weight"))) {
                continue;
            }
            return Err(t.invalid("this model has none of that name".into()));
        };
        let place = match role {
            Role::Gate => {
                halves.entry(name).or_default()[0] = Some(t);
                continue;
            }
            Role::Up => {
                halves.entry(name).or_default()[1] = Some(t);
                continue;
            }
            Role::Whole => TensorPlace::Whole(t.bytes(scales(t)?)),
            Role::LessOne => TensorPlace::LessOne(t.bytes(scales(t)?)),
            Role::PairedRows => t.paired_rows(head_dim, scales(t)?)?,
        };
        found.insert(name.clone(), (t.info(name, t.tensor.shape.clone(), 0), place));
    }
    for (name, pair) in halves {
        let (gate, up) = match pair {
            [Some(gate), Some(up)] => (gate, up),
            [Some(one), None] | [None, Some(one)] => {
                return Err(one.invalid(format!("the other half of `{name}` is missing")));
            }
            [None, None] => continue,
        };
        if found.contains_key(&name) {
            return Err(gate.invalid(format!("`{name}` is there already as one tensor")));
        }
        let mut shape = gate.tensor.shape.clone();
        let rank = if name.ends_with("bias") { 2 } else { 3 };
        if shape.len() != rank {
            return Err(gate.invalid(format!("shape {shape:?}, expected {rank} dimensions")));
        }
        if up.tensor.shape != shape {
            let (a, b) = (&up.tensor.shape, &gate.tensor.name);
            return Err(up.invalid(format!("shape {a:?}, expected {shape:?} as `{b}`")));
        }
        let elements = shape[1..].iter().product();
        // Both tensors are in the files and do not overlap, so twice the elements of one are below 2^64.
        shape[1] *= 2;
        let place =
            TensorPlace::Joined { gate: gate.bytes(scales(gate)?), up: up.bytes(scales(up)?), elements };
        found.insert(name.clone(), (gate.info(name, shape, up.tensor.bytes.len()), place));
    }
    Ok(found.into_values().collect())
}

/// Tensor as one of the files has it.
#[derive(Clone, Copy)]
struct FileTensor<'a> {
    tensor: &'a GgufTensor,
    path: &'a Path,
    file: usize,
}

impl FileTensor<'_> {
    fn bytes(&self, scales: Vec<f32>) -> TensorBytes {
        let GgufTensor { dtype, bytes, shape, .. } = self.tensor;
        let elements = shape.iter().product::<u64>() / scales.len().max(1) as u64;
        TensorBytes { file: self.file, dtype: *dtype, bytes: bytes.clone(), scales, elements }
    }

    /// Reads factors of a weight of a shape: one of all, or one of each expert.
    fn as_scales(&self, of: &[u64], files: &[GgufFile]) -> Result<Vec<f32>> {
        let count = self.tensor.shape.iter().product::<u64>();
        let experts = of.first().copied().filter(|_| of.len() == 3);
        if self.tensor.dtype != Dtype::F32 || (count != 1 && Some(count) != experts) {
            let (dtype, shape) = (self.tensor.dtype.name(), &self.tensor.shape);
            return Err(self.invalid(format!("{dtype} {shape:?}, expected one f32, or one of each expert")));
        }
        let mut out = vec![0.0; count as usize];
        self.bytes(Vec::new()).dequantize(files, 0, &mut out);
        Ok(out)
    }

    fn info(&self, name: String, shape: Vec<u64>, more_bytes: usize) -> TensorInfo {
        TensorInfo {
            name,
            dtype: self.tensor.dtype,
            shape,
            bytes: (self.tensor.bytes.len() + more_bytes) as u64,
            file: self.path.to_path_buf(),
        }
    }

    fn invalid(&self, what: String) -> Error {
        Error::invalid(self.path, format!("tensor `{}`: {what}", self.tensor.name.escape_debug()))
    }

    fn paired_rows(&self, head: u64, scales: Vec<f32>) -> Result<TensorPlace> {
        let [rows, columns] = match self.tensor.shape[..] {
            [rows] => [rows, 1],
            [rows, columns] => [rows, columns],
            _ => {
                return Err(
                    self.invalid(format!("shape {:?}, expected one or two dimensions", self.tensor.shape))
                );
            }
        };
        if head == 0 || !head.is_multiple_of(2) || !rows.is_multiple_of(head) {
            return Err(
                self.invalid(format!("{rows} rows, expected heads of an even number of rows, not {head}"))
            );
        }
        Ok(TensorPlace::PairedRows { rows: self.bytes(scales), head, columns })
    }
}
