//! `anemoe forms`

use crate::args::hub_checkpoint::{Extent, locate};
use crate::args::reading::Reading;
use crate::command::{Command, CommandReport};
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_convert::form_ladder::{LadderModel, OwnForm, Rung, Sighting, ladder};
use anemoe_convert::models;
use anemoe_convert::path_kind::PathKind;
use anemoe_convert::plan::PlanOptions;
use serde::Serialize;
use std::io;
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
    /// Positions that the caches of a checkpoint's bundle hold, as `build --max-context` [default: as `build`].
    #[arg(long, value_name = "N", value_parser = crate::args::numbers::at_least_one)]
    max_context: Option<usize>,
    #[command(flatten)]
    reading: Reading,
}

impl Command for Args {
    type Report = FormsReport;

    fn run(self, _: &Ui) -> anyhow::Result<FormsReport> {
        let (model, bundle) = match PathKind::at(&locate(&self.path, Extent::Headers)?.path) {
            PathKind::Bundle => {
                anyhow::ensure!(
                    self.max_context.is_none(),
                    "--max-context is a checkpoint's: the bundle {} is built",
                    self.path.display()
                );
                let chain = Chain::read(&self.path)?;
                let model = LadderModel {
                    has_history: chain.has_history(),
                    context: chain.model.max_context,
                    experts: chain.experts(),
                };
                (model, Some(OwnForm::of(&chain)))
            }
            _ => {
                let family = models::open(self.reading.open_extent(&self.path, Extent::Headers)?)?;
                let options = PlanOptions { max_context: self.max_context, ..PlanOptions::default() };
                (LadderModel::of(&family, options.context(family.sizes().positions)?), None)
            }
        };
        Ok(FormsReport { forms: ladder(model)?, bundle })
    }
}

/// Forms of a model, and that of the bundle.
#[derive(Serialize)]
pub struct FormsReport {
    forms: Vec<Rung>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bundle: Option<OwnForm>,
}

impl CommandReport for FormsReport {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        if let Some(own) = &self.bundle {
            ui.line(format!("this bundle: {}\n", own.text()))?;
        }
        for rung in &self.forms {
            let is_own = self.bundle.as_ref().is_some_and(|own| own.is(rung));
            let mark = if is_own { " (this bundle's)" } else { "" };
            ui.line(format!("{}{mark}", rung.name))?;
            print(rung, ui)?;
        }
        ui.line("of each sort of shard: anemoe build --forms FILE, see docs/ane-form.md")
    }
}

fn print(rung: &Rung, ui: &Ui) -> io::Result<()> {
    if !rung.build_args.is_empty() {
        ui.line(format!("  build with {}", rung.build_args.join(" ")))?;
    }
    for (sign, sightings) in [("for", &rung.speaks_for), ("against", &rung.against)] {
        for Sighting { seen, chip, source } in sightings {
            ui.line(format!("  {sign}: {seen} ({chip}) [{source}]"))?;
        }
    }
    ui.line("")
}
