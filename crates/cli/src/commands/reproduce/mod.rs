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

use crate::outcome::Outcome;
use crate::shell::quoted;
use crate::ui::{self, Table, Ui};
use anyhow::{Context, bail};
use command::GateCommand;
use recipe::Recipe;
use rows::{FigureRow, RowVerdict};
pub use run_record::RUN;
use run_record::RunRecord;
use serde_json::json;
use site::BuildSite;
use source::Source;
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

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    if args.list {
        return list(ui);
    }
    if args.figures {
        return figures(ui);
    }
    let recipe = recipe::open(&args.recipe.context("which recipe? anemoe reproduce --list")?)?;
    let sources = recipe.builds.iter().map(|build| {
        let named = build.source.as_deref().or(args.checkpoint.as_deref()).unwrap_or(&recipe.source);
        let layers = args.layers.map(usize::from).filter(|_| build.source.is_none());
        Source::new(&recipe, named, layers)
    });
    let sources = sources.collect::<anyhow::Result<Vec<Source>>>()?;
    if let Some(layers) = args.layers.filter(|_| sources.iter().all(|s| !s.is_synthetic)) {
        bail!("--layers {layers} cuts synthetic sources, and this is none: a checkpoint is built whole");
    }
    let folder = args.out.unwrap_or_else(|| PathBuf::from(format!("reproduce-{}", recipe.name)));
    let site =
        |(build, source)| BuildSite { recipe: &recipe, build, source, folder: &folder, dry: args.dry_run };
    let sites: Vec<BuildSite<'_>> = recipe.builds.iter().zip(&sources).map(site).collect();
    let built: Vec<&str> = sources.iter().map(|s| s.built.as_str()).collect();
    let mut record = match args.dry_run {
        true => RunRecord::default(),
        false => RunRecord::open(&folder, &recipe, &built.join(", "))?,
    };
    ui.line(format!("# {}\n\n{}\n", recipe.title, recipe.intent.trim()))?;
    let mut reasons = BTreeMap::new();
    for site in &sites {
        reasons.extend(site.run(&mut record)?.map(|reason| (site.build.name.as_str(), reason)));
    }
    let rows = rows::rows(&recipe, &record, &sources, &reasons);
    let pass = (args.dry_run || reasons.is_empty()) && rows.iter().all(|r| r.explained);
    record.end(pass, &rows, recipe.lesson.as_ref());
    let mut verdicts: BTreeMap<RowVerdict, usize> = BTreeMap::new();
    rows.iter().for_each(|r| *verdicts.entry(r.verdict).or_default() += 1);
    let builds = || recipe.builds.iter().filter_map(|b| record.get(&b.name, GateCommand::Build));
    let bundles: Vec<&String> = builds().filter_map(|b| b.bundle.as_ref()).collect();
    ui.document(&json!({
        "recipe": recipe.name, "title": recipe.title, "source": sources[0].planned, "pass": pass, "bundles": bundles,
        "verdicts": verdicts, "rows": rows,
    }))?;
    print(&recipe, &sources, &rows, ui)?;
    for (built, at) in builds().filter_map(|b| Some((b, b.stopped.as_ref()?))) {
        let then = match (built.again, &built.bundle) {
            (true, _) => "stopped the build; its weights are synthetic, so it was built without gates",
            (_, Some(_)) => "failed; the bundle is complete",
            (_, None) => "stopped the build; nothing behind it ran",
        };
        ui.line(format!("{}: the gate {at} {then}", built.build))?;
    }
    if !args.dry_run {
        ui.line(format!("bundles and results are in {0}; next: anemoe journal {0}", quoted(&folder)))?;
    }
    Ok(if pass { Outcome::Done } else { Outcome::GateFailed })
}

fn list(ui: &Ui) -> anyhow::Result<Outcome> {
    let all = recipe::built_in()?;
    let list: Vec<_> = all.iter().map(|r| json!({"name": r.name, "title": r.title})).collect();
    ui.document(&json!({"recipes": list}))?;
    let mut table = Table::ending_in_text(&["recipe", "title"]);
    all.into_iter().for_each(|r| table.row(vec![r.name, r.title]));
    table.print(ui)?;
    Ok(Outcome::Done)
}

fn figures(ui: &Ui) -> anyhow::Result<Outcome> {
    ui.document(&*figure::TABLE)?;
    let mut table = Table::ending_in_text(&["figure", "unit", "from", "meaning"]);
    for f in &figure::TABLE.figures {
        let gates: Vec<&str> = f.gates.iter().map(|g| g.name()).collect();
        table.row(vec![f.name.clone(), f.unit.clone(), gates.join(", "), f.meaning.clone()]);
    }
    table.print(ui)?;
    Ok(Outcome::Done)
}

fn print(recipe: &Recipe, sources: &[Source], rows: &[FigureRow<'_>], ui: &Ui) -> std::io::Result<()> {
    for (build, source) in recipe.builds.iter().zip(sources) {
        let is_cut = source.planned != source.built;
        let cut = if is_cut { format!(", built from {}", source.built) } else { String::new() };
        ui.line(format!("{}: {}{cut}; {}", build.name, source.planned, build.options.join(" ")))?;
    }
    ui.line("")?;
    let mut table = Table::ending_in_text(&["figure", "unit", "the book's", "ours", "verdict"]);
    for r in rows {
        let of = if recipe.builds.len() > 1 { format!("{}: ", r.build) } else { String::new() };
        let ours = r.ours.map_or_else(|| "-".into(), |x| r.of.figure.show(x));
        let colon = if r.why.is_empty() { "" } else { ": " };
        let said = format!("{}{colon}{}", <&str>::from(r.verdict), r.why);
        table.row(vec![of + r.figure, r.unit.into(), r.of.book.text.clone(), ours, said]);
    }
    table.print(ui)?;
    let unexplained = rows.iter().filter(|r| !r.explained).count();
    if unexplained > 0 {
        let of = ui::counted(rows.len(), "figure");
        let differ = if unexplained == 1 { "differs" } else { "differ" };
        ui.line(format!("{unexplained} of {of} {differ}, and the recipe does not say why"))?;
    }
    if let Some(lesson) = &recipe.lesson {
        ui.line(format!("\nLesson: {}", lesson.trim()))?;
    }
    Ok(())
}
