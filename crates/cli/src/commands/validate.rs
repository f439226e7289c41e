//! `anemoe validate`

use crate::args::origin::{Origin, OriginArgs};
use crate::args::runner::RunnerArgs;
use crate::args::text_gate_args::TextGateArgs;
use crate::bundle::Verify;
use crate::command::{Command, Page, to_value};
use crate::files;
use crate::gate_reference::{read_goldens, reference};
use crate::recorder::{JournalArgs, Recorder};
use crate::shell::quoted;
use crate::show::gate_results::{self, show_golden, show_probes};
use crate::target::expect_bundle;
use crate::ui::{Ui, verdict};
use anemoe_convert::nearest::did_you_mean;
use anemoe_convert::plan::PlannedShard;
use anemoe_gates::facts;
use anemoe_gates::gated::{NamedGate, NamedGolden};
use anemoe_gates::golden_gate::{self, GoldenGate};
use anemoe_gates::probe::{self, Inputs, ProbeContext, ProbeReport};
use anemoe_gates::reference::Golden;
use anemoe_gates::text_gate::{self, TextGate};
use anemoe_gates::weight_gate;
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::Model;
use anyhow::Context;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Compare a bundle with the golden, the checkpoint run in f32.
///
/// The golden gate compares logits and greedy tokens with a golden. With --checkpoint, the weight gate compares each weight with
/// the checkpoint's, and the text gate predictions over a text. With --probes, shards are compared with their FP16 forms, too. Exit status 1 when something differs
/// too much.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe validate small.anemoe --golden models/small-gemma4/golden.npz\n  anemoe validate small.anemoe --golden models/small-gemma4/golden.npz --probes 8 --checkpoint models/small-gemma4"
)]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// Golden: a run of the checkpoint in f32, from `anemoe golden` or Hugging Face transformers. Given several times, the bundle
    /// has to pass with each; shards are probed with the first.
    #[arg(long, value_name = "F.npz", required_unless_present = "checkpoint")]
    golden: Vec<PathBuf>,
    /// Cosine that the logits must reach in the median, and probed shards at every position.
    #[arg(long, value_name = "X", default_value_t = golden_gate::COSINE_BOUND)]
    min_cosine: f64,
    #[command(flatten)]
    text_gate: TextGateArgs,
    /// Also probe shards, that is compare them with their FP16 forms on test inputs: this many random vectors of length 1, and
    /// the values that the golden's prompt gives before the shard's layer. Of shards that differ only in weights, one is probed.
    #[arg(long, value_name = "N", requires_all = ["checkpoint", "golden"])]
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
    #[command(flatten)]
    runner: RunnerArgs,
    #[command(flatten)]
    source: OriginArgs,
    #[command(flatten)]
    verify: Verify,
    #[command(flatten)]
    journal: JournalArgs,
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        let recorder = Recorder::new(&self.journal, "validate");
        anyhow::ensure!(
            (-1.0..=1.0).contains(&self.min_cosine),
            "--min-cosine {} is not a cosine: between -1 and 1",
            self.min_cosine
        );
        if self.source.checkpoint.is_none() {
            self.text_gate.expect_default()?;
        }
        expect_bundle(&self.bundle)?;
        let goldens = read_goldens(&self.golden)?;
        let chain = self.verify.open(&self.bundle, ui)?;
        for NamedGolden { path, golden } in &goldens {
            golden_gate::fits(golden, &chain).map_err(|what| anemoe_convert::Error::invalid(path, what))?;
        }
        let core_ml = self.runner.core_ml(&self.bundle, &chain, false)?;
        let on_device = core_ml.map(|core_ml| Model::open(&self.bundle, &core_ml)).transpose()?;
        let mut gates = Vec::new();
        for NamedGolden { path, golden } in &goldens {
            let gate = match &on_device {
                Some(model) => golden_gate::gate_on_device(model, golden, self.min_cosine)?,
                None => golden_gate::gate(&self.bundle, golden, self.min_cosine)?,
            };
            gates.push(NamedGate { golden: path.clone(), gate });
        }
        let (weights, text) = match &self.source.checkpoint {
            Some(_) => {
                let bounds = self.text_gate.bounds()?;
                let origin = self.source.open(&self.bundle, "--checkpoint")?;
                let bar = ui.bar(origin.plan.shards.len() as u64, "weights");
                let Origin { family, plan, .. } = &origin;
                let better = |g: &NamedGolden| golden_gate::better_than_chance(&g.golden).unwrap_or(0.0);
                let learned = goldens.first().is_none_or(|g| better(g) >= golden_gate::LEARNED);
                let weights =
                    weight_gate::gate(family, plan, &self.bundle, &chain, learned, &mut || bar.inc(1))?;
                bar.finish_and_clear();
                let checkpoint = &family.checked.checkpoint;
                let text =
                    self.text_gate.text(checkpoint, chain.model.vocab_size, chain.model.max_context)?;
                let on_cpu = match &on_device {
                    Some(_) => None,
                    None => Some(Model::open(&self.bundle, &CpuBackend::default())?),
                };
                let model = on_device.as_ref().or(on_cpu.as_ref()).context("no model")?;
                let bar = ui.bar((text.windows.len() * chain.model.num_layers) as u64, "text");
                let gate = text_gate::gate(model, checkpoint, &text, bounds, &mut || bar.inc(1))?;
                bar.finish_and_clear();
                (Some(weights), Some(gate))
            }
            None => (None, None),
        };
        let first = goldens.first().map(|g| &g.golden);
        let probes = self.probes.zip(first);
        let probes = probes.map(|(count, expected)| probe(&self, count, expected, ui)).transpose()?;
        let pass = gates.iter().all(|g| g.gate.pass)
            && probes.as_ref().is_none_or(|p| p.pass)
            && weights.as_ref().is_none_or(|w| w.pass)
            && text.as_ref().is_none_or(TextGate::is_good_enough);
        let golden_facts = |g: &NamedGate| facts::validation(&g.gate, Some(&g.golden));
        let mut facts = gates.first().map(golden_facts).unwrap_or_default();
        facts.insert("pass".into(), pass.into());
        let mut document = match gates.first() {
            Some(first) => to_value(&GoldenGate { pass, ..first.gate.clone() })?,
            None => json!({"pass": pass}),
        };
        let mut lines = Vec::new();
        let are_several = gates.len() > 1;
        for NamedGate { golden, gate } in &gates {
            lines.extend(are_several.then(|| format!("{}:", golden.display())));
            show_golden(gate, &mut lines);
        }
        let failed: Vec<&NamedGate> = gates.iter().filter(|g| !g.gate.pass).collect();
        if are_several {
            document["goldens"] = to_value(&gates)?;
            let names: Vec<String> = failed.iter().map(|g| g.golden.display().to_string()).collect();
            lines.push(match failed.len() {
                0 => format!("pass: all {} goldens", gates.len()),
                n => format!("FAIL: {n} of {} goldens: {}", gates.len(), names.join(", ")),
            });
        }
        if let Some(weights) = &weights {
            document["weights"] = to_value(weights)?;
            facts.insert("weights".into(), facts::condense(weights).into());
            gate_results::show_weights(weights, "", &mut lines);
        }
        if let Some(text) = &text {
            document["text"] = to_value(text)?;
            facts.insert("text".into(), facts::condense(text).into());
            let said = verdict(text.is_good_enough());
            lines.push(format!("{said}: {}", gate_results::text_gate(text)));
        }
        if are_several {
            facts.insert("also".into(), facts::also(&gates[1..]));
        }
        if let Some(probes) = &probes {
            document["probes"] = to_value(probes)?;
            facts.insert("probes".into(), facts::probes(probes).into());
            lines.push(String::new());
            show_probes(probes, &mut lines);
        }
        lines.extend(failed.first().map(|failed| {
            let (bundle, golden) = (quoted(&self.bundle), quoted(&failed.golden));
            format!("next: anemoe trace {bundle} --golden {golden} shows which layer loses how much")
        }));
        recorder.gate(&self.bundle, pass, facts);
        Ok(Page { passed: pass, ..Page::new(document, lines) })
    }
}

/// Compares shards of the bundle with their FP16 references on probes.
fn probe(args: &Args, count: usize, expected: &Golden, ui: &Ui) -> anyhow::Result<ProbeReport> {
    let Origin { chain, family, plan, importance } = args.source.open(&args.bundle, "--probes")?;
    let checkpoint = &family.checked.checkpoint;
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
        family: &family,
        plan: &plan,
        chain: &chain,
        bundle: &args.bundle,
        importance: importance.as_ref(),
        scratch: scratch.path(),
    };
    let inputs = Inputs { count, seed: args.seed, real: Some(&golden), bos: chain.model.bos_token_id };
    let package = |s: &PlannedShard| args.bundle.join(s.package_file());
    let bar = ui.bar(shards.len() as u64, "probes");
    Ok(probe::probe(&site, &shards, &package, &inputs, args.min_cosine, &mut |name| {
        bar.set_message(name.to_string());
        bar.inc(1);
    })?)
}
