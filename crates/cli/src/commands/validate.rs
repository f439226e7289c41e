//! `anemoe validate`

use super::source::{Origin, Source};
use crate::Outcome;
use crate::bundle::Verify;
use crate::files;
use crate::journal::{JournalArgs, Recorder, facts};
use crate::shell::quoted;
use crate::target::expect_bundle;
use crate::ui::{Table, Ui};
use anemoe_convert::nearest::did_you_mean;
use anemoe_convert::plan::PlannedShard;
use anemoe_gates::fast::{self, FastGate};
use anemoe_gates::golden::{self, Agreement, Gate};
use anemoe_gates::probe::{self, Inputs, ProbeReport, Site};
use anemoe_gates::reference::Golden;
use anyhow::Context;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Compare a bundle with the golden, the checkpoint run in f32.
///
/// The golden gate compares logits and greedy tokens. With --probes, shards are compared with their FP16 forms, too. Exit status 1
/// when something differs too much.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe validate small.anemoe --golden models/small-gemma4/golden.npz\n  anemoe validate small.anemoe --golden models/small-gemma4/golden.npz --probes 8 --checkpoint models/small-gemma4"
)]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// Golden: a run of the checkpoint in f32, from `anemoe golden` or Hugging Face transformers.
    #[arg(long, value_name = "F.npz")]
    golden: PathBuf,
    /// Cosine that the logits must reach at every position and step.
    #[arg(long, value_name = "X", default_value_t = golden::MIN_COSINE)]
    min_cosine: f64,
    /// Also probe shards, that is compare them with their FP16 forms on test inputs: this many random vectors of length 1, and
    /// the values that the golden's prompt gives before the shard's layer. Of shards that differ only in weights, one is probed.
    #[arg(long, value_name = "N", requires = "checkpoint")]
    probes: Option<usize>,
    /// Seed of the random probes.
    #[arg(long, value_name = "N", default_value_t = probe::SEED, requires = "probes")]
    seed: u64,
    /// Probe these shards, or `all`.
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', requires = "probes")]
    shards: Vec<String>,
    /// Folder for the FP16 forms of shards, which are removed behind the probes [default: that of temporary files].
    #[arg(long, value_name = "DIR", requires = "probes")]
    scratch: Option<PathBuf>,
    /// Also hold the fast products of `generate --fast` to the exact ones, on the golden's prompt and continuation: median
    /// cosine of at least 0.999.
    #[arg(long)]
    fast: bool,
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    verify: Verify,
    #[command(flatten)]
    journal: JournalArgs,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    anyhow::ensure!(
        (-1.0..=1.0).contains(&args.min_cosine),
        "--min-cosine {} is not a cosine: between -1 and 1",
        args.min_cosine
    );
    expect_bundle(&args.bundle)?;
    let reference = Golden::read(&args.golden)?;
    let recorder = Recorder::new(&args.journal, "validate");
    let chain = args.verify.open(&args.bundle, ui)?;
    golden::fits(&reference, &chain).map_err(|what| anemoe_convert::Error::invalid(&args.golden, what))?;
    let gate = golden::gate(&args.bundle, &reference, args.min_cosine)?;
    let probes = args.probes.map(|count| probe(&args, count, &reference, ui)).transpose()?;
    let fast = args.fast.then(|| {
        let ids: Vec<u32> = reference.prompt_ids.iter().chain(&reference.decode_tokens).copied().collect();
        let room = chain.model.max_context.min(ids.len());
        fast::compare(&args.bundle, &ids[..room], fast::MIN_COSINE)
    });
    let fast = fast.transpose()?;
    let pass = fast.as_ref().is_none_or(|f| f.pass) && gate.pass && probes.as_ref().is_none_or(|p| p.pass);
    let mut facts = facts::validation(&gate, Some(&args.golden));
    let mut document = serde_json::to_value(&gate)?;
    if let Some(probes) = &probes {
        document["pass"] = pass.into();
        document["probes"] = serde_json::to_value(probes)?;
        facts.insert("probes".into(), facts::probes(probes).into());
    }
    if let Some(fast) = &fast {
        document["pass"] = pass.into();
        document["fast"] = serde_json::to_value(fast)?;
        facts.insert("fast".into(), facts::fast(fast).into());
    }
    recorder.gate(&args.bundle, pass, facts);
    ui.document(&document)?;
    print(&gate, ui)?;
    if let Some(probes) = &probes {
        ui.line("")?;
        print_probes(probes, ui)?;
    }
    if let Some(fast) = &fast {
        ui.line("")?;
        print_fast(fast, ui)?;
    }
    if !gate.pass {
        ui.line(format!(
            "next: anemoe trace {} --golden {} shows which layer loses how much",
            quoted(&args.bundle),
            quoted(&args.golden)
        ))?;
    }
    Ok(if pass { Outcome::Done } else { Outcome::GateFailed })
}

