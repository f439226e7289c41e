//! Weight compression: k-means tables, even tables, and linear kinds, each with the smallest squared error that it can have.

mod encoder;
mod histogram;
mod integers;
mod kmeans;
mod metrics;
mod palettize;
#[cfg(test)]
mod testing;

pub use encoder::{Encoder, ReadRows, TablesAndScales, TooLarge};
pub use histogram::Histogram;
pub use kmeans::{kmeans, kmeans_exact};
pub use metrics::Metrics;
pub use palettize::{Palettizer, TableMode};
