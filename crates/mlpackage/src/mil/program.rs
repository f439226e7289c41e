//! Programs, functions, blocks, operations, and the model description around them.

use super::types::{DataType, TensorType, ValueType};
use super::value::Value;
use std::collections::BTreeMap;
use std::fmt;

/// A model as one `model.mlmodel` holds it: the program, and the description of each function's features.
#[derive(Clone, Debug, PartialEq)]
pub struct MlModel {
    /// Specification version, 6 (iOS15) to 10 (iOS26); follows from the functions' opset.
    pub specification_version: i32,
    /// One description per function, in stored order. A model with the one function `main` stores it at top level.
    pub functions: Vec<FunctionDescription>,
    /// Name of the function that runs when none is named.
    pub default_function: String,
    /// Author, short description, user-defined metadata and so on.
    pub metadata: BTreeMap<String, String>,
    /// The program.
    pub program: Program,
}

/// The features of one function as the model description lists them.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct FunctionDescription {
    /// The function's name.
    pub name: String,
    /// Inputs, in order.
    pub inputs: Vec<Feature>,
    /// Outputs, in order.
    pub outputs: Vec<Feature>,
    /// States, in order.
    pub states: Vec<Feature>,
    /// Output with the class or the value that was predicted; empty unless the function is a classifier or regressor.
    pub predicted_feature: String,
    /// Output with the probability of each class; may be empty.
    pub predicted_probabilities: String,
}

/// One input, output or state.
#[derive(Clone, Debug, PartialEq)]
pub struct Feature {
    /// Name, the same as in the program.
    pub name: String,
    /// Its author's words; may be empty.
    pub short_description: String,
    /// Kind of value that callers pass.
    pub kind: FeatureKind,
    /// Element type: of an array fp16, fp32, fp64, int32 or int8; of a dictionary the type of its keys.
    pub dtype: DataType,
    /// Shape, or shapes that it may take; of an image `[1, channels, height, width]`, as in the program.
    pub shape: FeatureShape,
    /// Value of every element where a caller leaves the input out; `None` where it has to be given.
    pub default: Option<f64>,
}

impl Feature {
    /// Makes a multi-array that callers have to give.
    pub fn array(name: impl Into<String>, dtype: DataType, shape: FeatureShape) -> Feature {
        let (name, kind) = (name.into(), FeatureKind::MultiArray);
        Feature { name, short_description: String::new(), kind, dtype, shape, default: None }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            FeatureKind::MultiArray => write!(f, "{} {}", self.dtype, self.shape)?,
            FeatureKind::Image(color) => write!(f, "image {} {}", color.name(), self.shape)?,
            FeatureKind::Scalar => write!(f, "{}", self.dtype)?,
            FeatureKind::Dictionary => write!(f, "dictionary of {}", self.dtype)?,
            FeatureKind::Sequence => write!(f, "sequence of {}", self.dtype)?,
        }
        match self.default {
            Some(value) => write!(f, ", {value} if left out"),
            None => Ok(()),
        }
    }
}

/// Kind of value that callers pass for a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureKind {
    /// An array.
    MultiArray,
    /// An image; the program takes its channels apart, each from 0 to 255.
    Image(ColorSpace),
    /// One int64, fp64 or string, such as the label that a classifier gives.
    Scalar,
    /// Numbers by class, from int64 or string.
    Dictionary,
    /// A list of int64 or strings.
    Sequence,
}

/// Order and type of an image's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColorSpace {
    /// One channel, from 0 to 255.
    Grayscale,
    /// Red, green, blue.
    Rgb,
    /// Blue, green, red.
    Bgr,
    /// One channel of fp16 numbers.
    GrayscaleFloat16,
}

impl ColorSpace {
    /// Returns the name in the specification.
    pub const fn name(self) -> &'static str {
        match self {
            ColorSpace::Grayscale => "GRAYSCALE",
            ColorSpace::Rgb => "RGB",
            ColorSpace::Bgr => "BGR",
            ColorSpace::GrayscaleFloat16 => "GRAYSCALE_FLOAT16",
        }
    }

    /// Returns the number of channels.
    pub const fn channels(self) -> u64 {
        match self {
            ColorSpace::Grayscale | ColorSpace::GrayscaleFloat16 => 1,
            ColorSpace::Rgb | ColorSpace::Bgr => 3,
        }
    }
}

/// The shapes that a feature may take.
#[derive(Clone, Debug, PartialEq)]
pub enum FeatureShape {
    /// One shape.
    Fixed(Vec<u64>),
    /// Each dimension between two bounds, both included; `None` means no upper bound.
    Range {
        /// The shape used when the caller asks for no other.
        default: Vec<u64>,
        /// Bounds per dimension.
        ranges: Vec<(u64, Option<u64>)>,
    },
    /// One of several shapes; the first is the default.
    Enumerated(Vec<Vec<u64>>),
    /// An output whose shape depends on the inputs.
    Dynamic,
}

