//! `anemoe assemble`

use crate::args::reading::Reading;
use crate::args::store_args::OpenStore;
use crate::args::text_gate_args::TextGateArgs;
use crate::command::Command;
use crate::commands::build::BuildSummary;
use crate::error_report::sentence;
use crate::gate_reference::{read_goldens, with_bar};
use crate::part_store::pull_parts;
use crate::recorder::{JournalArgs, Recorder};
use crate::signals;
use crate::target::expect_begun_bundle;
use crate::ui::{self, Ui};
use anemoe_convert::build::Assembly;
use anemoe_convert::models::{self, Family};
use anemoe_gates::checkpoint_text::gate_prompt;
use anemoe_gates::gated::{self, GateReference};
use anemoe_gates::residency;
use anemoe_gates::text_gate::GateText;
use anyhow::Context;
use std::path::PathBuf;

/// Complete a bundle whose parts were built with `build --shard`.
///
/// Every shard has to be there and to have the hash of its record. Then come the gates of the whole, as in a build by one process.
/// Exit status 1 when one fails.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe build models/small-gemma4 -o parts.anemoe --shard 0/2\n  anemoe build models/small-gemma4 -o parts.anemoe --shard 1/2\n  anemoe assemble parts.anemoe\n  anemoe assemble whole.anemoe --pull s3://models/anemoe --name parts.anemoe"
)]
pub struct Args {
    /// The bundle's folder.
    bundle: PathBuf,
    /// Fetch the parts that `build --push` or `push` sent to this store, a folder or s3://BUCKET/PREFIX, first.
    #[arg(long, value_name = "STORE", value_hint = clap::ValueHint::DirPath)]
    pull: Option<PathBuf>,
    /// Name of the bundle in the store [default: that of the bundle's folder].
    #[arg(long, value_name = "NAME", requires = "pull")]
    name: Option<String>,
    /// Golden for the gates of the whole, from `anemoe golden` or Hugging Face transformers [default: a run in f32 of the parts'
    /// checkpoint, where it still is]. Given several times, the whole has to pass with each.
    #[arg(long, value_name = "F.npz", conflicts_with = "skip_gates")]
    golden: Vec<PathBuf>,
    /// Cosine that the logits must reach in the median [default: that of the parts].
    #[arg(long, value_name = "X", value_parser = cosine)]
    min_cosine: Option<f64>,
    #[command(flatten)]
    text_gate: TextGateArgs,
    /// No gates of the whole; chain.json says so. So it is without this where no part had gates.
    #[arg(long)]
    skip_gates: bool,
    #[command(flatten)]
    journal: JournalArgs,
}

fn cosine(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|c: &f64| (-1.0..=1.0).contains(c));
    value.ok_or_else(|| format!("`{text}` is not a cosine: between -1 and 1"))
}

impl Command for Args {
    type Report = BuildSummary;

    fn run(self, ui: &Ui) -> anyhow::Result<BuildSummary> {
        let recorder = Recorder::new(&self.journal, "assemble");
        let mut also = read_goldens(&self.golden)?;
        let bounds = self.text_gate.bounds()?;
        let given = (!also.is_empty()).then(|| also.remove(0).golden);
        if let Some(store) = &self.pull {
            let store = OpenStore::open(store, self.name.as_deref(), &self.bundle)?;
            let report = pull_parts(&store, &self.bundle)?;
            ui::message(format!(
                "{}: {} of the parts fetched from {}, {} there already",
                self.bundle.display(),
                ui::bytes(report.bytes_fetched),
                store.shown,
                ui::bytes(report.bytes_there)
            ));
        }
        expect_begun_bundle(&self.bundle)?;
        signals::announce_rest();
        let assembly = anemoe_convert::build::assemble(&self.bundle)?;
        let reference = match given {
            Some(golden) => {
                let origin = match origin(&assembly, &self.text_gate) {
                    Err(e) if self.text_gate.has_text() => return Err(e),
                    origin => origin.ok(),
                };
                Some(GateReference { golden, also, given: true, origin })
            }
            None if self.skip_gates || assembly.part_gates().1 => None,
            None => own_reference(&assembly, &self.text_gate, ui)?,
        };
        let options = residency::CheckOptions::default();
        let gated =
            gated::assemble(assembly, reference.as_ref(), &options, (self.min_cosine, bounds), &|_| ())?;
        let golden = self.golden.into_iter().next();
        let summary = BuildSummary { bundle: self.bundle, golden, planned: 0, part: None, gated, push: None };
        summary.record(&recorder);
        Ok(summary)
    }
}

/// Opens the checkpoint that the parts were built from, with the text of the gate.
fn origin(assembly: &Assembly, args: &TextGateArgs) -> anyhow::Result<(Family, GateText)> {
    let source = assembly.source().context("the parts do not say where their checkpoint is")?;
    let zaya_skip = source.zaya_skip.map(|s| s.parse()).transpose().map_err(anyhow::Error::msg)?;
    let reading = Reading { zaya_skip, is_rotated: source.is_rotated };
    let checkpoint = reading.open(&source.checkpoint)?;
    if assembly.chain()?.checkpoint_sha256.as_ref() != Some(&checkpoint.fingerprint()?) {
        anyhow::bail!("{}: is not what the parts were built from any more", source.checkpoint.display());
    }
    let model = &assembly.plan().chain.model;
    let text = args.text(&checkpoint, model.vocab_size, model.max_context)?;
    Ok((models::open(checkpoint)?, text))
}

/// Runs the checkpoint that the parts were built from. Returns none, with a warning, if the checkpoint is not in its place
/// any more: the bundle is completed all the same.
///
/// # Errors
/// There is a text of the user's, and no gate for it.
fn own_reference(assembly: &Assembly, args: &TextGateArgs, ui: &Ui) -> anyhow::Result<Option<GateReference>> {
    let run = || {
        let (family, text) = origin(assembly, args)?;
        let checkpoint = &family.checked.checkpoint;
        let (prompt, decode) = gate_prompt(checkpoint, assembly.plan())?;
        Ok::<_, anyhow::Error>((with_bar(checkpoint, &prompt, decode, ui)?, (family, text)))
    };
    match run() {
        Ok((golden, origin)) => {
            Ok(Some(GateReference { golden, also: Vec::new(), given: false, origin: Some(origin) }))
        }
        Err(e) if args.has_text() => Err(e),
        Err(e) => {
            ui::message(format!(
                "warning: no gates of the whole: {}; give --golden, or see anemoe validate",
                sentence(&e)
            ));
            Ok(None)
        }
    }
}
