//! A small Objective-C runtime with a small Foundation, in Rust, for tests on machines without either.
//!
//! It is slow, and stricter than a real runtime. Memory of dead objects is kept, so that a message to a dead object is
//! reported with its class. An autorelease without a pool, or one release too many, ends the test.
//!
//! Its tests are those of the backend that runs on it, in `sim/tests` and `sim/anemoe/tests`.

/// Sets the instance variables of an allocated object, and initializes it.
#[macro_export]
macro_rules! init {
    ($this:expr, $ivars:expr) => {{
        let this = $this.set_ivars($ivars);
        // SAFETY: `init` is the designated initializer of every class of the sim.
        unsafe { objc2::msg_send![super(this), init] }
    }};
}

mod blocks;
mod foundation;
mod runtime;
pub use blocks::{BLOCKS, COPIED};
pub use runtime::{alive, hold, made};

/// Registers the classes. Must run before any other use of Objective-C.
pub fn install() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(foundation::register);
}
