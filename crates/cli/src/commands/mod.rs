//! One file per sub-command.

pub mod build;
pub mod generate;
pub mod golden;
pub mod inspect;
pub mod plan;
pub mod predict;
pub mod quantize;
pub mod quickstart;
pub mod validate;
