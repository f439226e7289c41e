//! `anemoe golden`

use super::checkpoint::Reading;
use super::generate::Prompt;
use crate::Outcome;
use crate::files::Overwrite;
use crate::ui::Ui;
use anemoe_convert::checkpoint::{Checkpoint, SideFile};
use anemoe_gates::reference::{self, Golden, RunOptions};
use anemoe_runtime::tokenizer::Tokenizer;
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
    /// A Hugging Face folder, a .gguf file, or synthetic:NAME?seed=N&layers=N.
    checkpoint: PathBuf,
    #[command(flatten)]
    reading: Reading,
    #[command(flatten)]
    prompt: Prompt,
    /// Greedy tokens behind the prompt.
    #[arg(long, value_name = "N", default_value_t = 16)]
    decode: usize,
    /// The file to write.
    #[arg(short, long, value_name = "F.npz")]
    out: PathBuf,
    #[command(flatten)]
    overwrite: Overwrite,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let started = Instant::now();
    args.overwrite.output(&args.out)?;
    let checkpoint = args.reading.open(&args.checkpoint)?;
    let prompt = args.prompt.ids(|| tokenizer(&checkpoint), bos(&checkpoint))?;
    let golden = with_bar(&checkpoint, &prompt, args.decode, ui)?;
    golden.write(&args.out)?;
    ui.document(&serde_json::json!({
        "path": args.out.display().to_string(), "prompt_ids": golden.prompt_ids, "decode_tokens": golden.decode_tokens,
        "seconds": started.elapsed().as_secs_f64(),
    }))?;
    ui.line(format!(
        "{}: {} prompt tokens, {} decoded, in {:.1} s",
        args.out.display(),
        golden.prompt_ids.len(),
        golden.decode_tokens.len(),
        started.elapsed().as_secs_f64()
    ))?;
    Ok(Outcome::Done)
}

/// Makes a golden with hidden states and choices of experts, under a bar.
pub fn with_bar(
    checkpoint: &Checkpoint,
    prompt: &[u32],
    decode: usize,
    ui: &Ui,
) -> anemoe_convert::Result<Golden> {
    let bar = ui.bar(1, "golden, layers");
    let options = RunOptions { hidden: true, routing: true };
    let golden = reference::run_with_progress(checkpoint, prompt, decode, options, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    golden
}

/// The token that starts a text.
pub fn bos(checkpoint: &Checkpoint) -> Option<u32> {
    let text = checkpoint.config.get("text_config").unwrap_or(&checkpoint.config);
    text.get("bos_token_id").and_then(|v| v.as_u64()).and_then(|v| u32::try_from(v).ok())
}

/// The tokenizer beside the weights, or in them.
pub fn tokenizer(checkpoint: &Checkpoint) -> anyhow::Result<Tokenizer> {
    match checkpoint.side_file("tokenizer.json")? {
        Some(SideFile::Path(path)) => Ok(Tokenizer::open(&path)?),
        Some(SideFile::Bytes(text)) => Ok(Tokenizer::from_bytes(&text, &checkpoint.path)?),
        None => anyhow::bail!("{}: no tokenizer", checkpoint.path.display()),
    }
}
