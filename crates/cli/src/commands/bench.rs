//! `anemoe bench`

use crate::args::drafter::{DrafterArgs, Running};
use crate::args::executor::ExecutorArgs;
use crate::args::numbers::{at_least_one, count};
use crate::args::runner::RunnerArgs;
use crate::bundle::Verify;
use crate::command::{Command, Page, extended, to_value};
use crate::files::Overwrite;
use crate::recorder::{JournalArgs, Recorder};
use crate::show::bench_tables;
use crate::target::expect_bundle;
use crate::ui::Ui;
use anemoe_bundle::journal::Machine;
use anemoe_gates::facts;
use anemoe_io::{Error, Output, proc_bytes};
use anemoe_kernels::{Pool, measure_bandwidth};
use anemoe_runtime::bench::{BenchOptions, BenchTokens};
use anemoe_runtime::cpu::{CpuBackend, Options};
use anemoe_runtime::model::{Logits, MOST_UNDONE, Model};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Version of the JSON document.
const SCHEMA: u32 = 1;
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
    after_help = "Examples:\n  anemoe bench small.anemoe\n  anemoe bench small.anemoe --context 64,1024 --fast\n  anemoe bench small.anemoe --save a.json\n  anemoe bench small.anemoe --drafts 0,0.8\n  anemoe bench large.anemoe --drafter small.anemoe"
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
    #[command(flatten)]
    drafter: DrafterArgs,
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
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        let recorder = Recorder::new(&self.journal, "bench");
        let save = self.save.as_deref().map(|path| check_output(path, self.overwrite)).transpose()?;
        let backend = self.executor.backend()?;
        let backend = CpuBackend { options: Options { profile: self.ops, ..backend.options } };
        expect_bundle(&self.bundle)?;
        let chain = self.verify.open(&self.bundle, ui)?;
        let core_ml = self.runner.core_ml(&self.bundle, &chain, self.ops || !self.executor.is_default())?;
        let mut options = BenchOptions {
            prefill: self.prefill,
            context: self.context,
            decode: self.decode,
            sequences: self.sequences,
            verify_tokens: self.verify_tokens,
            drafts: self.drafts,
            drafter: None,
            repetitions: self.repetitions,
            prefill_chunk: self.prefill_chunk,
            seed: self.seed,
        };
        let read_bandwidth = || measure_bandwidth(Pool::global(), MEMORY, PASSES);
        let read_gb_s = read_bandwidth();
        let started = Instant::now();
        let model = match &core_ml {
            Some(core_ml) => Model::open(&self.bundle, core_ml)?,
            None => Model::open(&self.bundle, &backend)?,
        };
        model.prepare(1, Logits::Last);
        let mapped = model.populate();
        let load_s = started.elapsed().as_secs_f64();
        let run = Running { runner: &self.runner, executor: &self.executor, verify: self.verify };
        if options.decode > 1 || self.drafter.drafter.is_some() {
            options.drafter = self.drafter.open(&model, &run, ui)?;
        }
        check(&options, &model)?;
        let mut tokens = BenchTokens::new(options.seed, model.chain().model.vocab_size);
        model.append(&mut model.sequence(), &tokens.random_ids(1), Logits::Last, None)?;
        let first_token_s = started.elapsed().as_secs_f64();
        // Waits until the weights are in memory: later figures are not those of a cold start.
        if let Some(mapped) = mapped {
            let _ = mapped.join();
        }
        let bar = ui.bar(options.runs() as u64, "runs");
        let fast = core_ml.is_none().then(|| self.executor.products());
        let speeds = options.measure(&model, tokens, fast, read_gb_s, &|| bar.inc(1))?;
        drop(bar);
        let (machine, threads, read_after) = (Machine::here(), Pool::global().threads(), read_bandwidth());
        let [own, mapped] = ["RssAnon", "RssFile"].map(|name| proc_bytes("/proc/self/status", name));
        // `exact` or `fast` (products of 8-bit integers and bf16), and the first option that does not have its default.
        let mode = if core_ml.is_some() { "coreml".into() } else { self.executor.mode() };
        // `anemoe report` reads them.
        let mut facts = facts::of(json!({
            "mode": mode, "threads": threads, "read_gb_s": read_gb_s, "load_s": load_s, "first_token_s": first_token_s,
        }));
        facts.extend(facts::speeds(&speeds));
        recorder.end(&self.bundle, "", facts);
        let (bundle, source) = (self.bundle.display().to_string(), chain.source);
        let mut lines = vec![
            format!(
                "{}, {threads} threads, {}: reads {read_gb_s:.1} GB/s before, {read_after:.1} after",
                machine.cpu.as_deref().unwrap_or("this machine"),
                machine.isa.as_deref().unwrap_or("scalar")
            ),
            format!(
                "{bundle} ({source}), {mode}; loaded in {load_s:.2} s, first token behind {first_token_s:.2} s"
            ),
        ];
        let resident = |(own, mapped): (u64, u64)| {
            format!("resident: {} MB, and {} MB of mapped files", own / 1_000_000, mapped / 1_000_000)
        };
        lines.extend(own.zip(mapped).map(resident));
        bench_tables::show(&speeds, read_gb_s, self.shards, &mut lines);
        if self.ops && speeds.ops.is_empty() {
            lines.push(
                "operations: only those of fused functions are measured, and none is fused here".into(),
            );
        }
        // Bandwidth of all threads together, before and after the measurements.
        let figures = json!({"threads": threads, "read_gb_s": read_gb_s, "read_gb_s_after": read_after});
        let document = json!({
            "schema": SCHEMA, "version": env!("CARGO_PKG_VERSION"), "bundle": bundle, "source": source, "mode": mode,
            "machine": extended(to_value(&machine)?, &figures)?, "repetitions": options.repetitions, "load_s": load_s,
            "first_token_s": first_token_s, "memory": facts::of(json!({"own_bytes": own, "mapped_bytes": mapped})),
        });
        let document = extended(document, &speeds)?;
        let Some(save) = save else { return Ok(Page::new(document, lines)) };
        let text = serde_json::to_vec_pretty(&document)?;
        // Written after the output was shown, so that a failure does not lose it.
        let write =
            move || Ok(save.write(|file| file.write_all(&text)).map_err(|e| Error::io(save.path(), e))?);
        Ok(Page { later: Some(Box::new(write)), ..Page::new(document, lines) })
    }
}

/// Refuses an output that cannot be written, before anything is measured.
fn check_output(path: &Path, overwrite: Overwrite) -> anyhow::Result<Output> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    anyhow::ensure!(dir.is_dir(), "{}: there is no such folder", dir.display());
    anyhow::ensure!(!path.is_dir(), "{}: a folder, where a file is wanted", path.display());
    overwrite.output(path)
}

fn check(options: &BenchOptions, model: &Model) -> anyhow::Result<()> {
    let (longest, room) = (options.longest(), model.chain().model.max_context);
    anyhow::ensure!(
        options.drafts.is_empty() && options.drafter.is_none() || options.decode > 1,
        "--drafts and --drafter measure decoding: --decode {} leaves nothing to draft",
        options.decode
    );
    anyhow::ensure!(
        longest <= room,
        "{longest} tokens are asked for, and the bundle's context holds {room}: build with a larger --max-context"
    );
    Ok(())
}
