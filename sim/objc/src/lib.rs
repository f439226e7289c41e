//! A small Objective-C runtime with a small Foundation, in Rust, for tests on machines that have neither.
//!
//! Not fast, and stricter than a real one: memory of dead objects is kept, so a message to one is reported with its class; an
//! autorelease without a pool, or an object that is released too often, ends the test.
//!
//! Tests are those of the backend that runs on it, in `sim/tests` and `sim/anemoe/tests`.
mod blocks;
mod foundation;
mod runtime;
pub use blocks::{BLOCKS, COPIED};
pub use runtime::{OBJECTS, alive, hold, made};

/// Registers the classes; before any other use of Objective-C.
pub fn install() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(foundation::register);
}
