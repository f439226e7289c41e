//! Golden references, and the gates that a build has to pass.
#![deny(unsafe_code)]

pub mod ablation;
pub mod auto;
pub mod calibrate;
mod error;
pub mod gated;
pub mod golden_gate;
pub mod int8_gate;
pub mod integrity;
pub mod perplexity;
pub mod probe;
pub mod reference;
pub mod residency;
pub mod trace;

pub use error::{Error, Result};
