//! Shared by tests.

pub mod gguf;
pub mod tiny;
