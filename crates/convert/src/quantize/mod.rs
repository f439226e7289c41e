//! Weight compression.

mod kmeans;
mod metrics;
mod palettize;

pub use kmeans::{Histogram, kmeans, kmeans_exact};
pub use metrics::Metrics;
pub use palettize::{Palettizer, TableMode};
