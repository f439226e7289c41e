//! Builds of a recipe and their gates.

use super::command::{GateCommand, parse};
use super::recipe::{Recipe, RecipeBuild};
use super::run_record::{GateRecord, RunRecord};
use super::source::Source;
use crate::command::complete;
use crate::commands::{bench, build, check, generate, golden, plan, trace, validate};
use crate::ui::{self, Ui};
use anemoe_convert::plan::Plan;
use anemoe_gates::gated::{GateStage, GatedReport};
use anemoe_gates::residency::rule::Verdict;
use anyhow::{Context, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// One build of a recipe with its gates.
pub(super) struct BuildSite<'a> {
    pub recipe: &'a Recipe,
    pub build: &'a RecipeBuild,
    pub source: &'a Source,
    pub folder: &'a Path,
    pub dry: bool,
}

impl BuildSite<'_> {
    /// Runs the gates that bring figures, without those that ran before. Returns a reason if not all of them could run.
    pub fn run(&self, record: &mut RunRecord) -> anyhow::Result<Option<String>> {
        let name = self.build.name.as_str();
        for &gate in self.recipe.gates.iter().filter(|g| self.is_needed(**g)) {
            if self.dry && gate != GateCommand::Plan {
                return Ok(Some("--dry-run: only planned".into()));
            }
            let built = record.get(name, GateCommand::Build).filter(|b| b.bundle.is_none());
            if let Some(at) = built.and_then(|b| b.stopped.as_ref()) {
                return Ok(Some(format!("the gate {at} stopped the build")));
            }
            if record.get(name, gate).is_none() {
                ui::message(format!("{} {name}: {}", self.recipe.name, gate.name()));
                let what = || format!("recipe {}, build {name}: {}", self.recipe.name, gate.name());
                let started = Instant::now();
                record.add(self.run_gate(gate).with_context(what)?, started.elapsed().as_secs_f64());
            }
        }
        Ok(None)
    }

    fn run_gate(&self, gate: GateCommand) -> anyhow::Result<GateRecord> {
        let (name, words, ui) = (gate.name(), self.arguments(gate), &Ui::inner());
        let mut left = GateRecord::new(gate, &self.build.name);
        let figures = &mut left.figures;
        match gate {
            GateCommand::Plan => {
                let report = complete(parse::<plan::Args>(name, &words)?, name, ui)?;
                self.check_plan(&report.plan)?;
                figures.plan(&report.plan, &report.placement, &report.outliers, &report.op_types);
            }
            GateCommand::Build => self.run_build(&words, &mut left)?,
            GateCommand::Check => {
                let report = complete(parse::<check::Args>(name, &words)?, name, ui)?;
                report.placement().into_iter().for_each(|placement| figures.check(placement));
            }
            GateCommand::Validate => {
                self.make_golden()?;
                let report = complete(parse::<validate::Args>(name, &words)?, name, ui)?;
                figures.validate(&report.goldens, report.probes.as_ref());
            }
            GateCommand::Trace => {
                self.make_golden()?;
                figures.trace(&complete(parse::<trace::Args>(name, &words)?, name, ui)?.found);
            }
            GateCommand::Generate => {
                let report = complete(parse::<generate::Args>(name, &words)?, name, ui)?;
                figures.generate(&report.prompt_ids, &report.generated);
            }
            GateCommand::Bench => {
                complete(parse::<bench::Args>(name, &words)?, name, ui)?.report.figures(figures);
            }
        }
        Ok(left)
    }

    /// Builds the source; without gates, if one on quality stops a synthetic source.
    fn run_build(&self, words: &[OsString], left: &mut GateRecord) -> anyhow::Result<()> {
        let run = |words: &[OsString]| complete(parse::<build::Args>("build", words)?, "build", &Ui::inner());
        let mut report = run(words)?.gated;
        left.figures.build(&report);
        left.stopped = gate_that_stopped(&report);
        // Placement does not depend on weights: without gates, a synthetic model would fail in the same way.
        let of_placement = [GateStage::RepresentativeResidency, GateStage::Residency].map(Some);
        left.again = self.source.is_synthetic
            && report.build.is_none()
            && report.failed.is_some()
            && !of_placement.contains(&report.failed);
        if let Some(at) = left.stopped.as_ref().filter(|_| left.again) {
            ui::message(format!("{}: the gate {at} stopped it; on without gates", left.build));
            report = run(&[words, &["--skip-gates".into()]].concat())?.gated;
            left.figures.build(&report);
        }
        let bundle = report.build.map(|b| std::path::absolute(&b.bundle).unwrap_or(b.bundle));
        left.bundle = bundle.map(|b| b.display().to_string());
        Ok(())
    }

    /// Returns the options of a gate: the recipe's, then the build's.
    fn options(&self, gate: GateCommand) -> impl Iterator<Item = &String> {
        [&self.recipe.options, &self.build.gates].into_iter().filter_map(move |o| o.get(&gate)).flatten()
    }

    /// Tells whether a gate brings a figure of this build, or makes what such a figure needs.
    fn is_needed(&self, gate: GateCommand) -> bool {
        let index = self.recipe.builds.iter().position(|b| b.name == self.build.name);
        let mut figures = self.recipe.figures.iter().filter(|f| self.recipe.build_of(f) == index);
        // A figure that the plan has needs no build.
        let beyond = figures.clone().any(|f| !f.figure.gates.contains(&GateCommand::Plan));
        match gate {
            GateCommand::Plan => true,
            GateCommand::Build => beyond,
            _ => beyond && figures.any(|f| f.figure.gates.contains(&gate)),
        }
    }

    /// Checks that the source is of the recipe's family, and has the layers that are to be built.
    fn check_plan(&self, plan: &Plan) -> anyhow::Result<()> {
        let (source, found) = (&self.source.planned, &plan.family);
        if let Some(wanted) = self.recipe.family.as_ref().filter(|wanted| *wanted != found) {
            bail!("{source}: is of the family {found}, and the recipe is for {wanted}");
        }
        let all = plan.shards.iter().filter_map(|s| s.layer).max().map_or(0, |last| last + 1);
        match self.source.layers {
            Some(layers) if layers > all => bail!("--layers {layers}: {source} has {all}"),
            _ => Ok(()),
        }
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
        let words = [&words[..], &[file.into()]].concat();
        complete(parse::<golden::Args>("golden", &words)?, "golden", &Ui::inner())?;
        Ok(())
    }

    fn arguments(&self, gate: GateCommand) -> Vec<OsString> {
        let bundle = self.folder.join(format!("{}.anemoe", self.build.name)).into();
        let built = || OsString::from(&self.source.built);
        let mut all: Vec<OsString> = match gate {
            GateCommand::Plan => vec![self.source.planned.clone().into()],
            GateCommand::Build => {
                let intent = format!("--intent={}", self.recipe.intent.trim());
                vec![built(), "-o".into(), bundle, intent.into()]
            }
            GateCommand::Check | GateCommand::Bench => vec![bundle],
            GateCommand::Validate | GateCommand::Trace => {
                vec![bundle, "--golden".into(), self.golden_file().into()]
            }
            GateCommand::Generate => {
                let new = self.recipe.new_tokens.to_string().into();
                vec![bundle, "--prompt-ids".into(), self.prompt().into(), "--max-new".into(), new]
            }
        };
        if !gate.needs_bundle() {
            all.extend(self.build.options.iter().map(OsString::from));
        }
        all.extend(self.options(gate).map(OsString::from));
        if gate == GateCommand::Validate && self.options(gate).any(|o| o.starts_with("--probes")) {
            // The folder of the bundles has room for scratch files.
            all.extend(["--checkpoint".into(), built(), "--scratch".into(), self.folder.into()]);
        }
        all
    }
}

/// Returns the gate at which a build ended, with the packages that failed there; none if none failed.
fn gate_that_stopped(report: &GatedReport) -> Option<String> {
    let first = &report.representative;
    let placed = first.residency.iter().flat_map(|r| &r.packages).filter(|p| p.verdict == Verdict::NotAne);
    let layers = report.layers.iter().flat_map(|l| &l.probes);
    let probed = first.probes.iter().chain(layers).flat_map(|r| &r.shards).filter(|s| !s.pass);
    let mut names: Vec<&str> =
        placed.map(|p| p.name.as_str()).chain(probed.map(|s| s.shard.as_str())).collect();
    names.extend(report.weight_fault.iter().map(|w| w.shard.as_str()));
    names.sort_unstable();
    names.dedup();
    let at = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    Some(format!("`{}`{at}", report.failed?.name()))
}
