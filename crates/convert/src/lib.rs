//! Checkpoints to Core ML shards: models, plan, quantization, lowering.
#![deny(unsafe_code)]

pub mod build;
pub mod checkpoint;
pub mod error;
pub mod importance;
pub mod inspect;
pub mod kind_search;
pub mod lower;
pub mod models;
pub mod nearest;
pub mod one_tensor;
pub mod outliers;
pub mod path_kind;
pub mod plan;
pub mod quant;
pub mod quantize;
pub mod shard_program;
pub mod variants;

pub use error::{Error, Result};
