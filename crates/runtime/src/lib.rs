//! Runs Core ML packages on a CPU, and bundles as language models.
//!
//! [`cpu`] executes one package; [`model`] runs the chain of packages of a bundle on any [`backend`];
//! [`generate()`](generate::generate) continues a prompt.
//!
//! # Tests
//! `tests/all/interop.rs` runs packages of coremltools and compares with its results. Plans, caches and resizing agree with the
//! interpreter bit by bit. Tokenizers that contradict themselves give errors. Tests that need a bundle (forks, cuts, batches,
//! drafts) are in `gates/tests`. `cargo test -p anemoe-runtime` runs for 10 seconds on two busy cores, besides the compilation.
#![deny(unsafe_code)]

pub mod backend;
pub mod chat;
pub mod cpu;
pub mod generate;
mod memory_limit;
pub mod model;
pub mod predict;
pub mod sampler;
pub mod shard_work;
pub mod speculate;
pub mod tensor;
pub mod tokenizer;

pub use anemoe_io::{Error, Result};
