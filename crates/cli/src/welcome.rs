//! `anemoe` without a command prints a few lines about the next commands to type.

use crate::error_report::{self, INVALID};
use crate::ui;
use std::process::ExitCode;

/// Lines that say what to type next.
const NEXT: &str = "\
anemoe takes language models, dense and Mixture-of-Experts, to the Apple Neural Engine, and to any CPU. Type next:

  anemoe inspect CHECKPOINT              see what a checkpoint holds
  anemoe build CHECKPOINT -o my.anemoe   make Core ML packages of it, and check them
  anemoe chat my.anemoe                  talk with the model
  anemoe serve my.anemoe                 serve it as OpenAI's API does
  anemoe quickstart                      all of that on a small model, in a clone of the repository
  anemoe help                            all commands";

/// Prints the lines on standard error and returns the status of bad usage, since a script has to give a command.
pub fn print(json: bool) -> ExitCode {
    if json {
        error_report::print_json("usage", "no command; `anemoe help` lists them", None, None);
    }
    ui::message(NEXT);
    ExitCode::from(INVALID)
}
