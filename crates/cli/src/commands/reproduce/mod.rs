//! `anemoe reproduce`

#[cfg(test)]
mod arithmetic;
pub mod command;
mod recipe;
mod rows;
mod run_record;
mod source;

use crate::outcome::Outcome;
use crate::registry;
use crate::ui::{self, Table, Ui};
use anyhow::{Context, bail};
use command::GateCommand;
use recipe::{Recipe, RecipeBuild};
use rows::{FigureRow, RowVerdict};
use run_record::{RunIdentity, RunRecord};
use source::Source;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

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

/// Member of a build's document: a gate stopped the build, which was then repeated without gates.
const BUILT_AGAIN: &str = "built_again";

/// Document that `--json` prints.
#[derive(serde::Serialize)]
struct Reproduction<'a> {
    recipe: &'a str,
    title: &'a str,
    source: &'a str,
    pass: bool,
    /// Bundles that were built.
    bundles: Vec<String>,
    /// Rows per verdict.
    verdicts: BTreeMap<&'static str, usize>,
    rows: &'a [FigureRow],
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
    let run = RunIdentity {
        version: env!("CARGO_PKG_VERSION").into(),
        source: sources.iter().map(|s| s.built.as_str()).collect::<Vec<_>>().join(", "),
        recipe: recipe.text.clone(),
    };
    let site =
        |(build, source)| BuildSite { recipe: &recipe, build, source, folder: &folder, dry: args.dry_run };
    let sites: Vec<BuildSite<'_>> = recipe.builds.iter().zip(&sources).map(site).collect();
    sites.iter().try_for_each(BuildSite::check_goldens)?;
    let mut record = match args.dry_run {
        true => RunRecord::in_memory(run),
        false => RunRecord::open(&folder, run)?,
    };
    ui.line(format!("# {}\n\n{}\n", recipe.title, recipe.intent.trim()))?;
    let mut reasons = BTreeMap::new();
    let mut stopped = false;
    for site in &sites {
        if let Some(reason) = site.run(&mut record)? {
            stopped |= !args.dry_run;
            reasons.insert(site.build.name.as_str(), reason);
        }
    }
    let rows = rows::rows(&recipe, &record, &sources, &reasons);
    let pass = !stopped && rows.iter().all(FigureRow::is_explained);
    let mut verdicts = BTreeMap::new();
    rows.iter().for_each(|r| *verdicts.entry(r.verdict.name()).or_default() += 1);
    ui.document(&Reproduction {
        recipe: &recipe.name,
        title: &recipe.title,
        source: &sources[0].planned,
        pass,
        bundles: bundles(&recipe, &record),
        verdicts,
        rows: &rows,
    })?;
    print(&recipe, &sources, &rows, ui)?;
    for build in &recipe.builds {
        let built = record.get(&build.name, GateCommand::Build);
        if let Some(at) = built.and_then(gate_that_stopped) {
            let of = |key: &str| built.is_some_and(|b| !b[key].is_null());
            let then = match (of(BUILT_AGAIN), of("bundle")) {
                (true, _) => "stopped the build; its weights are synthetic, so it was built without gates",
                (_, true) => "failed; the bundle is complete",
                (_, false) => "stopped the build; nothing behind it ran",
            };
            ui.line(format!("{}: the gate {at} {then}", build.name))?;
        }
    }
    if !args.dry_run {
        ui.line(format!("bundles and documents are in {}", folder.display()))?;
    }
    Ok(if pass { Outcome::Done } else { Outcome::GateFailed })
}

fn list(ui: &Ui) -> anyhow::Result<Outcome> {
    let all = recipe::built_in()?;
    let list: Vec<_> = all.iter().map(|r| serde_json::json!({"name": r.name, "title": r.title})).collect();
    ui.document(&serde_json::json!({"recipes": list}))?;
    let mut table = Table::ending_in_text(&["recipe", "title"]);
    all.into_iter().for_each(|r| table.row(vec![r.name, r.title]));
    table.print(ui)?;
    Ok(Outcome::Done)
}

