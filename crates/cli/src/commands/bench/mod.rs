//! `anemoe bench`

mod bench_report;
mod drafts;
mod measure;
mod show_bench;

pub use bench_report::BenchReport;

use crate::args::executor::ExecutorArgs;
use crate::args::numbers::{at_least_one, count};
use crate::args::runner::RunnerArgs;
use crate::bundle::Verify;
use crate::command::{Command, CommandReport};
use crate::files::Overwrite;
use crate::recorder::{JournalArgs, Recorder};
use crate::target::expect_bundle;
use crate::ui::Ui;
use anemoe_io::{Error, Output};
use anemoe_kernels::Pool;
use anemoe_runtime::model::{Logits, MOST_UNDONE, Model};
use anemoe_runtime::shard_work::{WorkParts, bounds};
use bench_report::{MachineReport, SCHEMA};
use measure::{Bench, Tokens, memory};
use serde::Serialize;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Bytes that are read to measure bandwidth.
const MEMORY: usize = 512 << 20;
/// Times that the bytes are read.
const PASSES: usize = 5;

/// Measure the speed of a bundle on this machine.
///
/// Measures loading, prefill, and decode at several context lengths, and shows the bytes that are read beside the bandwidth of the
/// memory.
///
/// Tokens are random, so that each one goes to other experts. In front of a decode the context is filled with noise, since
/// the time does not depend on what is in it. Figures are medians.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe bench small.anemoe\n  anemoe bench small.anemoe --context 64,1024 --fast\n  anemoe bench small.anemoe --save a.json\n  anemoe bench small.anemoe --drafts 0,0.8"
)]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// Prompt lengths; 0 for none.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "64", value_parser = count)]
    prefill: Vec<usize>,
    /// Contexts in which tokens are decoded; the bundle's own limit is that of `build --max-context`.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "64", value_parser = count)]
    context: Vec<usize>,
    /// Tokens decoded in each context; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 32)]
    decode: usize,
    /// Also decode in so many sequences at once, in the first context.
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = at_least_one)]
    sequences: Vec<usize>,
    /// Also time passes over so many tokens of one sequence, as drafts are verified, beside passes over one; 0 for none.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "2,4,8", value_parser = verified)]
    verify_tokens: Vec<usize>,
    /// Also decode with drafts of which each token is right with this probability, beside plain decoding: 0.8 of four in five, 0
    /// for the worst text.
    #[arg(long, value_name = "P,..", value_delimiter = ',', value_parser = probability)]
    drafts: Vec<f64>,
    /// Times that each is measured.
    #[arg(long, value_name = "N", default_value = "3", value_parser = at_least_one)]
    repetitions: usize,
    /// Most tokens of one prefill call.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    prefill_chunk: Option<usize>,
    /// Start of the random tokens.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Also show each shard.
    #[arg(long)]
    shards: bool,
    /// Also measure each operation of fused functions, which takes a little time itself.
    #[arg(long)]
    ops: bool,
    /// Write the figures as JSON.
    #[arg(long, value_name = "F.json")]
    save: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
    #[command(flatten)]
    verify: Verify,
    #[command(flatten)]
    runner: RunnerArgs,
    #[command(flatten)]
    executor: ExecutorArgs,
    #[command(flatten)]
    journal: JournalArgs,
}

/// Parses the tokens of a pass over a draft, 2 to `MOST_UNDONE + 1`; 0 for no pass.
fn verified(text: &str) -> Result<usize, String> {
    let n = count(text)?;
    if n == 1 || n > MOST_UNDONE + 1 {
        return Err(format!("{n} tokens, where a pass over a draft has 2 to {}", MOST_UNDONE + 1));
    }
    Ok(n)
}

/// Parses a probability, 0 to 1.
fn probability(text: &str) -> Result<f64, String> {
    let p: Option<f64> = text.trim().parse().ok();
    p.filter(|p| (0.0..=1.0).contains(p)).ok_or_else(|| format!("`{text}` is not a probability from 0 to 1"))
}

impl Command for Args {
    type Report = Benchmark;

