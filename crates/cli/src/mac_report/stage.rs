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
    /// All of them, in order.
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

    /// Name of the stage.
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

    /// Name of the stage's entry in a report.
    pub fn entry(self) -> String {
        format!("stages/{}.json", self.name())
    }

    /// Command whose document the stage has, by which its figures are known.
    pub const fn command(self) -> &'static str {
        match self {
            StageName::Predict => "predict-speed",
            other => other.name(),
        }
    }

    /// True if the stage needs the bundle of an earlier one.
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
    /// It was refused with an error.
    Refused,
    /// Its process ended without an answer.
    Crashed,
    /// It had to be ended.
    Hung,
    /// It was not run.
    Skipped,
}

impl StageEnd {
    /// Word for people.
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

    /// True if a later run need not do it again.
    pub const fn is_finished(self) -> bool {
        !matches!(self, StageEnd::Skipped)
    }

    /// True if it is a finding against the Mac or the bundle.
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
    /// Seconds that it took.
    pub seconds: f64,
    /// Reason, where it is not done.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Document of its command; null where there is none.
    #[serde(default)]
    pub document: Value,
}
