//! Goldens, and the gates that a build has to pass.
//!
//! # Tests
//! The reference agrees with goldens of Hugging Face transformers. Sequences have the same bits alone, in a batch,
//! and after forks and cuts. A plan and its build get the same verdict. Rules score as stated on published outcomes.
//! `cargo test -p anemoe-gates` runs for 2 minutes on two busy cores, besides the compilation.
#![deny(unsafe_code)]

pub mod ablation;
pub mod auto;
pub mod bundle_report;
pub mod calibrate;
pub mod checkpoint_text;
pub mod cost;
pub mod facts;
pub mod gated;
pub mod golden_gate;
pub mod integrity;
pub mod layer_sample;
pub mod many_runs;
pub mod package_inputs;
pub mod perplexity;
pub mod probe;
pub mod program_facts;
pub mod quality_front;
pub mod reference;
pub mod residency;
pub mod search_record;
pub mod text_feedback;
pub mod text_gate;
pub mod trace;
pub mod weight_gate;

pub use anemoe_io::{Error, Result};
