//! Runs Core ML packages on a CPU, and bundles of them as language models.
//!
//! [`cpu`] executes one package; [`model`] runs a bundle's chain of them on any [`backend`]; [`generate()`](generate::generate)
//! continues a prompt.
//!
//! # Tests
//! `tests/interop.rs` runs packages of coremltools and compares with its results; plans, caches and resizing agree with the interpreter bit by
//! bit; tokenizers that lie are errors. What needs a bundle (forks, cuts, batches, drafts) is tested in `gates/tests`.
//! `cargo test -p anemoe-runtime` runs for 10 seconds on two busy cores, besides the compilation.
#![deny(unsafe_code)]

pub mod backend;
pub mod chat;
pub mod cpu;
pub mod generate;
mod memory_limit;
pub mod model;
pub mod predict;
pub mod sampler;
pub mod speculate;
pub mod tensor;
pub mod tokenizer;

pub use anemoe_io::{Error, Result};
