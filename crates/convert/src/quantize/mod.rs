//! Weight compression: k-means tables, even tables, and linear kinds, each with the smallest squared error that it can have.

mod histogram;
mod kmeans;
mod linear;
mod matrix;
mod metrics;
mod palettize;
#[cfg(test)]
mod testing;

pub use histogram::Histogram;
pub use kmeans::{kmeans, kmeans_exact};
pub use matrix::{Encoder, ReadRows, Side, TooLarge};
pub use metrics::Metrics;
pub use palettize::{Palettizer, TableMode};