fn figures(ui: &Ui) -> anyhow::Result<Outcome> {
    let mut table = Table::ending_in_text(&["figure", "unit", "from", "meaning"]);
    let mut list = Vec::new();
    for f in registry::all() {
        let commands: Vec<&str> = f.commands().collect();
        table.row(vec![f.name.into(), f.unit.into(), commands.join(", "), f.text.into()]);
        list.push(serde_json::json!({"name": f.name, "unit": f.unit, "commands": commands, "text": f.text}));
    }
    ui.document(&serde_json::json!({"figures": list}))?;
    table.print(ui)?;
    Ok(Outcome::Done)
}

/// One build of a recipe with its gates.
struct BuildSite<'a> {
    recipe: &'a Recipe,
    build: &'a RecipeBuild,
    source: &'a Source,
    folder: &'a Path,
    dry: bool,
}

impl BuildSite<'_> {
    /// Runs the gates that bring figures in the recipe's order, without those that ran before. Returns a reason if not all
    /// of them could run.
    fn run(&self, record: &mut RunRecord) -> anyhow::Result<Option<String>> {
        let name = self.build.name.as_str();
        for &gate in self.recipe.gates.iter().filter(|g| self.is_needed(**g)) {
            if self.dry && gate != GateCommand::Plan {
                return Ok(Some("--dry-run: only planned".into()));
            }
            if let Some(reason) = self.stopped(record, gate) {
                return Ok(Some(reason));
            }
            if record.get(name, gate).is_some() {
                continue;
            }
            ui::message(format!("{} {name}: {}", self.recipe.name, gate.name()));
            let what = || format!("recipe {}, build {name}: {}", self.recipe.name, gate.name());
            if gate.needs_golden() {
                self.golden().with_context(what)?;
            }
            let (mut document, _) = gate.run(&self.arguments(gate)).with_context(what)?;
            if gate == GateCommand::Plan {
                self.check_family(&document)?;
                self.check_layers(&document)?;
            }
            let at = gate_that_stopped(&document).filter(|_| gate == GateCommand::Build);
            // Placement does not depend on weights: without gates, a synthetic model would fail in the same way.
            let of_quality = document["failed"].as_str().is_some_and(|gate| !gate.ends_with("residency"));
            let goes_on = self.source.is_synthetic && of_quality && document["bundle"].is_null();
            if let Some(at) = at.filter(|_| goes_on) {
                ui::message(format!(
                    "{} {name}: the gate {at} stopped it; on without gates",
                    self.recipe.name
                ));
                let again = [self.arguments(gate), vec!["--skip-gates".into()]].concat();
                let (built, _) = gate.run(&again).with_context(what)?;
                fill(&mut document, built);
                document[BUILT_AGAIN] = true.into();
            }
            record.add(name, gate, document)?;
        }
        Ok(None)
    }

    /// Checks that the goldens named in options of gates exist, since no gate makes them.
    fn check_goldens(&self) -> anyhow::Result<()> {
        for &gate in &self.recipe.gates {
            let options = self.options(gate);
            let mut own =
                options.iter().enumerate().filter_map(|(i, option)| match option.strip_prefix("--golden") {
                    Some("") => options.get(i + 1).map(String::as_str),
                    Some(rest) => rest.strip_prefix('='),
                    None => None,
                });
            if let Some(missing) = own.find(|path| !Path::new(path).is_file()) {
                bail!(
                    "recipe {}, build {}: the gate `{}` needs the golden {missing}, which is not there and which no gate makes \
                     before it; make it with `anemoe golden`, or leave it to `validate` and `trace`, whose golden is one of prompt_ids",
                    self.recipe.name,
                    self.build.name,
                    gate.name()
                );
            }
        }
        Ok(())
    }

    /// Returns the options of a gate: the recipe's, then the build's.
    fn options(&self, gate: GateCommand) -> Vec<String> {
        let given = [&self.recipe.options, &self.build.gates].into_iter().filter_map(|o| o.get(&gate));
        given.flatten().cloned().collect()
    }

    /// Tells whether a gate brings a figure of this build, or makes what such a figure needs.
    fn is_needed(&self, gate: GateCommand) -> bool {
        let index = self.recipe.builds.iter().position(|b| b.name == self.build.name);
        let figures = || self.recipe.figures.iter().filter(|f| Some(f.build) == index);
        let brings = figures().any(|f| f.figure.commands().any(|c| c == gate.name()));
        // A figure that the plan has needs no build.
        let beyond = figures().any(|f| !f.figure.commands().any(|c| c == GateCommand::Plan.name()));
        match gate {
            GateCommand::Plan => true,
            GateCommand::Build => beyond,
            _ => brings && beyond,
        }
    }

    /// Returns the reason why a gate cannot run: a gate stopped the build, which left no bundle. None if the gate can run.
    fn stopped(&self, record: &RunRecord, gate: GateCommand) -> Option<String> {
        if !gate.needs_bundle() {
            return None;
        }
        let built = record.get(&self.build.name, GateCommand::Build)?;
        let at = gate_that_stopped(built).filter(|_| built["bundle"].is_null())?;
        Some(format!("the gate {at} stopped the build"))
    }

    /// Checks that the source is of the recipe's family.
    fn check_family(&self, plan: &serde_json::Value) -> anyhow::Result<()> {
        let found = plan["family"].as_str().unwrap_or_default();
        match &self.recipe.family {
            Some(wanted) if wanted != found => {
                bail!(
                    "{}: is of the family {found}, and the recipe {} is for {wanted}",
                    self.source.planned,
                    self.recipe.name
                )
            }
            _ => Ok(()),
        }
    }

    /// Checks that the model has the layers that are to be built.
    fn check_layers(&self, plan: &serde_json::Value) -> anyhow::Result<()> {
        let shards = plan["shards"].as_array().into_iter().flatten();
        let all = shards.filter_map(|s| s["layer"].as_u64()).max().map_or(0, |last| last + 1);
        match self.source.layers {
            Some(layers) if layers as u64 > all => {
                bail!("--layers {layers}: {} has {all}", self.source.planned)
            }
            _ => Ok(()),
        }
    }

    fn bundle(&self) -> OsString {
        self.folder.join(format!("{}.anemoe", self.build.name)).into()
    }

    /// Returns the path of the golden: one file for the recipe's source and prompt, and one for each build with its own.
    fn golden_file(&self) -> PathBuf {
        let own = self.build.source.is_some() || !self.build.prompt_ids.is_empty();
        let own = if own { format!("{}.", self.build.name) } else { String::new() };
        self.folder.join(format!("{own}golden.npz"))
    }

    fn prompt(&self) -> String {
        let own = Some(&self.build.prompt_ids).filter(|ids| !ids.is_empty());
        let ids: Vec<String> = own.unwrap_or(&self.recipe.prompt_ids).iter().map(u32::to_string).collect();
        ids.join(",")
    }

    /// Makes the golden, unless its file exists.
    fn golden(&self) -> anyhow::Result<()> {
        let file = self.golden_file();
        if file.is_file() {
            return Ok(());
        }
        ui::message(format!("{}: golden, the checkpoint in f32", self.recipe.name));
        let steps = self.recipe.new_tokens.to_string();
        let prompt = self.prompt();
        let fixed =
            [&self.source.built, "--prompt-ids", &prompt, "--decode", &steps, "-o"].map(OsString::from);
        command::make_golden(&[&fixed[..], &[file.into()]].concat())
    }

    fn arguments(&self, gate: GateCommand) -> Vec<OsString> {
        let bundle = self.bundle();
        let golden = self.golden_file().into();
        let options = self.options(gate);
        let mut all: Vec<OsString> = match gate {
            GateCommand::Plan => vec![self.source.planned.clone().into()],
            GateCommand::Build => {
                let intent = format!("--intent={}", self.recipe.intent.trim());
                vec![self.source.built.clone().into(), "-o".into(), bundle, intent.into()]
            }
            GateCommand::Check | GateCommand::Bench => vec![bundle],
            GateCommand::Validate | GateCommand::Trace => vec![bundle, "--golden".into(), golden],
            GateCommand::Generate => {
                let new = self.recipe.new_tokens.to_string();
                vec![bundle, "--prompt-ids".into(), self.prompt().into(), "--max-new".into(), new.into()]
            }
        };
        if !gate.needs_bundle() {
            all.extend(self.build.options.iter().map(OsString::from));
        }
        all.extend(options.iter().map(OsString::from));
        if gate == GateCommand::Validate && options.iter().any(|o| o.starts_with("--probes")) {
            // The folder of the bundles has room for scratch files.
            let scratch = self.folder.as_os_str();
            all.extend([
                "--checkpoint".into(),
                self.source.built.clone().into(),
                "--scratch".into(),
                scratch.into(),
            ]);
        }
        all
    }
}