impl FeatureShape {
    /// Returns the shape that is meant where a caller asks for none; `None` where any is.
    pub fn default(&self) -> Option<&[u64]> {
        match self {
            FeatureShape::Fixed(shape) | FeatureShape::Range { default: shape, .. } => Some(shape),
            FeatureShape::Enumerated(all) => all.first().map(Vec::as_slice),
            FeatureShape::Dynamic => None,
        }
    }
}

impl fmt::Display for FeatureShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FeatureShape::Fixed(shape) => write!(f, "{shape:?}"),
            FeatureShape::Range { ranges, .. } => {
                let bound = |(low, high): &(u64, Option<u64>)| match high {
                    Some(high) if low == high => low.to_string(),
                    Some(high) => format!("{low}..{high}"),
                    None => format!("{low}.."),
                };
                write!(f, "[{}]", ranges.iter().map(bound).collect::<Vec<_>>().join(", "))
            }
            FeatureShape::Enumerated(all) => {
                let all: Vec<String> = all.iter().map(|shape| format!("{shape:?}")).collect();
                write!(f, "one of {}", all.join(", "))
            }
            FeatureShape::Dynamic => f.write_str("dynamic"),
        }
    }
}

/// A MIL program.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Program {
    /// Functions by name.
    pub functions: BTreeMap<String, Function>,
    /// Program attributes; usually empty.
    pub attributes: BTreeMap<String, Value>,
}

/// The operator set of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Opset {
    CoreML5,
    CoreML6,
    CoreML7,
    CoreML8,
    CoreML9,
}

impl Opset {
    /// All opsets, oldest first.
    pub const ALL: [Opset; 5] =
        [Opset::CoreML5, Opset::CoreML6, Opset::CoreML7, Opset::CoreML8, Opset::CoreML9];

    /// Returns the opset's name in the file format.
    pub const fn name(self) -> &'static str {
        match self {
            Opset::CoreML5 => "CoreML5",
            Opset::CoreML6 => "CoreML6",
            Opset::CoreML7 => "CoreML7",
            Opset::CoreML8 => "CoreML8",
            Opset::CoreML9 => "CoreML9",
        }
    }

    /// Returns the specification version of the opset: 6 for CoreML5 (iOS15) up to 10 for CoreML9 (iOS26).
    pub const fn specification_version(self) -> i32 {
        match self {
            Opset::CoreML5 => 6,
            Opset::CoreML6 => 7,
            Opset::CoreML7 => 8,
            Opset::CoreML8 => 9,
            Opset::CoreML9 => 10,
        }
    }

    /// Returns the opset named `name`.
    pub fn from_name(name: &str) -> Option<Opset> {
        Opset::ALL.into_iter().find(|o| o.name() == name)
    }
}

impl fmt::Display for Opset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A function: typed inputs and one block specialised for an opset.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Inputs in order; states have [`ValueType::State`].
    pub inputs: Vec<NamedType>,
    /// Opset of the block.
    pub opset: Opset,
    /// The body.
    pub block: Block,
}

/// A name with its type.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedType {
    /// Name, unique in the function.
    pub name: String,
    /// Type.
    pub ty: ValueType,
}

impl NamedType {
    /// Makes a named tensor type.
    pub fn tensor(name: impl Into<String>, ty: TensorType) -> Self {
        NamedType { name: name.into(), ty: ValueType::Tensor(ty) }
    }
}

/// A sequence of operations in topological order.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Block {
    /// Inputs of a nested block; empty for a function's own block.
    pub inputs: Vec<NamedType>,
    /// Operations in order.
    pub operations: Vec<Operation>,
    /// Names of the results.
    pub outputs: Vec<String>,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// Type without opset prefix, for instance `conv`, `const`, `constexpr_lut_to_dense`.
    pub op_type: String,
    /// Operands by parameter name.
    pub inputs: BTreeMap<String, Argument>,
    /// Results. `write_state` has none.
    pub outputs: Vec<NamedType>,
    /// Nested blocks of `cond` and `while_loop`.
    pub blocks: Vec<Block>,
    /// `name`; `val` of a `const`; operands of an iOS16 `constexpr_*`.
    pub attributes: BTreeMap<String, Value>,
}

impl Operation {
    /// Returns the `name` attribute, or else the first output's name, or else the op type.
    pub fn name(&self) -> &str {
        self.attributes
            .get("name")
            .and_then(Value::as_str)
            .or_else(|| self.outputs.first().map(|o| o.name.as_str()))
            .unwrap_or(&self.op_type)
    }
}

/// Bindings of a parameter: one, or several for a variadic parameter such as `concat`'s `values`.
#[derive(Clone, Debug, PartialEq)]
pub struct Argument(pub Vec<Binding>);

/// A reference to a value of the program, or a constant written in place.
#[derive(Clone, Debug, PartialEq)]
pub enum Binding {
    /// Name of an earlier result or input.
    Name(String),
    /// A constant.
    Value(Value),
}
