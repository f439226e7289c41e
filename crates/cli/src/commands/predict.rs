//! `anemoe predict`

use crate::args::executor::precision;
use crate::command::{Command, Page};
use crate::files::Overwrite;
use crate::target::expect_package;
use crate::ui::Ui;
use anemoe_runtime::cpu::Precision;
use anemoe_runtime::predict::{InputFile, Prediction, StepResults};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Most classes that are printed; `--json` has all.
const PRINTED_CLASSES: usize = 5;

/// Run one Core ML package, from whatever tool, on arrays and pictures from files.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe predict model.mlpackage --inputs step0.npz --inputs step1.npz --outputs 'out{}.npz'\n  anemoe predict classifier.mlpackage --inputs cat.jpg\n  anemoe predict model.mlpackage --inputs image=cat.png scale=scale.npy --outputs out.npz"
)]
pub struct Args {
    /// The .mlpackage, or a .mlmodel.
    package: PathBuf,
    /// Inputs: an archive with an array per input, and state:NAME to start a state from; NAME=F.png, NAME=F.jpg or NAME=F.npy for
    /// one input, F.png where one input alone is an image. A file that gives what the step has already begins the next step;
    /// states carry over. Inputs with a default may be left out.
    #[arg(long, value_name = "A.npz", num_args = 1..)]
    inputs: Vec<PathBuf>,
    /// File to write: an archive, or a .png for the only image; {} becomes the number of the step, without it only the last
    /// step is written.
    #[arg(long, value_name = "OUT{}.npz")]
    outputs: Option<PathBuf>,
    /// Function to run [default: the package's own].
    #[arg(long, value_name = "NAME")]
    function: Option<String>,
    /// fp16 rounds every fp16 result, as the device does; fp32 rounds nothing.
    #[arg(long, value_parser = precision(), default_value = "fp16")]
    precision: Precision,
    #[command(flatten)]
    overwrite: Overwrite,
}

impl Command for Args {
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
        expect_package(&self.package)?;
        let prediction = Prediction {
            package: self.package,
            function: self.function,
            precision: self.precision,
            inputs: InputFile::steps(self.inputs.iter().map(|path| InputFile::parse(path))),
            outputs: self.outputs,
        };
        let inputs: Vec<&Path> = prediction.inputs.iter().flatten().map(InputFile::path).collect();
        for target in prediction.targets() {
            self.overwrite.output_beside(&target, &inputs)?;
        }
        let steps = prediction.run()?.into_iter().enumerate();
        // A step that is neither written nor asked for alone has nothing to say.
        let is_said = |step: &StepResults| {
            step.path.is_some() || step.classes.is_some() || prediction.outputs.is_none()
        };
        let mut lines = Vec::new();
        let outputs = steps.filter(|(_, step)| is_said(step)).map(|(i, step)| output(i, step, &mut lines));
        let outputs: Vec<Value> = outputs.collect();
        Ok(Page::new(json!({"steps": prediction.inputs.len(), "outputs": outputs}), lines))
    }
}

/// Makes the document of a step's outputs, and adds their lines: shapes by name, and the outputs of a classifier, as the
/// package names them.
fn output(i: usize, step: StepResults, out: &mut Vec<String>) -> Value {
    let path = step.path.as_ref().map(|p| p.display().to_string());
    let list: Vec<String> = step.arrays.iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
    let name = path.clone().unwrap_or_else(|| format!("step {i}"));
    out.push(format!("{name}: {}", list.join(", ")));
    let arrays: BTreeMap<String, Vec<usize>> = step.arrays.into_iter().collect();
    let mut document = json!({"path": path, "arrays": arrays});
    if let Some(classes) = step.classes {
        let most = classes.ranked.iter().take(PRINTED_CLASSES);
        let most: Vec<String> = most.map(|(label, p)| format!("{label} {p:.4}")).collect();
        out.push(format!("  {}: {}", classes.label, most.join(", ")));
        let all: Map<String, Value> =
            classes.ranked.iter().map(|(label, p)| (label.to_string(), json!(p))).collect();
        let first = classes.ranked.first().map(|(label, _)| label);
        document["classes"] = json!({classes.label: first, classes.probabilities: all});
    }
    document
}