/// Fast products for people.
fn print_fast(f: &FastGate, ui: &Ui) -> std::io::Result<()> {
    for d in &f.differing {
        ui.line(format!(
            "position {}: fast, token {} is the most probable instead of {}, whose logit leads by {:.3}{}",
            d.position,
            d.fast,
            d.exact,
            d.margin,
            if d.near_tie { ": a near tie" } else { "" }
        ))?;
    }
    let behind: Vec<String> = f.stream.iter().map(|c| format!("{c:.6}")).collect();
    ui.line(format!(
        "values between the layers (hidden state), lowest cosine before the first layer and behind each: {}",
        behind.join(" ")
    ))?;
    ui.line(format!(
        "{}: fast against exact products, median cosine of the logits {:.6} (at least {} wanted), lowest {:.6}, {} of {} positions below {}; {} tokens differ",
        if f.pass { "pass" } else { "FAIL" },
        f.median_cosine,
        f.threshold,
        f.min_cosine,
        f.below,
        f.positions,
        f.threshold,
        f.differing.len()
    ))
}

/// Probes shards of the bundle.
fn probe(args: &Args, count: usize, reference: &Golden, ui: &Ui) -> anyhow::Result<ProbeReport> {
    let Origin { chain, family, plan, .. } = args.source.open(&args.bundle, "--probes")?;
    let checkpoint = &family.opened().checkpoint;
    let golden = super::build::reference(checkpoint, &plan, Some(reference), ui)?;
    let mut seen = BTreeSet::new();
    let mut shards: Vec<&PlannedShard> = Vec::new();
    if args.shards.is_empty() {
        shards.extend(plan.shards.iter().filter(|s| seen.insert(s.sort())));
    } else if args.shards == ["all"] {
        shards.extend(&plan.shards);
    } else {
        for name in &args.shards {
            let names = plan.shards.iter().map(|s| s.name.as_str());
            shards.push(plan.shard(name).with_context(|| {
                format!("--shards: no shard is named `{name}`{}", did_you_mean(name, names))
            })?);
        }
    }
    let scratch = files::scratch(args.scratch.as_deref())?;
    let site = Site {
        family: family.as_ref(),
        plan: &plan,
        chain: &chain,
        bundle: &args.bundle,
        scratch: scratch.path(),
    };
    let inputs = Inputs { count, seed: args.seed, real: Some(&golden), bos: chain.model.bos_token_id };
    let package = |s: &PlannedShard| args.bundle.join(s.package_file());
    let bar = ui.bar(shards.len() as u64, "probes");
    let found = probe::probe(&site, &shards, &package, &inputs, args.min_cosine, &mut |name| {
        bar.set_message(name.to_string());
        bar.inc(1);
    });
    bar.finish_and_clear();
    Ok(found?)
}

