//! Stages of a verification, and how they end.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A stage, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum StageName {
    /// The machine.
    Doctor,
    /// Forms that the Neural Engine takes.
    Tune,
    /// The bundle in these forms.
    Build,
    /// Compiled models.
    Compile,
    /// Placement.
    Check,
    /// Thousands of calls.
    Soak,
    /// Golden gate on the device.
    Validate,
    /// Speed.
    Bench,
    /// Speed as predicted, to be held against the bench.
    Predict,
    /// Power, through `powermetrics`.
    Energy,
}

impl StageName {
    /// All stages, in order.
    pub const ALL: [StageName; 10] = [
        StageName::Doctor,
        StageName::Tune,
        StageName::Build,
        StageName::Compile,
        StageName::Check,
        StageName::Soak,
        StageName::Validate,
        StageName::Bench,
        StageName::Predict,
        StageName::Energy,
    ];

    /// Returns the name of the stage.
    pub const fn name(self) -> &'static str {
        match self {
            StageName::Doctor => "doctor",
            StageName::Tune => "tune",
            StageName::Build => "build",
            StageName::Compile => "compile",
            StageName::Check => "check",
            StageName::Soak => "soak",
            StageName::Validate => "validate",
            StageName::Bench => "bench",
            StageName::Predict => "predict",
            StageName::Energy => "energy",
        }
    }

    /// Returns the name of the stage's entry in a report.
    pub fn entry(self) -> String {
        format!("stages/{}.json", self.name())
    }

    /// Returns the command whose document the stage has.
    pub const fn command(self) -> &'static str {
        match self {
            StageName::Predict => "predict-speed",
            other => other.name(),
        }
    }

    /// Tells whether the stage needs the bundle of an earlier stage.
    pub const fn needs_bundle(self) -> bool {
        !matches!(self, StageName::Doctor | StageName::Tune | StageName::Build)
    }
}

/// End of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageEnd {
    /// Done, or the gate passed.
    Done,
    /// The gate failed, or a part of the stage did.
    Failed,
    /// The stage was refused with an error.
    Refused,
    /// The process ended without an answer.
    Crashed,
    /// The process had to be ended.
    Hung,
    /// The stage was not run.
    Skipped,
}

impl StageEnd {
    /// Returns a word for people.
    pub const fn word(self) -> &'static str {
        match self {
            StageEnd::Done => "done",
            StageEnd::Failed => "failed",
            StageEnd::Refused => "refused",
            StageEnd::Crashed => "crashed",
            StageEnd::Hung => "hung",
            StageEnd::Skipped => "skipped",
        }
    }

    /// Tells whether a later run need not repeat the stage.
    pub const fn is_finished(self) -> bool {
        !matches!(self, StageEnd::Skipped)
    }

    /// Tells whether the end is a finding against the Mac or the bundle.
    pub const fn is_failure(self) -> bool {
        !matches!(self, StageEnd::Done | StageEnd::Skipped)
    }
}

/// Record of a stage.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StageRecord {
    /// Stage.
    pub stage: StageName,
    /// End.
    pub end: StageEnd,
    /// Duration, in seconds.
    pub seconds: f64,
    /// Reason, unless the stage is done.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Document of the stage's command; null without one.
    #[serde(default)]
    pub document: Value,
}
