//! Graph: one function as a list of ops, weights and states.
//!
//! A real program fills every field (see [`super::analyze`]). A published measurement names only some facts of its
//! graph (see [`crate::residency::outcomes`]) and leaves the other fields open, so that the same rules judge both.

use anemoe_convert::quant::Granularity;
use anemoe_mlpackage::mil::{DataType, TensorType};
use std::collections::BTreeMap;

/// Fewest ops of a graph that counts as a layer, the context in which the ANE also takes small depths.
pub const LAYER_OPS: u64 = 12;

/// Facts of a package: its functions and weights.
#[derive(Clone, Debug, Default)]
pub struct PackageFacts {
    /// Bytes of weights as stored, shared ones once; where known.
    pub weight_bytes: Option<u64>,
    /// Functions of the package.
    pub graphs: Vec<Graph>,
}

/// Function as a graph.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// Name of the function.
    pub function: String,
    /// Compute ops in order, including ops of nested blocks. A summary lists only the ops that its text names.
    pub ops: Vec<Op>,
    /// Number of compute ops, where it is known.
    pub op_count: Option<u64>,
    /// Number of `const` and `constexpr_*` ops by type; they have no device.
    pub no_device: BTreeMap<String, u64>,
    /// Stored weights that ops use, each once.
    pub weights: Vec<GraphWeight>,
    /// Bytes of stored weights, where they are known.
    pub weight_bytes: Option<u64>,
    /// Most positions that a weight matrix is applied to in a call: tokens of a language model, pixels of a picture.
    pub positions: Option<u64>,
    /// Number of attention blocks (or stated layers), where it is known.
    pub layers: Option<u64>,
    /// Shapes of the inputs.
    pub shapes: Shapes,
    /// States of the function.
    pub states: Vec<GraphState>,
    /// Most elements of a state that are read or written at once, where rows replace other rows; `None` where a state
    /// is written as a whole.
    pub state_reach: Option<u64>,
    /// Bytes of each input with a fixed shape, by name.
    pub input_bytes: BTreeMap<String, u64>,
    /// Inputs (without states) and outputs, by name with their dimensions; 0 stands for a dimension that is not fixed.
    pub borders: Vec<(String, Vec<u64>)>,
    /// Name of an operand, a constant of the program itself, with an element that fp16 cannot hold: an infinity, or beyond
    /// +-65504. Bounds of `clip` do not count.
    pub beyond_fp16: Option<String>,
    /// True if the graph ends in the projection to a vocabulary, or holds it.
    pub vocabulary_head: bool,
    /// Kind of the graph.
    pub kind: GraphKind,
}

/// Kind of a graph, by which measured graphs are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphKind {
    /// Not stated.
    #[default]
    Unstated,
    /// One `linear` with a stored matrix, and few other ops.
    Linear,
    /// One convolution, and few other ops.
    Conv,
    /// One product of two computed matrices.
    Matmul,
    /// One fused attention.
    Attention,
    /// Several products, and few other ops.
    Few,
    /// Products with the ops of a layer around them: attention, experts, an encoder, a whole model.
    Layers,
    /// The projection to a vocabulary.
    Head,
    /// Norms, sums and a router that join other shards, without attention or experts of its own.
    Glue,
    /// Another kind.
    Other,
}

impl GraphKind {
    /// All kinds with their names in tables.
    pub const NAMED: [(&str, GraphKind); 10] = [
        ("", GraphKind::Unstated),
        ("linear", GraphKind::Linear),
        ("conv", GraphKind::Conv),
        ("matmul", GraphKind::Matmul),
        ("attention", GraphKind::Attention),
        ("few", GraphKind::Few),
        ("layers", GraphKind::Layers),
        ("head", GraphKind::Head),
        ("glue", GraphKind::Glue),
        ("other", GraphKind::Other),
    ];

