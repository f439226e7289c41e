//! Risky work in a process of its own: a crash or a hang becomes a report.
//!
//! ```text
//! command --Work, one line of JSON--> anemoe step --Reply, the last line of JSON--> Ended
//!                                                 --reports of progress, a line each--> Limit::Silence
//!         --standard input: `stop` ends endless work; its end tells the child that the command is gone
//! ```

mod child;
mod risky;

pub use child::{Ended, Limit, ParentLink, Worker, in_child, serve};
pub use risky::{ChildFailure, Risky, RiskyArgs};

use anemoe_gates::soak::SoakLength;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Work of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "work", rename_all = "snake_case")]
pub enum Work {
    /// Compiles a package.
    Compile {
        /// The package.
        package: PathBuf,
        /// Place of the compiled model.
        target: PathBuf,
    },
    /// Loads functions, one after the other.
    Load {
        /// The package.
        package: PathBuf,
        /// The compiled model.
        compiled: PathBuf,
        /// Names of the functions.
        functions: Vec<String>,
    },
    /// Asks for the plans of functions.
    Plan {
        /// The package.
        package: PathBuf,
        /// The compiled model.
        compiled: PathBuf,
        /// Names of all functions of the package.
        functions: Vec<String>,
        /// True if the CPU alone is allowed.
        cpu_only: bool,
    },
    /// Runs the trial of a form.
    Measure {
        /// Folder of the trial.
        folder: PathBuf,
        /// Packages that Core ML runs, each with its compiled model.
        packages: Vec<(PathBuf, PathBuf)>,
        /// Tokens of a call.
        tokens: usize,
        /// Number of calls.
        calls: usize,
    },
    /// Soaks a bundle on Core ML.
    Soak {
        /// The bundle.
        bundle: PathBuf,
        /// Shards that Core ML runs, while the CPU executor runs all others; empty for all shards.
        only: Vec<String>,
        /// Length of the soak.
        length: SoakLength,
    },
    /// Runs a bundle on Core ML until it is told to stop, and reports progress once everything is loaded.
    Run {
        /// The bundle.
        bundle: PathBuf,
    },
    /// Runs a whole command, whose document is kept.
    Command {
        /// Name of the command.
        command: String,
        /// Arguments of the command.
        arguments: Vec<String>,
    },
}

impl Work {
    /// Returns the name of the step, for people.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Compile { .. } => "compile",
            Work::Load { .. } => "load",
            Work::Plan { .. } => "plan",
            Work::Measure { .. } => "measure",
            Work::Soak { .. } => "soak",
            Work::Run { .. } => "run",
            Work::Command { .. } => "command",
        }
    }

    /// Tells whether the user reads along: messages go to standard error as they come.
    pub fn speaks(&self) -> bool {
        matches!(self, Work::Command { .. })
    }
}

/// Answer to [`Work::Command`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CommandDone {
    /// True if the command's gate passed, or the command has no gate.
    pub passed: bool,
    /// Document of the command.
    pub document: serde_json::Value,
}

/// Seconds to load each function, by name.
pub type LoadSeconds = BTreeMap<String, f64>;
