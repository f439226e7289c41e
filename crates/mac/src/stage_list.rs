//! Stages of a verification, in the order in which they run.

use anemoe_coreml::causes::End;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Bundle in the work folder.
pub const BUNDLE: &str = "bundle.anemoe";
/// Folder of the trials of forms.
pub const TRIALS: &str = "tune";
/// Golden that is made if the checkpoint has none.
pub const GOLDEN: &str = "golden.npz";
/// File and entry with the forms.
pub const FORMS: &str = "forms.toml";
/// File and entry with the plan report.
pub const PLAN: &str = "plan.json";
/// File and entry with the saved bench.
pub const BENCH: &str = "bench.json";
/// Entry with the system.
pub const SYSTEM: &str = "system.json";
/// Entry with the packages.
pub const PACKAGES: &str = "packages.json";

/// A stage.
pub struct MacStage {
    /// Name.
    pub name: &'static str,
    /// Rough time: a guess, since nobody has run this on a Mac, from numbers of calls and the times of other compilers.
    pub time: &'static str,
    /// Description for people.
    pub what: &'static str,
    /// Work of the stage.
    pub job: StageJob,
    /// Files and folders of the work folder that the stage makes.
    pub makes: &'static [&'static str],
}

/// Work of a stage.
pub enum StageJob {
    /// Runs a command of anemoe; words in braces stand for settings, see [`crate::verification::Verification`].
    Command(&'static str),
    /// Soaks the bundle.
    Soak,
    /// Reads power while the bundle runs.
    Energy,
}

use StageJob::{Command, Energy, Soak};

const fn stage(
    name: &'static str,
    time: &'static str,
    what: &'static str,
    job: StageJob,
    makes: &'static [&'static str],
) -> MacStage {
    MacStage { name, time, what, job, makes }
}

/// All stages; those behind `build` run its bundle.
pub const STAGES: [MacStage; 10] = [
    stage("doctor", "seconds", "system, chip, memory, disks", Command("doctor"), &[]),
    stage(
        "tune",
        "10 to 40 min",
        "each sort of shard in each form: compiled, placed, timed, compared",
        Command(
            "tune {checkpoint} -o {forms} --work {trials} --force --quant {quant} --tokens {tokens} \
             --calls {calls} --timeout {timeout}",
        ),
        &[FORMS, TRIALS],
    ),
    stage(
        "build",
        "seconds",
        "the bundle in the forms that were chosen",
        Command(
            "build {checkpoint} -o {bundle} --quant {quant} --tokens {tokens} --skip-gates --no-journal {--forms}",
        ),
        &[BUNDLE],
    ),
    stage(
        "compile",
        "1 to 10 min",
        "every package compiled, every function loaded",
        Command("compile {bundle} --timeout {timeout}"),
        &[],
    ),
    stage(
        "check",
        "1 min",
        "where each operation is planned, with negative controls",
        Command("check {bundle} --device --save {plan} --force --no-journal --timeout {timeout}"),
        &[PLAN],
    ),
    stage("soak", "6 min and more", "thousands of passes with states, memory and numbers watched", Soak, &[]),
    stage(
        "validate",
        "1 min",
        "golden gate on the device",
        Command("validate {bundle} --golden {golden} --backend coreml --no-journal"),
        &[],
    ),
    stage(
        "bench",
        "2 min",
        "speed at each token count",
        Command(
            "bench {bundle} --backend coreml --save {bench} --force --no-journal --context {context} \
             --decode {decode} --verify-tokens {verified} --prefill {prompts}",
        ),
        &[BENCH],
    ),
    stage(
        "predict",
        "seconds",
        "speed as predicted, to calibrate by",
        Command("predict-speed {bundle} --chip {chip}"),
        &[],
    ),
    stage("energy", "1 min", "power through powermetrics, where it may be run", Energy, &[]),
];

/// Record of a stage.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StageRecord {
    /// Name of the stage.
    pub stage: String,
    /// End.
    pub end: End,
    /// Duration, in seconds.
    pub seconds: f64,
    /// Reason, unless the stage is done.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Document of the stage; null without one.
    #[serde(default)]
    pub document: Value,
}

impl MacStage {
    /// Returns the name of the stage's entry in a report, and of its file in the work folder.
    pub fn entry(&self) -> String {
        format!("stages/{}.json", self.name)
    }
}

/// Tells whether a report has an entry of this name.
pub fn is_entry(name: &str) -> bool {
    [SYSTEM, PACKAGES, PLAN, BENCH, FORMS].contains(&name) || STAGES.iter().any(|s| s.entry() == name)
}
