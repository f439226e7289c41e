//! Checkpoints: named tensors that are read in pieces, and the configuration beside them.

use crate::Result;
use std::ops::Range;
use std::path::{Path, PathBuf};

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