    fn run(self, ui: &Ui) -> anyhow::Result<Benchmark> {
        let save = self.save.as_deref().map(|path| check_output(path, self.overwrite)).transpose()?;
        let backend = self.executor.backend()?;
        let backend = anemoe_runtime::cpu::CpuBackend {
            options: anemoe_runtime::cpu::Options { profile: self.ops, ..backend.options },
        };
        expect_bundle(&self.bundle)?;
        let chain = self.verify.open(&self.bundle, ui)?;
        let core_ml = self.runner.core_ml(&self.bundle, &chain, self.ops || !self.executor.is_default())?;
        let pool = Pool::global();
        let read_gb_s = anemoe_kernels::measure_bandwidth(pool, MEMORY, PASSES);
        let started = Instant::now();
        let model = match &core_ml {
            Some(core_ml) => Model::open(&self.bundle, core_ml)?,
            None => Model::open(&self.bundle, &backend)?,
        };
        model.prepare(1, Logits::Last);
        let mut sequence = model.sequence();
        let mapped = model.populate();
        let load_s = started.elapsed().as_secs_f64();
        check(&self, &model)?;
        let mut tokens = Tokens::new(self.seed, model.chain().model.vocab_size);
        model.append(&mut sequence, &tokens.random_ids(1), Logits::Last, None)?;
        let first_token_s = started.elapsed().as_secs_f64();
        // Waits until the weights are in memory: later figures are not those of a cold start.
        if let Some(mapped) = mapped {
            let _ = mapped.join();
        }

        let mut bench = Bench::new(&self, &model, sequence, tokens, pool, ui);
        let decode = bench.decodes()?;
        let batches = bench.batches()?;
        let verify = bench.verify()?;
        let drafts = bench.drafts()?;
        let prefill = bench.prefills()?;
        bench.bar.finish_and_clear();
        let WorkParts { kinds, shards, ops } = bench.parts.unwrap_or_default();
        let bounds = match &core_ml {
            Some(_) => Vec::new(),
            None => bounds(&bench.passes, pool, self.executor.is_fast(), read_gb_s),
        };
        let report = BenchReport {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").into(),
            bundle: self.bundle.clone(),
            source: model.chain().source.clone(),
            mode: if core_ml.is_some() { "coreml".into() } else { self.executor.mode() },
            machine: MachineReport {
                machine: crate::machine::this(),
                threads: pool.threads(),
                read_gb_s,
                read_gb_s_after: anemoe_kernels::measure_bandwidth(pool, MEMORY, PASSES),
            },
            repetitions: self.repetitions,
            load_s,
            first_token_s,
            prefill,
            decode,
            batches,
            verify,
            drafts,
            kinds,
            bounds,
            shards,
            ops,
            memory: memory(),
        };
        let lacks_ops = self.ops && report.ops.is_empty();
        Ok(Benchmark { report, lists_shards: self.shards, lacks_ops, save })
    }

    fn journal(&self) -> Option<&JournalArgs> {
        Some(&self.journal)
    }
}

/// Figures of a run, and how they are shown.
#[derive(Serialize)]
#[serde(transparent)]
pub struct Benchmark {
    pub report: BenchReport,
    #[serde(skip)]
    lists_shards: bool,
    /// True if operations were to be measured, and none is fused.
    #[serde(skip)]
    lacks_ops: bool,
    #[serde(skip)]
    save: Option<Output>,
}

impl CommandReport for Benchmark {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        show_bench::print(&self.report, self.lists_shards, ui)?;
        if self.lacks_ops {
            ui.line("operations: only those of fused functions are measured, and none is fused here")?;
        }
        Ok(())
    }

    fn record(&self, recorder: &Recorder) {
        recorder.end(&self.report.bundle, "", self.report.facts());
    }

    /// Writes the file after the output was shown, so that a failure does not lose it.
    fn go_on(self) -> anyhow::Result<()> {
        let Some(save) = self.save else { return Ok(()) };
        let text = serde_json::to_vec_pretty(&self.report)?;
        Ok(save.write(|file| file.write_all(&text)).map_err(|e| Error::io(save.path(), e))?)
    }
}

/// Refuses an output that cannot be written, before anything is measured.
fn check_output(path: &Path, overwrite: Overwrite) -> anyhow::Result<Output> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    anyhow::ensure!(dir.is_dir(), "{}: there is no such folder", dir.display());
    anyhow::ensure!(!path.is_dir(), "{}: a folder, where a file is wanted", path.display());
    overwrite.output(path)
}

fn check(args: &Args, model: &Model) -> anyhow::Result<()> {
    let room = model.chain().model.max_context;
    let verified = args.verify_tokens.iter().copied().max().unwrap_or(0);
    let first = args.context.first().copied().unwrap_or(0);
    let behind = args.context.iter().map(|c| c.saturating_add(args.decode));
    let longest = args.prefill.iter().copied().chain(behind).max().unwrap_or(0);
    let drafts = if args.drafts.is_empty() { 0 } else { first.max(1).saturating_add(args.decode) };
    let longest = longest.max(drafts);
    let longest = if verified > 0 { longest.max(first.saturating_add(verified)) } else { longest };
    anyhow::ensure!(
        args.drafts.is_empty() || args.decode > 1,
        "--drafts measures decoding: --decode {} leaves nothing to draft",
        args.decode
    );
    anyhow::ensure!(
        longest <= room,
        "{longest} tokens are asked for, and the bundle's context holds {room}: build with a larger --max-context"
    );
    Ok(())
}
