//! `chain.json`: the execution contract of a bundle.
//!
//! ```text
//! contract       Chain: the model, its embedding, ropes, caches and packages
//! steps          Step, Run: the work of the host in a pass, in order
//! build_results  Gates, AutoChoice: results of the build; nothing that runs a bundle reads them
//! check          finds contradictions of a chain before anything uses it
//! chain_file     reads and writes the file
//! ```

mod build_results;
mod chain_file;
mod check;
mod contract;
mod steps;

pub use build_results::{AutoChoice, GateResult, Gates, TensorChoice, UniformResult};
pub use chain_file::FORMATS;
pub use check::SOFTCAPPING;
pub use contract::{
    Assistant, Cache, Centroids, Chain, Embedding, ModelInfo, Rope, Shard, ShardFunction, ShardKind,
    TokenCount, Vectors,
};
pub use steps::{HostInput, InputBinding, Kept, OutputBinding, RowRange, Run, Step, When};
