//! `anemoe assemble`

use super::build;
use crate::Outcome;
use crate::interrupt;
use crate::ui::Ui;
use anemoe_gates::gated;
use anemoe_gates::golden::MIN_COSINE;
use anemoe_gates::reference::Golden;
use anemoe_gates::residency;
use std::path::PathBuf;

/// Complete a bundle whose parts were built with `build --shard`: every shard is there and has the hash of its record. With a
/// reference run, the gates of the whole decide the exit status.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe build models/small-gemma4 -o small.anemoe --shard 0/2\n  anemoe build models/small-gemma4 -o small.anemoe --shard 1/2\n  anemoe assemble small.anemoe --golden models/small-gemma4/golden.npz"
)]
pub struct Args {
    /// The bundle's folder.
    bundle: PathBuf,
    /// Reference run for the gates of the whole, from `anemoe golden` or Hugging Face transformers; without it they are not
    /// run, and chain.json says so.
    #[arg(long, value_name = "F.npz")]
    golden: Option<PathBuf>,
    /// Cosine that the logits must reach at every position and step.
    #[arg(long, value_name = "X", default_value_t = MIN_COSINE)]
    min_cosine: f64,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let golden = args.golden.as_deref().map(Golden::read).transpose()?;
    interrupt::install()?;
    let assembly = anemoe_convert::build::assemble(&args.bundle)?;
    let options = residency::Options::default();
    let report = gated::assemble(assembly, golden.as_ref(), &options, args.min_cosine, &|_| ())?;
    ui.document(&report)?;
    build::print(&report, &args.bundle, 0, ui)?;
    if golden.is_none() {
        ui.line("the gates of the whole were not run: give --golden, or see anemoe check and validate")?;
    }
    Ok(if report.pass { Outcome::Done } else { Outcome::GateFailed })
}
