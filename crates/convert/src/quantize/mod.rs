//! Weight compression: k-means tables, even tables, and linear kinds, each with the smallest squared error that it can have.

mod dense;
mod encoder;
mod feedback;
mod histogram;
mod integers;
mod kmeans;
mod metrics;
pub mod mxfp4;
mod palettize;
pub mod q4_0;
#[cfg(test)]
mod testing;
mod vector_table;

pub use dense::product;
pub use encoder::{Encoder, OutsideFp16, ROUNDS_TO_INFINITY, ReadRows, TablesAndScales};
pub use feedback::{CompressedMatrix, InputSums, SecondMoments};
pub use histogram::Histogram;
pub use kmeans::{kmeans, kmeans_exact};
pub use metrics::Metrics;
pub use palettize::{Palettizer, TableMode};
pub use vector_table::{VectorTable, fit_vectors};
