//! Runs Core ML packages on a CPU, and bundles of them as language models.
pub mod cpu;
pub mod tensor;
