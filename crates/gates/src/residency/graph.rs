//! Graph that the rules look at: one function as a list of ops, weights and states.
//!
//! A real program fills every field (see [`super::analyze`]); a published measurement that names only some facts of its
//! graph (see [`super::outcomes`]) leaves the others open, so that the same rules judge both.

use anemoe_mlpackage::mil::{DataType, TensorType};
use std::collections::BTreeMap;

/// One function.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// Name of the function.
    pub function: String,
    /// Compute ops in order, those of nested blocks included. A summary lists only the ops that its text names.
    pub ops: Vec<Op>,
    /// Number of compute ops, where it is known.
    pub op_count: Option<u64>,
    /// `const` and `constexpr_*` by type, which have no device.
    pub no_device: BTreeMap<String, u64>,
    /// Stored weights that ops use, each once.
    pub weights: Vec<GraphWeight>,
    /// Bytes of stored weights, where they are known.
    pub weight_bytes: Option<u64>,
    /// Products with a stored matrix; `None` in a summary that does not count them.
    pub matrix_count: Option<u64>,
    /// Most positions that one weight matrix is applied to in a call: tokens of a language model, pixels of a picture.
    pub positions: Option<u64>,
    /// Attention blocks (or stated layers), where they are known.
    pub layers: Option<u64>,
    /// Shapes of the inputs.
    pub shapes: Shapes,
    /// Dimensions of each state; empty dimensions where they are not known.
    pub states: Vec<GraphState>,
    /// Elements of a state that are read or written at once, at most, where rows are put in place of others; none where a state
    /// is written as a whole.
    pub state_reach: Option<u64>,
    /// Bytes of each input with a fixed shape, by name.
    pub input_bytes: BTreeMap<String, u64>,
    /// Inputs, without states, and outputs, by name with their dimensions; 0 stands for one that is not fixed.
    pub borders: Vec<(String, Vec<u64>)>,
    /// True if it ends in, or holds, the projection to a vocabulary.
    pub vocabulary_head: bool,
    /// True if it joins other shards: norms, sums, a router, and no attention or pack of its own.
    pub glue: bool,
}

/// Shapes of inputs: one, or several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shapes {
    /// One shape each.
    #[default]
    Fixed,
    /// A dimension lies in a range; the most sizes of a ranged dimension, `None` without bound. An input of 2 rows and one
    /// for each of 1 to 4 tokens has 4 sizes, as the tokens have.
    Ranged(Option<u64>),
    /// A list of shapes.
    Enumerated,
}

/// A state of the function.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GraphState {
    /// Name.
    pub name: String,
    /// Dimensions, outermost first.
    pub dims: Vec<u64>,
}

/// One op that runs somewhere.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Op {
    /// Its name, unique in the function.
    pub name: String,
    /// Name of its first result, by which a plan report knows it.
    pub result: String,
    /// Type without opset prefix.
    pub op_type: String,
    /// Tensor operands that are computed or fed (no constants), as far as their types are known.
    pub inputs: Vec<TensorType>,
    /// Results.
    pub outputs: Vec<TensorType>,
    /// Indices into [`Graph::weights`].
    pub weights: Vec<usize>,
    /// For ops that sum products over an axis.
    pub contraction: Option<Contraction>,
    /// Parameters that decide shapes and come from data at run time (`begin` of a slice, for instance).
    pub runtime_bounds: Vec<String>,
    /// Elements along the axis that is searched or normalised, for `topk`, `reduce_argmax`, `softmax`.
    pub axis_extent: Option<u64>,
    /// For `slice_update`: what is updated was read from a state.
    pub updates_state: bool,
    /// Pool window, upsampling factor: the largest.
    pub window: Option<u64>,
    /// Stride of a convolution: the largest.
    pub stride: Option<u64>,
    /// For `concat` on the last axis: operands that are pieces of a tensor from behind its first element on that axis.
    pub later_pieces: u64,
    /// For `write_state`: what is written was joined by `concat`.
    pub writes_joined: bool,
}

