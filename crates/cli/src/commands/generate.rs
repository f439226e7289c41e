//! `anemoe generate`

use crate::args::executor::ExecutorArgs;
use crate::args::numbers::at_least_one;
use crate::args::prompt::{MAX_PROMPT, PromptArgs, bounded_text};
use crate::args::runner::RunnerArgs;
use crate::args::sampling::SamplingArgs;
use crate::bundle::Verify;
use crate::outcome::Outcome;
use crate::target::expect_bundle;
use crate::ui::{self, Ui};
use anemoe_runtime::generate::{GenerateOptions, Generated, Stop, generate};
use anemoe_runtime::model::{Logits, MOST_UNDONE, Model};
use anemoe_runtime::speculate::{Corpus, Mode, Speculation, SpeculationReport, is_small, measure_drafts};
use anemoe_runtime::tokenizer::{TextStream, Tokenizer};
use anyhow::Context;
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
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Go on behind the model's end tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// Most tokens of one prefill call; 1 goes token by token.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    prefill_chunk: Option<usize>,
    #[command(flatten)]
    speculate: Speculate,
    #[command(flatten)]
    runner: RunnerArgs,
    #[command(flatten)]
    executor: ExecutorArgs,
    #[command(flatten)]
    verify: Verify,
}

/// Most new tokens where neither the command line nor the model says how many.
const MAX_NEW: usize = 128;
/// Fewest new tokens for which lengths of drafts of a small model are measured before the first.
const WORTH_MEASURING: usize = 256;
/// Most tokens of a corpus; the automaton of one takes some 150 bytes a token.
const MAX_CORPUS: usize = 2_000_000;

/// Drafts from repetitions. Tokens stay the same, whatever is drafted.
#[derive(clap::Args, Clone)]
pub struct Speculate {
    /// Draft tokens from what repeats, and verify several in one pass: `ngram` wherever something repeats, `auto` where it pays
    /// as measured, `off` never.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = DraftsWhen::Auto)]
    speculate: DraftsWhen,
    /// Most tokens of a draft.
    #[arg(long, value_name = "N", default_value = "8", value_parser = draft_length)]
    draft_max: usize,
    /// Fewest tokens that have to repeat.
    #[arg(long, value_name = "N", default_value = "2", value_parser = at_least_one)]
    ngram_min: usize,
    /// Most tokens of a repetition: of a longer one the newest N are looked for, and what followed them last.
    #[arg(long, value_name = "N", default_value = "24", value_parser = at_least_one)]
    ngram_max: usize,
    /// Text from which tokens are drafted too.
    #[arg(long, value_name = "F")]
    ngram_corpus: Option<PathBuf>,
}

fn draft_length(text: &str) -> Result<usize, String> {
    let n = at_least_one(text)?;
    if n > MOST_UNDONE {
        Err(format!("{n} is more than {MOST_UNDONE}, the most tokens of a draft"))
    } else {
        Ok(n)
    }
}

/// Condition for drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum DraftsWhen {
    Off,
    Ngram,
    Auto,
}

impl Speculate {
    /// Makes the options of drafts; `tokenizer` encodes the corpus.
    pub fn options(&self, tokenizer: Option<&Tokenizer>) -> anyhow::Result<Speculation> {
        let corpus = match &self.ngram_corpus {
            None => None,
            Some(path) => {
                let tokenizer = tokenizer.context("--ngram-corpus needs the model's tokenizer")?;
                let what = format!("--ngram-corpus {}", path.display());
                let text = bounded_text(
                    anemoe_io::open_input(path, MAX_PROMPT).with_context(|| what.clone())?,
                    &what,
                    "text",
                )?;
                let ids = tokenizer.encode(&text, None)?;
                anyhow::ensure!(
                    ids.len() <= MAX_CORPUS,
                    "{what}: {} tokens, where {MAX_CORPUS} are the most",
                    ids.len()
                );
                // Where nothing is drafted, the file is only checked.
                let is_used = self.speculate != DraftsWhen::Off;
                is_used.then(|| std::sync::Arc::new(Corpus::new(&ids)))
            }
        };
        let options = Speculation {
            mode: match self.speculate {
                DraftsWhen::Off => Mode::Off,
                DraftsWhen::Ngram => Mode::Ngram,
                DraftsWhen::Auto => Mode::Auto,
            },
            draft_max: self.draft_max,
            ngram_min: self.ngram_min,
            ngram_max: self.ngram_max,
            corpus,
            ..Speculation::default()
        };
        options.check().map_err(|what| anyhow::anyhow!("--ngram-min, --ngram-max: {what}"))?;
        Ok(options)
    }
}

/// Continuation of a prompt.
pub struct Generation {
    pub prompt: Vec<u32>,
    pub generated: Generated,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    complete(args, ui)?;
    Ok(Outcome::Done)
}

