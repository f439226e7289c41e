//! `anemoe forms`

use crate::args::hub_checkpoint::{Extent, locate};
use crate::args::reading::Reading;
use crate::command::{Command, Page};
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_convert::form_ladder::{LadderModel, OwnForm, Sighting, ladder};
use anemoe_convert::models;
use anemoe_convert::path_kind::PathKind;
use anemoe_convert::plan::PlanOptions;
use serde_json::json;
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
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
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
                (LadderModel::of(&family, options.context(family.decoder.positions)?), None)
            }
        };
        let forms = ladder(model)?;
        let mut lines = Vec::new();
        lines.extend(bundle.iter().map(|own| format!("this bundle: {}\n", own.text())));
        for rung in &forms {
            let is_own = bundle.as_ref().is_some_and(|own| own.is(rung));
            lines.push(format!("{}{}", rung.name, if is_own { " (this bundle's)" } else { "" }));
            if !rung.build_args.is_empty() {
                lines.push(format!("  build with {}", rung.build_args.join(" ")));
            }
            for (sign, sightings) in [("for", &rung.speaks_for), ("against", &rung.against)] {
                for Sighting { seen, chip, source } in sightings {
                    lines.push(format!("  {sign}: {seen} ({chip}) [{source}]"));
                }
            }
            lines.push(String::new());
        }
        lines.push("of each sort of shard: anemoe build --forms FILE, see docs/ane-form.md".into());
        let mut document = json!({"forms": forms});
        if let Some(own) = bundle {
            document["bundle"] = json!(own);
        }
        Ok(Page::new(document, lines))
    }
}
