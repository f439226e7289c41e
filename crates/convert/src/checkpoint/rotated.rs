//! Tensors of another source times rotations, with vectors multiplied into their columns.
//!
//! ```text
//! W [rows, cols]   ->   R'out (W diag(s)) Rin      Rin: rows in parts of its size, Rout: groups of as many rows
//! ```

use super::rotation::Rotation;
use super::{Checkpoint, Dtype, SideFile, TensorInfo, TensorSource, check_finite, place_of};
use crate::{Error, Result};
use anemoe_io::locked;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

/// Most matrices of the largest size that are kept, rotated, for readers of further rows: one for each job of a build, and
/// one more.
pub const MOST_KEPT: usize = 9;

/// Rotations of a tensor, and what is multiplied into it before.
#[derive(Default)]
pub struct TensorRotation {
    /// Tensor that the elements are from, where it has another name.
    pub from: Option<String>,
    /// Vector that the columns are multiplied by.
    pub scale: Option<String>,
    /// Rotation of the columns, `W R`.
    pub inputs: Option<Arc<Rotation>>,
    /// Rotation of the rows, `R' W`. A vector is a matrix of one column.
    pub outputs: Option<Arc<Rotation>>,
    /// True if each row is a vector of its own, such as the bias of an expert.
    pub is_vectors: bool,
    /// True if all elements are 1: the vector was multiplied into the matrices behind it.
    pub is_one: bool,
}

/// Returns the checkpoint with changed tensors, by name.
///
/// # Errors
/// A tensor is missing.
pub fn rotated(checkpoint: Checkpoint, changes: BTreeMap<String, TensorRotation>) -> Result<Checkpoint> {
    let inner = checkpoint.source;
    let mut tensors: BTreeMap<String, TensorInfo> =
        inner.tensors().iter().map(|info| (info.name.clone(), info.clone())).collect();
    let mut all = BTreeMap::new();
    for (name, change) in changes {
        let from = change.from.as_ref().unwrap_or(&name);
        let missing = || Error::invalid(inner.path(), format!("checkpoint: tensor `{from}` is missing"));
        let info = inner.info(from).ok_or_else(missing)?;
        let matrix = RotatedTensor::new(info, change);
        let info =
            TensorInfo { name: name.clone(), dtype: Dtype::F32, bytes: 4 * info.elements(), ..info.clone() };
        tensors.insert(name.clone(), info);
        all.insert(name, matrix);
    }
    let tensors = tensors.into_values().collect();
    let largest = all.values().filter(|t: &&RotatedTensor| t.group > 1).map(RotatedTensor::elements).max();
    let most_kept = (rayon::current_num_threads() + 1).min(MOST_KEPT) * largest.unwrap_or(0);
    let source = Box::new(Rotated { inner, tensors, changes: all, most_kept, kept: Mutex::default() });
    Ok(Checkpoint { source, ..checkpoint })
}

/// A tensor as rows of columns, and what becomes of them.
struct RotatedTensor {
    change: TensorRotation,
    /// Name of the source's tensor.
    from: String,
    cols: usize,
    /// Rows that are rotated together; 1 without a rotation of the rows.
    group: usize,
    /// Elements of [`TensorRotation::scale`], read when they are needed: a plan needs no weight.
    scale: OnceLock<Vec<f32>>,
}

impl RotatedTensor {
    fn new(info: &TensorInfo, change: TensorRotation) -> RotatedTensor {
        let cols = match info.shape.as_slice() {
            [] | [_] => 1,
            _ if change.is_vectors => 1,
            [.., cols] => *cols as usize,
        };
        let group = change.outputs.as_ref().map_or(1, |r| r.size());
        RotatedTensor { from: info.name.clone(), change, cols, group, scale: OnceLock::new() }
    }

    /// Returns the elements of a group.
    fn elements(&self) -> usize {
        self.group * self.cols
    }

