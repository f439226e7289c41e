//! `anemoe step`: one step of another command, in a process of its own. `anemoe help` does not show it.

use super::reproduce::command::parse;
use super::{bench, build, check, compile, doctor, golden, predict_speed, tune, validate};
use crate::command::execute;
use crate::error_report::sentence;
use crate::outcome::Outcome;
use crate::ui::Ui;
use anemoe_mac::{CommandDone, serve_parent};

/// Do one step of another command.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_: Args, _: &Ui) -> anyhow::Result<Outcome> {
    serve_parent(&|name, arguments| run_command(name, arguments).map_err(|e| sentence(&e)))?;
    Ok(Outcome::Done)
}

/// Runs one of the commands that `verify-on-mac` consists of.
fn run_command(name: &str, arguments: &[String]) -> anyhow::Result<CommandDone> {
    let ui = Ui::inner();
    let outcome = match name {
        "bench" => execute::<bench::Args>(parse("bench", arguments)?, "bench", &ui),
        "build" => execute::<build::Args>(parse("build", arguments)?, "build", &ui),
        "check" => check::run(parse("check", arguments)?, &ui),
        "compile" => compile::run(parse("compile", arguments)?, &ui),
        "doctor" => doctor::run(parse("doctor", arguments)?, &ui),
        "golden" => execute::<golden::Args>(parse("golden", arguments)?, "golden", &ui),
        "predict-speed" => execute::<predict_speed::Args>(parse("predict-speed", arguments)?, "predict_speed", &ui),
        "tune" => tune::run(parse("tune", arguments)?, &ui),
        "validate" => execute::<validate::Args>(parse("validate", arguments)?, "validate", &ui),
        _ => anyhow::bail!("`{name}` is not a command that a step does"),
    }?;
    let passed = matches!(outcome, Outcome::Done);
    Ok(CommandDone { passed, document: ui.into_document().unwrap_or_default() })
}
