//! `anemoe trace`

use crate::args::executor::precision;
use crate::args::numbers::choice;
use crate::args::origin::{Origin, OriginArgs};
use crate::bundle::Verify;
use crate::command::{Command, Page, to_value};
use crate::files;
use crate::recorder::{JournalArgs, Recorder};
use crate::target::expect_bundle;
use crate::ui::{Table, Ui, advance};
use anemoe_bundle::journal::status;
use anemoe_gates::ablation::{self, Ablation, AblationReport, AblationUnit};
use anemoe_gates::facts;
use anemoe_gates::reference::Golden;
use anemoe_gates::trace::{self, Fidelity, Trace};
use anemoe_runtime::cpu::Precision;
use clap::builder::TypedValueParser;
use std::path::PathBuf;

/// Show behind which layer a bundle leaves its golden, and why.
///
/// The values that flow from layer to layer (the hidden state) are compared with those of the golden, by cosine. With --swap,
/// parts are put back to FP16 one after the other, which shows the compression that costs most.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe trace small.anemoe --golden models/small-gemma4/golden.npz\n  anemoe trace small.anemoe --golden models/small-gemma4/golden.npz --swap --checkpoint models/small-gemma4"
)]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// Golden with the values between the layers (hidden states), from `anemoe golden` or Hugging Face transformers.
    #[arg(long, value_name = "F.npz")]
    golden: PathBuf,
    /// fp32 computes in f32 on the stored weights; fp16 rounds every result, as the device does.
    #[arg(long, value_parser = precision(), default_value = "fp32")]
    precision: Precision,
    /// Replace one after the other by FP16 and rank what that gains: each part of each layer, each layer, or each part of the
    /// model in all layers.
    #[arg(long, value_parser = unit(), num_args = 0..=1, default_missing_value = "each", requires = "checkpoint")]
    swap: Option<AblationUnit>,
    /// Folder for the FP16 shards, which are removed behind the run [default: that of temporary files].
    #[arg(long, value_name = "DIR", requires = "swap")]
    scratch: Option<PathBuf>,
    #[command(flatten)]
    source: OriginArgs,
    #[command(flatten)]
    verify: Verify,
    #[command(flatten)]
    journal: JournalArgs,
}

fn unit() -> impl TypedValueParser<Value = AblationUnit> {
    choice([("each", AblationUnit::Each), ("layer", AblationUnit::Layer), ("part", AblationUnit::Part)])
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        let recorder = Recorder::new(&self.journal, "trace");
        expect_bundle(&self.bundle)?;
        let golden = Golden::read(&self.golden)?;
        let chain = self.verify.open(&self.bundle, ui)?;
        let unfit = |what: String| anemoe_convert::Error::invalid(&self.golden, what);
        trace::fits(&golden, &chain).map_err(unfit)?;
        anemoe_gates::golden_gate::fits(&golden, &chain).map_err(unfit)?;
        let found = trace::trace(&self.bundle, &golden, self.precision)?;
        let swap = self.swap.map(|unit| swaps(&self, unit, &golden, ui)).transpose()?;
        let mut facts = facts::trace(&found, &self.golden);
        facts.extend(swap.iter().map(|swaps| ("swap".into(), facts::swaps(swaps).into())));
        recorder.end(&self.bundle, status::DONE, facts);
        let (mut document, mut lines) = (to_value(&found)?, Vec::new());
        show(&found, &mut lines);
        if let Some(swaps) = &swap {
            document["swap"] = to_value(swaps)?;
            lines.push(String::new());
            show_swaps(swaps, &mut lines);
        }
        Ok(Page::new(document, lines))
    }
}