/// Returns the absolute paths of the bundles that were built.
fn bundles(recipe: &Recipe, record: &RunRecord) -> Vec<String> {
    let built = recipe.builds.iter().filter_map(|b| record.get(&b.name, GateCommand::Build));
    let paths = built.filter_map(|document| document["bundle"].as_str());
    let absolute = |p: &str| std::path::absolute(p).map_or_else(|_| p.into(), |a| a.display().to_string());
    paths.map(absolute).collect()
}

/// Returns the gate at which a build ended, from its document, with the packages that failed there; none if none failed.
fn gate_that_stopped(build: &serde_json::Value) -> Option<String> {
    let failed = build["failed"].as_str()?;
    let places =
        ["/representative/residency/packages", "/representative/probes/shards", "/layers/probes/shards"];
    let lists = places.iter().filter_map(|p| build.pointer(p)?.as_array());
    let wrong = lists.flatten().filter(|x| x["pass"] == false || x["verdict"] == "not_ane");
    let mut names: Vec<&str> =
        wrong.filter_map(|x| x["shard"].as_str().or_else(|| x["name"].as_str())).collect();
    names.extend(build.pointer("/weight_fault/shard").and_then(serde_json::Value::as_str));
    names.dedup();
    let at = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    Some(format!("`{}`{at}", failed.replace('_', " ")))
}

