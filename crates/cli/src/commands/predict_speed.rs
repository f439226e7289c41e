//! `anemoe predict-speed`

use crate::args::evidence::EvidenceArgs;
use crate::args::planning::{PlanArgs, PlanUse, PlannedCheckpoint, plan_checkpoint};
use crate::bundle::Verify;
use crate::command::{Command, Page, parse, to_value};
use crate::show::speed::{self, SpeedDocument};
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_convert::context_buckets::ContextBuckets;
use anemoe_convert::models::Family;
use anemoe_convert::path_kind::PathKind;
use anemoe_convert::plan::PlanOptions;
use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::cost::drafts::{DraftedForm, DrafterForecast, MOST_DRAFTED, SpeculationForecast};
use anemoe_gates::cost::forecast::{Costed, PassSize, forecast, open_packages, with_memory};
use anemoe_gates::cost::forms::{self, Setting};
use anemoe_gates::residency::PlannedPrograms;
use anemoe_gates::residency::rule::{Chip, Conditions};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Default memory of the machine, in GB.
const MEMORY_GB: f64 = 64.0;
/// Share of the memory that weights may fill; the system needs the rest.
const SHARE_OF_MEMORY: f64 = 0.75;

/// Predict the speed of a model on the Neural Engine, with a range.
///
/// Counts what each call reads, decodes and multiplies, and puts that beside published figures of chips. Nothing is measured: a
/// range is as wide as what is published. For a checkpoint it also compares forms: packings, kinds, contexts.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe predict-speed synthetic:zaya1-8b\n  anemoe predict-speed synthetic:gemma4-26b-a4b --chip m4-pro --memory-gb 24 --quant lut4\n  anemoe predict-speed synthetic:gemma4-26b-a4b --drafter synthetic:gemma4-26b-a4b-assistant"
)]
pub struct Args {
    /// A checkpoint (folder, .gguf file or synthetic:NAME), or a bundle.
    path: PathBuf,
    /// Chip: m1 to m5, with -pro, -max or -ultra.
    #[arg(long, value_name = "CHIP", default_value = "m4-max", value_parser = ChipProfile::named)]
    chip: ChipProfile,
    /// A profile in place of a chip, such as the `chip.toml` of a report in a folder of evidence.
    #[arg(long, value_name = "FILE", conflicts_with = "chip")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    evidence: EvidenceArgs,
    /// Memory of the machine, in GB.
    #[arg(long, value_name = "GB", default_value_t = MEMORY_GB, value_parser = positive)]
    memory_gb: f64,
    /// Positions that the caches of a checkpoint hold; a bundle has its own.
    #[arg(long, value_name = "N", value_parser = crate::args::numbers::at_least_one)]
    context: Option<usize>,
    /// Contexts of a checkpoint for which attention has functions of its own, as `build --context-buckets`.
    #[arg(long, value_name = "N,N,..", default_value_t, hide_default_value = true)]
    context_buckets: ContextBuckets,
    /// Tokens of a pass, as drafts are verified, beside one token.
    #[arg(long, value_name = "T", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=4096))]
    tokens: u16,
    /// Compression of a checkpoint, as `build --quant`; auto is not measured here.
    #[arg(long, value_name = "KIND", default_value = "lut4")]
    quant: String,
    /// Experts that one call computes, of a checkpoint.
    #[arg(long, value_name = "N", value_parser = crate::args::numbers::at_least_one)]
    experts_per_shard: Option<usize>,
    /// Layers that share a package, of a checkpoint.
    #[arg(long, value_name = "N", value_parser = crate::args::numbers::at_least_one)]
    layers_per_shard: Option<usize>,
    /// A drafter, an assistant or a small model: a checkpoint or a bundle. Shows what a drafted token and passes over drafts cost, by
    /// form, and from which share of right tokens they pay.
    #[arg(long, value_name = "PATH")]
    drafter: Option<PathBuf>,
    #[command(flatten)]
    verify: Verify,
}