fn swaps(args: &Args, unit: AblationUnit, golden: &Golden, ui: &Ui) -> anyhow::Result<AblationReport> {
    let Origin { chain, family, plan, importance } = args.source.open(&args.bundle, "--swap")?;
    let scratch = files::scratch(args.scratch.as_deref())?;
    let search = ablation::AblationContext {
        family: &family,
        plan: &plan,
        importance: importance.as_ref(),
        bundle: &args.bundle,
        chain: &chain,
        golden,
        scratch: scratch.path(),
    };
    let bar = ui.bar(1, "replacing by FP16");
    Ok(ablation::search(&search, unit, &mut |done, total| advance(&bar, done, total, ""))?)
}

fn show_swaps(report: &AblationReport, out: &mut Vec<String>) {
    let name = |s: &Ablation| {
        let part = s.part.as_deref();
        match (s.layer, part) {
            (Some(l), Some(part)) => format!("layer {l}, {part}"),
            (Some(l), None) => format!("layer {l}"),
            (None, part) => part.unwrap_or("all").to_string(),
        }
    };
    let row = |what: String, kinds: String, f: &ablation::Figures, gain: String, worst: [String; 3]| {
        let mut row = vec![what, kinds, format!("{:.5}", f.mean_kl), gain];
        row.extend([format!("{:.6}", f.min_cosine), f.wrong_choices.to_string()]);
        row.extend(worst);
        row
    };
    let baseline = row("nothing".into(), String::new(), &report.baseline, String::new(), Default::default());
    let swaps = report.swaps.iter().map(|s| {
        let w = &s.worst;
        let worst = [
            format!("{} {}", w.shard, w.matrix),
            format!("{:.2e}", w.relative_error),
            format!("{:.1}", w.ratio),
        ];
        row(name(s), s.kinds.join(", "), &s.figures, format!("{:+.5}", s.gain_kl), worst)
    });
    let figures = ["in FP16", "instead of", "KL, nats", "gain", "lowest cosine", "differing choices"];
    let headings = [&figures[..], &["worst matrix", "its error", "largest / mean"]].concat();
    out.extend(Table::new(&headings).with_rows(std::iter::once(baseline).chain(swaps)).lines());
    if let Some(first) = report.swaps.first() {
        let w = &first.worst;
        out.push(format!("costs most: {}; {} (tensor `{}`): {}", name(first), w.matrix, w.tensor, w.cause));
    }
    for s in report.swaps.iter().skip(1).filter(|s| s.worst.outlier) {
        let w = &s.worst;
        out.push(format!("also: {}; {} (tensor `{}`): {}", name(s), w.matrix, w.tensor, w.cause));
    }
}

fn show(t: &Trace, out: &mut Vec<String>) {
    let mut columns = vec!["behind", "lowest cosine", "at", "mean"];
    if t.f32_stream {
        columns.extend(["lowest, state in fp16", "at"]);
    }
    columns.extend(["largest value", "rms", "state / change"]);
    let rows = t.layers.iter().map(|l| {
        let name = match l.boundary {
            0 => "embedding".to_string(),
            i => format!("layer {}", i - 1),
        };
        let cosine = |c: f64| format!("{c:.7}");
        let Fidelity { min_cosine, position, mean_cosine } = l.fidelity;
        let mut row = vec![name, cosine(min_cosine), position.to_string(), cosine(mean_cosine)];
        if t.f32_stream {
            let f = l.fp16_stream;
            row.push(f.map_or_else(String::new, |f| cosine(f.min_cosine)));
            row.push(f.map_or_else(String::new, |f| f.position.to_string()));
        }
        row.extend([l.largest, l.rms].map(|x| format!("{x:.3}")));
        row.push(l.stream_to_change.map_or_else(String::new, |r| format!("{r:.1}")));
        row
    });
    out.extend(Table::new(&columns).with_rows(rows).lines());
    out.push(
        "state: the hidden state, the values that flow from layer to layer; state / change: its \
         length over what the layer changed, at most; fp16 keeps 11 bits"
            .into(),
    );
    if t.f32_stream {
        out.push(
            "the host keeps this state in f32; the columns `state in fp16` show what rounding it would cost"
                .into(),
        );
    }
}
