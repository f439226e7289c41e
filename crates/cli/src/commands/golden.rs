//! `anemoe golden`

use crate::args::prompt::PromptArgs;
use crate::args::reading::Reading;
use crate::command::{Command, Page};
use crate::files::Overwrite;
use crate::gate_reference::with_bar;
use crate::ui::Ui;
use anemoe_gates::checkpoint_text::{bos, tokenizer};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Run a checkpoint in f32, as the reference that bundles are compared with.
///
/// The file, called the golden, holds logits, tokens, the values between the layers (hidden states) and the choices of experts.
/// Neither packages nor compression take part.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe golden models/small-gemma4 --prompt-ids 2,926,871 --decode 16 -o golden.npz"
)]
pub struct Args {
    /// A Hugging Face folder, a .gguf file, hf:OWNER/NAME[@REV] from the hub, or synthetic:NAME?seed=N&layers=N.
    checkpoint: PathBuf,
    #[command(flatten)]
    reading: Reading,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Greedy tokens behind the prompt.
    #[arg(long, value_name = "N", default_value_t = 16)]
    decode: usize,
    /// The file to write.
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
        let prompt = self.prompt.ids(|| Ok(tokenizer(&checkpoint)?), bos(&checkpoint))?;
        let golden = with_bar(&checkpoint, &prompt, self.decode, ui)?;
        golden.write(&self.out)?;
        let (path, seconds) = (self.out.display().to_string(), started.elapsed().as_secs_f64());
        let (prompt, decoded) = (golden.prompt_ids, golden.decode_tokens);
        let counts = format!("{} prompt tokens, {} decoded", prompt.len(), decoded.len());
        let line = format!("{path}: {counts}, in {seconds:.1} s");
        let document =
            json!({"path": path, "prompt_ids": prompt, "decode_tokens": decoded, "seconds": seconds});
        Ok(Page::new(document, [line]))
    }
}