    /// Tells whether the graph is one product and little else.
    pub const fn is_lone(self) -> bool {
        matches!(self, GraphKind::Linear | GraphKind::Conv | GraphKind::Matmul | GraphKind::Attention)
    }
}

/// Shapes of the inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shapes {
    /// One shape for each input.
    #[default]
    Fixed,
    /// A range of a dimension, with the most sizes of a ranged dimension; `None` without an upper bound. An input of
    /// 2 fixed rows and one row for each of 1 to 4 tokens has 4 sizes, like the tokens.
    Ranged(Option<u64>),
    /// A list of shapes of an input.
    Enumerated,
}

/// State of a function.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GraphState {
    /// Name of the state.
    pub name: String,
    /// Dimensions, outermost first; empty where they are not known.
    pub dims: Vec<u64>,
}

/// Op that runs on a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Op {
    /// Name, unique in the function.
    pub name: String,
    /// Name of the op's first result, which identifies the op in a plan report.
    pub result: String,
    /// Op type without the opset's prefix.
    pub op_type: String,
    /// Types of tensor operands that are computed or fed (no constants), as far as they are known.
    pub inputs: Vec<TensorType>,
    /// Types of the results, as far as they are known.
    pub outputs: Vec<TensorType>,
    /// Indices into [`Graph::weights`] of the op's weights.
    pub weights: Vec<usize>,
    /// Sum of products, for ops that have one.
    pub contraction: Option<Contraction>,
    /// Names of parameters that decide shapes and come from data at run time, for instance `begin` of a slice.
    pub runtime_bounds: Vec<String>,
    /// Elements along the axis that is searched or normalized, for `topk`, `reduce_argmax`, `softmax`.
    pub axis_extent: Option<u64>,
    /// True for a `slice_update` of a value that was read from a state.
    pub updates_state: bool,
    /// Largest stride of a convolution.
    pub stride: Option<u64>,
    /// True for a `write_state` of a value that `concat` made.
    pub writes_joined: bool,
}

/// Sum of products over an axis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Contraction {
    /// Terms per sum: input channels of a group, or inner dimension of a product.
    pub depth: Option<u64>,
    /// Output channels, or columns of a product.
    pub outputs: Option<u64>,
    /// Positions that the matrix is applied to.
    pub positions: Option<u64>,
    /// Spatial extents of a convolution's kernel.
    pub kernel: Vec<u64>,
    /// Number of groups of a convolution.
    pub groups: u64,
    /// True if both operands are computed, as in attention.
    pub between_activations: bool,
}

/// Stored weight.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphWeight {
    /// Name of the constant.
    pub name: String,
    /// Dimensions of the dense weight.
    pub dims: Vec<u64>,
    /// Storage form.
    pub form: StoredForm,
    /// Bytes as stored, tables and scales included.
    pub bytes: u64,
}

/// Storage form of a weight.
#[derive(Clone, Debug, PartialEq)]
pub enum StoredForm {
    /// Dense elements without compression.
    Dense(DataType),
    /// Indices into tables.
    Lut {
        /// Bits of an index.
        bits: u64,
        /// Axes along which the weight is cut into groups, each with a table.
        grouped_axes: Vec<usize>,
        /// Element type of the tables.
        entries: DataType,
        /// Weights per index.
        vector: u64,
        /// True if another `constexpr_*` scales the tables or the result.
        scaled: bool,
    },
    /// Integers with scales.
    Linear {
        /// Bits of an integer.
        bits: u64,
        /// Elements that share a scale.
        grain: Granularity,
    },
    /// Nonzero elements only.
    Sparse,
    /// A compression that the text does not describe.
    Unstated,
}

impl Graph {
    /// Returns the weighted sums of products: convolutions, linears, products with a stored matrix.
    pub fn matrices(&self) -> impl Iterator<Item = (&Op, &Contraction)> {
        self.ops
            .iter()
            .filter_map(|op| op.contraction.as_ref().map(|c| (op, c)))
            .filter(|(_, c)| !c.between_activations)
    }

