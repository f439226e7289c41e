//! `anemoe bench`

use crate::args::executor::ExecutorArgs;
use crate::args::numbers::{at_least_one, count};
use crate::bundle::Verify;
use crate::files::Overwrite;
use crate::outcome::Outcome;
use crate::recorder::{JournalArgs, Recorder, facts};
use crate::target::expect_bundle;
use crate::ui::{Table, Ui};
use anemoe_bundle::journal::Machine;
use anemoe_io::Random;
use anemoe_kernels::Pool;
use anemoe_runtime::model::{Logits, Model, Request, Sequence, ShardStats};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Version of the document.
const SCHEMA: u32 = 1;
/// Most bytes of a document that is compared with.
const MAX_BYTES: u64 = 64 << 20;
/// Memory that is read to measure bandwidth, and how often.
const MEMORY: usize = 512 << 20;
const PASSES: usize = 5;
/// Memory that is read between repetitions.
const GAUGE: usize = 256 << 20;
/// Operations in the table.
const MOST_OPS: usize = 24;

/// Measure the speed of a bundle on this machine.
///
/// Measures loading, prefill, and decode at several context lengths, and shows the bytes that are read beside the bandwidth of the
/// memory.
///
/// Tokens are random, so that each one goes to other experts. In front of a decode the context is filled with noise, since
/// the time does not depend on what is in it. Figures are medians.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe bench small.anemoe\n  anemoe bench small.anemoe --context 64,1024 --fast\n  anemoe bench small.anemoe --save a.json\n  anemoe bench small.anemoe --against a.json"
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
    /// Write the figures as lines of comma-separated values.
    #[arg(long, value_name = "F.csv")]
    csv: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
    #[command(flatten)]
    verify: Verify,
    /// Show the figures beside those of an earlier run, from --save.
    #[arg(long, value_name = "F.json")]
    against: Option<PathBuf>,
    #[command(flatten)]
    executor: ExecutorArgs,
    #[command(flatten)]
    journal: JournalArgs,
}

/// What was measured.
#[derive(Serialize, Deserialize)]
struct Report {
    schema: u32,
    version: String,
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    bundle: PathBuf,
    source: String,
    /// `exact`, or `fast` where products are of integers and bf16; and what is not as it is by default.
    mode: String,
    machine: MachineReport,
    repetitions: usize,
    /// Seconds to open the bundle.
    load_s: f64,
    /// Seconds from the start to the first token's logits.
    first_token_s: f64,
    prefill: Vec<Prefill>,
    decode: Vec<Decode>,
    /// With --sequences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    batches: Vec<Batch>,
    /// Shards of one kind together, while decoding in the first context.
    kinds: Vec<Part>,
    shards: Vec<Part>,
    ops: Vec<OpPart>,
    memory: Memory,
    /// With --against.
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Against>,
}

/// An earlier run beside this one.
#[derive(Serialize, Deserialize)]
struct Against {
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    file: PathBuf,
    /// What else was not the same.
    differs: Vec<String>,
    /// Measurements of both.
    beside: Vec<Beside>,
}

#[derive(Serialize, Deserialize)]
struct Beside {
    /// For instance `decode at 64`.
    what: String,
    earlier_tok_s: f64,
    /// This run's speed over the earlier one's.
    ratio: f64,
}

impl Against {
    fn new(file: &Path, now: &Report, earlier: &Report) -> Against {
        let of = |r: &Report| {
            let m = &r.machine;
            [
                ("model", r.source.clone()),
                ("version", r.version.clone()),
                ("mode", r.mode.clone()),
                ("threads", m.threads.to_string()),
                ("processor", m.machine.cpu.clone().unwrap_or_default()),
                ("instructions", m.machine.isa.clone().unwrap_or_default()),
            ]
        };
        let differs = of(now).into_iter().zip(of(earlier)).filter(|(now, was)| now.1 != was.1);
        let differs = differs.map(|((what, now), (_, was))| format!("{what} `{was}`, now `{now}`")).collect();
        let was = earlier.speeds();
        let both = now.speeds().into_iter().filter_map(|(what, tok_s)| {
            let earlier_tok_s = was.iter().find(|(w, _)| *w == what)?.1;
            Some(Beside { what, earlier_tok_s, ratio: tok_s / earlier_tok_s })
        });
        Against { file: file.to_path_buf(), differs, beside: both.collect() }
    }
}