/// A sum of products.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Contraction {
    /// Terms per sum: input channels of a group, inner dimension of a product.
    pub depth: Option<u64>,
    /// Output channels, or columns of a product.
    pub outputs: Option<u64>,
    /// Positions that the matrix is applied to.
    pub positions: Option<u64>,
    /// Spatial extents of a convolution's kernel.
    pub kernel: Vec<u64>,
    /// Groups of a convolution.
    pub groups: u64,
    /// The operands are both computed, as in attention.
    pub between_activations: bool,
}

/// A stored weight.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphWeight {
    /// Name of the constant.
    pub name: String,
    /// Dimensions of the dense weight.
    pub dims: Vec<u64>,
    /// Storage form.
    pub form: Form,
    /// Bytes as stored, tables and scales included.
    pub bytes: u64,
}

/// Storage form of a weight.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Uncompressed.
    Dense(DataType),
    /// Indices into tables.
    Lut {
        /// Bits of an index.
        bits: u64,
        /// Axes along which the weight is cut into groups with a table each.
        grouped_axes: Vec<usize>,
        /// Element type of the tables.
        entries: DataType,
        /// Weights per index.
        vector: u64,
        /// Tables or result pass through another `constexpr_*` that scales them.
        scaled: bool,
    },
    /// Integers with scales.
    Linear {
        /// Bits of an integer.
        bits: u64,
        /// Elements that share a scale.
        grain: Grain,
    },
    /// Zeros left out.
    Sparse,
    /// Compressed in a way that the text does not say.
    Unstated,
}

/// Elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grain {
    /// The whole tensor.
    Tensor,
    /// A channel.
    Channel,
    /// A block within a channel.
    Block,
}

impl Graph {
    /// Weighted sums of products: convolutions, linears, products with a stored matrix.
    pub fn matrices(&self) -> impl Iterator<Item = (&Op, &Contraction)> {
        self.ops
            .iter()
            .filter_map(|op| op.contraction.as_ref().map(|c| (op, c)))
            .filter(|(_, c)| !c.between_activations)
    }

    /// Number of compute ops; a summary that does not say it has at least those it names.
    pub fn at_least_ops(&self) -> u64 {
        self.op_count.unwrap_or(self.ops.len() as u64)
    }

    /// True if every weight is stored in a form that was seen on the ANE in layer graphs.
    pub fn forms_seen(&self) -> bool {
        self.weights.iter().all(|w| match &w.form {
            Form::Dense(dtype) => *dtype == DataType::Float16 || w.bytes < SMALL_CONSTANT,
            Form::Lut { entries, vector, scaled, grouped_axes, .. } => {
                *entries == DataType::Float16 && *vector == 1 && !scaled && grouped_axes.len() <= 1
            }
            Form::Linear { bits: 8, grain: Grain::Tensor | Grain::Channel } => true,
            Form::Linear { .. } | Form::Sparse | Form::Unstated => false,
        })
    }

    /// Bytes of weights that are stored with tables.
    pub fn lut_bytes(&self) -> u64 {
        self.weights
            .iter()
            .filter(|w| matches!(w.form, Form::Lut { .. }))
            .fold(0, |n, w| n.saturating_add(w.bytes))
    }

    /// True if every matrix of some size is uncompressed.
    pub fn is_fp16(&self) -> bool {
        self.weights.iter().all(|w| matches!(w.form, Form::Dense(_)))
    }
}

/// Scalars and vectors say nothing about how the matrices of a graph are stored.
pub const SMALL_CONSTANT: u64 = 1 << 16;

impl Form {
    /// Name for messages: `lut4 g`, `int8 per tensor`, `fp16`.
    pub fn describe(&self) -> String {
        match self {
            Form::Dense(dtype) => dtype.name().into(),
            Form::Lut { bits, grouped_axes, entries, .. } => {
                let grouped = if grouped_axes.is_empty() { "per tensor" } else { "in groups" };
                format!("lut{bits} {grouped} with {entries} entries")
            }
            Form::Linear { bits, grain } => {
                let grain = match grain {
                    Grain::Tensor => "tensor",
                    Grain::Channel => "channel",
                    Grain::Block => "block",
                };
                format!("int{bits} per {grain}")
            }
            Form::Sparse => "sparse".into(),
            Form::Unstated => "a compression that is not stated".into(),
        }
    }
}
