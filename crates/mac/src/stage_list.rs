//! Stages of a verification, in the order in which they run.

use crate::child::Ended;
use serde::{Deserialize, Serialize};

// Files of the work folder, and entries of a report.
pub const BUNDLE: &str = "bundle.anemoe";
pub const FORMS: &str = "forms.toml";
pub const PLAN: &str = "plan.json";
pub const BENCH: &str = "bench.json";
pub const SYSTEM: &str = "system.json";
pub const PACKAGES: &str = "packages.json";

/// Longest reason of a stage, in characters.
pub const MAX_REASON: usize = 600;

/// A stage.
pub struct MacStage {
    /// Name.
    pub name: &'static str,
    /// Description for people.
    pub what: &'static str,
    /// Command of anemoe; empty for the stages `soak` and `energy`. `@NAME` is a file of the work folder, `>NAME` a file or
    /// folder there that the stage makes, and words in braces stand for settings, see [`crate::verification::Verification`].
    pub job: &'static str,
}

const fn stage(name: &'static str, what: &'static str, job: &'static str) -> MacStage {
    MacStage { name, what, job }
}

/// All stages; those behind `build` run its bundle.
pub const STAGES: [MacStage; 10] = [
    stage("doctor", "system, chip, memory, disks", "doctor"),
    stage(
        "tune",
        "each sort of shard in each form: compiled, placed, timed, compared",
        "tune {checkpoint} -o >forms.toml --work >tune --force --quant {quant} --tokens {tokens} \
             --calls {calls} --timeout {timeout}",
    ),
    stage(
        "build",
        "the bundle in the forms that were chosen",
        "build {checkpoint} -o >bundle.anemoe --quant {quant} --tokens {tokens} --skip-gates --no-journal {--forms}",
    ),
    stage(
        "compile",
        "packages compiled, every function loaded",
        "compile @bundle.anemoe --timeout {timeout}",
    ),
    stage(
        "check",
        "where each operation is planned, with negative controls",
        "check @bundle.anemoe --device --save >plan.json --force --no-journal --timeout {timeout}",
    ),
    stage("soak", "thousands of passes with states, memory and numbers watched", ""),
    stage(
        "validate",
        "golden gate on the device",
        "validate @bundle.anemoe --golden {golden} --backend coreml --no-journal",
    ),
    stage(
        "bench",
        "speed at each token count",
        "bench @bundle.anemoe --backend coreml --save >bench.json --force --no-journal --context {context} \
             --decode {decode} --verify-tokens {verified} --prefill {prompts}",
    ),
    stage("predict", "speed as predicted, to calibrate by", "predict-speed @bundle.anemoe --chip {chip}"),
    stage("energy", "power through powermetrics, where it may be run", ""),
];

/// Record of a stage.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StageRecord {
    /// Name of the stage.
    pub stage: String,
    /// Duration, in seconds.
    pub seconds: f64,
    /// End.
    #[serde(flatten)]
    pub ended: Ended,
}

impl MacStage {
    /// Lists the files and folders of the work folder that the stage makes.
    pub fn makes(&self) -> impl Iterator<Item = &'static str> {
        self.job.split(' ').filter_map(|word| word.strip_prefix('>'))
    }

    /// Returns the name of the stage's entry in a report, and of its file in the work folder.
    pub fn entry(&self) -> String {
        format!("stages/{}.json", self.name)
    }
}

/// Tells whether a report has an entry of this name.
pub fn is_entry(name: &str) -> bool {
    [SYSTEM, PACKAGES, PLAN, BENCH, FORMS].contains(&name) || STAGES.iter().any(|s| s.entry() == name)
}
