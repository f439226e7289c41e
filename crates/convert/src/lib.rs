//! Checkpoints to Core ML shards: models, plan, quantization, lowering.
#![deny(unsafe_code)]

pub mod auto;
pub mod build;
pub mod checkpoint;
pub mod error;
pub mod importance;
pub mod inspect;
pub mod lower;
pub mod models;
pub mod nearest;
pub mod outliers;
pub mod place;
pub mod plan;
pub mod program;
pub mod quant;
pub mod quantize;
pub mod tensor;
pub mod variants;

pub use error::{Error, Result};
