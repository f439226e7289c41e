//! `anemoe reproduce`

#[cfg(test)]
mod arithmetic;
pub mod command;
mod figure;
mod recipe;
mod rows;
mod run_record;
mod site;
mod source;
#[cfg(test)]
mod tests;

use crate::command::{Command, CommandReport};
use crate::outcome::Outcome;
use crate::shell::quoted;
use crate::ui::{self, Table, Ui};
use anyhow::{Context, bail};
use command::GateCommand;
use figure::FigureTable;
use recipe::Recipe;
use rows::{FigureRow, RowVerdict};
pub use run_record::RUN;
use run_record::RunRecord;
use serde::Serialize;
use site::BuildSite;
use source::Source;
use std::collections::BTreeMap;
use std::io;
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
    type Report = Reproduced;

    fn run(self, ui: &Ui) -> anyhow::Result<Reproduced> {
        if self.list {
            let listed = |r: Recipe| ListedRecipe { name: r.name, title: r.title };
            return Ok(Reproduced::Recipes { recipes: recipe::built_in()?.into_iter().map(listed).collect() });
        }
        if self.figures {
            return Ok(Reproduced::Figures(&figure::TABLE));
        }
        let recipe = recipe::open(&self.recipe.context("which recipe? anemoe reproduce --list")?)?;
        let sources = recipe.builds.iter().map(|build| {
            let named = build.source.as_deref().or(self.checkpoint.as_deref()).unwrap_or(&recipe.source);
            let layers = self.layers.map(usize::from).filter(|_| build.source.is_none());
            Source::new(&recipe, named, layers)
        });
        let sources = sources.collect::<anyhow::Result<Vec<Source>>>()?;
        if let Some(layers) = self.layers.filter(|_| sources.iter().all(|s| !s.is_synthetic)) {
            bail!("--layers {layers} cuts synthetic sources, and this is none: a checkpoint is built whole");
        }
        let folder = self.out.unwrap_or_else(|| PathBuf::from(format!("reproduce-{}", recipe.name)));
        let site =
            |(build, source)| BuildSite { recipe: &recipe, build, source, folder: &folder, dry: self.dry_run };
        let sites: Vec<BuildSite<'_>> = recipe.builds.iter().zip(&sources).map(site).collect();
        let built: Vec<&str> = sources.iter().map(|s| s.built.as_str()).collect();
        let mut record = match self.dry_run {
            true => RunRecord::default(),
            false => RunRecord::open(&folder, &recipe, &built.join(", "))?,
        };
        ui.line(format!("# {}\n\n{}\n", recipe.title, recipe.intent.trim()))?;
        let mut reasons = BTreeMap::new();
        for site in &sites {
            reasons.extend(site.run(&mut record)?.map(|reason| (site.build.name.as_str(), reason)));
        }
        let rows = rows::rows(&recipe, &record, &sources, &reasons);
        let pass = (self.dry_run || reasons.is_empty()) && rows.iter().all(|r| r.explained);
        record.end(pass, &rows, recipe.lesson.as_ref());
        let mut verdicts: BTreeMap<RowVerdict, usize> = BTreeMap::new();
        rows.iter().for_each(|r| *verdicts.entry(r.verdict).or_default() += 1);
        let builds = || recipe.builds.iter().filter_map(|b| record.get(&b.name, GateCommand::Build));
        let bundles = builds().filter_map(|b| b.bundle.clone()).collect();
        let setup = recipe.builds.iter().zip(&sources).map(|(build, source)| {
            let is_cut = source.planned != source.built;
            let cut = if is_cut { format!(", built from {}", source.built) } else { String::new() };
            format!("{}: {}{cut}; {}", build.name, source.planned, build.options.join(" "))
        });
        let setup = setup.collect();
        let stopped = builds().filter_map(|b| Some((b, b.stopped.as_ref()?))).map(|(built, at)| {
            let then = match (built.again, &built.bundle) {
                (true, _) => "stopped the build; its weights are synthetic, so it was built without gates",
                (_, Some(_)) => "failed; the bundle is complete",
                (_, None) => "stopped the build; nothing behind it ran",
            };
            format!("{}: the gate {at} {then}", built.build)
        });
        let mut remarks: Vec<String> = stopped.collect();
        if !self.dry_run {
            let folder = quoted(&folder);
            remarks.push(format!("bundles and results are in {folder}; next: anemoe journal {folder}"));
        }
        let source = sources.into_iter().next().map(|s| s.planned).unwrap_or_default();
        let Recipe { name: recipe, title, lesson, .. } = recipe;
        let run = RecipeRun { recipe, title, source, pass, bundles, verdicts, rows, setup, lesson, remarks };
        Ok(Reproduced::Run(run))
    }
}