    /// Reads a group of rows, whole.
    fn read_group(&self, inner: &dyn TensorSource, group: u64, values: &mut [f32]) -> Result<()> {
        let elements = self.elements() as u64;
        inner.read(&self.from, group * elements..(group + 1) * elements, values)?;
        if let Some(vector) = &self.change.scale {
            let scale = match self.scale.get() {
                Some(scale) => scale,
                None => {
                    let mut read = vec![0f32; self.cols];
                    inner.read(vector, 0..self.cols as u64, &mut read)?;
                    self.scale.get_or_init(|| read)
                }
            };
            for row in values.chunks_exact_mut(self.cols) {
                row.iter_mut().zip(scale).for_each(|(v, s)| *v *= s);
            }
        }
        if let Some(r) = &self.change.inputs {
            r.rotate_rows(values);
        }
        if let Some(r) = &self.change.outputs {
            r.rotate_columns(values);
        }
        inner.info(&self.from).map_or(Ok(()), |info| check_finite(info, group * elements, values))
    }
}

/// Rows of a tensor that are rotated together; none until they are read.
type RotatedRows = Arc<Mutex<Option<Arc<Vec<f32>>>>>;

/// A group of rows that is kept.
struct RotatedGroup {
    tensor: String,
    group: u64,
    elements: usize,
    rows: RotatedRows,
}

/// Rotated tensors of another source.
struct Rotated {
    inner: Box<dyn TensorSource>,
    tensors: Vec<TensorInfo>,
    changes: BTreeMap<String, RotatedTensor>,
    /// Most elements of rows that are kept.
    most_kept: usize,
    /// Groups of rows that were read last. The last one used is at the end.
    kept: Mutex<Vec<RotatedGroup>>,
}

impl Rotated {
    /// Returns a group of rows. Those that are rotated together stay for readers of further ones.
    fn group(&self, name: &str, tensor: &RotatedTensor, group: u64) -> Result<Arc<Vec<f32>>> {
        let rows = match tensor.group {
            1 => RotatedRows::default(),
            _ => self.kept_rows(name, group, tensor.elements()),
        };
        let mut values = locked(&rows);
        if let Some(there) = &*values {
            return Ok(Arc::clone(there));
        }
        let mut read = vec![0f32; tensor.elements()];
        tensor.read_group(self.inner.as_ref(), group, &mut read)?;
        Ok(Arc::clone(values.insert(Arc::new(read))))
    }

    /// Returns the place of rows that are kept.
    fn kept_rows(&self, tensor: &str, group: u64, elements: usize) -> RotatedRows {
        let mut kept = locked(&self.kept);
        let found = match kept.iter().position(|k| k.tensor == tensor && k.group == group) {
            Some(i) => kept.remove(i),
            None => {
                RotatedGroup { tensor: tensor.to_string(), group, elements, rows: RotatedRows::default() }
            }
        };
        let rows = Arc::clone(&found.rows);
        kept.push(found);
        while kept.iter().map(|k| k.elements).sum::<usize>() > self.most_kept {
            kept.remove(0);
        }
        rows
    }
}

impl TensorSource for Rotated {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn files(&self) -> BTreeSet<PathBuf> {
        self.inner.files()
    }

    fn read(&self, name: &str, range: Range<u64>, mut out: &mut [f32]) -> Result<()> {
        let Some(tensor) = self.changes.get(name) else { return self.inner.read(name, range, out) };
        if let Some(i) = place_of(&self.tensors, name) {
            self.tensors[i].check_range(&range, out.len())?;
        }
        if tensor.change.is_one {
            out.fill(1.0);
            return Ok(());
        }
        let elements = tensor.elements();
        let mut at = range.start;
        while !out.is_empty() {
            let (group, first) = (at / elements as u64, (at % elements as u64) as usize);
            let (now, later) = out.split_at_mut(out.len().min(elements - first));
            if tensor.group == 1 && now.len() == elements {
                tensor.read_group(self.inner.as_ref(), group, now)?;
            } else {
                now.copy_from_slice(&self.group(name, tensor, group)?[first..first + now.len()]);
            }
            at += now.len() as u64;
            out = later;
        }
        Ok(())
    }

    fn read_bytes(&self, name: &str, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        self.inner.read_bytes(name, range, out)
    }

    fn read_integers(&self, name: &str) -> Result<Vec<i64>> {
        self.inner.read_integers(name)
    }

    fn origin(&self, name: &str, element: u64) -> (PathBuf, String) {
        self.inner.origin(self.changes.get(name).map_or(name, |tensor| &tensor.from), element)
    }

    fn unrotated(&self) -> Option<&dyn TensorSource> {
        Some(self.inner.as_ref())
    }

    fn side_file(&self, name: &str) -> Result<Option<SideFile>> {
        self.inner.side_file(name)
    }
}
