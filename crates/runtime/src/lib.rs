//! Runs Core ML packages on a CPU, and bundles of them as language models.
//!
//! [`cpu`] executes one package; [`model`] runs a bundle's chain of them on any [`backend`]; [`generate()`](generate::generate)
//! continues a prompt.
#![deny(unsafe_code)]

pub mod backend;
pub mod cpu;
pub mod error;
pub mod generate;
mod memory_limit;
pub mod model;
pub mod predict;
pub mod sampler;
pub mod speculate;
pub mod tensor;
pub mod tokenizer;

pub use error::{Error, Result};
