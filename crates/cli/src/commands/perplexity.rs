//! `anemoe perplexity`

use crate::args::executor::ExecutorArgs;
use crate::args::hub_checkpoint::{Extent, locate};
use crate::args::reading::Reading;
use crate::args::text_windows::TextArgs;
use crate::bundle::Verify;
use crate::command::{Command, Page};
use crate::target::expect_bundle;
use crate::ui::{self, Ui};
use anemoe_convert::path_kind::PathKind;
use anemoe_gates::perplexity::{bundle_likelihood, checkpoint_likelihood};
use anemoe_runtime::model::Model;
use anemoe_text::tokenizer::Tokenizer;
use anyhow::Context;
use serde_json::json;
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
    #[command(flatten)]
    executor: ExecutorArgs,
    #[command(flatten)]
    verify: Verify,
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        let path = self.model.as_path();
        let bundle = match PathKind::at(&locate(path, Extent::Whole)?.path) {
            PathKind::Bundle => true,
            // Fails with the command that completes the bundle.
            PathKind::Unfinished => {
                expect_bundle(path)?;
                false
            }
            _ => false,
        };
        if bundle && self.reading.zaya_skip.is_some() {
            anyhow::bail!("--zaya-skip: a bundle is read as it was built");
        }
        let (windows, likelihood, seconds) = if bundle {
            self.verify.open(path, ui)?;
            let model = Model::open(path, &self.executor.backend()?)?;
            let tokenizer = Tokenizer::open(&path.join("tokenizer.json"));
            let tokenizer = tokenizer.context("a text needs the model's tokenizer")?;
            let windows = self.text.windows(&tokenizer, model.chain().model.bos_token_id)?;
            let (most, longest) = (model.chain().model.max_context, windows.iter().map(Vec::len).max());
            if longest > Some(most) {
                anyhow::bail!("--context {}: the bundle has a context of {most} tokens", self.text.context);
            }
            let bar = ui.bar(windows.len() as u64, "windows");
            let started = Instant::now();
            let likelihood = bundle_likelihood(&model, &windows, &mut || bar.inc(1));
            bar.finish_and_clear();
            (windows, likelihood?, started.elapsed().as_secs_f64())
        } else {
            let checkpoint = self.reading.open(&self.model)?;
            let windows = self.text.of_checkpoint(&checkpoint)?;
            let bar = ui.bar(0, "layers");
            let started = Instant::now();
            let likelihood = checkpoint_likelihood(&checkpoint, None, &windows, &mut || bar.inc(1));
            bar.finish_and_clear();
            (windows, likelihood?, started.elapsed().as_secs_f64())
        };
        let (perplexity, tokens, context) = (likelihood.perplexity(), likelihood.tokens, self.text.context);
        let (nll, tok_s) = (likelihood.nll / tokens as f64, tokens as f64 / seconds.max(1e-9));
        let line = format!(
            "perplexity {perplexity:.4} ({nll:.5} nats per token) over {} in {} of at most {context}; {tok_s:.0} tok/s",
            ui::counted(tokens, "token"),
            ui::counted(windows.len(), "window"),
        );
        // Context: most tokens of a window; nll: nats per token.
        let document = json!({
            "model": path.display().to_string(), "kind": if bundle { "bundle" } else { "checkpoint" }, "perplexity": perplexity,
            "nll": nll, "tokens": tokens, "windows": windows.len(), "context": context, "seconds": seconds, "tok_s": tok_s,
        });
        Ok(Page::new(document, [line]))
    }
}
