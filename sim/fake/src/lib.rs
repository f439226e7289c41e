//! A fake Core ML: classes with Core ML's names, registered with the Objective-C runtime at run time. Their models run
//! packages on the CPU executor and round every result to fp16.
//!
//! The fake ends the test where Core ML only says *undefined*: two predictions on one state at a time, a state whose
//! model is gone, a state's memory outside its handler. It does whatever Core ML may do: rows of results start at
//! multiples of 64 bytes, completion handlers run on other threads and their objects are gone right after them,
//! backings may stay unused.
//!
//! A compiled model is a folder with the file `coremldata.bin`, which holds the path of its package. A file `stale` in
//! the folder makes it a model of another system.
//!
//! Its tests are those of the backend that runs on it, in `sim/tests` and `sim/anemoe/tests`.
#![allow(non_snake_case)]

mod arrays;
mod faults;
mod features;
mod models;
mod plans;

pub use faults::{Fault, clear_faults, plant, plant_from};
pub use models::{loaded, settle};

/// Registers all classes. Must run before any other use of Core ML.
pub fn install() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    objc_sim::install();
    macro_rules! register {
        ($($class:path)*) => { $(<$class as objc2::ClassType>::class();)* };
    }
    ONCE.call_once(|| {
        register! {
            arrays::FakeArray
            features::FakeValue features::FakeProvider features::FakeResult features::FakeOptions
            features::FakeConfiguration features::FakeFeature
            models::FakeState models::FakeDescription models::FakeModel
            plans::FakeNeuralEngine plans::FakeGpu plans::FakeCpu plans::FakeCost
            plans::FakeUsage plans::FakeNamedType plans::FakeOperation plans::FakeBlock
            plans::FakeFunction plans::FakeProgram plans::FakeStructure plans::FakePlan
        }
    });
}
