//! `anemoe validate`

use crate::args::origin::{Origin, OriginArgs};
use crate::args::runner::RunnerArgs;
use crate::bundle::Verify;
use crate::files;
use crate::gate_reference::{read_goldens, reference};
use crate::outcome::Outcome;
use crate::recorder::{JournalArgs, Recorder, facts};
use crate::shell::quoted;
use crate::show::gate_results::{print_fast, print_golden, print_probes};
use crate::target::expect_bundle;
use crate::ui::Ui;
use anemoe_convert::nearest::did_you_mean;
use anemoe_convert::plan::PlannedShard;
use anemoe_gates::gated::{NamedGate, NamedGolden};
use anemoe_gates::golden_gate;
use anemoe_gates::int8_gate;
use anemoe_gates::probe::{self, Inputs, ProbeContext, ProbeReport};
use anemoe_gates::reference::Golden;
use anemoe_runtime::model::Model;
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
    /// Golden: a run of the checkpoint in f32, from `anemoe golden` or Hugging Face transformers. Given several times, the bundle
    /// has to pass with each; shards are probed with the first.
    #[arg(long, value_name = "F.npz", required = true)]
    golden: Vec<PathBuf>,
    /// Cosine that the logits must reach at every position and step.
    #[arg(long, value_name = "X", default_value_t = golden_gate::MIN_COSINE)]
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
    runner: RunnerArgs,
    #[command(flatten)]
    source: OriginArgs,
    #[command(flatten)]
    verify: Verify,
    #[command(flatten)]
    journal: JournalArgs,
}

/// Gates of a bundle, with each golden.
pub struct Validated {
    pub pass: bool,
    pub gates: Vec<NamedGate>,
    pub probes: Option<ProbeReport>,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    Ok(if compare(args, ui)?.pass { Outcome::Done } else { Outcome::GateFailed })
}

/// Compares a bundle with goldens and shows the result.
pub fn compare(args: Args, ui: &Ui) -> anyhow::Result<Validated> {
    anyhow::ensure!(
        (-1.0..=1.0).contains(&args.min_cosine),
        "--min-cosine {} is not a cosine: between -1 and 1",
        args.min_cosine
    );
    expect_bundle(&args.bundle)?;
    let goldens = read_goldens(&args.golden)?;
    let recorder = Recorder::new(&args.journal, "validate");
    let chain = args.verify.open(&args.bundle, ui)?;
    for NamedGolden { path, golden } in &goldens {
        golden_gate::fits(golden, &chain).map_err(|what| anemoe_convert::Error::invalid(path, what))?;
    }
    let core_ml = args.runner.core_ml(&args.bundle, &chain, false)?;
    let on_device = core_ml.map(|core_ml| Model::open(&args.bundle, &core_ml)).transpose()?;
    let mut gates = Vec::new();
    for NamedGolden { path, golden } in &goldens {
        let gate = match &on_device {
            Some(model) => golden_gate::gate_on_device(model, golden, args.min_cosine)?,
            None => golden_gate::gate(&args.bundle, golden, args.min_cosine)?,
        };
        gates.push(NamedGate { golden: path.clone(), gate });
    }
    let [NamedGate { gate, golden: first }, others @ ..] = gates.as_slice() else {
        anyhow::bail!("--golden: no file is given");
    };
    let expected = &goldens[0].golden;
    let probes = args.probes.map(|count| probe(&args, count, expected, ui)).transpose()?;
    let fast = args.fast.then(|| {
        let ids: Vec<u32> = expected.prompt_ids.iter().chain(&expected.decode_tokens).copied().collect();
        let room = chain.model.max_context.min(ids.len());
        int8_gate::compare(&args.bundle, &ids[..room], int8_gate::MIN_FAST_COSINE)
    });
    let fast = fast.transpose()?;
    let pass = fast.as_ref().is_none_or(|f| f.pass)
        && gates.iter().all(|g| g.gate.pass)
        && probes.as_ref().is_none_or(|p| p.pass);
    let mut facts = facts::validation(gate, Some(first.as_path()));
    let mut document = serde_json::to_value(gate)?;
    if !others.is_empty() {
        document["pass"] = pass.into();
        document["goldens"] = serde_json::to_value(&gates)?;
        facts.insert("pass".into(), pass.into());
        facts.insert("also".into(), facts::also(others));
    }
    if let Some(probes) = &probes {
        document["pass"] = pass.into();
        document["probes"] = serde_json::to_value(probes)?;
        facts.insert("probes".into(), facts::probes(probes).into());
    }
    if let Some(fast) = &fast {
        document["pass"] = pass.into();
        document["fast"] = serde_json::to_value(fast)?;
        facts.insert("fast".into(), facts::condense(fast).into());
    }
    recorder.gate(&args.bundle, pass, facts);
    ui.document(&document)?;
    for named in &gates {
        if !others.is_empty() {
            ui.line(format!("{}:", named.golden.display()))?;
        }
        print_golden(&named.gate, ui)?;
    }
    if !others.is_empty() {
        let failed: Vec<String> =
            gates.iter().filter(|g| !g.gate.pass).map(|g| g.golden.display().to_string()).collect();
        ui.line(match failed.len() {
            0 => format!("pass: all {} goldens", gates.len()),
            n => format!("FAIL: {n} of {} goldens: {}", gates.len(), failed.join(", ")),
        })?;
    }
    if let Some(probes) = &probes {
        ui.line("")?;
        print_probes(probes, ui)?;
    }
    if let Some(fast) = &fast {
        ui.line("")?;
        print_fast(fast, ui)?;
    }
    if let Some(failed) = gates.iter().find(|g| !g.gate.pass) {
        ui.line(format!(
            "next: anemoe trace {} --golden {} shows which layer loses how much",
            quoted(&args.bundle),
            quoted(&failed.golden)
        ))?;
    }
    Ok(Validated { pass, gates, probes })
}

/// Compares shards of the bundle with their FP16 references on probes.
fn probe(args: &Args, count: usize, expected: &Golden, ui: &Ui) -> anyhow::Result<ProbeReport> {
    let Origin { chain, family, plan, importance } = args.source.open(&args.bundle, "--probes")?;
    let checkpoint = &family.checked_checkpoint().checkpoint;
    let golden = reference(checkpoint, &plan, Some(expected), ui)?;
    let mut seen = BTreeSet::new();
    let mut shards: Vec<&PlannedShard> = Vec::new();
    if args.shards.is_empty() {
        shards.extend(plan.shards.iter().filter(|s| seen.insert(s.signature())));
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
    let site = ProbeContext {
        family: family.as_ref(),
        plan: &plan,
        chain: &chain,
        bundle: &args.bundle,
        importance: importance.as_ref(),
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
