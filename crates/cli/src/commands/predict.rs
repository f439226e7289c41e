//! `anemoe predict`

use crate::args::executor::PrecisionArg;
use crate::files::Overwrite;
use crate::outcome::Outcome;
use crate::target::expect_package;
use crate::ui::Ui;
use anemoe_runtime::predict::Prediction;
use std::path::PathBuf;

/// Run one Core ML package, from whatever tool, on arrays from files.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe predict model.mlpackage --inputs step0.npz --inputs step1.npz --outputs 'out{}.npz'"
)]
pub struct Args {
    /// The .mlpackage.
    package: PathBuf,
    /// Archive with an array per input, and state:NAME to start a state from; several run in order, states carry over.
    #[arg(long, value_name = "A.npz", required = true, num_args = 1..)]
    inputs: Vec<PathBuf>,
    /// Archive to write; {} becomes the number of the step, without it only the last step is written.
    #[arg(long, value_name = "OUT{}.npz")]
    outputs: PathBuf,
    /// Function to run [default: the package's own].
    #[arg(long, value_name = "NAME")]
    function: Option<String>,
    /// fp16 rounds every fp16 result, as the device does; fp32 rounds nothing.
    #[arg(long, value_enum, default_value = "fp16")]
    precision: PrecisionArg,
    #[command(flatten)]
    overwrite: Overwrite,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    expect_package(&args.package)?;
    let prediction = Prediction {
        package: args.package,
        function: args.function,
        precision: args.precision.into(),
        inputs: args.inputs,
        outputs: args.outputs,
    };
    for target in prediction.targets() {
        args.overwrite.output(&target)?;
    }
    let written = prediction.run()?;
    let mut document = Vec::new();
    for file in &written {
        let arrays: serde_json::Map<String, serde_json::Value> =
            file.arrays.iter().map(|(name, shape)| (name.clone(), serde_json::json!(shape))).collect();
        document.push(serde_json::json!({"path": file.path.display().to_string(), "arrays": arrays}));
        let list: Vec<String> = file.arrays.iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
        ui.line(format!("{}: {}", file.path.display(), list.join(", ")))?;
    }
    ui.document(&serde_json::json!({"steps": prediction.inputs.len(), "outputs": document}))?;
    Ok(Outcome::Done)
}