impl Decode {
    fn name(&self) -> String {
        format!("decode at {}", self.context)
    }
}

impl Batch {
    fn name(&self) -> String {
        format!("{} sequences at {}", self.sequences, self.context)
    }
}

impl Prefill {
    fn name(&self) -> String {
        format!("prefill {}", self.tokens)
    }
}

impl Report {
    /// Tokens per second of each measurement.
    fn speeds(&self) -> Vec<(String, f64)> {
        let decode = self.decode.iter().map(|d| (d.name(), d.tok_s));
        let batches = self.batches.iter().map(|b| (b.name(), b.tok_s));
        decode.chain(batches).chain(self.prefill.iter().map(|p| (p.name(), p.tok_s))).collect()
    }
}

#[derive(Serialize, Deserialize)]
struct MachineReport {
    #[serde(flatten)]
    machine: Machine,
    threads: usize,
    /// Gigabytes per second that all threads read together, before and after the rest.
    read_gb_s: f64,
    read_gb_s_after: f64,
}

#[derive(Serialize, Deserialize)]
struct Prefill {
    tokens: usize,
    seconds: f64,
    tok_s: f64,
    /// Gigabytes of weights and caches read.
    gb: f64,
    gb_s: f64,
    /// Different experts that a layer ran in a call, on average; absent without experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    distinct_experts: Option<f64>,
}

/// Several sequences that take a token each in every pass.
#[derive(Serialize, Deserialize)]
struct Batch {
    sequences: usize,
    context: usize,
    /// Tokens of each sequence.
    tokens: usize,
    seconds: f64,
    /// Tokens per second of all sequences together.
    tok_s: f64,
    tok_s_per_sequence: f64,
    /// Speed of all together over that of one sequence, where one was measured too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    over_one: Option<f64>,
    gb_per_token: f64,
    gb_s: f64,
    /// Different experts that a layer ran in a pass, on average; absent without experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    distinct_experts: Option<f64>,
}

#[derive(Serialize, Deserialize)]
struct Decode {
    context: usize,
    tokens: usize,
    seconds: f64,
    tok_s: f64,
    ms_per_token: f64,
    /// Gigabytes of weights and caches read for a token.
    gb_per_token: f64,
    gb_s: f64,
    /// Gigabytes per second that all threads read beside it.
    read_gb_s: f64,
    /// Median over the repetitions, each beside its own reading.
    share_of_bandwidth: f64,
    /// Tokens per second if nothing took time but reading these bytes.
    ceiling_tok_s: f64,
}

#[derive(Serialize, Deserialize)]
struct Part {
    name: String,
    calls: u64,
    ms_per_token: f64,
    share: f64,
    gb_per_token: f64,
    gb_s: f64,
}

#[derive(Serialize, Deserialize)]
struct OpPart {
    op: String,
    ms_per_token: f64,
    share: f64,
}

/// Resident memory behind the last measurement, where the system tells.
#[derive(Serialize, Deserialize)]
struct Memory {
    #[serde(skip_serializing_if = "Option::is_none")]
    own_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mapped_bytes: Option<u64>,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let earlier = args.against.as_deref().map(read_report).transpose()?;
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
    let backend = args.executor.backend()?;
    let backend = anemoe_runtime::cpu::CpuBackend {
        options: anemoe_runtime::cpu::Options { profile: args.ops, ..backend.options },
    };
    expect_bundle(&args.bundle)?;
    args.verify.open(&args.bundle, ui)?;
    let recorder = Recorder::new(&args.journal, "bench");
    let pool = Pool::global();
    let read_gb_s = anemoe_kernels::measure_bandwidth(pool, MEMORY, PASSES);
    let started = Instant::now();
    let model = Model::open(&args.bundle, &backend)?;
    model.prepare(1, Logits::Last);
    let mut sequence = model.sequence();
    let mapped = model.populate();
    let load_s = started.elapsed().as_secs_f64();
    check(&args, &model)?;
    let mut tokens = Tokens { random: Random::new(args.seed), vocabulary: model.chain().model.vocab_size };
    model.append(&mut sequence, &tokens.some(1), Logits::Last, None)?;
    let first_token_s = started.elapsed().as_secs_f64();
    // What is measured from here on is not what a first minute is like.
    if let Some(mapped) = mapped {
        let _ = mapped.join();
    }

