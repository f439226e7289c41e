//! `anemoe step`: one step of another command, in a process of its own. `anemoe help` does not show it.

use super::{
    bench, build, check, compile, doctor, generate, golden, plan, predict_speed, trace, tune, validate,
};
use crate::command::{Command, CommandReport, Page, parse};
use crate::error_report::sentence;
use crate::ui::Ui;
use anemoe_mac::{CommandDone, serve_parent};
use serde_json::Value;
use std::ffi::OsStr;

/// Do one step of another command.
#[derive(clap::Args)]
pub struct Args {}

impl Command for Args {
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
        serve_parent(&|name, arguments| run_command(name, arguments).map_err(|e| sentence(&e)))?;
        // Its parent has the result.
        Ok(Page::new(Value::Null, [""; 0]))
    }
}

/// Runs one of the commands of which recipes and `verify-on-mac` consist.
pub fn run_command(name: &str, arguments: &[impl AsRef<OsStr>]) -> anyhow::Result<CommandDone> {
    match name {
        "bench" => done::<bench::Args>("bench", arguments),
        "build" => done::<build::Args>("build", arguments),
        "check" => done::<check::Args>("check", arguments),
        "compile" => done::<compile::Args>("compile", arguments),
        "doctor" => done::<doctor::Args>("doctor", arguments),
        "generate" => done::<generate::Args>("generate", arguments),
        "golden" => done::<golden::Args>("golden", arguments),
        "plan" => done::<plan::Args>("plan", arguments),
        "predict-speed" => done::<predict_speed::Args>("predict-speed", arguments),
        "trace" => done::<trace::Args>("trace", arguments),
        "tune" => done::<tune::Args>("tune", arguments),
        "validate" => done::<validate::Args>("validate", arguments),
        _ => anyhow::bail!("`{name}` is not a command that a step does"),
    }
}

fn done<C: Command + clap::Args>(
    name: &'static str,
    arguments: &[impl AsRef<OsStr>],
) -> anyhow::Result<CommandDone> {
    let report = parse::<C>(name, arguments)?.run(&Ui::inner())?;
    let (passed, document) = (report.passed(), serde_json::to_value(&report)?);
    report.go_on()?;
    Ok(CommandDone { passed, document })
}
