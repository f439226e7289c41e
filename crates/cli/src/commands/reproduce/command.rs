//! Commands that a recipe runs, in this process, and the options that a recipe may give them.

use crate::args::planning::{PlanArgs, clap_message};
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;

/// Command that brings figures, in the order in which gates run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GateCommand {
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

/// Options that a recipe may give, besides those of plans: none that writes outside the folder of the run, sends something
/// away, or replaces what the recipe says.
const OPTIONS: &str = "against all backend checkpoint chip context decode device draft-max drafts evidence fast golden \
    ignore-eos importance jobs max-loaded max-memory min-cosine ngram-corpus ngram-max ngram-min no-fuse no-journal \
    no-verify note ops precision prefill prefill-chunk probe-layers probe-seed probes repetitions report seed sequences \
    shards skip-gates speculate states strict swap system temperature timeout top-k top-p units verify-tokens";

impl GateCommand {
    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        ["plan", "build", "check", "validate", "trace", "generate", "bench"][self as usize]
    }

    /// Tells whether the command reads the bundle that `build` makes.
    pub fn needs_bundle(self) -> bool {
        self > GateCommand::Build
    }

    /// Tells whether the command needs the tokens of a prompt, or of a golden.
    pub const fn needs_prompt(self) -> bool {
        matches!(self, GateCommand::Validate | GateCommand::Trace | GateCommand::Generate)
    }

    /// Checks that the words of a recipe are options that it may give.
    ///
    /// # Errors
    /// A word is none of these options, nor the value of one.
    pub fn check_options(self, words: &[String]) -> anyhow::Result<()> {
        let of_plan = parser::<PlanArgs>("plan");
        let is_allowed = |name: &str| {
            let of_plan = || of_plan.get_arguments().any(|a| a.get_long() == Some(name));
            OPTIONS.split_whitespace().any(|allowed| allowed == name) || !self.needs_bundle() && of_plan()
        };
        let mut takes_value = false;
        for word in words {
            let name = word.strip_prefix("--").map(|rest| rest.split('=').next().unwrap_or(rest));
            if !name.map_or(takes_value && !word.starts_with('-'), is_allowed) {
                bail!(
                    "`{}` for `{}`: a recipe gives options as --NAME=VALUE, and none that names outputs or stores: what it \
                     makes is in the folder of the run",
                    word.escape_debug(),
                    self.name()
                );
            }
            takes_value = name.is_some() && !word.contains('=');
        }
        Ok(())
    }
}

/// Makes the parser of a command's arguments.
fn parser<A: clap::Args>(name: &'static str) -> clap::Command {
    A::augment_args(clap::Command::new(name).no_binary_name(true))
}

/// Parses arguments as the command line of a command.
///
/// # Errors
/// The command has no such arguments.
pub fn parse<A: clap::Args>(name: &'static str, arguments: &[impl AsRef<OsStr>]) -> anyhow::Result<A> {
    let words = arguments.iter().map(|a| a.as_ref().to_os_string());
    let read = parser::<A>(name).try_get_matches_from(words).and_then(|m| A::from_arg_matches(&m));
    read.map_err(|e| anyhow::anyhow!("{}", clap_message(&e))).with_context(|| {
        let words: Vec<_> = arguments.iter().map(|a| a.as_ref().to_string_lossy()).collect();
        format!("{name} {}", words.join(" "))
    })
}
