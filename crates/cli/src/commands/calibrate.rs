//! `anemoe calibrate`

use crate::args::reading::Reading;
use crate::args::text_windows::TextArgs;
use crate::files::Overwrite;
use crate::outcome::Outcome;
use crate::ui::Ui;
use anemoe_convert::importance::Importance;
use anemoe_gates::calibrate::moments;
use std::path::PathBuf;
use std::time::Instant;

/// Measure how much each input of each matrix matters, for `build --importance`.
///
/// An input matters by its mean square over a text, for each expert by itself. `build --importance` weighs errors with it.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe calibrate models/small-gemma4 --text notes.txt -o importance.npz\n  anemoe build models/small-gemma4 -o weighted.anemoe --quant lut4 --importance importance.npz"
)]
pub struct Args {
    /// A Hugging Face folder or a .gguf file.
    checkpoint: PathBuf,
    #[command(flatten)]
    reading: Reading,
    #[command(flatten)]
    text: TextArgs,
    /// The file to write: an array per tensor, `[inputs]` or `[experts, inputs]`.
    #[arg(short, long, value_name = "F.npz")]
    out: PathBuf,
    #[command(flatten)]
    overwrite: Overwrite,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let started = Instant::now();
    args.overwrite.output(&args.out)?;
    let checkpoint = args.reading.open(&args.checkpoint)?;
    let windows = args.text.of_checkpoint(&checkpoint)?;
    let bar = ui.bar(0, "layers");
    let found = moments(&checkpoint, &windows, &mut || bar.inc(1));
    bar.finish_and_clear();
    let found = found?;
    Importance::write(&args.out, &found)?;
    let tokens: usize = windows.iter().map(Vec::len).sum();
    let seconds = started.elapsed().as_secs_f64();
    ui.document(&serde_json::json!({
        "path": args.out.display().to_string(), "tensors": found.len(), "tokens": tokens, "windows": windows.len(), "seconds": seconds,
    }))?;
    ui.line(format!(
        "{}: inputs of {} tensors over {tokens} tokens, in {seconds:.1} s",
        args.out.display(),
        found.len()
    ))?;
    Ok(Outcome::Done)
}