    /// Returns the number of compute ops; in a summary without the number, the ops that it names.
    pub fn at_least_ops(&self) -> u64 {
        self.op_count.unwrap_or(self.ops.len() as u64)
    }

    /// Tells whether the source counts ops that it does not name.
    pub fn has_unnamed_ops(&self) -> bool {
        self.op_count.is_some_and(|n| n > self.ops.len() as u64)
    }

    /// Returns the class of storage in which most bytes of weights are; `None` where it is not known.
    pub fn form(&self) -> Option<FormClass> {
        let mut bytes: Vec<(FormClass, u64)> = Vec::new();
        for w in &self.weights {
            let class = w.form.class()?;
            match bytes.iter_mut().find(|(known, _)| *known == class) {
                Some((_, sum)) => *sum = sum.saturating_add(w.bytes),
                None => bytes.push((class, w.bytes)),
            }
        }
        if bytes.is_empty() && matches!(self.kind, GraphKind::Matmul | GraphKind::Attention) {
            return Some(FormClass::Fp16);
        }
        bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(class, _)| class)
    }

    /// Returns the size by which graphs of one kind are compared: depth of a product with a stored matrix,
    /// multiplications of a matmul, elements of an attention, bytes of weights of others.
    pub fn size(&self) -> Option<u64> {
        let product = || self.ops.iter().find_map(|op| op.contraction.as_ref());
        match self.kind {
            GraphKind::Linear | GraphKind::Conv => self.matrices().find_map(|(_, c)| c.depth),
            GraphKind::Matmul => {
                product().and_then(|c| Some(c.depth?.saturating_mul(c.outputs?).saturating_mul(c.positions?)))
            }
            GraphKind::Attention => {
                self.ops.iter().flat_map(|op| &op.inputs).filter_map(TensorType::elements).max()
            }
            _ => self.weight_bytes.filter(|_| !self.weights.is_empty()),
        }
    }

    /// Tells whether every weight is stored without compression.
    pub fn is_fp16(&self) -> bool {
        self.weights.iter().all(|w| matches!(w.form, StoredForm::Dense(_)))
    }
}

/// Bytes below which a weight is a scalar or vector, which says nothing about the storage form of a graph's matrices.
pub const SMALL_CONSTANT: u64 = 1 << 16;

/// Class of storage forms that measured graphs are compared in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormClass {
    /// fp16 without compression.
    Fp16,
    /// Tables of fp16 entries for a tensor or for groups of channels.
    Tables,
    /// INT8 with a scale for a tensor or for each channel.
    Int8,
    /// Any other form, none of which was seen on the ANE each time.
    Other,
}

impl StoredForm {
    /// Returns the class of the form; `None` where it is not stated.
    pub fn class(&self) -> Option<FormClass> {
        Some(match self {
            StoredForm::Dense(DataType::Float16) => FormClass::Fp16,
            StoredForm::Lut {
                grouped_axes, entries: DataType::Float16, vector: 1, scaled: false, ..
            } if grouped_axes.len() <= 1 => FormClass::Tables,
            StoredForm::Linear { bits: 8, grain: Granularity::Tensor | Granularity::Channel } => {
                FormClass::Int8
            }
            StoredForm::Unstated => return None,
            _ => FormClass::Other,
        })
    }

    /// Returns the name for messages, for instance `lut4 in groups with fp16 entries`, `int8 per tensor`, `fp16`.
    pub fn describe(&self) -> String {
        match self {
            StoredForm::Dense(dtype) => dtype.name().into(),
            StoredForm::Lut { bits, grouped_axes, entries, scaled, .. } => {
                let grouped = if grouped_axes.is_empty() { "per tensor" } else { "in groups" };
                let scaled = if *scaled { ", scaled" } else { "" };
                format!("lut{bits} {grouped} with {entries} entries{scaled}")
            }
            StoredForm::Linear { bits, grain } => format!("int{bits} per {}", grain.name()),
            StoredForm::Sparse => "sparse".into(),
            StoredForm::Unstated => "a compression that is not stated".into(),
        }
    }