    let prefill: Vec<usize> = args.prefill.iter().copied().filter(|&n| n > 0).collect();
    let contexts: &[usize] = if args.decode > 0 { &args.context } else { &[] };
    let batched: &[usize] = if args.decode > 0 { &args.sequences } else { &[] };
    let steps = (prefill.len() + contexts.len() + batched.len()) * (args.repetitions + 1);
    let bar = ui.bar(steps as u64, "runs");
    let mut decodes = Vec::new();
    let gauge = Gauge::new();
    let (mut kinds, mut shards, mut ops) = (Vec::new(), Vec::new(), Vec::new());
    for &context in contexts {
        let before = model.shard_stats();
        let mut bytes = 0.0;
        let (mut reads, mut shares) = (Vec::new(), Vec::new());
        let seconds = median(args.repetitions, &bar, || {
            model.fill_with_noise(&mut sequence, context, args.seed)?;
            let first = gauge.gb_s(pool);
            let ids = tokens.some(args.decode);
            let read = bytes_read(&model);
            let started = Instant::now();
            for id in ids {
                model.append(&mut sequence, &[id], Logits::Last, None)?;
            }
            let elapsed = started.elapsed();
            bytes = (bytes_read(&model) - read) as f64;
            // Other work on a machine comes and goes: what memory gives is measured close by.
            let read = (first + gauge.gb_s(pool)) / 2.0;
            reads.push(read);
            shares.push(bytes / 1e9 / elapsed.as_secs_f64() / read);
            Ok(elapsed)
        })?;
        let (read_gb_s, share_of_bandwidth) = (middle(&mut reads[1..]), middle(&mut shares[1..]));
        let n = args.decode as f64;
        let gb_per_token = bytes / n / 1e9;
        decodes.push(Decode {
            context,
            tokens: args.decode,
            seconds,
            tok_s: n / seconds,
            ms_per_token: seconds / n * 1e3,
            gb_per_token,
            gb_s: bytes / 1e9 / seconds,
            read_gb_s,
            share_of_bandwidth,
            ceiling_tok_s: if gb_per_token > 0.0 { read_gb_s / gb_per_token } else { 0.0 },
        });
        if kinds.is_empty() {
            let all = (args.repetitions + 1) * args.decode;
            (kinds, shards, ops) = parts(&model, &before, all);
        }
    }
    drop(gauge);
    let batches = batches(&args, batched, &model, &mut tokens, &bar)?;
    let mut prefills = Vec::new();
    for n in prefill {
        let before = model.shard_stats();
        let (mut bytes, mut experts) = (0.0, None);
        let passes = n.div_ceil(model.most_tokens(args.prefill_chunk));
        let seconds = median(args.repetitions, &bar, || {
            sequence.clear();
            let ids = tokens.some(n);
            let (read, before) = (bytes_read(&model), model.shard_stats());
            let started = Instant::now();
            model.append(&mut sequence, &ids, Logits::Last, args.prefill_chunk)?;
            let elapsed = started.elapsed();
            bytes = (bytes_read(&model) - read) as f64;
            experts = distinct_experts(&model, &before, passes);
            Ok(elapsed)
        })?;
        let gb = bytes / 1e9;
        prefills.push(Prefill {
            tokens: n,
            seconds,
            tok_s: n as f64 / seconds,
            gb,
            gb_s: gb / seconds,
            distinct_experts: experts,
        });
        // Of the first prompt where nothing is decoded.
        if kinds.is_empty() {
            (kinds, shards, ops) = parts(&model, &before, (args.repetitions + 1) * n);
        }
    }
    bar.finish_and_clear();
    let memory = memory();
    let mut report = Report {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").into(),
        bundle: args.bundle.clone(),
        source: model.chain().source.clone(),
        mode: args.executor.mode(),
        machine: MachineReport {
            machine: crate::recorder::machine::this(),
            threads: pool.threads(),
            read_gb_s,
            read_gb_s_after: anemoe_kernels::measure_bandwidth(pool, MEMORY, PASSES),
        },
        repetitions: args.repetitions,
        load_s,
        first_token_s,
        prefill: prefills,
        decode: decodes,
        batches,
        kinds,
        shards,
        ops,
        memory,
        against: None,
    };
    recorder.end(&args.bundle, "", event(&report));
    let (saved, lines) = (serde_json::to_vec_pretty(&report)?, csv(&report));
    report.against = args.against.as_deref().zip(earlier).map(|(file, e)| Against::new(file, &report, &e));
    ui.document(&report)?;
    print(&report, args.shards, ui)?;
    if args.ops && report.ops.is_empty() {
        ui.line("operations: only those of fused functions are measured, and none is fused here")?;
    }
    // Behind what is shown, which is not lost then where a file cannot be written.
    for (path, bytes) in [(&args.save, saved.as_slice()), (&args.csv, lines.as_bytes())] {
        if let Some(path) = path {
            anemoe_bundle::write_atomic(path, bytes)?;
        }
    }
    Ok(Outcome::Done)
}

