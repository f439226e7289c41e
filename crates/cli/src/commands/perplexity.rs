//! `anemoe perplexity`

use crate::args::executor::PrecisionArg;
use crate::args::hub_checkpoint::{Extent, locate};
use crate::args::reading::Reading;
use crate::args::text_windows::TextArgs;
use crate::bundle::Verify;
use crate::outcome::Outcome;
use crate::target::expect_bundle;
use crate::ui::{self, Ui};
use anemoe_convert::path_kind::PathKind;
use anemoe_gates::perplexity::{bundle_likelihood, checkpoint_likelihood};
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::Model;
use anemoe_runtime::tokenizer::Tokenizer;
use std::path::PathBuf;
use std::time::Instant;

/// Measure how well a bundle, or a checkpoint in f32, predicts a text.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe perplexity small.anemoe --text notes.txt\n  anemoe perplexity models/small-gemma4 --text notes.txt"
)]
pub struct Args {
    /// A bundle, or a checkpoint: a Hugging Face folder or a .gguf file.
    model: PathBuf,
    #[command(flatten)]
    reading: Reading,
    #[command(flatten)]
    text: TextArgs,
    /// Precision of a bundle: fp32 computes in f32 on the stored weights; fp16 rounds every result, as the
    /// device does.
    #[arg(long, value_enum, default_value = "fp32")]
    precision: PrecisionArg,
    #[command(flatten)]
    verify: Verify,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let path = args.model.as_path();
    let bundle = match PathKind::at(&locate(path, Extent::Whole)?.path) {
        PathKind::Bundle => true,
        // Fails with the command that completes the bundle.
        PathKind::Unfinished => return expect_bundle(path).map(|()| Outcome::Done),
        _ => false,
    };
    if bundle && args.reading.zaya_skip.is_some() {
        anyhow::bail!("--zaya-skip: a bundle is read as it was built");
    }
    let (windows, likelihood, seconds) = if bundle {
        args.verify.open(path, ui)?;
        let model = Model::open(path, &CpuBackend::with(args.precision.into()))?;
        let tokenizer = Tokenizer::open(&path.join("tokenizer.json"))?;
        let windows = args.text.windows(&tokenizer, model.chain().model.bos_token_id)?;
        let bar = ui.bar(windows.len() as u64, "windows");
        let started = Instant::now();
        let likelihood = bundle_likelihood(&model, &windows, &mut || bar.inc(1));
        bar.finish_and_clear();
        (windows, likelihood?, started.elapsed().as_secs_f64())
    } else {
        let checkpoint = args.reading.open(&args.model)?;
        let windows = args.text.of_checkpoint(&checkpoint)?;
        let bar = ui.bar(0, "layers");
        let started = Instant::now();
        let likelihood = checkpoint_likelihood(&checkpoint, None, &windows, &mut || bar.inc(1));
        bar.finish_and_clear();
        (windows, likelihood?, started.elapsed().as_secs_f64())
    };
    let rate = likelihood.tokens as f64 / seconds.max(1e-9);
    let mean = likelihood.nll / likelihood.tokens as f64;
    ui.document(&serde_json::json!({
        "model": path.display().to_string(), "kind": if bundle { "bundle" } else { "checkpoint" },
        "perplexity": likelihood.perplexity(), "nll": mean, "tokens": likelihood.tokens, "windows": windows.len(),
        "context": args.text.context, "seconds": seconds, "tok_s": rate,
    }))?;
    ui.line(format!(
        "perplexity {:.4} ({mean:.5} nats per token) over {} in {} of at most {}; {rate:.0} tok/s",
        likelihood.perplexity(),
        ui::counted(likelihood.tokens, "token"),
        ui::counted(windows.len(), "window"),
        args.text.context
    ))?;
    Ok(Outcome::Done)
}
