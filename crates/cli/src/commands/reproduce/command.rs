//! Commands that a recipe runs, in this process.

use super::super::{bench, build, check, generate, golden, plan, trace, validate};
use crate::args::planning::clap_message;
use crate::outcome::Outcome;
use crate::ui::Ui;
use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;

/// A command that brings figures. The gates of a recipe are such commands, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum GateCommand {
    /// Sizes, counts and predicted placement of the whole model.
    Plan,
    /// Gates of the representative shards, scale-out, gates of the whole.
    Build,
    /// Placement of the packages.
    Check,
    /// Logits and tokens; with `--probes`, shards.
    Validate,
    /// Hidden states after every layer.
    Trace,
    /// Text and drafts.
    Generate,
    /// Speed.
    Bench,
}

impl GateCommand {
    /// Returns the name on the command line and in the registry.
    pub const fn name(self) -> &'static str {
        match self {
            GateCommand::Plan => "plan",
            GateCommand::Build => "build",
            GateCommand::Check => "check",
            GateCommand::Validate => "validate",
            GateCommand::Trace => "trace",
            GateCommand::Generate => "generate",
            GateCommand::Bench => "bench",
        }
    }

    /// Tells whether the command reads the bundle that `build` makes.
    pub const fn needs_bundle(self) -> bool {
        !matches!(self, GateCommand::Plan | GateCommand::Build)
    }

    /// Tells whether the command compares with a golden.
    pub const fn needs_golden(self) -> bool {
        matches!(self, GateCommand::Validate | GateCommand::Trace)
    }

    /// Runs the command with these arguments; returns its document, and whether its gate passed.
    ///
    /// # Errors
    /// The command fails.
    pub fn run(self, arguments: &[String]) -> anyhow::Result<(Value, bool)> {
        let name = self.name();
        let ui = Ui::inner();
        let outcome = match self {
            GateCommand::Plan => plan::run(parse(name, arguments)?, &ui),
            GateCommand::Build => build::run(parse(name, arguments)?, &ui),
            GateCommand::Check => check::run(parse(name, arguments)?, &ui),
            GateCommand::Validate => validate::run(parse(name, arguments)?, &ui),
            GateCommand::Trace => trace::run(parse(name, arguments)?, &ui),
            GateCommand::Generate => generate::run(parse(name, arguments)?, &ui),
            GateCommand::Bench => bench::run(parse(name, arguments)?, &ui),
        };
        let passed = matches!(outcome?, Outcome::Done);
        Ok((ui.into_document().unwrap_or_default(), passed))
    }
}

/// Runs the checkpoint in f32 and writes the golden.
///
/// # Errors
/// The command fails.
pub(super) fn make_golden(arguments: &[String]) -> anyhow::Result<()> {
    golden::run(parse("golden", arguments)?, &Ui::inner())?;
    Ok(())
}

/// Parses arguments as the command line of a command.
pub fn parse<A: clap::Args>(name: &'static str, arguments: &[String]) -> anyhow::Result<A> {
    let command = A::augment_args(clap::Command::new(name).no_binary_name(true));
    let read = command.try_get_matches_from(arguments).and_then(|m| A::from_arg_matches(&m));
    read.map_err(|e| anyhow::anyhow!("{}", clap_message(&e)))
        .with_context(|| format!("{name} {}", arguments.join(" ")))
}
