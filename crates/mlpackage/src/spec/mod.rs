//! Converts the owned program to and from the protobuf specification.

mod decode;
mod encode;

pub use decode::{decode, decode_some};
pub use encode::{encode, encode_with};

use crate::mil::DataType;

/// Deepest nesting of blocks and of value types that is decoded.
const MAX_DEPTH: usize = 32;

/// Data types with their numbers in `MIL.proto`.
const DATA_TYPES: [(DataType, i32); 22] = [
    (DataType::Bool, 1),
    (DataType::String, 2),
    (DataType::Float16, 10),
    (DataType::Float32, 11),
    (DataType::Float64, 12),
    (DataType::BFloat16, 13),
    (DataType::Int8, 21),
    (DataType::Int16, 22),
    (DataType::Int32, 23),
    (DataType::Int64, 24),
    (DataType::Int4, 25),
    (DataType::UInt8, 31),
    (DataType::UInt16, 32),
    (DataType::UInt32, 33),
    (DataType::UInt64, 34),
    (DataType::UInt4, 35),
    (DataType::UInt2, 36),
    (DataType::UInt1, 37),
    (DataType::UInt6, 38),
    (DataType::UInt3, 39),
    (DataType::Float8E4M3FN, 40),
    (DataType::Float8E5M2, 41),
];

/// Data types of features with their numbers in `FeatureTypes.proto`.
const FEATURE_TYPES: [(DataType, i32); 5] = [
    (DataType::Float32, 65568),
    (DataType::Float64, 65600),
    (DataType::Int32, 131104),
    (DataType::Float16, 65552),
    (DataType::Int8, 131080),
];

/// Metadata fields that have a field of their own in the description; all others are user-defined.
const METADATA_FIELDS: [&str; 4] = ["author", "license", "shortDescription", "versionString"];