/// Adds the members of another document that a document lacks.
fn fill(document: &mut serde_json::Value, other: serde_json::Value) {
    let (Some(document), serde_json::Value::Object(other)) = (document.as_object_mut(), other) else {
        return;
    };
    for (key, value) in other {
        let own = document.entry(key).or_insert(serde_json::Value::Null);
        if own.is_null() {
            *own = value;
        }
    }
}

fn print(recipe: &Recipe, sources: &[Source], rows: &[FigureRow], ui: &Ui) -> std::io::Result<()> {
    let several = recipe.builds.len() > 1;
    for (build, source) in recipe.builds.iter().zip(sources) {
        let cut = if source.planned == source.built {
            String::new()
        } else {
            format!(", built from {}", source.built)
        };
        ui.line(format!("{}: {}{cut}; {}", build.name, source.planned, build.options.join(" ")))?;
    }
    ui.line("")?;
    let mut table = Table::ending_in_text(&["figure", "unit", "the book's", "ours", "verdict"]);
    for r in rows {
        let name = if several { format!("{}: {}", r.build, r.figure) } else { r.figure.into() };
        let said = match r.why.as_str() {
            "" => r.verdict.name().to_string(),
            why => format!("{}: {why}", r.verdict.name()),
        };
        table.row(vec![name, r.unit.into(), r.book_text.clone(), r.ours_text.clone(), said]);
    }
    table.print(ui)?;
    let unexplained = rows.iter().filter(|r| r.verdict == RowVerdict::Differs && !r.is_explained()).count();
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
