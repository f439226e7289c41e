//! Job of one weight, and its report.

use super::pruning::Pruning;
use crate::quant::{Groups, Quant};
use anemoe_bundle::IndexBits;
use anemoe_mlpackage::mil::Value;

/// Compression of one weight.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightJob {
    /// Tables or integers.
    Quantize {
        /// Kind of compression.
        kind: Quant,
        /// Group sizes.
        groups: Groups,
        /// Axes of output and input channels.
        axes: [usize; 2],
        /// Form of the codes.
        form: CodeForm,
    },
    /// Zeros are left out.
    Sparse(Pruning),
    /// Tables that were made elsewhere.
    Tables(Box<GivenTables>),
}

/// Dimensions, outermost first, and elements.
pub type Shaped<T> = (Vec<usize>, Vec<T>);

/// Operands of a `constexpr_lut_to_dense`, and what becomes of its result.
#[derive(Clone, Debug, PartialEq)]
pub struct GivenTables {
    /// Width of an index.
    pub bits: IndexBits,
    /// Dimensions of the indices, and the packed indices; for vectors the axis that an entry is along is shorter.
    pub indices: Shaped<u8>,
    /// Entries `[groups of each axis.., entries, numbers of an entry]`.
    pub lut: Shaped<f32>,
    /// Axis that an entry is along, for vectors.
    pub vector_axis: Option<usize>,
    /// Scales, of an axis or of none.
    pub scale: Option<Shaped<f32>>,
    /// Squared error over squared weights.
    pub relative_mse: f64,
}

impl GivenTables {
    /// Returns the bytes of indices, entries and scales, whose numbers have the type of the weight `like`.
    pub(super) fn bytes(&self, like: &Value) -> u64 {
        let scales = self.scale.as_ref().map_or(0, |(_, scales)| scales.len());
        self.indices.1.len() as u64 + (self.lut.1.len() + scales) as u64 * element_bytes(like)
    }
}

/// Form of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeForm {
    /// Integers with sign, or indices of a table of numbers.
    Plain,
    /// Integers without sign.
    Unsigned,
    /// Indices of tables. Weights are divided by the largest magnitude of their output channel before where they are scaled.
    Tables {
        /// Output channels that an entry is for.
        vector: usize,
        /// True for scales per output channel.
        scaled: bool,
    },
}

/// Result of one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightReport {
    /// Function.
    pub function: String,
    /// Name of the constant.
    pub name: String,
    /// Kind; `fp16` or `fp32` for a weight whose tables would cost more than they save, `dense` for one to which the rule does not
    /// apply or whose values fp16 does not hold: all of these stay.
    pub kind: String,
    /// Bytes before.
    pub before: u64,
    /// Bytes of all that stands for it.
    pub after: u64,
    /// Squared error over squared weights.
    pub relative_mse: f64,
}

impl WeightReport {
    /// Makes the report of a weight of `n` elements that stays.
    pub(super) fn dense(value: &Value, n: usize) -> WeightReport {
        let before = n as u64 * element_bytes(value);
        let (function, name) = (String::new(), String::new());
        WeightReport { function, name, kind: "dense".into(), before, after: before, relative_mse: 0.0 }
    }

    /// Makes the report of a weight of `n` elements whose tables or scales would cost more than they save.
    pub(super) fn as_it_is(value: &Value, n: usize) -> WeightReport {
        WeightReport { kind: format!("fp{}", 8 * element_bytes(value)), ..WeightReport::dense(value, n) }
    }
}

/// Returns the bytes of an element of a float tensor.
pub(super) fn element_bytes(value: &Value) -> u64 {
    value.ty.tensor().map_or(2, |t| t.dtype.bits() as u64 / 8)
}
