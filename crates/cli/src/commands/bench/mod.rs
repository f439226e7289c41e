//! `anemoe bench`

mod bench_args;
mod bench_report;
mod bounds;
mod dispatch;
mod drafts;
mod measure;
mod show_bench;

pub use bench_args::Args;
pub use bench_report::BenchReport;

use crate::outcome::Outcome;
use crate::recorder::Recorder;
use crate::target::expect_bundle;
use crate::ui::Ui;
use anemoe_kernels::Pool;
use anemoe_runtime::cpu::{CpuBackend, Options};
use anemoe_runtime::model::{Logits, Model};
use bench_report::{Against, MachineReport, SCHEMA, csv, event, read_report};
use measure::{Bench, Tokens, memory};
use std::path::Path;
use std::time::Instant;

/// Bytes that are read to measure bandwidth.
const MEMORY: usize = 512 << 20;
/// Times that the bytes are read.
const PASSES: usize = 5;

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    if !args.dispatch.is_empty() {
        check_outputs(&args)?;
        return dispatch::run(&args, &backend(&args)?, ui);
    }
    measure(args, ui)?;
    Ok(Outcome::Done)
}

/// Makes the CPU backend that is measured.
fn backend(args: &Args) -> anyhow::Result<CpuBackend> {
    let CpuBackend { options } = args.executor.backend()?;
    Ok(CpuBackend { options: Options { profile: args.ops, ..options } })
}

/// Measures the speed of a bundle and shows it.
pub fn measure(args: Args, ui: &Ui) -> anyhow::Result<BenchReport> {
    let earlier = args.against.as_deref().map(read_report).transpose()?;
    check_outputs(&args)?;
    let backend = backend(&args)?;
    expect_bundle(&args.bundle)?;
    let chain = args.verify.open(&args.bundle, ui)?;
    let core_ml = args.runner.core_ml(&args.bundle, &chain, args.ops || !args.executor.is_default())?;
    let recorder = Recorder::new(&args.journal, "bench");
    let pool = Pool::global();
    let read_gb_s = anemoe_kernels::measure_bandwidth(pool, MEMORY, PASSES);
    let started = Instant::now();
    let model = match &core_ml {
        Some(core_ml) => Model::open(&args.bundle, core_ml)?,
        None => Model::open(&args.bundle, &backend)?,
    };
    model.prepare(1, Logits::Last);
    let mut sequence = model.sequence();
    let mapped = model.populate();
    let load_s = started.elapsed().as_secs_f64();
    check(&args, &model)?;
    let mut tokens = Tokens::new(args.seed, model.chain().model.vocab_size);
    model.append(&mut sequence, &tokens.random_ids(1), Logits::Last, None)?;
    let first_token_s = started.elapsed().as_secs_f64();
    // Waits until the weights are in memory: later figures are not those of a cold start.
    if let Some(mapped) = mapped {
        let _ = mapped.join();
    }

    let mut bench = Bench::new(&args, &model, sequence, tokens, pool, ui);
    let decode = bench.decodes()?;
    let batches = bench.batches()?;
    let verify = bench.verify()?;
    let drafts = bench.drafts()?;
    let prefill = bench.prefills()?;
    let passes = std::mem::take(&mut bench.passes);
    let (kinds, shards, ops) = bench.finish();
    let bounds = match &core_ml {
        Some(_) => Vec::new(),
        None => bounds::of_kinds(&passes, pool, args.executor.is_fast(), read_gb_s),
    };
    let mut report = BenchReport {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").into(),
        bundle: args.bundle.clone(),
        source: model.chain().source.clone(),
        mode: if core_ml.is_some() { "coreml".into() } else { args.executor.mode() },
        machine: MachineReport {
            machine: crate::machine::this(),
            threads: pool.threads(),
            read_gb_s,
            read_gb_s_after: anemoe_kernels::measure_bandwidth(pool, MEMORY, PASSES),
        },
        repetitions: args.repetitions,
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
        against: None,
    };
    recorder.end(&args.bundle, "", event(&report));
    let (saved, lines) = (serde_json::to_vec_pretty(&report)?, csv(&report));
    report.against = args.against.as_deref().zip(earlier).map(|(file, e)| Against::new(file, &report, &e));
    ui.document(&report)?;
    show_bench::print(&report, args.shards, ui)?;
    if args.ops && report.ops.is_empty() {
        ui.line("operations: only those of fused functions are measured, and none is fused here")?;
    }
    // Files are written after the output is shown, so that a failure does not lose it.
    for (path, bytes) in [(&args.save, saved.as_slice()), (&args.csv, lines.as_bytes())] {
        if let Some(path) = path {
            anemoe_bundle::write_atomic(path, bytes)?;
        }
    }
    Ok(report)
}

/// Refuses outputs that cannot be written, before anything is measured.
fn check_outputs(args: &Args) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.save.is_none() || args.save != args.csv,
        "--save and --csv name the same file: it would hold one of them"
    );
    for path in [&args.save, &args.csv].into_iter().flatten() {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        anyhow::ensure!(dir.is_dir(), "{}: there is no such folder", dir.display());
        anyhow::ensure!(!path.is_dir(), "{}: a folder, where a file is wanted", path.display());
        args.overwrite.output(path)?;
    }
    Ok(())
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
