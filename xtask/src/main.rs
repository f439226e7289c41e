//! Tasks of the repository: checks of the sources, generated code and plots, fuzz targets, trials of the built binary,
//! tests of the Core ML backend without a Mac.
//!
//! # Tests
//! Unit tests check that cycles, names and openings are found in small sources, and that the plots in the repository
//! are those of `docs/results.json`: `cargo test -p xtask`.

mod cycles;
mod defects;
mod doc_openings;
mod doc_paths;
mod fuzz;
mod mac_check;
mod module_tree;
mod names;
mod options;
mod plots;
mod protobuf_code;
mod seeds;
mod sim;
mod task;
mod trial;

#[path = "../../crates/convert/tests/common/mod.rs"]
mod files;

use options::TaskOptions;
use std::process::ExitCode;
use task::Passed;

const USAGE: &str = "usage: cargo xtask TASK
  cycles [CRATE..]            lists files of a crate that use each other
  names                       lists types and files of one name, doc comments that open with a clause, and
                              sources that documents name and that are not there
  proto                       writes crates/mlpackage/src/proto/generated.rs
  plots                       draws docs/plots from docs/results.json
  fuzz [TARGET..]             runs fuzz targets; CONTRIBUTING.md
       [--seconds N] [--runs N] [--sanitizer none|address] [--seed-only]
  sim [FILTER..]              runs the Core ML backend on Linux, against a fake Core ML; docs/mac.md
  defects [WORD..]            puts defects into that backend, one at a time, and lists those that its tests miss
  mac-check                   type-checks the binary for macOS, on Linux
  trial --anemoe PATH         runs the binary on damaged and hostile inputs; CONTRIBUTING.md
       [--runs N] [--seed S] [--jobs J] [--keep] [--only COMMAND] [--interrupt N]";

fn run() -> Passed {
    let mut args = std::env::args().skip(1);
    let task = args.next().ok_or(USAGE)?;
    let options = TaskOptions::parse(args)?;
    match task.as_str() {
        "cycles" => cycles::check(&options.finish()?),
        "names" => names::check(),
        "proto" => protobuf_code::write(),
        "plots" => plots::write(),
        "fuzz" => fuzz::run(options),
        "sim" => sim::run(options),
        "defects" => defects::run(options),
        "mac-check" => mac_check::run(options),
        "trial" => trial::run(options),
        _ => Err(USAGE.into()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}
