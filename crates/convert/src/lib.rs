//! Checkpoints to Core ML shards: models, plan, quantization, lowering.
#![deny(unsafe_code)]

pub mod checkpoint;
pub mod error;
pub mod models;
pub mod quantize;

pub use error::{Error, Result};
