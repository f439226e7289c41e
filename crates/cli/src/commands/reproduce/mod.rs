//! `anemoe reproduce`

mod figure;
mod recipe;
mod recipe_run;
mod rows;
#[cfg(test)]
mod tests;

use crate::command::{Command, Page};
use crate::shell::quoted;
use crate::ui::{self, Table, Ui};
use anyhow::{Context, bail};
use recipe::RecipeCommand;
pub use recipe_run::RUN;
use recipe_run::{BuildRun, RunRecord};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Run an experiment of the field notes, or one of your own, beside its figures.
///
/// A recipe names a source, ways to build it, gates in their order, and figures with where they are from. Without a checkpoint a
/// recipe of the field notes runs on synthetic weights of the real shapes: sizes, counts and ops are those of the real model,
/// cosines are not. Sizes and counts are of the whole model, as planned; of synthetic sources --layers are built, also where a
/// gate on their quality fails. An interrupted run goes on where it was. Exit status 1 when a figure differs and the recipe does
/// not say why, or a gate stopped a build.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe reproduce --list\n  anemoe reproduce exp-35 --dry-run\n  anemoe reproduce l0-probe --layers 1\n  anemoe reproduce exp-35 --checkpoint ZAYA1-8B\n  anemoe reproduce my-experiment.toml"
)]
pub struct Args {
    /// Name of a recipe, see --list, or a file.
    #[arg(value_name = "NAME|FILE")]
    recipe: Option<PathBuf>,
    /// A checkpoint instead of the recipe's source.
    #[arg(long, value_name = "CHECKPOINT")]
    checkpoint: Option<PathBuf>,
    /// Layers of a synthetic source that are built [default: as many as the recipe says, mostly 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    layers: Option<u16>,
    /// Only plan: nothing is built or written, and the figures that follow from shapes are shown.
    #[arg(long)]
    dry_run: bool,
    /// Folder for bundles and results [default: reproduce-NAME].
    #[arg(short, long, value_name = "DIR", conflicts_with = "dry_run")]
    out: Option<PathBuf>,
    /// List the recipes that come with anemoe.
    #[arg(long, conflicts_with_all = ["recipe", "dry_run", "out", "checkpoint", "layers"])]
    list: bool,
    /// List the figures that recipes may name.
    #[arg(long, conflicts_with_all = ["recipe", "dry_run", "out", "checkpoint", "layers"])]
    figures: bool,
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        if self.list {
            let recipes = recipe::built_in()?;
            let rows = recipes.iter().map(|r| vec![r.name.clone(), r.title.clone()]);
            let table = Table::ending_in_text(&["recipe", "title"]).with_rows(rows);
            let listed = recipes.iter().map(|r| json!({"name": r.name, "title": r.title}));
            return Ok(Page::new(json!({"recipes": listed.collect::<Vec<_>>()}), table.lines()));
        }
        if self.figures {
            let figures = &figure::TABLE.figures;
            let rows = figures.iter().map(|f| {
                let gates: Vec<&str> = f.gates.iter().map(|g| g.name()).collect();
                vec![f.name.clone(), f.unit.clone(), gates.join(", "), f.meaning.clone()]
            });
            let table = Table::ending_in_text(&["figure", "unit", "from", "meaning"]).with_rows(rows);
            return Ok(Page::new(json!({"figures": figures}), table.lines()));
        }
        let recipe = recipe::open(&self.recipe.context("which recipe? anemoe reproduce --list")?)?;
        let folder = self.out.unwrap_or_else(|| PathBuf::from(format!("reproduce-{}", recipe.name)));
        let given = (self.checkpoint.as_deref(), self.layers);
        let builds =
            recipe.builds.iter().map(|build| BuildRun::new(&recipe, build, given, &folder, self.dry_run));
        let mut builds = builds.collect::<anyhow::Result<Vec<_>>>()?;
        if let Some(layers) = self.layers.filter(|_| builds.iter().all(|b| !b.source.is_synthetic)) {
            bail!("--layers {layers} cuts synthetic sources, and this is none: a checkpoint is built whole");
        }
        let built: Vec<&str> = builds.iter().map(|b| b.source.built.as_str()).collect();
        let mut record = RunRecord::open(&folder, &recipe, &built.join(", "), self.dry_run)?;
        ui.line(format!("# {}\n\n{}\n", recipe.title, recipe.intent.trim()))?;
        builds.iter_mut().try_for_each(|build| build.run(&mut record))?;
        let rows = rows::rows(&recipe, &record, &builds);
        let is_finished = self.dry_run || builds.iter().all(|b| b.unfinished.is_none());
        let pass = is_finished && rows.iter().all(|r| r.explained);
        record.end(pass, &rows, recipe.lesson.as_ref());
        let mut verdicts: BTreeMap<&str, usize> = BTreeMap::new();
        rows.iter().for_each(|r| *verdicts.entry(r.verdict).or_default() += 1);
        let (mut lines, mut bundles, mut remarks) = (Vec::new(), Vec::new(), Vec::new());
        for BuildRun { build, source, .. } in &builds {
            let is_cut = source.planned != source.built;
            let cut = if is_cut { format!(", built from {}", source.built) } else { String::new() };
            lines.push(format!("{}: {}{cut}; {}", build.name, source.planned, build.options.join(" ")));
            let Some(built) = record.get(&build.name, RecipeCommand::Build) else { continue };
            bundles.extend(built.bundle.as_deref());
            let then = match (built.again, &built.bundle) {
                (true, _) => "stopped the build; its weights are synthetic, so it was built without gates",
                (_, Some(_)) => "failed; the bundle is complete",
                (_, None) => "stopped the build; nothing behind it ran",
            };
            remarks.extend(built.stopped.iter().map(|at| format!("{}: the gate {at} {then}", build.name)));
        }
        lines.push(String::new());
        let shown = rows.iter().map(|r| r.cells(builds.len() > 1));
        let headings = ["figure", "unit", "the book's", "ours", "verdict"];
        lines.extend(Table::ending_in_text(&headings).with_rows(shown).lines());
        let unexplained = rows.iter().filter(|r| !r.explained).count();
        if unexplained > 0 {
            let of = ui::counted(rows.len(), "figure");
            let differ = if unexplained == 1 { "differs" } else { "differ" };
            lines.push(format!("{unexplained} of {of} {differ}, and the recipe does not say why"));
        }
        lines.extend(recipe.lesson.iter().map(|lesson| format!("\nLesson: {}", lesson.trim())));
        lines.extend(remarks);
        if !self.dry_run {
            let folder = quoted(&folder);
            lines.push(format!("bundles and results are in {folder}; next: anemoe journal {folder}"));
        }
        let document = json!({
            "recipe": recipe.name, "title": recipe.title, "source": builds[0].source.planned, "pass": pass,
            "bundles": bundles, "verdicts": verdicts, "rows": rows,
        });
        Ok(Page { passed: pass, ..Page::new(document, lines) })
    }
}