fn check(args: &Args, model: &Model) -> anyhow::Result<()> {
    let room = model.chain().model.max_context;
    let longest =
        args.prefill.iter().copied().chain(args.context.iter().map(|c| c.saturating_add(args.decode))).max();
    let longest = longest.unwrap_or(0);
    anyhow::ensure!(
        longest <= room,
        "{longest} tokens are asked for, and the bundle's context holds {room}: build with a larger --max-context"
    );
    Ok(())
}

fn read_report(path: &Path) -> anyhow::Result<Report> {
    let what = || format!("--against {}", path.display());
    let text = anemoe_io::read_input(path, MAX_BYTES).with_context(what)?;
    let report: Report = anemoe_io::json::parse(&text).with_context(what)?;
    anyhow::ensure!(
        report.schema == SCHEMA,
        "--against {}: schema {} where this version reads {SCHEMA}",
        path.display(),
        report.schema
    );
    for (measured, tok_s) in report.speeds() {
        anyhow::ensure!(
            tok_s.is_finite() && tok_s > 0.0,
            "--against {}: {measured}: {tok_s} tokens per second",
            path.display()
        );
    }
    Ok(report)
}

/// Random tokens.
struct Tokens {
    random: Random,
    vocabulary: usize,
}

impl Tokens {
    fn some(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.random.below(self.vocabulary) as u32).collect()
    }
}

/// Median seconds of several runs, behind one that is not counted.
fn median(
    repetitions: usize,
    bar: &indicatif::ProgressBar,
    mut run: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    for i in 0..=repetitions {
        let time = run()?.as_secs_f64();
        bar.inc(1);
        if i > 0 {
            times.push(time);
        }
    }
    Ok(middle(&mut times).max(1e-9))
}

/// The median.
fn middle(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (values[(n - 1) / 2] + values[n / 2]) / 2.0
}

/// Memory that is read between repetitions.
struct Gauge(Vec<u8>);

impl Gauge {
    fn new() -> Gauge {
        // Pages that nothing was written to are all the same one.
        Gauge(vec![1; GAUGE])
    }

    /// Gigabytes per second that all threads read.
    fn gb_s(&self, pool: &Pool) -> f64 {
        let started = Instant::now();
        std::hint::black_box(anemoe_kernels::read(pool, &self.0));
        self.0.len() as f64 / 1e9 / started.elapsed().as_secs_f64()
    }
}

fn bytes_read(model: &Model) -> u64 {
    model.shard_stats().iter().map(|s| s.counts.bytes_read).sum()
}

/// Different experts that a layer ran in a pass since `before`, on average over layers with experts.
fn distinct_experts(model: &Model, before: &[ShardStats], passes: usize) -> Option<f64> {
    let mut layers = BTreeMap::<Option<usize>, u64>::new();
    for ((now, before), shard) in model.shard_stats().iter().zip(before).zip(&model.chain().shards) {
        let ran = now.counts.experts - before.counts.experts;
        if ran > 0 {
            *layers.entry(shard.layer).or_default() += ran;
        }
    }
    let all: u64 = layers.values().sum();
    (passes > 0 && !layers.is_empty()).then(|| all as f64 / (layers.len() * passes) as f64)
}

