//! MIL, the Model Intermediate Language: owned types, independent of protobuf.

pub mod builder;
mod identifiers;
pub mod ops;
mod program;
pub mod text;
mod types;
mod value;
pub mod verify;

pub use program::{
    Argument, Binding, Block, ColorSpace, Feature, FeatureKind, FeatureShape, Function, FunctionDescription,
    MlModel, NamedType, Operation, Opset, Program,
};
pub use types::{DataType, Dim, TensorType, ValueType};
pub use value::{Immediate, TensorData, Value, ValueData};
