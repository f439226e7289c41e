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
}

/// One input, output or state.
#[derive(Clone, Debug, PartialEq)]
pub struct Feature {
    /// Name, the same as in the program.
    pub name: String,
    /// fp16, fp32, fp64, int32 or int8.
    pub dtype: DataType,
    /// Shape, or shapes that it may take.
    pub shape: FeatureShape,
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
