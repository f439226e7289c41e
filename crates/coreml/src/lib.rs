//! Runs packages on the Apple Neural Engine through Core ML.
//!
//! ```text
//! CoreMlBackend --open--> package --prepare--> function --run--> one thread that owns every Core ML object:
//!                                                                MLModel by function,
//!                                                                MLState and caches by sequence and package
//! ```
//! The engine is compiled for Apple's systems, and for the fake Core ML of `sim/` (feature `sim`). On other systems
//! [`CoreMlBackend::new`] fails.
//!
//! # Tests
//! `cargo xtask sim` runs this crate on Linux against a fake Core ML whose engine is the CPU executor. It checks that
//! tokens equal those of the CPU backend, that faults become errors with a cause, and that objects are released.
//! `cargo xtask mac-check` type-checks the crate for macOS. It has not run on a Mac yet: `docs/mac.md`.

pub mod causes;
mod compiled;
#[cfg(any(target_vendor = "apple", feature = "sim"))]
mod engine;
pub mod op_plan;
mod settings;
mod system_facts;
#[cfg(not(any(target_vendor = "apple", feature = "sim")))]
mod unavailable;

pub use compiled::{COMPILED, CompiledModels};
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
