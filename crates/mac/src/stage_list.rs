//! Stages of a verification, in the order in which they run.

use crate::child::Ended;
use serde::{Deserialize, Serialize};

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
    /// Description for people.
    pub what: &'static str,
    /// [`SOAK`], [`ENERGY`], or a command of anemoe: `@NAME` is a file of the work folder, and words in braces stand for
    /// settings, see [`crate::verification::Verification`].
    pub job: &'static str,
    /// Files and folders of the work folder that the stage makes.
    pub makes: &'static [&'static str],
}

/// Job of the stage that soaks the bundle.
pub const SOAK: &str = "soak";
/// Job of the stage that reads power while the bundle runs.
pub const ENERGY: &str = "energy";

const fn stage(
    name: &'static str,
    what: &'static str,
    job: &'static str,
    makes: &'static [&'static str],
) -> MacStage {
    MacStage { name, what, job, makes }
}

/// All stages; those behind `build` run its bundle.
pub const STAGES: [MacStage; 10] = [
    stage("doctor", "system, chip, memory, disks", "doctor", &[]),
    stage(
        "tune",
        "each sort of shard in each form: compiled, placed, timed, compared",
        "tune {checkpoint} -o @forms.toml --work @tune --force --quant {quant} --tokens {tokens} \
             --calls {calls} --timeout {timeout}",
        &[FORMS, TRIALS],
    ),
    stage(
        "build",
        "the bundle in the forms that were chosen",
        "build {checkpoint} -o @bundle.anemoe --quant {quant} --tokens {tokens} --skip-gates --no-journal {--forms}",
        &[BUNDLE],
    ),
    stage(
        "compile",
        "every package compiled, every function loaded",
        "compile @bundle.anemoe --timeout {timeout}",
        &[],
    ),
    stage(
        "check",
        "where each operation is planned, with negative controls",
        "check @bundle.anemoe --device --save @plan.json --force --no-journal --timeout {timeout}",
        &[PLAN],
    ),
    stage("soak", "thousands of passes with states, memory and numbers watched", SOAK, &[]),
    stage(
        "validate",
        "golden gate on the device",
        "validate @bundle.anemoe --golden {golden} --backend coreml --no-journal",
        &[],
    ),
    stage(
        "bench",
        "speed at each token count",
        "bench @bundle.anemoe --backend coreml --save @bench.json --force --no-journal --context {context} \
             --decode {decode} --verify-tokens {verified} --prefill {prompts}",
        &[BENCH],
    ),
    stage(
        "predict",
        "speed as predicted, to calibrate by",
        "predict-speed @bundle.anemoe --chip {chip}",
        &[],
    ),
    stage("energy", "power through powermetrics, where it may be run", ENERGY, &[]),
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
    /// Returns the name of the stage's entry in a report, and of its file in the work folder.
    pub fn entry(&self) -> String {
        format!("stages/{}.json", self.name)
    }
}

/// Tells whether a report has an entry of this name.
pub fn is_entry(name: &str) -> bool {
    [SYSTEM, PACKAGES, PLAN, BENCH, FORMS].contains(&name) || STAGES.iter().any(|s| s.entry() == name)
}
