//! `anemoe calibrate`

use crate::args::reading::Reading;
use crate::args::text_windows::TextArgs;
use crate::command::{Command, Page};
use crate::files::Overwrite;
use crate::ui::Ui;
use anemoe_convert::importance::Importance;
use anemoe_gates::calibrate::moments;
use serde_json::json;
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

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        let started = Instant::now();
        self.overwrite.output(&self.out)?;
        let checkpoint = self.reading.open(&self.checkpoint)?;
        let windows = self.text.of_checkpoint(&checkpoint)?;
        let bar = ui.bar(0, "layers");
        let found = moments(&checkpoint, &windows, &mut || bar.inc(1))?;
        Importance::write(&self.out, &found)?;
        let (path, seconds) = (self.out.display().to_string(), started.elapsed().as_secs_f64());
        let (tensors, tokens) = (found.len(), windows.iter().map(Vec::len).sum::<usize>());
        let line = format!("{path}: inputs of {tensors} tensors over {tokens} tokens, in {seconds:.1} s");
        let windows = windows.len();
        let document = json!({"path": path, "tensors": tensors, "tokens": tokens, "windows": windows, "seconds": seconds});
        Ok(Page::new(document, [line]))
    }
}