/// Decodes in so many sequences at once, each of `counts`.
fn batches(
    args: &Args,
    counts: &[usize],
    model: &Model,
    tokens: &mut Tokens,
    bar: &indicatif::ProgressBar,
) -> anyhow::Result<Vec<Batch>> {
    let context = args.context.first().copied().unwrap_or(0);
    let mut batches: Vec<Batch> = Vec::new();
    for &n in counts {
        let mut sequences: Vec<Sequence> = (0..n).map(|_| model.sequence()).collect();
        let (mut bytes, mut experts) = (0.0, None);
        let seconds = median(args.repetitions, bar, || {
            for (i, sequence) in sequences.iter_mut().enumerate() {
                model.fill_with_noise(sequence, context, args.seed + i as u64)?;
            }
            let ids: Vec<Vec<u32>> = (0..args.decode).map(|_| tokens.some(n)).collect();
            let (read, before) = (bytes_read(model), model.shard_stats());
            let started = Instant::now();
            for ids in &ids {
                let mut requests: Vec<Request<'_>> = sequences
                    .iter_mut()
                    .zip(ids.chunks(1))
                    .map(|(sequence, ids)| Request { sequence, ids, logits: Logits::Last })
                    .collect();
                model.forward(&mut requests)?;
            }
            let elapsed = started.elapsed();
            bytes = (bytes_read(model) - read) as f64;
            experts = distinct_experts(model, &before, args.decode);
            Ok(elapsed)
        })?;
        let all = (n * args.decode) as f64;
        let tok_s = all / seconds;
        let one = batches.iter().find(|b| b.sequences == 1).map(|b| b.tok_s);
        batches.push(Batch {
            sequences: n,
            context,
            tokens: args.decode,
            seconds,
            tok_s,
            tok_s_per_sequence: tok_s / n as f64,
            over_one: one.map(|one| tok_s / one),
            gb_per_token: bytes / all / 1e9,
            gb_s: bytes / 1e9 / seconds,
            distinct_experts: experts,
        });
    }
    Ok(batches)
}

/// What shards and operations have done since `before`, for each of `tokens` tokens.
fn parts(model: &Model, before: &[ShardStats], tokens: usize) -> (Vec<Part>, Vec<Part>, Vec<OpPart>) {
    let after = model.shard_stats();
    let all: f64 = after.iter().zip(before).map(|(a, b)| (a.time - b.time).as_secs_f64()).sum();
    let n = tokens.max(1) as f64;
    let part = |name: String, calls: u64, seconds: f64, bytes: u64| Part {
        name,
        calls,
        ms_per_token: seconds / n * 1e3,
        share: if all > 0.0 { seconds / all } else { 0.0 },
        gb_per_token: bytes as f64 / n / 1e9,
        gb_s: if seconds > 0.0 { bytes as f64 / 1e9 / seconds } else { 0.0 },
    };
    let mut shards = Vec::new();
    let mut kinds: BTreeMap<&str, (u64, f64, u64)> = BTreeMap::new();
    let mut ops: BTreeMap<String, f64> = BTreeMap::new();
    for ((a, b), shard) in after.iter().zip(before).zip(&model.chain().shards) {
        let (calls, seconds) = (a.calls - b.calls, (a.time - b.time).as_secs_f64());
        let bytes = a.counts.bytes_read - b.counts.bytes_read;
        let kind = kinds.entry(shard.kind.name()).or_default();
        *kind = (kind.0 + calls, kind.1 + seconds, kind.2 + bytes);
        shards.push(part(shard.name.clone(), calls, seconds, bytes));
        for (all, sign) in [(&a.ops, 1.0), (&b.ops, -1.0)] {
            for op in all {
                let name = format!("{} {}", shard.kind.name(), op.op_type);
                *ops.entry(name).or_default() += sign * op.time.as_secs_f64();
            }
        }
    }
    let kinds = kinds.into_iter().map(|(k, (c, s, b))| part(k.into(), c, s, b)).collect();
    let mut ops: Vec<OpPart> = ops
        .into_iter()
        .filter(|(_, s)| *s > 1e-9)
        .map(|(op, s)| OpPart { op, ms_per_token: s / n * 1e3, share: if all > 0.0 { s / all } else { 0.0 } })
        .collect();
    ops.sort_by(|a, b| b.ms_per_token.total_cmp(&a.ms_per_token));
    (kinds, shards, ops)
}

