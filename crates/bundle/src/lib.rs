//! The `.anemoe` bundle: what `build` writes and every backend runs.
//!
//! ```text
//! NAME.anemoe/
//!   chain.json               the execution contract ([`Chain`])
//!   embed.bin                [vocab_size, hidden_size] fp16, row-major, little endian
//!   vectors.npz              f32 vectors of host steps, when there are any
//!   tokenizer.json  tokenizer_config.json  chat_template.jinja  generation_config.json
//!                            copied from the checkpoint, where it has them
//!   shards/NAME.mlpackage    Core ML packages
//!   drafter.anemoe/          bundle of the model that drafts for this one, where there is one
//!   journal.jsonl            what was done to the bundle ([`journal`]); nothing that runs the bundle reads it
//! ```
//!
//! A chain says what a host does for one pass over T tokens, without naming a model family: the order of the
//! packages, the inputs that the host computes (rotary rows, masks, cache positions), the values that flow from
//! package to package, and the layers where the host chooses experts.
//!
//! # Tests
//! Journals survive torn lines, garbage and several writers. Hashes of packages depend on names and contents alone.
//! `cargo test -p anemoe-bundle` runs for 2 seconds on two busy cores, besides the compilation.
#![deny(unsafe_code)]

mod chain;
mod hash;
pub mod journal;
pub mod journal_entries;
mod machine;

pub use chain::{
    Assistant, AutoChoice, Cache, Centroids, Chain, Embedding, FORMATS, GateResult, Gates, HostInput,
    InputBinding, Kept, ModelInfo, OutputBinding, Rope, RowRange, Run, SOFTCAPPING, Shard, ShardFunction,
    ShardKind, Step, TensorChoice, TokenCount, UniformResult, Vectors, When,
};
pub use hash::{
    MANIFEST, file_sha256, package_bytes, package_files, package_sha256, package_sha256_with, sampled_sha256,
    sha256, write_atomic,
};

pub use anemoe_io::{Error, Result};
pub use anemoe_kernels::{IndexBits, IntBits, WeightFormat};
use serde::Serializer;
use std::path::Path;

/// Name of the execution contract in a bundle.
pub const CHAIN_FILE: &str = "chain.json";
/// Name of the folder of packages in a bundle.
pub const SHARDS_DIR: &str = "shards";
/// Name of the drafter's bundle in a bundle.
pub const DRAFTER_DIR: &str = "drafter.anemoe";

/// Serializes a path as text for people: bytes that are not UTF-8 are replaced, where serde would refuse the path.
///
/// # Errors
/// Fails when the serializer fails.
pub fn path_text<P: AsRef<Path>, S: Serializer>(path: &P, s: S) -> std::result::Result<S::Ok, S::Error> {
    s.collect_str(&path.as_ref().display())
}
