//! A fake Core ML: classes of Core ML's names, registered with the Objective-C runtime at run time, whose models run packages on the
//! CPU executor with every result rounded to fp16.
//!
//! Strict where Core ML only says *undefined*: two predictions on one state at a time, a state whose model is gone, a state's memory
//! outside of its handler. Unfriendly where Core ML may be: rows of results start at multiples of 64 bytes, completion handlers run on
//! other threads and their objects are gone right after them, backings may stay unused.
//!
//! A compiled model is a folder with `coremldata.bin`, in which the path of its package stands. With a file `stale` in it, it is one of
//! another system.
//!
//! Tests are those of the backend that runs on it, in `sim/tests` and `sim/anemoe/tests`.
#![allow(non_snake_case)]

mod arrays;
mod faults;
mod features;
mod models;
mod plans;

pub use faults::{Fault, clear_faults, plant, plant_from};
pub use models::{loaded, settle};

/// Registers all classes; before anything else of Core ML is used.
pub fn install() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    objc_sim::install();
    ONCE.call_once(|| {
        arrays::register();
        features::register();
        models::register();
        plans::register();
    });
}
