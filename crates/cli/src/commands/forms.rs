//! `anemoe forms`

use crate::args::hub_checkpoint::locate;
use crate::args::reading::Reading;
use crate::outcome::Outcome;
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_convert::form_ladder::{Rung, Sighting, ladder};
use anemoe_convert::models;
use anemoe_convert::path_kind::PathKind;
use std::path::PathBuf;

/// List the forms that shards can have, and what was seen of each.
///
/// Published findings about the Neural Engine contradict each other. Every form computes the same; a Mac has to say which
/// one a chip takes.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe forms models/small-gemma4\n  anemoe forms small.anemoe --json")]
pub struct Args {
    /// A checkpoint, or a bundle.
    path: PathBuf,
    #[command(flatten)]
    reading: Reading,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let (has_history, own) = match PathKind::at(&locate(&args.path)?.path) {
        PathKind::Bundle => {
            let chain = Chain::read(&args.path)?;
            let own = chain.options.get("form").cloned().unwrap_or_else(|| serde_json::json!({}));
            (chain.has_history(), serde_json::from_value(own).ok())
        }
        _ => (models::open(args.reading.open(&args.path)?)?.has_history(), None),
    };
    let rungs = ladder(has_history)?;
    ui.document(&serde_json::json!({"forms": rungs}))?;
    for rung in &rungs {
        let mark = if own == Some(rung.form) { " (this bundle's)" } else { "" };
        ui.line(format!("{}{mark}", rung.name))?;
        print(rung, ui)?;
    }
    ui.line("of each sort of shard: anemoe build --forms FILE, see docs/ane-form.md")?;
    Ok(Outcome::Done)
}

fn print(rung: &Rung, ui: &Ui) -> anyhow::Result<()> {
    if !rung.build_args.is_empty() {
        ui.line(format!("  build with {}", rung.build_args.join(" ")))?;
    }
    for (sign, sightings) in [("for", &rung.speaks_for), ("against", &rung.against)] {
        for Sighting { seen, chip, source } in sightings {
            ui.line(format!("  {sign}: {seen} ({chip}) [{source}]"))?;
        }
    }
    Ok(ui.line("")?)
}
