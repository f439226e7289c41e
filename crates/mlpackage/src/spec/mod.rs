//! Converts the owned program to and from the protobuf specification.

mod decode;
mod encode;

pub use decode::{decode, decode_some};
pub use encode::{encode, encode_with};

use crate::mil::{ColorSpace, DataType};

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

/// Color spaces of images with their numbers in `FeatureTypes.proto`.
const COLOR_SPACES: [(ColorSpace, i32); 4] = [
    (ColorSpace::Grayscale, 10),
    (ColorSpace::Rgb, 20),
    (ColorSpace::Bgr, 30),
    (ColorSpace::GrayscaleFloat16, 40),
];

/// Kinds of models that are not ML Programs, by their fields of `Model` in `Model.proto`.
#[rustfmt::skip]
const OTHER_MODELS: [(u32, &str); 36] = [
    (200, "a pipeline classifier"), (201, "a pipeline regressor"), (202, "a pipeline"),
    (300, "a generalized linear regressor"), (301, "a support vector regressor"), (302, "a tree ensemble regressor"),
    (303, "a neural network regressor"), (304, "a Bayesian probit regressor"),
    (400, "a generalized linear classifier"), (401, "a support vector classifier"), (402, "a tree ensemble classifier"),
    (403, "a neural network classifier"), (404, "a k-nearest neighbors classifier"),
    (500, "a neural network"), (501, "an item similarity recommender"),
    (555, "a custom model"), (556, "a linked model"), (560, "a class confidence thresholding model"),
    (600, "a one-hot encoder"), (601, "an imputer"), (602, "a feature vectorizer"), (603, "a dictionary vectorizer"),
    (604, "a scaler"), (606, "a categorical mapping"), (607, "a normalizer"), (609, "an array feature extractor"),
    (610, "a non-maximum suppression"), (900, "an identity"),
    (2000, "a text classifier"), (2001, "a word tagger"), (2002, "a Vision feature print"),
    (2003, "a sound analysis preprocessing"), (2004, "a gazetteer"), (2005, "a word embedding"),
    (2006, "an audio feature print"), (3000, "a serialized model"),
];

/// Metadata fields that have a field of their own in the description; all others are user-defined.
const METADATA_FIELDS: [&str; 4] = ["author", "license", "shortDescription", "versionString"];