/// Table of a recipe that ran, or a list.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Reproduced {
    Run(RecipeRun),
    Recipes { recipes: Vec<ListedRecipe> },
    Figures(&'static FigureTable),
}

#[derive(Serialize)]
pub struct ListedRecipe {
    name: String,
    title: String,
}

/// Results of a recipe beside the book's.
#[derive(Serialize)]
pub struct RecipeRun {
    recipe: String,
    title: String,
    /// The source that was planned, of the first build.
    source: String,
    pass: bool,
    bundles: Vec<String>,
    /// Number of rows with each verdict.
    verdicts: BTreeMap<RowVerdict, usize>,
    rows: Vec<FigureRow>,
    /// A line for each build.
    #[serde(skip)]
    setup: Vec<String>,
    #[serde(skip)]
    lesson: Option<String>,
    /// Lines below the table.
    #[serde(skip)]
    remarks: Vec<String>,
}

impl CommandReport for Reproduced {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        match self {
            Reproduced::Run(run) => run.print(ui),
            Reproduced::Recipes { recipes } => {
                let mut table = Table::ending_in_text(&["recipe", "title"]);
                recipes.iter().for_each(|r| table.row(vec![r.name.clone(), r.title.clone()]));
                table.print(ui)
            }
            Reproduced::Figures(all) => {
                let mut table = Table::ending_in_text(&["figure", "unit", "from", "meaning"]);
                for f in &all.figures {
                    let gates: Vec<&str> = f.gates.iter().map(|g| g.name()).collect();
                    table.row(vec![f.name.clone(), f.unit.clone(), gates.join(", "), f.meaning.clone()]);
                }
                table.print(ui)
            }
        }
    }

    fn outcome(&self) -> Outcome {
        Outcome::of(!matches!(self, Reproduced::Run(run) if !run.pass))
    }
}

impl RecipeRun {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        self.setup.iter().try_for_each(|line| ui.line(line))?;
        ui.line("")?;
        let mut table = Table::ending_in_text(&["figure", "unit", "the book's", "ours", "verdict"]);
        for r in &self.rows {
            let of = if self.setup.len() > 1 { format!("{}: ", r.build) } else { String::new() };
            let colon = if r.why.is_empty() { "" } else { ": " };
            let said = format!("{}{colon}{}", <&str>::from(r.verdict), r.why);
            let [book, ours] = r.shown.clone();
            table.row(vec![of + r.figure, r.unit.into(), book, ours, said]);
        }
        table.print(ui)?;
        let unexplained = self.rows.iter().filter(|r| !r.explained).count();
        if unexplained > 0 {
            let of = ui::counted(self.rows.len(), "figure");
            let differ = if unexplained == 1 { "differs" } else { "differ" };
            ui.line(format!("{unexplained} of {of} {differ}, and the recipe does not say why"))?;
        }
        if let Some(lesson) = &self.lesson {
            ui.line(format!("\nLesson: {}", lesson.trim()))?;
        }
        self.remarks.iter().try_for_each(|line| ui.line(line))
    }
}
