//! `anemoe validate`

use crate::Outcome;
use crate::journal::{JournalArgs, Recorder, facts};
use crate::ui::{Table, Ui};
use anemoe_gates::golden::{self, Agreement, Gate};
use anemoe_gates::reference::Golden;
use std::path::PathBuf;

/// Golden gate: logits and greedy tokens of a bundle against a reference run. Exit status 1 when it fails.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe validate small.anemoe --golden models/small-gemma4/golden.npz")]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// Reference run, from `anemoe golden` or Hugging Face transformers.
    #[arg(long, value_name = "F.npz")]
    golden: PathBuf,
    /// Cosine that the logits must reach at every position and step.
    #[arg(long, value_name = "X", default_value_t = golden::MIN_COSINE)]
    min_cosine: f64,
    #[command(flatten)]
    journal: JournalArgs,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    anyhow::ensure!(
        (-1.0..=1.0).contains(&args.min_cosine),
        "--min-cosine {} is not a cosine: between -1 and 1",
        args.min_cosine
    );
    let reference = Golden::read(&args.golden)?;
    let recorder = Recorder::new(&args.journal, "validate");
    let gate = golden::gate(&args.bundle, &reference, args.min_cosine)?;
    recorder.gate(&args.bundle, gate.pass, facts::validation(&gate, &args.golden));
    ui.document(&gate)?;
    print(&gate, ui)?;
    Ok(if gate.pass { Outcome::Done } else { Outcome::GateFailed })
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
