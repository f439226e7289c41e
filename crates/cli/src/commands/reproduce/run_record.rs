//! Record of a run: the journal of its folder has an event for each gate of each build, so that an interrupted run goes on
//! where it was.

use super::command::GateCommand;
use super::recipe::Recipe;
use super::rows::FigureRow;
use crate::recorder::{JournalArgs, Recorder, facts};
use anemoe_bundle::journal::{self, Event, status};
use anemoe_gates::figures::NamedFigures;
use anemoe_io::Error;
use anyhow::bail;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Kind of the events that begin and end a run.
pub const RUN: &str = "reproduce";

/// Results of a gate of a build.
#[derive(Serialize, Deserialize)]
pub(super) struct GateRecord {
    pub gate: GateCommand,
    pub build: String,
    pub figures: NamedFigures,
    /// Absolute path of the bundle that was built.
    pub bundle: Option<String>,
    /// Gate that stopped the build, with the packages that failed there.
    pub stopped: Option<String>,
    /// True if the build was repeated without gates.
    pub again: bool,
}

impl GateRecord {
    pub fn new(gate: GateCommand, build: &str) -> GateRecord {
        let figures = NamedFigures::default();
        GateRecord { gate, build: build.into(), figures, bundle: None, stopped: None, again: false }
    }
}

/// Results of the gates of a run.
#[derive(Default)]
pub(super) struct RunRecord {
    gates: Vec<GateRecord>,
    /// Folder of the journal; none for a dry run.
    journal: Option<(PathBuf, Recorder)>,
}

impl RunRecord {
    /// Opens the record in a folder, with the gates that an earlier run of the same recipe, sources and version left; makes
    /// the folder if needed.
    ///
    /// # Errors
    /// The folder cannot be written, or holds another run or something else.
    pub fn open(folder: &Path, recipe: &Recipe, source: &str) -> anyhow::Result<RunRecord> {
        let events = journal::read(folder)?.events;
        let deciding = ["recipe_sha256", "source"];
        let begun = json!({"title": recipe.title, "recipe_sha256": recipe.sha256, "source": source});
        let begun = facts::of(begun);
        let is_same = |run: &Event| {
            run.version == env!("CARGO_PKG_VERSION")
                && deciding.iter().all(|key| run.facts.get(*key) == begun.get(*key))
        };
        match events.iter().find(|e| e.kind == RUN) {
            Some(run) if is_same(run) => {}
            Some(run) => bail!(
                "{}: holds a run by version {} of other builds, options or sources ({}, and this is of {source}); name another \
                 folder with --out, or remove it",
                folder.display(),
                run.version,
                run.facts.get("source").and_then(Value::as_str).unwrap_or_default()
            ),
            None if std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) => bail!(
                "{}: is not empty, and holds no run of a recipe; name another folder with --out",
                folder.display()
            ),
            None => std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?,
        }
        let intent = Some(recipe.intent.trim().to_string());
        let recorder = Recorder::new(&JournalArgs { intent, ..JournalArgs::default() }, RUN);
        recorder.begin(folder, begun);
        let left = events.into_iter().filter_map(|e| serde_json::from_value(Value::Object(e.facts)).ok());
        Ok(RunRecord { gates: left.collect(), journal: Some((folder.into(), recorder)) })
    }

    /// Returns what a gate of a build left, if it has run.
    pub fn get(&self, build: &str, gate: GateCommand) -> Option<&GateRecord> {
        self.gates.iter().find(|g| g.gate == gate && g.build == build)
    }

    /// Adds what a gate left.
    pub fn add(&mut self, left: GateRecord, seconds: f64) {
        if let Some((folder, recorder)) = &self.journal {
            let said = if left.stopped.is_some() { status::FAIL } else { status::DONE };
            recorder.also(folder, left.gate.name(), said, Some(seconds), facts::of(json!(left)));
        }
        self.gates.push(left);
    }

    /// Ends the run with the rows of its table.
    pub fn end(&self, pass: bool, rows: &[FigureRow], lesson: Option<&String>) {
        if let Some((folder, recorder)) = &self.journal {
            let lesson = lesson.map(|text| text.trim());
            recorder.gate(folder, pass, facts::of(json!({"rows": rows, "lesson": lesson})));
        }
    }
}
