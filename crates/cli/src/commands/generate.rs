//! `anemoe generate`

use super::executor::Executor;
use crate::Outcome;
use crate::bundle::Verify;
use crate::ui::Ui;
use anemoe_runtime::engine::Engine;
use anemoe_runtime::generate::{GenerateOptions, Generated, Stop, generate};
use anemoe_runtime::sampler::Sampling;
use anemoe_runtime::tokenizer::{TextStream, Tokenizer};
use anyhow::Context;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Continue a prompt.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe generate small.anemoe --prompt 'def main():' --max-new 40")]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    #[command(flatten)]
    prompt: Prompt,
    /// Most new tokens.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new: usize,
    /// Divides the logits; 0 always takes the most probable token.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Only the N most probable tokens; 0 for all.
    #[arg(long, value_name = "N", default_value_t = 0)]
    top_k: usize,
    /// Only the most probable tokens that together reach this probability.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Starts the random sequence.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Go on behind the model's end tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// Most tokens of one prefill call; 1 goes token by token.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    prefill_chunk: Option<usize>,
    #[command(flatten)]
    executor: Executor,
    #[command(flatten)]
    verify: Verify,
}

/// A prompt as text or as ids.
#[derive(clap::Args, Clone)]
#[group(required = true, multiple = false)]
pub struct Prompt {
    /// Text, tokenized with the model's tokenizer.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Token ids, for instance 2,42,7.
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    prompt_ids: Option<Vec<u32>>,
}

impl Prompt {
    /// The ids; `tokenizer` opens the model's tokenizer, which only a text needs.
    pub fn ids(
        &self,
        tokenizer: impl FnOnce() -> anyhow::Result<Tokenizer>,
        bos: Option<u32>,
    ) -> anyhow::Result<Vec<u32>> {
        match (&self.prompt_ids, &self.prompt) {
            (Some(ids), _) => Ok(ids.clone()),
            (None, Some(text)) => {
                let tokenizer = tokenizer()
                    .context("a text prompt needs the model's tokenizer; give --prompt-ids instead")?;
                Ok(tokenizer.encode(text, bos)?)
            }
            (None, None) => anyhow::bail!("give --prompt or --prompt-ids"),
        }
    }
}

pub fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("`{text}` is not a number from 1 on"))
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let backend = args.executor.backend()?;
    args.verify.open(&args.bundle, ui)?;
    let started = Instant::now();
    let mut engine = Engine::open(&args.bundle, &backend)?;
    let tokenizer_file = args.bundle.join("tokenizer.json");
    let prompt =
        args.prompt.ids(|| Ok(Tokenizer::open(&tokenizer_file)?), engine.chain().model.bos_token_id)?;
    // For the prompt, and for the tokens behind it.
    engine.prepare(args.prefill_chunk.unwrap_or(usize::MAX).min(prompt.len()));
    engine.prepare(1);
    drop(engine.populate());
    let load = started.elapsed();
    let tokenizer = tokenizer_file.exists().then(|| Tokenizer::open(&tokenizer_file)).transpose()?;
    let options = GenerateOptions {
        max_new: args.max_new,
        sampling: Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            seed: args.seed,
        },
        ignore_eos: args.ignore_eos,
        prefill_chunk: args.prefill_chunk,
    };
    let generated = stream(&mut engine, &prompt, &options, tokenizer.as_ref(), ui)?;
    let text = tokenizer.as_ref().map(|t| t.decode(&generated.ids)).transpose()?;
    ui.document(&serde_json::json!({
        "prompt_ids": prompt,
        "generated_ids": generated.ids,
        "text": text,
        "stop": stop_name(generated.stop),
        "timing": timing(&generated, load),
    }))?;
    crate::ui::message(summary(&generated, load));
    Ok(Outcome::Done)
}

/// Generates, printing text (or ids, without a tokenizer) as it comes.
pub fn stream(
    engine: &mut Engine,
    prompt: &[u32],
    options: &GenerateOptions,
    tokenizer: Option<&Tokenizer>,
    ui: &Ui,
) -> anyhow::Result<Generated> {
    let mut text = tokenizer.map(|t| TextStream::new(t, prompt)).transpose()?;
    let mut failure: Option<anyhow::Error> = None;
    let mut first = true;
    let generated = generate(engine, prompt, options, |id| {
        let piece = match &mut text {
            Some(text) => text.push(id).map_err(anyhow::Error::from),
            None => Ok(if first { id.to_string() } else { format!(",{id}") }),
        };
        first = false;
        match piece.and_then(|piece| Ok(ui.part(&piece)?)) {
            Ok(()) => true,
            Err(e) => {
                failure = Some(e);
                false
            }
        }
    })?;
    if let Some(e) = failure {
        return Err(e);
    }
    ui.line("")?;
    Ok(generated)
}

/// The contract's `timing`.
pub fn timing(g: &Generated, load: Duration) -> serde_json::Value {
    serde_json::json!({
        "load_s": load.as_secs_f64(),
        "prefill_tokens": g.prefill_tokens,
        "prefill_s": g.prefill.as_secs_f64(),
        "decode_tokens": g.decode_tokens,
        "decode_s": g.decode.as_secs_f64(),
        "decode_tok_s": g.tokens_per_second(),
    })
}

fn stop_name(stop: Stop) -> &'static str {
    match stop {
        Stop::EndToken(_) => "end_token",
        Stop::MaxNew => "max_new",
        Stop::ContextFull => "context_full",
        Stop::Caller => "interrupted",
    }
}

fn summary(g: &Generated, load: Duration) -> String {
    format!(
        "load {:.2} s; prompt {} tokens in {:.3} s; {} tokens decoded at {:.1} tok/s; ended by {}",
        load.as_secs_f64(),
        g.prefill_tokens,
        g.prefill.as_secs_f64(),
        g.decode_tokens,
        g.tokens_per_second(),
        stop_name(g.stop).replace('_', " ")
    )
}
