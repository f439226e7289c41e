//! Options that several commands share.

pub mod drafter;
pub mod evidence;
pub mod executor;
pub mod form_args;
pub mod hub_checkpoint;
pub mod model_args;
pub mod numbers;
pub mod origin;
pub mod planning;
pub mod prompt;
pub mod reading;
pub mod reasoning;
pub mod runner;
pub mod sampling;
pub mod speculate_args;
pub mod step_limit;
pub mod store_args;
pub mod text_windows;
