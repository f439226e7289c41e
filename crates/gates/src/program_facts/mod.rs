//! Facts of MIL programs without their weights: ops with types and shapes, storage forms, states. The residency gate
//! judges them, and the cost model counts their work.

pub mod analyze;
pub mod digest;
pub mod graph;
mod planned;

pub use analyze::facts;
pub use graph::PackageFacts;
pub use planned::PlannedPrograms;
