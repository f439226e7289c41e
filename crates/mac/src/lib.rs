//! Finds out what a Mac does with Core ML packages. Each risky step has a process of its own, so that a crash or a hang
//! is a finding.
//!
//! ```text
//! child, risky_steps                 processes that work for another one, what their failures mean, and progress
//! caches, json_file                  compiled models; files that a later run goes on with
//! bundle_compiler                    `anemoe compile`
//! tune, form_trial                   `anemoe tune`
//! device_check                       `anemoe check --device`
//! stage_list, verification           `anemoe verify-on-mac`: the stages as data, and their runner
//! soak, energy                       its stages without a command
//! mac_report, private                its report
//! import                             `anemoe import-report`
//! ```
//!
//! # Tests
//! `cargo xtask sim` runs every command on Linux against the fake Core ML, with planted crashes, hangs, refusals, wrong
//! numbers, leaks and placements; `crates/cli/tests/black_box/import_report.rs` reads hostile reports. Nothing of this
//! has run on a Mac yet: `docs/mac.md`.
#![deny(unsafe_code)]

mod bundle_compiler;
mod caches;
mod child;
mod device_check;
mod energy;
mod form_trial;
mod import;
mod json_file;
mod mac_report;
mod private;
mod risky_steps;
mod soak;
mod stage_list;
mod tune;
mod verification;

pub use bundle_compiler::{BundleSteps, CompileReport};
pub use caches::{CacheUse, compiled_models, is_folder, list_caches};
pub use child::{CommandDone, Ended, serve_parent};
pub use device_check::DeviceFindings;
pub use import::{ReportFindings, add_evidence};
pub use mac_report::{MacReport, ReportSystem, report_entries, write_archive};
pub use private::PrivateWords;
pub use risky_steps::Listener;
pub use soak::SoakLength;
pub use stage_list::{MacStage, STAGES, StageRecord};
pub use tune::{FormChoice, TuneReport, Tuner};
pub use verification::Verification;
