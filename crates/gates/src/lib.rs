//! Golden references, and the gates that a build has to pass.
#![deny(unsafe_code)]

pub mod golden;
pub mod reference;
pub mod static_report;