fn positive(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.trim().parse().ok();
    number.filter(|n| n.is_finite() && *n > 0.0).ok_or_else(|| format!("`{text}` is not a number above 0"))
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        let chip = match &self.profile {
            Some(file) => ChipProfile::read(file)?,
            None => self.evidence.calibrated(&self.chip)?,
        };
        let evidence = self.evidence.outcomes()?;
        let path = &self.path;
        let memory = SHARE_OF_MEMORY * self.memory_gb * 1e9;
        let tokens = usize::from(self.tokens);
        if PathKind::at(path) == PathKind::Bundle {
            anyhow::ensure!(
                self.context.is_none()
                    && self.experts_per_shard.is_none()
                    && self.layers_per_shard.is_none()
                    && self.context_buckets == ContextBuckets::default(),
                "--context, --context-buckets, --experts-per-shard and --layers-per-shard are a checkpoint's: the bundle {} is built",
                path.display()
            );
        }
        let counts = if tokens == 1 { "1".into() } else { format!("1,{tokens}") };
        let Costs { chain, packages, planned } = self.costs(path, &counts, self.experts_per_shard, ui)?;
        let pass = |size| with_memory(forecast(&chain, &packages, &chip, size), &chip, memory);
        let (one, several) = (pass(PassSize::of(1)), pass(PassSize::of(tokens)));
        let contexts: BTreeSet<usize> =
            packages.iter().flat_map(|p| &p.functions).filter_map(|f| f.context).collect();
        let contexts =
            contexts.into_iter().map(|context| pass(PassSize { tokens: 1, context: Some(context) }));
        let contexts = contexts.collect();
        let conditions = Conditions { chip: Chip::parse(chip.base_name()), ..Conditions::default() };
        let setting = Setting { chip: &chip, memory, conditions, evidence };
        let (forms, recommended) = planned.map_or_else(Default::default, |(family, options)| {
            let forms = forms::all(&family, &options, &setting);
            let recommended = forms::recommend(&forms, &options);
            (forms, recommended)
        });
        let drafter = match &self.drafter {
            Some(drafter) => Some(self.drafts(drafter, (&chip, memory), ui)?),
            None => None,
        };
        let document = SpeedDocument {
            source: path.display().to_string(),
            profile: chip,
            memory_bytes: memory,
            speculation: SpeculationForecast::of(&one, &several),
            one,
            several,
            contexts,
            drafter,
            forms,
            recommended,
        };
        let mut lines = Vec::new();
        speed::show(&document, &mut lines);
        Ok(Page::new(to_value(&document)?, lines))
    }
}

/// Chain and packages of a model; of a checkpoint also its family and options.
struct Costs {
    chain: Chain,
    packages: Vec<Costed>,
    planned: Option<(Family, PlanOptions)>,
}

impl Args {
    /// Opens the packages of a bundle, or plans those of a checkpoint.
    fn costs(&self, path: &Path, counts: &str, experts: Option<usize>, ui: &Ui) -> anyhow::Result<Costs> {
        if PathKind::at(path) == PathKind::Bundle {
            let chain = self.verify.open(path, ui)?;
            let packages = open_packages(path, &chain)?;
            return Ok(Costs { chain, packages, planned: None });
        }
        let PlannedCheckpoint { family, plan, .. } = plan_of(path, self, (counts, experts), ui)?;
        let packages = forms::packages(&plan, &PlannedPrograms::lower(&family, &plan)?);
        Ok(Costs { chain: plan.chain, packages, planned: Some((family, plan.options)) })
    }

    /// Forecasts a drafter, and passes over its drafts.
    fn drafts(
        &self,
        drafter: &Path,
        (chip, memory): (&ChipProfile, f64),
        ui: &Ui,
    ) -> anyhow::Result<DrafterForecast> {
        let own = self.costs(drafter, "1", None, ui)?;
        let ms = forecast(&own.chain, &own.packages, chip, PassSize::of(1)).ms;
        let counts: Vec<String> = (1..=MOST_DRAFTED + 1).map(|n| n.to_string()).collect();
        let counts = counts.join(",");
        let given = self.costs(&self.path, &counts, self.experts_per_shard, ui)?;
        let (is_checkpoint, has_experts) = (given.planned.is_some(), given.chain.experts().is_some());
        let name = match (is_checkpoint, self.experts_per_shard) {
            (false, _) => "as built".to_string(),
            (true, None) => "default".to_string(),
            (true, Some(n)) => format!("--experts-per-shard {n}"),
        };
        let mut all = vec![(name, given)];
        if is_checkpoint && has_experts && self.experts_per_shard != Some(1) {
            all.push(("--experts-per-shard 1".into(), self.costs(&self.path, &counts, Some(1), ui)?));
        }
        let forms = all
            .into_iter()
            .map(|(form, costs)| DraftedForm::of(form, (&costs.chain, &costs.packages), (chip, memory), &ms));
        Ok(DrafterForecast { source: drafter.display().to_string(), ms, forms: forms.collect() })
    }
}

fn plan_of(
    path: &Path,
    args: &Args,
    (counts, experts): (&str, Option<usize>),
    ui: &Ui,
) -> anyhow::Result<PlannedCheckpoint> {
    let mut words =
        vec!["--quant".to_string(), args.quant.clone(), "--skip-outliers".into(), "--tokens".into()];
    words.push(counts.to_string());
    for (option, value) in [
        ("--max-context", args.context),
        ("--experts-per-shard", experts),
        ("--layers-per-shard", args.layers_per_shard),
    ] {
        words.extend(value.into_iter().flat_map(|n| [option.to_string(), n.to_string()]));
    }
    words.extend(["--context-buckets".into(), args.context_buckets.to_string()]);
    anyhow::ensure!(args.quant != "auto", "--quant auto measures; give a kind, for instance lut4");
    plan_checkpoint(path, &parse::<PlanArgs>("plan", &words)?, PlanUse::Look, ui)
}
