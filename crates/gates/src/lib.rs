//! Golden references, and the gates that a build has to pass.
#![deny(unsafe_code)]

pub mod auto;
pub mod calibrate;
pub mod fast;
pub mod gated;
pub mod golden;
pub mod integrity;
pub mod probe;
pub mod reference;
pub mod residency;
pub mod swap;
pub mod text;
pub mod trace;

pub use anemoe_io::{Error, Result};
