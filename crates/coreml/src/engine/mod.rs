//! Core ML, behind the traits of `anemoe_runtime::backend`.
//!
//! ```text
//! coreml_package.rs  packages and functions, as the model sees them
//!   coreml_states.rs   states of a sequence: begin, fork, cut back, save
//!   loading.rs         loads functions, several at once
//!     objects.rs         everything that Core ML owns, on one thread: loaded functions, states, caches; unloads for
//!     room
//!       instance.rs        a loaded function with its buffers; one prediction
//!         arrays.rs          memory that Core ML reads and writes
//! owner.rs           the thread          failure.rs   NSError and exceptions
//! ```

mod arrays;
mod compute_plan;
mod coreml_package;
mod coreml_states;
mod failure;
mod instance;
mod interface;
mod loading;
mod objects;
mod owner;
mod system;
mod translate;

pub use compute_plan::plan_of;
pub use coreml_package::CoreMlBackend;
pub use loading::available;
pub use system::{HELD_MEMORY, held_memory, system_facts, this_system};
pub use translate::compile;
