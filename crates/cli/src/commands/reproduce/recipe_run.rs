//! Builds of a recipe with their gates. The journal of the run's folder has an event for each gate of each build, so that an
//! interrupted run goes on where it was.

use super::figure::figures;
use super::recipe::{Recipe, RecipeBuild, RecipeCommand};
use super::rows::FigureRow;
use crate::args::hub_checkpoint::{Extent, locate};
use crate::command::{Command, parse};
use crate::commands::build;
use crate::commands::step::run_command;
use crate::recorder::{JournalArgs, Recorder};
use crate::ui::{self, Ui};
use anemoe_bundle::journal::{self, status};
use anemoe_convert::models;
use anemoe_convert::path_kind::PathKind;
use anemoe_gates::facts;
use anemoe_gates::gated::{GateStage, GatedReport};
use anemoe_io::Error;
use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Kind of the events that begin and end a run.
pub const RUN: &str = "reproduce";

/// Checkpoint that is planned, and checkpoint that is built.
pub(super) struct Source {
    pub planned: String,
    /// Checkpoint that is built: the planned one, with fewer layers if it is synthetic.
    pub built: String,
    pub is_synthetic: bool,
    /// Layers of the model that are built; none for all.
    pub layers: Option<usize>,
}

impl Source {
    /// Makes the source of the checkpoint at `path`; cuts a synthetic one to `layers`, else to the recipe's layers.
    fn new(recipe: &Recipe, path: &Path, layers: Option<usize>) -> anyhow::Result<Source> {
        let planned = path.to_str().with_context(|| format!("{}: not UTF-8", path.display()))?;
        // Commands would read an option.
        let planned = if planned.starts_with('-') { format!("./{planned}") } else { planned.to_string() };
        let is_synthetic = models::is_synthetic(&planned);
        let is_checkpoint = |path: &Path| matches!(PathKind::at(path), PathKind::Checkpoint | PathKind::Gguf);
        ensure!(
            is_synthetic || is_checkpoint(&locate(path, Extent::Whole)?.path),
            "{planned}: no checkpoint (a Hugging Face folder or a .gguf file); the recipe {} names {}",
            recipe.name,
            recipe.source.display()
        );
        let (name, query) = planned.split_once('?').unwrap_or((&planned, ""));
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let (cut, mut kept): (Vec<&str>, Vec<&str>) = pairs.partition(|pair| pair.starts_with("layers="));
        let layers = layers.or(cut.is_empty().then_some(recipe.layers)).filter(|_| is_synthetic);
        let own = layers.map(|layers| format!("layers={layers}"));
        kept.extend(own.as_deref());
        let built = if layers.is_some() { format!("{name}?{}", kept.join("&")) } else { planned.clone() };
        Ok(Source { built, planned, is_synthetic, layers })
    }
}

/// Results of a gate of a build.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct CommandRecord {
    gate: RecipeCommand,
    build: String,
    figures: BTreeMap<String, f64>,
    /// Absolute path of the bundle that was built.
    pub bundle: Option<String>,
    /// Gate that stopped the build, with the packages that failed there.
    pub stopped: Option<String>,
    /// True if the build was repeated without gates.
    pub again: bool,
}

/// Results of the gates of a run, which a journal keeps unless the run is dry.
pub(super) struct RunRecord {
    gates: Vec<CommandRecord>,
    folder: PathBuf,
    recorder: Recorder,
}

impl RunRecord {
    /// Opens the record in a folder, with the gates that an earlier run of the same recipe, sources and version left. Fails if
    /// the folder holds another run or something else.
    pub fn open(folder: &Path, recipe: &Recipe, source: &str, is_dry: bool) -> anyhow::Result<RunRecord> {
        let events = if is_dry { Vec::new() } else { journal::read(folder)?.events };
        let begun =
            facts::of(json!({"title": recipe.title, "recipe_sha256": recipe.sha256, "source": source}));
        let place = folder.display();
        if let Some(run) = events.iter().find(|e| e.kind == RUN) {
            let [own, known] =
                [&begun, &run.facts].map(|f| ["recipe_sha256", "source"].map(|key| f.get(key)));
            ensure!(
                run.version == env!("CARGO_PKG_VERSION") && own == known,
                "{place}: holds a run by version {} of other builds, options or sources ({}, and this is of {source}); name another \
                 folder with --out, or remove it",
                run.version,
                known[1].and_then(Value::as_str).unwrap_or_default()
            );
        } else if !is_dry {
            let is_empty = std::fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_none());
            ensure!(
                is_empty,
                "{place}: is not empty, and holds no run of a recipe; name another folder with --out"
            );
            std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        }
        let intent = Some(recipe.intent.trim().to_string());
        let args = JournalArgs { intent, no_journal: is_dry, ..JournalArgs::default() };
        let recorder = Recorder::new(&args, RUN);
        recorder.begin(folder, begun);
        let left = events.into_iter().filter_map(|e| serde_json::from_value(Value::Object(e.facts)).ok());
        Ok(RunRecord { gates: left.collect(), folder: folder.into(), recorder })
    }

    /// Returns what a gate of a build left, if it has run.
    pub fn get(&self, build: &str, gate: RecipeCommand) -> Option<&CommandRecord> {
        self.gates.iter().find(|g| g.gate == gate && g.build == build)
    }

    /// Returns a figure of a build, from the first of the gates that left it.
    pub fn figure(&self, build: &str, name: &str, gates: &[RecipeCommand]) -> Option<f64> {
        gates.iter().filter_map(|gate| self.get(build, *gate)?.figures.get(name)).next().copied()
    }

    fn add(&mut self, left: CommandRecord, seconds: f64) {
        let said = if left.stopped.is_some() { status::FAIL } else { status::DONE };
        self.recorder.also(&self.folder, left.gate.name(), said, Some(seconds), facts::of(json!(left)));
        self.gates.push(left);
    }

    /// Ends the run with the rows of its table.
    pub fn end(&self, pass: bool, rows: &[FigureRow], lesson: Option<&String>) {
        let lesson = lesson.map(|text| text.trim());
        self.recorder.gate(&self.folder, pass, facts::of(json!({"rows": rows, "lesson": lesson})));
    }
}

