//! Commands that a recipe runs, in this process.

use super::super::{bench, build, check, generate, golden, plan, trace, validate};
use crate::args::planning::{PlanArgs, clap_message};
use crate::command::execute;
use crate::outcome::Outcome;
use crate::ui::Ui;
use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::Value;
use std::ffi::{OsStr, OsString};

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

    /// Returns the options that a recipe may give, besides those of a plan for `plan` and `build`: none that writes
    /// outside the folder of the run, sends something away, or replaces what the recipe says.
    const fn own_options(self) -> &'static str {
        match self {
            GateCommand::Plan => "all evidence",
            GateCommand::Build => {
                "golden jobs max-memory no-journal note probe-layers probe-seed probes skip-gates"
            }
            GateCommand::Check => {
                "chip device evidence no-journal no-verify note ops report strict system target timeout units"
            }
            GateCommand::Validate => {
                "backend fast golden importance max-loaded min-cosine no-journal no-verify note probes seed shards"
            }
            GateCommand::Trace => "checkpoint golden importance no-journal no-verify note precision swap",
            GateCommand::Generate => {
                "backend draft-max fast ignore-eos max-loaded ngram-corpus ngram-max ngram-min no-fuse no-verify \
                 precision prefill-chunk seed speculate states temperature top-k top-p"
            }
            GateCommand::Bench => {
                "against backend context decode drafts fast max-loaded no-fuse no-journal no-verify note ops precision \
                 prefill prefill-chunk repetitions seed sequences shards states verify-tokens"
            }
        }
    }

    /// Checks that the words of a recipe are options that it may give.
    ///
    /// # Errors
    /// A word is none of these options, nor the value of one.
    pub fn check_options(self, words: &[String]) -> anyhow::Result<()> {
        let command = match self {
            GateCommand::Plan => parser::<plan::Args>(self.name()),
            GateCommand::Build => parser::<build::Args>(self.name()),
            GateCommand::Check => parser::<check::Args>(self.name()),
            GateCommand::Validate => parser::<validate::Args>(self.name()),
            GateCommand::Trace => parser::<trace::Args>(self.name()),
            GateCommand::Generate => parser::<generate::Args>(self.name()),
            GateCommand::Bench => parser::<bench::Args>(self.name()),
        };
        let of_plan = parser::<PlanArgs>("plan");
        let plans = matches!(self, GateCommand::Plan | GateCommand::Build);
        let is_allowed = |name: &str| {
            self.own_options().split(' ').any(|own| own == name)
                || plans && of_plan.get_arguments().any(|a| a.get_long() == Some(name))
        };
        let mut words = words.iter().peekable();
        while let Some(word) = words.next() {
            let name = word.strip_prefix("--").map(|rest| rest.split('=').next().unwrap_or(rest));
            let known = name.filter(|name| is_allowed(name));
            let option = known.and_then(|name| command.get_arguments().find(|a| a.get_long() == Some(name)));
            let Some(option) = option else {
                bail!(
                    "`{}` for `{}`: a recipe gives options as --NAME=VALUE, and none that names outputs or stores: what it \
                     makes is in the folder of the run",
                    word.escape_debug(),
                    self.name()
                );
            };
            if option.get_action().takes_values() && !word.contains('=') {
                words.next_if(|value| !value.starts_with('-'));
            }
        }
        Ok(())
    }

    /// Runs the command with these arguments; returns its document, and whether its gate passed.
    ///
    /// # Errors
    /// The command fails.
    pub fn run(self, arguments: &[OsString]) -> anyhow::Result<(Value, bool)> {
        let name = self.name();
        let ui = Ui::inner();
        let outcome = match self {
            GateCommand::Plan => execute::<plan::Args>(parse(name, arguments)?, "plan", &ui),
            GateCommand::Build => execute::<build::Args>(parse(name, arguments)?, "build", &ui),
            GateCommand::Check => check::run(parse(name, arguments)?, &ui),
            GateCommand::Validate => execute::<validate::Args>(parse(name, arguments)?, "validate", &ui),
            GateCommand::Trace => execute::<trace::Args>(parse(name, arguments)?, "trace", &ui),
            GateCommand::Generate => execute::<generate::Args>(parse(name, arguments)?, "generate", &ui),
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
pub(super) fn make_golden(arguments: &[OsString]) -> anyhow::Result<()> {
    execute::<golden::Args>(parse("golden", arguments)?, "golden", &Ui::inner())?;
    Ok(())
}

/// Makes the parser of a command's arguments.
fn parser<A: clap::Args>(name: &'static str) -> clap::Command {
    A::augment_args(clap::Command::new(name).no_binary_name(true))
}

/// Parses arguments as the command line of a command.
pub fn parse<A: clap::Args>(name: &'static str, arguments: &[impl AsRef<OsStr>]) -> anyhow::Result<A> {
    let words = arguments.iter().map(|a| a.as_ref().to_os_string());
    let read = parser::<A>(name).try_get_matches_from(words).and_then(|m| A::from_arg_matches(&m));
    read.map_err(|e| anyhow::anyhow!("{}", clap_message(&e))).with_context(|| {
        let words: Vec<_> = arguments.iter().map(|a| a.as_ref().to_string_lossy()).collect();
        format!("{name} {}", words.join(" "))
    })
}
