//! Helpers that tests share.

pub mod gguf;
pub mod tiny;
