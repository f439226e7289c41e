//! `anemoe assemble`

use super::build;
use crate::Outcome;
use crate::journal::{JournalArgs, Recorder, facts};
use crate::ui::Ui;
use anemoe_bundle::journal::status;
use std::path::PathBuf;

/// Complete a bundle whose parts were built with `build --shard`: every shard is there and has the hash of its record.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe build models/small-gemma4 -o small.anemoe --shard 0/2\n  anemoe build models/small-gemma4 -o small.anemoe --shard 1/2\n  anemoe assemble small.anemoe"
)]
pub struct Args {
    /// The bundle's folder.
    bundle: PathBuf,
    #[command(flatten)]
    journal: JournalArgs,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let recorder = Recorder::new(&args.journal, "assemble");
    let report = anemoe_convert::build::assemble(&args.bundle)?;
    recorder.end(&args.bundle, status::DONE, facts::build(&report, &args.bundle, None));
    ui.document(&report)?;
    ui.line(build::summary(&report))?;
    Ok(Outcome::Done)
}
