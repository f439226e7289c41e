//! `chain.json`: the execution contract of a bundle.
//!
//! ```text
//! contract       Chain: the model, its embedding, ropes, caches and packages
//! steps          Step, Run: what the host does in a pass, in order
//! build_results  Gates, AutoChoice: what a build found out; nothing that runs a bundle reads them
//! check          contradictions of a chain, before anything uses it
//! chain_file     reading and writing
//! ```

mod build_results;
mod chain_file;
mod check;
mod contract;
mod steps;

pub use build_results::{AutoChoice, GateResult, Gates, TensorChoice, UniformResult};
pub use chain_file::FORMAT;
pub use check::SOFTCAPPING;
pub use contract::{
    Cache, Chain, Embedding, ModelInfo, Rope, Shard, ShardFunction, ShardKind, TokenCount, Vectors,
};
pub use steps::{HostInput, InputBinding, Kept, OutputBinding, RowRange, Run, Step, When};
