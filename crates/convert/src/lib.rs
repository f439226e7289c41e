//! Turns checkpoints into Core ML shards: models, plan, quantization, lowering.
//!
//! # Tests
//! Kinds of compression have the bytes and errors that they claim: tests hold them against plain searches and exact
//! optima. One model in two layouts is read as the same checkpoint. `synthetic:` models have their published sizes.
//! Every damaged checkpoint or configuration is refused; the error names key, tensor and element. `tests/` opens
//! fixtures; the other tests are beside the code. `cargo test -p anemoe-convert` runs for 10 seconds on two busy
//! cores, besides the compilation.
#![deny(unsafe_code)]

pub mod bank_scales;
pub mod build;
pub mod checkpoint;
pub mod compressed;
pub mod context_buckets;
pub mod form;
pub mod form_ladder;
pub mod forms_file;
pub mod importance;
pub mod inspect;
pub mod kind_search;
pub mod lattice;
pub mod lattice_report;
pub mod lower;
pub mod models;
pub mod nearest;
pub mod one_tensor;
pub mod outliers;
pub mod package_weights;
pub mod path_kind;
pub mod plan;
pub mod quant;
pub mod quantize;
pub mod shard_program;
pub mod tensor_file;
pub mod variants;

pub use anemoe_io::{Error, Result};
