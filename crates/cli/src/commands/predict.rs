//! `anemoe predict`

use crate::args::executor::PrecisionArg;
use crate::files::Overwrite;
use crate::outcome::Outcome;
use crate::target::expect_package;
use crate::ui::Ui;
use anemoe_runtime::predict::{InputFile, PredictedClasses, Prediction};
use serde_json::{Map, Value, json};
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
        inputs: InputFile::steps(args.inputs.iter().map(|path| input_file(path))),
        outputs: args.outputs,
    };
    let inputs: Vec<&Path> = prediction.inputs.iter().flatten().map(InputFile::path).collect();
    for target in prediction.targets() {
        args.overwrite.output_beside(&target, &inputs)?;
    }
    let mut document = Vec::new();
    for (i, step) in prediction.run()?.iter().enumerate() {
        // A step that is neither written nor asked for alone has nothing to say.
        if step.path.is_none() && step.classes.is_none() && prediction.outputs.is_some() {
            continue;
        }
        let arrays: Map<String, Value> =
            step.arrays.iter().map(|(name, shape)| (name.clone(), json!(shape))).collect();
        let path = step.path.as_ref().map(|p| p.display().to_string());
        let list: Vec<String> = step.arrays.iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
        ui.line(format!("{}: {}", path.clone().unwrap_or_else(|| format!("step {i}")), list.join(", ")))?;
        let mut entry = json!({"path": path, "arrays": arrays});
        if let Some(classes) = &step.classes {
            entry["classes"] = by_name(classes);
            let most: Vec<String> = classes.ranked.iter().take(PRINTED_CLASSES).map(shown).collect();
            ui.line(format!("  {}: {}", classes.label, most.join(", ")))?;
        }
        document.push(entry);
    }
    ui.document(&json!({"steps": prediction.inputs.len(), "outputs": document}))?;
    Ok(Outcome::Done)
}

/// Reads an input as [`InputFile::parse`] does, also where the path behind `NAME=` is not text.
fn input_file(given: &Path) -> InputFile {
    #[cfg(unix)]
    if given.to_str().is_none() {
        use std::os::unix::ffi::OsStrExt;
        let bytes = given.as_os_str().as_bytes();
        let at = bytes.iter().position(|b| *b == b'=');
        let named = at.map(|at| (std::str::from_utf8(&bytes[..at]), &bytes[at + 1..]));
        if let Some((Ok(name), file)) = named
            && !name.contains('/')
            && !bytes.to_ascii_lowercase().ends_with(b".npz")
        {
            let path = std::ffi::OsStr::from_bytes(file).into();
            return InputFile::Single { input: Some(name.into()), path };
        }
    }
    InputFile::parse(given)
}

fn shown((label, probability): &(anemoe_runtime::cpu::ClassLabel, f32)) -> String {
    format!("{label} {probability:.4}")
}

/// Returns the outputs of a classifier as the package names them.
fn by_name(classes: &PredictedClasses) -> Value {
    let all: Map<String, Value> =
        classes.ranked.iter().map(|(label, p)| (label.to_string(), json!(p))).collect();
    let first = classes.ranked.first().map(|(label, _)| label);
    json!({classes.label.as_str(): first, classes.probabilities.as_str(): all})
}
