//! Core ML's file formats off a Mac: an owned MIL (the program inside an ML Program model), its op tables and
//! verifier, weight storage v2, the protobuf specification and the `.mlpackage` directory.
//!
//! Nothing in this crate knows about language models, and nothing in it is unsafe but the memory map of a weight
//! file. Names follow `MIL.proto` and coremltools.
//!
//! ```text
//! mil::Program --spec--> protobuf --package--> NAME.mlpackage/Data/com.apple.CoreML/model.mlmodel
//! weights      --blob----------------------->                                     /weights/weight.bin
//! ```
//!
//! # Tests
//! Packages of coremltools pass the verifier and are the same after a decoding and an encoding. Equal packages have
//! equal bytes. Every broken package, weight file or program is refused with an error that names the fault.
//! `cargo test -p anemoe-mlpackage` runs for 4 seconds on two busy cores, besides the compilation.
#![deny(unsafe_code)]

pub mod blob;
pub mod mil;
pub mod package;
mod proto;
pub mod spec;

pub use anemoe_io::{Error, Result};