/// The probes for people: a row per shard, and what is out of the ordinary.
pub fn print_probes(report: &ProbeReport, ui: &Ui) -> std::io::Result<()> {
    let mut table =
        Table::new(&["shard", "kind", "positions", "median", "mean", "lowest", "at", "no active expert", ""]);
    for s in &report.shards {
        let all = s.probes.iter().flat_map(|p| p.positions.iter().enumerate().map(move |(i, c)| (p, i, c)));
        let lowest = all.filter_map(|(p, i, c)| Some((p, i, (*c)?))).min_by(|a, b| a.2.total_cmp(&b.2));
        let cosine = |c: f64| format!("{c:.6}");
        table.row(vec![
            s.shard.clone(),
            s.kind.name().into(),
            s.counted.to_string(),
            cosine(s.median_cosine),
            cosine(s.mean_cosine),
            cosine(s.min_cosine),
            lowest.map_or_else(String::new, |(p, i, _)| format!("{}, {i}", p.probe)),
            s.no_active_expert.to_string(),
            if s.pass { "pass" } else { "FAIL" }.into(),
        ]);
    }
    table.print(ui)?;
    for s in report.shards.iter().filter(|s| s.not_finite > 0) {
        ui.line(format!("{}: {} positions are not numbers", s.shard, s.not_finite))?;
    }
    for s in report.shards.iter().filter(|s| s.counted == 0) {
        ui.line(format!("{}: no probe has an active expert of it: nothing can be said", s.shard))?;
    }
    for warning in &report.warnings {
        ui.line(format!("warning: {warning}"))?;
    }
    ui.line(format!(
        "{}: {} shards against {}; {} random probes of length 1 (seed {}) and what the prompt gives; \
         median of at least {} wanted",
        if report.pass { "pass" } else { "FAIL" },
        report.shards.len(),
        report.against,
        report.random_probes,
        report.seed,
        report.threshold
    ))
}

/// The result for people.
pub fn print(gate: &Gate, ui: &Ui) -> std::io::Result<()> {
    let v = &gate.exact;
    let mut table = Table::new(&["after", "cosine", "KL, nats", "same top token"]);
    let mut row = |name: String, a: &Agreement| {
        let kl = a.kl.map_or_else(|| "not a number".into(), |kl| format!("{kl:.5}"));
        table.row(vec![name, format!("{:.6}", a.cosine), kl, if a.top1 { "yes" } else { "no" }.into()]);
    };
    for p in &v.positions {
        row(format!("prompt token {}", p.pos), &p.agreement);
    }
    // Steps are many and alike: the first, and the lowest of all.
    let lowest = v.decode.iter().min_by(|a, b| a.agreement.cosine.total_cmp(&b.agreement.cosine));
    let mut shown: Vec<_> = v.decode.first().into_iter().chain(lowest).collect();
    shown.dedup_by_key(|d| d.step);
    for d in shown {
        row(format!("decode step {}", d.step), &d.agreement);
    }
    table.print(ui)?;
    for c in &v.wrong_choices {
        ui.line(format!(
            "decode step {}: token {} instead of {}, whose logit leads by {:.3} in the reference{}",
            c.step,
            c.chosen,
            c.expected,
            c.margin,
            if c.near_tie { ": a near tie" } else { "" }
        ))?;
    }
    ui.line(format!(
        "mean divergence {:.5} nats; the same token is the most probable in {:.1} %",
        v.mean_kl,
        100.0 * v.top1_agreement
    ))?;
    let fp16 = &gate.fp16;
    ui.line(format!(
        "with every result rounded to fp16, as on the device: median cosine {:.6} (at least {} wanted), lowest {:.6}, {} differing choices",
        fp16.median_cosine,
        fp16.threshold,
        fp16.min_cosine,
        fp16.wrong_choices.len()
    ))?;
    if let Some(first) = fp16.not_finite.first() {
        ui.line(format!(
            "in fp16 the logits of {} positions and steps are not numbers, first at {first}: values overflow there",
            fp16.not_finite.len()
        ))?;
    }
    let equal = v.generated_ids.iter().zip(&v.expected_ids).take_while(|(a, b)| a == b).count();
    ui.line(format!(
        "{}: lowest cosine {:.6} (at least {} wanted) over {} positions and {} steps; {equal} of {} greedy tokens equal",
        if gate.pass { "pass" } else { "FAIL" },
        v.min_cosine,
        v.threshold,
        v.positions.len(),
        v.decode.len(),
        v.expected_ids.len()
    ))
}
