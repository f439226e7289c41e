//! `anemoe step`: one step of another command, in a process of its own. `anemoe help` does not show it.

use super::reproduce::command::parse;
use super::{bench, build, check, compile, doctor, golden, predict_speed, tune, validate};
use crate::command::{Command, CommandReport, complete};
use crate::error_report::sentence;
use crate::outcome::Outcome;
use crate::ui::Ui;
use anemoe_mac::{CommandDone, serve_parent};
use serde::Serialize;
use std::io;

/// Do one step of another command.
#[derive(clap::Args)]
pub struct Args {}

impl Command for Args {
    type Report = StepDone;

    fn run(self, _: &Ui) -> anyhow::Result<StepDone> {
        serve_parent(&|name, arguments| run_command(name, arguments).map_err(|e| sentence(&e)))?;
        Ok(StepDone)
    }
}

/// A step whose result its parent has.
#[derive(Serialize)]
pub struct StepDone;

impl CommandReport for StepDone {
    fn print(&self, _: &Ui) -> io::Result<()> {
        Ok(())
    }
}

/// Runs one of the commands that `verify-on-mac` consists of.
fn run_command(name: &str, arguments: &[String]) -> anyhow::Result<CommandDone> {
    match name {
        "bench" => done::<bench::Args>("bench", arguments),
        "build" => done::<build::Args>("build", arguments),
        "check" => done::<check::Args>("check", arguments),
        "compile" => done::<compile::Args>("compile", arguments),
        "doctor" => done::<doctor::Args>("doctor", arguments),
        "golden" => done::<golden::Args>("golden", arguments),
        "predict-speed" => done::<predict_speed::Args>("predict-speed", arguments),
        "tune" => done::<tune::Args>("tune", arguments),
        "validate" => done::<validate::Args>("validate", arguments),
        _ => anyhow::bail!("`{name}` is not a command that a step does"),
    }
}

fn done<C: Command + clap::Args>(name: &'static str, arguments: &[String]) -> anyhow::Result<CommandDone> {
    let report = complete(parse::<C>(name, arguments)?, name, &Ui::inner())?;
    let passed = matches!(report.outcome(), Outcome::Done);
    let document = serde_json::to_value(&report)?;
    report.go_on()?;
    Ok(CommandDone { passed, document })
}
