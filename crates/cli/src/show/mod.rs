//! What commands print for people.

pub mod build;
pub mod gates;
pub mod plan;
pub mod residency;