/// One build of a recipe with its gates.
pub(super) struct BuildRun<'a> {
    recipe: &'a Recipe,
    pub build: &'a RecipeBuild,
    pub source: Source,
    folder: &'a Path,
    is_dry: bool,
    /// Reason why not all gates ran.
    pub unfinished: Option<String>,
}

impl<'a> BuildRun<'a> {
    /// Prepares a build. `checkpoint` and `layers` stand in place of the recipe's, unless the build has a source of its own.
    pub fn new(
        recipe: &'a Recipe,
        build: &'a RecipeBuild,
        (checkpoint, layers): (Option<&Path>, Option<u16>),
        folder: &'a Path,
        is_dry: bool,
    ) -> anyhow::Result<BuildRun<'a>> {
        let source = match &build.source {
            Some(own) => Source::new(recipe, own, None)?,
            None => Source::new(recipe, checkpoint.unwrap_or(&recipe.source), layers.map(usize::from))?,
        };
        Ok(BuildRun { recipe, build, source, folder, is_dry, unfinished: None })
    }

    /// Runs the gates that bring figures, without those that ran before.
    pub fn run(&mut self, record: &mut RunRecord) -> anyhow::Result<()> {
        let (recipe, name) = (self.recipe, self.build.name.as_str());
        for &gate in &recipe.gates {
            if !self.is_needed(gate) {
                continue;
            }
            let built = record.get(name, RecipeCommand::Build).filter(|b| b.bundle.is_none());
            let stopped =
                built.and_then(|b| b.stopped.as_ref()).map(|at| format!("the gate {at} stopped the build"));
            let is_beyond = self.is_dry && gate != RecipeCommand::Plan;
            self.unfinished = if is_beyond { Some("--dry-run: only planned".into()) } else { stopped };
            if self.unfinished.is_some() {
                return Ok(());
            }
            if record.get(name, gate).is_none() {
                ui::message(format!("{} {name}: {}", recipe.name, gate.name()));
                let what = || format!("recipe {}, build {name}: {}", recipe.name, gate.name());
                let started = Instant::now();
                record.add(self.run_gate(gate).with_context(what)?, started.elapsed().as_secs_f64());
            }
        }
        Ok(())
    }

    fn run_gate(&self, gate: RecipeCommand) -> anyhow::Result<CommandRecord> {
        let (words, build) = (self.arguments(gate), self.build.name.clone());
        let mut left = CommandRecord { gate, build, ..CommandRecord::default() };
        if matches!(gate, RecipeCommand::Validate | RecipeCommand::Trace) {
            self.make_golden()?;
        }
        if gate == RecipeCommand::Build {
            self.run_build(&words, &mut left)?;
            return Ok(left);
        }
        let document = run_command(gate.name(), &words)?.document;
        if gate == RecipeCommand::Plan {
            self.check_plan(&document)?;
        }
        left.figures = figures(gate, &facts::of(document));
        Ok(left)
    }

    /// Builds the source; without gates, if one on quality stops a synthetic source.
    fn run_build(&self, words: &[OsString], left: &mut CommandRecord) -> anyhow::Result<()> {
        let run = |words: &[OsString], left: &mut CommandRecord| -> anyhow::Result<GatedReport> {
            let gated = parse::<build::Args>("build", words)?.run(&Ui::inner())?.gated;
            left.figures.extend(figures(RecipeCommand::Build, &facts::of(serde_json::to_value(&gated)?)));
            Ok(gated)
        };
        let mut gated = run(words, left)?;
        left.stopped = gated.stopped();
        // Placement does not depend on weights: without gates, a synthetic model would fail in the same way.
        let of_placement = [GateStage::RepresentativeResidency, GateStage::Residency].map(Some);
        let is_of_weights = gated.failed.is_some() && !of_placement.contains(&gated.failed);
        left.again = self.source.is_synthetic && gated.build.is_none() && is_of_weights;
        if let Some(at) = left.stopped.as_ref().filter(|_| left.again) {
            ui::message(format!("{}: the gate {at} stopped it; on without gates", left.build));
            gated = run(&[words, &["--skip-gates".into()]].concat(), left)?;
        }
        let bundle = gated.build.map(|b| std::path::absolute(&b.bundle).unwrap_or(b.bundle));
        left.bundle = bundle.map(|b| b.display().to_string());
        Ok(())
    }

    /// Returns the options of a gate: the recipe's, then the build's.
    fn options(&self, gate: RecipeCommand) -> impl Iterator<Item = &String> {
        [&self.recipe.options, &self.build.gates].into_iter().filter_map(move |o| o.get(&gate)).flatten()
    }

    /// Tells whether a gate brings a figure of this build, or makes what such a figure needs.
    fn is_needed(&self, gate: RecipeCommand) -> bool {
        let own = self.recipe.figures.iter().filter(|f| self.recipe.build_of(f) == self.build.name);
        let mut gates = own.map(|f| &f.figure.gates);
        // A figure that the plan has needs no build.
        let beyond = gates.clone().any(|gates| !gates.contains(&RecipeCommand::Plan));
        match gate {
            RecipeCommand::Plan => true,
            RecipeCommand::Build => beyond,
            _ => beyond && gates.any(|gates| gates.contains(&gate)),
        }
    }

    /// Checks that the source is of the recipe's family, and has the layers that are to be built.
    fn check_plan(&self, plan: &Value) -> anyhow::Result<()> {
        let (source, found) = (&self.source.planned, plan["family"].as_str().unwrap_or_default());
        let wanted = self.recipe.family.as_deref().unwrap_or(found);
        ensure!(wanted == found, "{source}: is of the family {found}, and the recipe is for {wanted}");
        let last = plan["shards"].as_array().into_iter().flatten().filter_map(|s| s["layer"].as_u64()).max();
        let (all, layers) = (last.map_or(0, |last| last as usize + 1), self.source.layers.unwrap_or(0));
        ensure!(layers <= all, "--layers {layers}: {source} has {all}");
        Ok(())
    }

    /// Returns the path of the golden: one file for the recipe's source, and one for each build with its own.
    fn golden_file(&self) -> PathBuf {
        let own = self.build.source.as_ref().map(|_| format!("{}.", self.build.name));
        self.folder.join(format!("{}golden.npz", own.unwrap_or_default()))
    }

    fn prompt(&self) -> String {
        let ids: Vec<String> = self.recipe.prompt_ids.iter().map(u32::to_string).collect();
        ids.join(",")
    }

    /// Makes the golden, unless its file exists: runs the checkpoint in f32.
    fn make_golden(&self) -> anyhow::Result<()> {
        let file = self.golden_file();
        if file.is_file() {
            return Ok(());
        }
        ui::message(format!("{}: golden, the checkpoint in f32", self.recipe.name));
        let (prompt, steps) = (self.prompt(), self.recipe.new_tokens.to_string());
        let words =
            [&self.source.built, "--prompt-ids", &prompt, "--decode", &steps, "-o"].map(OsString::from);
        run_command("golden", &[&words[..], &[file.into()]].concat()).map(drop)
    }

    fn arguments(&self, gate: RecipeCommand) -> Vec<OsString> {
        let bundle = self.folder.join(format!("{}.anemoe", self.build.name)).into();
        let built = || OsString::from(&self.source.built);
        let mut all: Vec<OsString> = match gate {
            RecipeCommand::Plan => vec![self.source.planned.clone().into()],
            RecipeCommand::Build => {
                let intent = format!("--intent={}", self.recipe.intent.trim());
                vec![built(), "-o".into(), bundle, intent.into()]
            }
            RecipeCommand::Check | RecipeCommand::Bench => vec![bundle],
            RecipeCommand::Validate | RecipeCommand::Trace => {
                vec![bundle, "--golden".into(), self.golden_file().into()]
            }
            RecipeCommand::Generate => {
                let new = self.recipe.new_tokens.to_string().into();
                vec![bundle, "--prompt-ids".into(), self.prompt().into(), "--max-new".into(), new]
            }
        };
        if !gate.needs_bundle() {
            all.extend(self.build.options.iter().map(OsString::from));
        }
        all.extend(self.options(gate).map(OsString::from));
        if gate == RecipeCommand::Validate && self.options(gate).any(|o| o.starts_with("--probes")) {
            // The folder of the bundles has room for scratch files.
            all.extend(["--checkpoint".into(), built(), "--scratch".into(), self.folder.into()]);
        }
        all
    }
}
