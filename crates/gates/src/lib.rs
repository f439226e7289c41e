//! Golden references, and the gates that a build has to pass.
#![deny(unsafe_code)]

pub mod auto;
pub mod calibrate;
pub mod golden;
pub mod reference;
pub mod residency;
pub mod text;
pub mod trace;