/// Resident bytes of this process: its own, and of mapped files.
fn memory() -> Memory {
    #[cfg(target_os = "linux")]
    {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let of = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(key))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        Memory { own_bytes: of("RssAnon:"), mapped_bytes: of("RssFile:") }
    }
    #[cfg(not(target_os = "linux"))]
    Memory { own_bytes: None, mapped_bytes: None }
}

fn event(report: &Report) -> crate::recorder::Facts {
    let mut facts = facts::of(serde_json::json!({
        "mode": report.mode,
        "threads": report.machine.threads,
        "read_gb_s": report.machine.read_gb_s,
        "load_s": report.load_s,
        "first_token_s": report.first_token_s,
    }));
    for p in &report.prefill {
        facts.insert(format!("prefill_{}_tok_s", p.tokens), p.tok_s.into());
    }
    for d in &report.decode {
        facts.insert(format!("decode_at_{}_tok_s", d.context), d.tok_s.into());
        facts.insert(format!("decode_at_{}_gb_s", d.context), d.gb_s.into());
    }
    facts
}

fn csv(report: &Report) -> String {
    let mut lines = vec!["what,size,figure,unit".to_string()];
    let mut add = |what: &str, size: &dyn std::fmt::Display, figure: f64, unit: &str| {
        // Names hold no quotes: they are of shards and operations.
        lines.push(format!("{what},{size},{figure},{unit}"));
    };
    add("read bandwidth", &"", report.machine.read_gb_s, "GB/s");
    add("load", &"", report.load_s, "s");
    add("first token", &"", report.first_token_s, "s");
    for p in &report.prefill {
        add("prefill", &p.tokens, p.tok_s, "tok/s");
        add("prefill", &p.tokens, p.gb_s, "GB/s");
    }
    for d in &report.decode {
        add("decode", &d.context, d.tok_s, "tok/s");
        add("decode", &d.context, d.gb_per_token, "GB/token");
        add("decode", &d.context, d.gb_s, "GB/s");
        add("decode", &d.context, d.share_of_bandwidth, "share of bandwidth");
    }
    for b in &report.batches {
        add("sequences", &b.sequences, b.tok_s, "tok/s");
        add("sequences", &b.sequences, b.tok_s_per_sequence, "tok/s each");
        add("sequences", &b.sequences, b.gb_per_token, "GB/token");
    }
    for (what, parts) in [("kind", &report.kinds), ("shard", &report.shards)] {
        for p in parts {
            add(what, &p.name, p.ms_per_token, "ms/token");
            add(what, &p.name, p.gb_s, "GB/s");
        }
    }
    for o in &report.ops {
        add("op", &o.op, o.ms_per_token, "ms/token");
    }
    lines.push(String::new());
    lines.join("\n")
}

