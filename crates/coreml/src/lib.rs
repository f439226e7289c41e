//! Runs packages on the Apple Neural Engine, through Core ML.
//!
//! ```text
//! CoreMlBackend --open--> package --prepare--> function --run--> one thread that owns every Core ML object
//!                                                                 MLModel by function, MLState and caches by sequence and package
//! ```
//! The code is compiled for Apple's systems, and for the fake Core ML of `sim/` (feature `sim`). Elsewhere
//! [`CoreMlBackend::new`] is an error.
//!
//! # Tests
//! `cargo xtask sim` runs this crate on Linux against a fake Core ML whose engine is the CPU executor: tokens are those of the CPU
//! backend, faults are errors with a cause, objects are let go. `cargo xtask mac-check` type-checks it for macOS. It has not run
//! on a Mac yet: `docs/mac.md`.

pub mod causes;
mod compiled;
#[cfg(any(target_vendor = "apple", feature = "sim"))]
mod engine;
pub mod plan;
mod settings;
mod system_facts;
#[cfg(not(any(target_vendor = "apple", feature = "sim")))]
mod unavailable;

pub use compiled::{COMPILED, CompiledModels, CompiledRecord};
#[cfg(any(target_vendor = "apple", feature = "sim"))]
pub use engine::{
    CoreMlBackend, HELD_MEMORY, available, compile, held_memory, plan_of, system_facts, this_system,
};
pub use settings::{ComputeUnits, CoreMlSettings};
pub use system_facts::SystemFacts;
#[cfg(not(any(target_vendor = "apple", feature = "sim")))]
pub use unavailable::{
    CoreMlBackend, HELD_MEMORY, available, compile, held_memory, plan_of, system_facts, this_system,
};

pub use anemoe_io::{Error, Result};