    /// Returns the name in tables of outcomes; empty where the form is not stated.
    pub fn name(&self) -> String {
        match self {
            StoredForm::Dense(DataType::Float16) => "fp16".into(),
            StoredForm::Dense(_) => "fp32".into(),
            StoredForm::Linear { bits, grain } => format!("int{bits}-{}", grain.name()),
            StoredForm::Lut { bits, grouped_axes, entries, scaled, .. } => {
                let axes = ["-tensor", "", "-two"][grouped_axes.len().min(2)];
                let entries = if *entries == DataType::Int8 { "-int8" } else { "" };
                format!("lut{bits}{axes}{entries}{}", if *scaled { "-scaled" } else { "" })
            }
            StoredForm::Sparse => "sparse".into(),
            StoredForm::Unstated => String::new(),
        }
    }

    /// Parses a name in tables of outcomes.
    ///
    /// # Errors
    /// No form has the name; the message lists examples.
    pub fn parse(text: &str) -> Result<StoredForm, String> {
        let bad = || {
            format!("`{text}` is not a value of `weights`: fp16, fp32, int8-tensor, int4-block, lut4, sparse")
        };
        let bits = |text: &str| text.parse().ok().filter(|bits| (1..=8).contains(bits)).ok_or_else(bad);
        let mut words = text.split('-');
        let stem = words.next().unwrap_or("");
        let rest: Vec<&str> = words.collect();
        if let Some(digits) = stem.strip_prefix("lut") {
            if rest.iter().any(|w| !["tensor", "two", "axes", "scaled", "int8"].contains(w)) {
                return Err(bad());
            }
            return Ok(StoredForm::Lut {
                bits: bits(digits)?,
                grouped_axes: match (rest.contains(&"two"), rest.contains(&"tensor")) {
                    (true, _) => vec![0, 1],
                    (_, true) => vec![],
                    _ => vec![0],
                },
                entries: if rest.contains(&"int8") { DataType::Int8 } else { DataType::Float16 },
                vector: 1,
                scaled: rest.contains(&"scaled"),
            });
        }
        if let (Some(digits), [name]) = (stem.strip_prefix("int"), rest.as_slice()) {
            let grain = Granularity::of_name(name).ok_or_else(bad)?;
            return Ok(StoredForm::Linear { bits: bits(digits)?, grain });
        }
        match text {
            "fp16" => Ok(StoredForm::Dense(DataType::Float16)),
            "fp32" => Ok(StoredForm::Dense(DataType::Float32)),
            "sparse" => Ok(StoredForm::Sparse),
            "" => Ok(StoredForm::Unstated),
            _ => Err(bad()),
        }
    }
}

impl Shapes {
    /// Returns the name in tables of outcomes: `fixed`, `enumerated`, `range`, or `range4` for four sizes.
    pub fn name(&self) -> String {
        match self {
            Shapes::Fixed => "fixed".into(),
            Shapes::Enumerated => "enumerated".into(),
            Shapes::Ranged(None) => "range".into(),
            Shapes::Ranged(Some(n)) => format!("range{n}"),
        }
    }

    /// Parses a name in tables of outcomes.
    ///
    /// # Errors
    /// The text is no name of shapes; the message lists examples.
    pub fn parse(text: &str) -> Result<Shapes, String> {
        match text {
            "" | "fixed" => Ok(Shapes::Fixed),
            "enumerated" => Ok(Shapes::Enumerated),
            "range" => Ok(Shapes::Ranged(None)),
            _ => {
                let sizes = text.strip_prefix("range").and_then(|n| n.parse().ok());
                sizes.map(|n| Shapes::Ranged(Some(n))).ok_or_else(|| {
                    format!("`{text}` is not a value of `shapes`: fixed, enumerated, range, range4")
                })
            }
        }
    }
}
