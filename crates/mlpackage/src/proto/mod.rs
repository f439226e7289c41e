//! Protobuf messages of Core ML's specification, as far as ML Programs need them.
//!
//! Generated from `proto/coreml.proto` by `cargo run -p xtask --features proto -- proto`.
#![allow(missing_docs, clippy::all)]

include!("generated.rs");