fn print(report: &Report, shards: bool, ui: &Ui) -> anyhow::Result<()> {
    let m = &report.machine;
    ui.line(format!(
        "{}, {} threads, {}: reads {:.1} GB/s before, {:.1} after",
        m.machine.cpu.as_deref().unwrap_or("this machine"),
        m.threads,
        m.machine.isa.as_deref().unwrap_or("scalar"),
        m.read_gb_s,
        m.read_gb_s_after
    ))?;
    ui.line(format!(
        "{} ({}), {}; loaded in {:.2} s, first token behind {:.2} s",
        report.bundle.display(),
        report.source,
        report.mode,
        report.load_s,
        report.first_token_s
    ))?;
    if let (Some(own), Some(mapped)) = (report.memory.own_bytes, report.memory.mapped_bytes) {
        ui.line(format!("resident: {} MB, and {} MB of mapped files", own / 1_000_000, mapped / 1_000_000))?;
    }
    ui.line("")?;
    let mut headings =
        vec!["", "tok/s", "ms per token", "GB per token", "GB/s", "of bandwidth", "ceiling tok/s"];
    if report.against.is_some() {
        headings.extend(["earlier tok/s", "ratio"]);
    }
    let mut table = Table::new(&headings);
    let beside = |cells: &mut Vec<String>| {
        if let Some(against) = &report.against {
            let found = against.beside.iter().find(|b| b.what == cells[0]);
            cells.push(found.map_or("-".into(), |b| format!("{:.2}", b.earlier_tok_s)));
            cells.push(found.map_or("-".into(), |b| format!("{:.3}", b.ratio)));
        }
    };
    for d in &report.decode {
        let mut cells = vec![
            d.name(),
            format!("{:.2}", d.tok_s),
            format!("{:.2}", d.ms_per_token),
            format!("{:.4}", d.gb_per_token),
            format!("{:.1}", d.gb_s),
            format!("{:.0} %", 100.0 * d.share_of_bandwidth),
            format!("{:.2}", d.ceiling_tok_s),
        ];
        beside(&mut cells);
        table.row(cells);
    }
    for b in &report.batches {
        let mut cells = vec![
            b.name(),
            format!("{:.2}", b.tok_s),
            format!("{:.2}", b.seconds * 1e3 / (b.sequences * b.tokens) as f64),
            format!("{:.4}", b.gb_per_token),
            format!("{:.1}", b.gb_s),
            format!("{:.0} %", 100.0 * b.gb_s / m.read_gb_s),
            "-".into(),
        ];
        beside(&mut cells);
        table.row(cells);
    }
    for p in &report.prefill {
        let mut cells = vec![
            p.name(),
            format!("{:.2}", p.tok_s),
            format!("{:.2}", p.seconds * 1e3 / p.tokens as f64),
            format!("{:.4}", p.gb / p.tokens as f64),
            format!("{:.1}", p.gb_s),
            format!("{:.0} %", 100.0 * p.gb_s / m.read_gb_s),
            "-".into(),
        ];
        beside(&mut cells);
        table.row(cells);
    }
    table.print(ui)?;
    for b in &report.batches {
        let over = b.over_one.map_or(String::new(), |x| format!(", {x:.2} times one sequence"));
        ui.line(format!("{}: {:.2} tok/s each{over}", b.name(), b.tok_s_per_sequence))?;
    }
    let batches = report.batches.iter().map(|b| (b.name(), b.distinct_experts));
    for (name, experts) in report.prefill.iter().map(|p| (p.name(), p.distinct_experts)).chain(batches) {
        if let Some(experts) = experts {
            ui.line(format!("{name}: {experts:.1} different experts in a layer and call"))?;
        }
    }
    if let Some(against) = report.against.as_ref().filter(|a| !a.differs.is_empty()) {
        ui.line(format!("earlier, of {}: {}", against.file.display(), against.differs.join("; ")))?;
    }
    let of = |parts: &[Part], title: &str| -> anyhow::Result<()> {
        ui.line("")?;
        let mut table = Table::new(&[title, "calls", "ms per token", "share", "GB per token", "GB/s"]);
        for p in parts {
            table.row(vec![
                p.name.clone(),
                p.calls.to_string(),
                format!("{:.3}", p.ms_per_token),
                format!("{:.1} %", 100.0 * p.share),
                format!("{:.4}", p.gb_per_token),
                format!("{:.1}", p.gb_s),
            ]);
        }
        Ok(table.print(ui)?)
    };
    if !report.kinds.is_empty() {
        of(&report.kinds, "shards")?;
    }
    if shards {
        of(&report.shards, "shard")?;
    }
    if !report.ops.is_empty() {
        ui.line("")?;
        let mut table = Table::new(&["operation", "ms per token", "share"]);
        for o in report.ops.iter().take(MOST_OPS) {
            table.row(vec![
                o.op.clone(),
                format!("{:.3}", o.ms_per_token),
                format!("{:.1} %", 100.0 * o.share),
            ]);
        }
        table.print(ui)?;
    }
    Ok(())
}
