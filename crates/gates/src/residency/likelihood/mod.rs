//! Predicts the probability that the ANE runs a function, from features that graphs share, where rules leave the
//! question open.
//!
//! ```text
//! published outcomes --rules--> outcomes that no rule decides --features--> regression --> log-odds of a new graph
//!                          \--> outcomes that a rule speaks against --> error rate of such rules
//! ```

mod evidence_sum;
pub mod features;
mod logistic;
mod predictor;
mod training;

pub use predictor::{Design, Influence, Predictor};
pub use training::{PreparedOutcome, prepare};