/// Continues a prompt and shows the text.
pub fn complete(args: Args, ui: &Ui) -> anyhow::Result<Generation> {
    let backend = args.executor.backend()?;
    let bundle = args.bundle.as_ref().or(args.model.as_ref()).context("give the bundle")?;
    expect_bundle(bundle)?;
    let chain = args.verify.open(bundle, ui)?;
    let chosen = args.sampling.choose(bundle, chain.model.vocab_size)?;
    let core_ml = args.runner.core_ml(bundle, &chain, !args.executor.is_default())?;
    let started = Instant::now();
    let model = match &core_ml {
        Some(core_ml) => Model::open(bundle, core_ml)?,
        None => Model::open(bundle, &backend)?,
    };
    let tokenizer_file = bundle.join("tokenizer.json");
    let prompt =
        args.prompt.ids(|| Ok(Tokenizer::open(&tokenizer_file)?), model.chain().model.bos_token_id)?;
    let tokenizer = tokenizer_file.exists().then(|| Tokenizer::open(&tokenizer_file)).transpose()?;
    let speculation = args.speculate.options(tokenizer.as_ref())?;
    // One preparation for the prompt, one for decoding, and those of drafts, whose passes run for a moment.
    model.prepare(args.prefill_chunk.unwrap_or(usize::MAX).min(prompt.len()), Logits::Last);
    model.prepare(1, Logits::Last);
    let max_new = args.max_new.or_else(|| chosen.own.max_new(prompt.len())).unwrap_or(MAX_NEW);
    if max_new >= WORTH_MEASURING && is_small(&model) {
        measure_drafts(&model, &speculation)?;
    }
    drop(model.populate());
    let load = started.elapsed();
    let options = GenerateOptions {
        max_new,
        sampling: chosen.sampling.clone(),
        ignore_eos: args.ignore_eos,
        prefill_chunk: args.prefill_chunk,
        speculation,
    };
    let generated = stream(&model, &prompt, &options, tokenizer.as_ref(), ui)?;
    let text = tokenizer.as_ref().map(|t| t.decode(&generated.ids)).transpose()?;
    ui.document(&serde_json::json!({
        "prompt_ids": prompt,
        "generated_ids": generated.ids,
        "text": text,
        "stop": stop_name(generated.stop),
        "sampling": chosen.document(),
        "timing": timing(&generated, load),
        "speculation": generated.speculation.as_ref().map(figures),
    }))?;
    crate::ui::message(summary(&generated, load));
    if let Some(report) = &generated.speculation {
        crate::ui::message(drafts(report));
    }
    Ok(Generation { prompt, generated })
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

/// Returns `timing` of the JSON document: tokens, seconds, and tokens per second.
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

/// Returns the figures of drafts as JSON.
pub fn figures(r: &SpeculationReport) -> serde_json::Value {
    let passes = r
        .passes
        .iter()
        .map(|(tokens, ms, calls)| serde_json::json!({"tokens": tokens, "ms_per_call": ms, "calls": calls}));
    let break_even = r.break_even.iter().map(
        |b| serde_json::json!({"drafted": b.drafted, "acceptance": b.acceptance, "is_measured": b.is_measured}),
    );
    serde_json::json!({
        "verifier_calls": r.verifier_calls,
        "drafted": r.drafted,
        "accepted": r.accepted,
        "fallbacks": r.fallbacks,
        "acceptance": r.acceptance,
        "passes": passes.collect::<Vec<_>>(),
        "break_even": break_even.collect::<Vec<_>>(),
    })
}

/// Formats the figures of drafts, one line each.
fn drafts(r: &SpeculationReport) -> String {
    let passes = r.passes.iter().map(|(tokens, ms, calls)| format!("{tokens}: {ms:.1} ms ({calls})"));
    let break_even = r.break_even.iter().map(|b| {
        let acceptance = b.acceptance.map_or("never".into(), |a| format!("{a:.2}"));
        let estimated = if b.is_measured { "" } else { "~" };
        format!("{}: {estimated}{acceptance}", b.drafted)
    });
    let break_even: Vec<String> = break_even.collect();
    format!(
        "drafts: {} of {} accepted ({:.0} %) in {}, {} without\n\
         tokens of a pass, its time and how many: {}\n\
         drafted tokens, and the acceptance that pays for them (~ estimated): {}",
        r.accepted,
        ui::counted(r.drafted, "token"),
        100.0 * r.acceptance,
        ui::counted(r.verifier_calls, "pass"),
        ui::counted(r.fallbacks, "pass"),
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

fn summary(g: &Generated, load: Duration) -> String {
    format!(
        "load {:.2} s; prompt of {} in {:.3} s; {} decoded at {:.1} tok/s; ended by {}",
        load.as_secs_f64(),
        ui::counted(g.prefill_tokens, "token"),
        g.prefill.as_secs_f64(),
        ui::counted(g.decode_tokens, "token"),
        g.tokens_per_second(),
        stop_name(g.stop).replace('_', " ")
    )
}
