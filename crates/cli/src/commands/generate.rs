//! `anemoe generate`

use crate::args::model_args::ModelArgs;
use crate::args::numbers::at_least_one;
use crate::args::prompt::PromptArgs;
use crate::command::{Command, CommandReport};
use crate::target::expect_bundle;
use crate::ui::{self, Ui};
use anemoe_runtime::generate::{GenerateOptions, Generated, Stop, generate};
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::speculate::{SpeculationReport, prepare_drafts};
use anemoe_text::tokenizer::{TextStream, Tokenizer};
use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Continue a prompt.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe generate small.anemoe --prompt 'def main():' --max-new 40\n  anemoe generate small.anemoe -p 'def main():' -n 40 --temperature 0.7 --top-k 40\n  anemoe generate small.anemoe --prompt-file code.py\n  anemoe generate small.anemoe --prompt - < code.py"
)]
pub struct Args {
    /// The bundle, unless -m names it.
    #[arg(required_unless_present = "model")]
    bundle: Option<PathBuf>,
    /// The bundle, as an option instead.
    #[arg(short, long, value_name = "BUNDLE", conflicts_with = "bundle")]
    model: Option<PathBuf>,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Most new tokens [default: the model's own, else 128].
    #[arg(short = 'n', long, value_name = "N")]
    max_new: Option<usize>,
    /// Go on behind the model's end tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// Most tokens of one prefill call; 1 goes token by token.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    prefill_chunk: Option<usize>,
    #[command(flatten)]
    run: ModelArgs,
}

/// Most new tokens where neither the command line nor the model says how many.
const MAX_NEW: usize = 128;
/// Fewest new tokens for which passes of drafts are prepared: some 50 ms.
const WORTH_PREPARING: usize = 128;

impl Command for Args {
    type Report = GenerateReport;

    fn run(self, ui: &Ui) -> anyhow::Result<GenerateReport> {
        self.run.check()?;
        let bundle = self.bundle.as_ref().or(self.model.as_ref()).context("give the bundle")?;
        expect_bundle(bundle)?;
        let chain = self.run.verify.open(bundle, ui)?;
        let chosen = self.run.sampling.choose(bundle, chain.model.vocab_size)?;
        let started = Instant::now();
        let model = self.run.open(bundle, &chain)?;
        let tokenizer_file = bundle.join("tokenizer.json");
        let prompt =
            self.prompt.ids(|| Ok(Tokenizer::open(&tokenizer_file)?), model.chain().model.bos_token_id)?;
        let tokenizer = tokenizer_file.exists().then(|| Tokenizer::open(&tokenizer_file)).transpose()?;
        let speculation = self.run.speculation(&model, tokenizer.as_ref(), ui)?;
        // One preparation for the prompt, one for decoding, and those of drafts, whose passes run for a moment.
        model.prepare(self.prefill_chunk.unwrap_or(usize::MAX).min(prompt.len()), Logits::Last);
        model.prepare(1, Logits::Last);
        let max_new = self.max_new.or_else(|| chosen.own.max_new(prompt.len())).unwrap_or(MAX_NEW);
        if max_new >= WORTH_PREPARING || speculation.drafter.is_some() {
            prepare_drafts(&model, &speculation)?;
        }
        drop(model.populate());
        let load = started.elapsed();
        let options = GenerateOptions {
            max_new,
            sampling: chosen.sampling.clone(),
            ignore_eos: self.ignore_eos,
            prefill_chunk: self.prefill_chunk,
            speculation,
        };
        let generated = stream(&model, &prompt, &options, tokenizer.as_ref(), ui)?;
        let text = tokenizer.as_ref().map(|t| t.decode(&generated.ids)).transpose()?;
        Ok(GenerateReport {
            stop: stop_name(generated.stop),
            sampling: chosen.document(),
            timing: Timing::new(&generated, load),
            speculation: generated.speculation.clone(),
            prompt_ids: prompt,
            generated_ids: generated.ids.clone(),
            text,
            generated,
        })
    }
}

/// A continuation.
#[derive(Serialize)]
pub struct GenerateReport {
    pub prompt_ids: Vec<u32>,
    pub generated_ids: Vec<u32>,
    text: Option<String>,
    stop: &'static str,
    sampling: Value,
    pub timing: Timing,
    speculation: Option<SpeculationReport>,
    #[serde(skip)]
    pub generated: Generated,
}

impl CommandReport for GenerateReport {
    fn show(&self, _: &mut Vec<String>) {}

    fn print(&self, _: &Ui) -> io::Result<()> {
        let t = &self.timing;
        ui::message(format!(
            "load {:.2} s; prompt of {} in {:.3} s; {} decoded at {:.1} tok/s; ended by {}",
            t.load_s,
            ui::counted(t.prefill_tokens, "token"),
            t.prefill_s,
            ui::counted(t.decode_tokens, "token"),
            t.decode_tok_s,
            self.stop.replace('_', " ")
        ));
        self.generated.speculation.iter().for_each(|report| ui::message(drafts(report)));
        Ok(())
    }
}

/// Generates, printing text (or ids, without a tokenizer) as it comes.
pub fn stream(
    model: &Model,
    prompt: &[u32],
    options: &GenerateOptions,
    tokenizer: Option<&Tokenizer>,
    ui: &Ui,
) -> anyhow::Result<Generated> {
    let mut text = tokenizer.map(|t| TextStream::new(t, prompt)).transpose()?;
    let mut failure: Option<anyhow::Error> = None;
    let mut first = true;
    let generated = generate(model, &mut model.sequence(), prompt, options, |id| {
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

/// Times of a generation.
#[derive(Serialize)]
pub struct Timing {
    pub load_s: f64,
    pub prefill_tokens: usize,
    pub prefill_s: f64,
    decode_tokens: usize,
    decode_s: f64,
    pub decode_tok_s: f64,
}

impl Timing {
    /// Takes the times of a generation whose model was loaded in `load`.
    pub fn new(g: &Generated, load: Duration) -> Timing {
        Timing {
            load_s: load.as_secs_f64(),
            prefill_tokens: g.prefill_tokens,
            prefill_s: g.prefill.as_secs_f64(),
            decode_tokens: g.decode_tokens,
            decode_s: g.decode.as_secs_f64(),
            decode_tok_s: g.tokens_per_second(),
        }
    }
}

/// Formats the figures of drafts, one line each.
fn drafts(r: &SpeculationReport) -> String {
    let passes = r.passes.iter().map(|p| format!("{}: {:.1} ms ({})", p.tokens, p.ms_per_call, p.calls));
    let break_even = r.break_even.iter().map(|b| {
        let acceptance = b.acceptance.map_or("never".into(), |a| format!("{a:.2}"));
        let estimated = if b.is_measured { "" } else { "~" };
        format!("{}: {estimated}{acceptance}", b.drafted)
    });
    let break_even: Vec<String> = break_even.collect();
    let sources = r.sources.iter().map(|s| {
        format!("\ndrafts of {}: {} of {} accepted, made in {:.1} ms", s.source, s.accepted, s.drafted, s.ms)
    });
    format!(
        "drafts: {} of {} accepted ({:.0} %) in {}, {} without{}\n\
         tokens of a pass, its time and how many: {}\n\
         drafted tokens, and the acceptance that pays for them (~ estimated): {}",
        r.accepted,
        ui::counted(r.drafted, "token"),
        100.0 * r.acceptance,
        ui::counted(r.verifier_calls, "pass"),
        ui::counted(r.fallbacks, "pass"),
        sources.collect::<String>(),
        passes.collect::<Vec<_>>().join(", "),
        if break_even.is_empty() {
            "no pass for one token was measured".into()
        } else {
            break_even.join(", ")
        }
    )
}

pub fn stop_name(stop: Stop) -> &'static str {
    match stop {
        Stop::EndToken(_) => "end_token",
        Stop::MaxNew => "max_new",
        Stop::ContextFull => "context_full",
        Stop::Caller => "interrupted",
    }
}
