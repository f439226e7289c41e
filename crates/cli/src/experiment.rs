//! Experiments of a book: a folder with `book.jsonl`, whose events have the format of a journal's.
//!
//! ```text
//! journal new ──> event `experiment`: id, intent, expectations        before anything is built
//! any command with --experiment ──> event of its kind: figures, by the registry; which expectations fail
//! journal add ──> event `note`: what people write, state, milestones, links
//! ```

use crate::args::runner::chosen_backend;
use crate::error_report::sentence;
use crate::outcome::Outcome;
use crate::registry::{self, Bound, Figure, FigureNeeds};
use crate::standing;
use crate::ui;
use anemoe_bundle::journal::{self, BOOK_FILE, Event, Prose, status};
use anyhow::{Context, bail};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

/// Kind of the event that begins an experiment.
pub const BEGINS: &str = "experiment";

/// A figure with its expected bound, such as `shard_mb<110`.
#[derive(Clone)]
pub struct Expectation {
    pub text: String,
    pub figure: &'static Figure,
    bound: Bound,
}

impl FromStr for Expectation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
        let (name, bound) = text.split_at(end);
        let figure = registry::find(name)?;
        if bound.trim().is_empty() {
            return Err(format!(
                "`{text}` expects nothing: write for instance {name}<110, in {}",
                figure.unit
            ));
        }
        Ok(Expectation { text: text.into(), figure, bound: figure.bound(bound)? })
    }
}

/// An experiment of a book, as `BOOK/ID`.
#[derive(Clone, Debug)]
pub struct ExperimentPath {
    pub book: PathBuf,
    pub id: String,
}

impl ExperimentPath {
    /// Splits `BOOK/ID`, and does not check that book and experiment exist.
    ///
    /// # Errors
    /// The path has another form.
    pub fn split(path: &Path) -> anyhow::Result<ExperimentPath> {
        let id = path.file_name().and_then(|name| name.to_str());
        let id = id.filter(|id| id.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c)));
        let book = path.parent().filter(|p| !p.as_os_str().is_empty());
        let (id, book) = id.zip(book).with_context(|| {
            format!(
                "{}: not of the form BOOK/ID, with an ID of letters, digits, `_`, `-` and `.`",
                path.display()
            )
        })?;
        Ok(ExperimentPath { book: book.into(), id: id.into() })
    }

    /// Finds an experiment that has begun.
    ///
    /// # Errors
    /// There is no such experiment.
    pub fn open(path: &Path) -> anyhow::Result<ExperimentPath> {
        let this = ExperimentPath::split(path)?;
        if !this.book.join(BOOK_FILE).is_file() {
            bail!(
                "{}: no book of experiments; `anemoe journal new {} --intent TEXT` begins one",
                this.book.display(),
                path.display()
            );
        }
        let known: Vec<String> = ids(&journal::read(&this.book)?.events).map(str::to_string).collect();
        if !known.contains(&this.id) {
            bail!("{}: no experiment `{}`; there are: {}", this.book.display(), this.id, known.join(", "));
        }
        Ok(ExperimentPath { book: std::path::absolute(&this.book).unwrap_or(this.book), ..this })
    }

    fn events(&self) -> Vec<Event> {
        let of = |e: &Event| e.id == self.id || e.of.as_deref() == Some(&self.id);
        journal::read(&self.book).map(|j| j.events.into_iter().filter(of).collect()).unwrap_or_default()
    }

    /// Adds an event and returns its id; warns and returns none if it cannot be written.
    fn append(&self, event: Event) -> Option<String> {
        let written = journal::append(&self.book, Event { of: Some(self.id.clone()), ..event });
        let refused =
            |e| ui::message(format!("warning: {e}; nothing was written down of experiment {}", self.id));
        written.map_err(refused).ok().map(|event| event.id)
    }
}

/// Lists the ids of the experiments of a book.
pub fn ids(events: &[Event]) -> impl Iterator<Item = &str> {
    events.iter().filter(|e| e.kind == BEGINS).map(|e| e.id.as_str())
}

/// Begins an experiment, in a new book if there is none. `facts` has expectations, links, and the experiment that is
/// replaced.
///
/// # Errors
/// The id is taken, the replaced experiment is not in the book, or the book cannot be written.
pub fn begin(at: &ExperimentPath, intent: String, facts: Value) -> anyhow::Result<()> {
    journal::make_book(&at.book)?;
    let events = journal::read(&at.book)?.events;
    if events.iter().any(|e| e.id == at.id) {
        bail!("{}: there is an experiment `{}` already", at.book.display(), at.id);
    }
    if let Some(old) = facts["replaces"].as_str().filter(|old| !ids(&events).any(|id| id == *old)) {
        let known: Vec<&str> = ids(&events).collect();
        bail!("--replaces {old}: no such experiment; there are: {}", known.join(", "));
    }
    let prose = Prose { intent: Some(intent), ..Prose::default() };
    let event = Event { id: at.id.clone(), facts: facts_of(facts), prose, ..Event::new(BEGINS, "intent") };
    journal::append(&at.book, event)?;
    Ok(())
}

/// Returns the texts of expectations, as they are stored.
pub fn texts(expect: &[Expectation]) -> Vec<&str> {
    expect.iter().map(|e| e.text.as_str()).collect()
}

/// Returns the members that are neither null nor empty lists.
pub fn facts_of(value: Value) -> Map<String, Value> {
    let Value::Object(mut map) = value else { return Map::new() };
    map.retain(|_, v| !v.is_null() && v.as_array().is_none_or(|a| !a.is_empty()));
    map
}

/// A command that runs for an experiment.
pub struct ExperimentRun {
    at: ExperimentPath,
    command: String,
    bundle: Option<PathBuf>,
    /// Files that the command compares with, and their hashes.
    goldens: Vec<Value>,
    options: Map<String, Value>,
    started: Instant,
    /// Id of the event that records the beginning.
    begun: Option<String>,
}

impl ExperimentRun {
    /// Records that a command has begun.
    pub fn begin(
        at: ExperimentPath,
        command: &str,
        bundle: Option<PathBuf>,
        goldens: Vec<Value>,
        options: Map<String, Value>,
    ) -> ExperimentRun {
        let facts = facts_of(json!({"bundle": bundle.as_ref().map(|b| b.display().to_string())}));
        let begun = at.append(Event { facts, ..Event::new(command, status::STARTED) });
        ExperimentRun {
            at,
            command: command.into(),
            bundle,
            goldens,
            options,
            started: Instant::now(),
            begun,
        }
    }

    /// Records the end of a command: figures of its document, and the expectations that they fail.
    pub fn end(mut self, result: &anyhow::Result<Outcome>, document: Option<&Value>) {
        // The backend that ran counts, not the one that was asked for.
        if let Some(backend) = chosen_backend() {
            self.options.insert("backend".into(), backend.into());
        }
        let packages = self.bundle.as_deref().and_then(standing::packages_sha256);
        let mut facts = facts_of(json!({
            "bundle": self.bundle.as_ref().map(|b| b.display().to_string()), "ends": self.begun, standing::GOLDENS: self.goldens, standing::PACKAGES: packages,
        }));
        let status = match result {
            Ok(Outcome::Done) => status::DONE,
            Ok(Outcome::GateFailed) => status::FAIL,
            Err(e) => {
                facts.insert("error".into(), sentence(e).into());
                status::ERROR
            }
        };
        let measured = document.map(|d| registry::measured(&self.command, d)).unwrap_or_default();
        let figures: Map<String, Value> =
            measured.iter().map(|(f, x)| (f.name.to_string(), (*x).into())).collect();
        facts.extend(facts_of(json!({"figures": figures})));
        // A recipe builds several bundles.
        facts.extend(document.and_then(|d| Some(("bundles".to_string(), d.get("bundles")?.clone()))));
        let seconds = Some((self.started.elapsed().as_secs_f64() * 1e3).round() / 1e3);
        let (machine, options) = (Some(crate::machine::this()), self.options);
        let version = env!("CARGO_PKG_VERSION").into();
        let event = Event { seconds, version, machine, options, facts, ..Event::new(&self.command, status) };
        let events = [self.at.events(), vec![event.clone()]].concat();
        for e in Experiment::of(&events).iter().flat_map(|x| &x.expectations) {
            let Some((figure, found)) = measured.iter().find(|(f, _)| f.name == e.figure) else { continue };
            let Ok(expectation) = e.text.parse::<Expectation>() else { continue };
            let said = match (expectation.bound.holds(*found), e.holds) {
                (true, Some(false)) => format!("holds here, and still FAILS: {}", e.found_text()),
                (true, _) => "holds".into(),
                (false, _) => "FAILS".into(),
            };
            let found = figure.show(*found);
            let here =
                stand_in(figure, &self.command, &event.options).map(|s| format!(", {s}")).unwrap_or_default();
            ui::message(format!(
                "experiment {}: {}: {found} {}{here}: {said}",
                self.at.id, e.text, figure.unit
            ));
        }
        self.at.append(event);
    }
}

/// An expectation, and its result.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CheckedExpectation {
    pub text: String,
    pub figure: String,
    pub unit: &'static str,
    /// The newest figure, or the newest failing one while a failure stands.
    pub found: Option<f64>,
    pub holds: Option<bool>,
    /// File of the golden with which the expectation fails.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub golden: Option<String>,
    /// Origin of a figure that by its name is a Mac's, but was not measured on a Mac.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stand_in: Option<&'static str>,
}

impl CheckedExpectation {
    /// Formats the figure for people.
    pub fn found_text(&self) -> String {
        let here = self.stand_in.map(|s| format!(", {s}")).unwrap_or_default();
        match (self.found, registry::find(&self.figure)) {
            (Some(x), Ok(figure)) => {
                let golden = self.golden.as_ref().map(|g| format!(" with {g}")).unwrap_or_default();
                format!("{} {}{golden}{here}", figure.show(x), self.unit)
            }
            _ => "nothing yet".into(),
        }
    }
}

/// Names the stand-in for a Mac's figure that a command brought with these options; none if a Mac measured the figure, or
/// none is needed.
fn stand_in(figure: &Figure, command: &str, options: &Map<String, Value>) -> Option<&'static str> {
    let has = |key| options.get(key).is_some_and(|v| *v != Value::Bool(false));
    let measured = match command {
        "check" => has("device") || has("report"),
        _ => options.get("backend").is_some_and(|b| *b == "coreml"),
    };
    (figure.needs == FigureNeeds::Mac && !measured).then_some(match figure.unit {
        "ops" | "packages" => "predicted",
        _ => "on the CPU",
    })
}

/// An experiment, read from its events.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Experiment {
    pub title: Option<String>,
    /// `intent`, `running`, `passed`, `failed` or `dead end`.
    pub state: String,
    pub expectations: Vec<CheckedExpectation>,
    pub bundles: Vec<String>,
    pub replaces: Option<String>,
    /// Milestones with their dates.
    pub milestones: Vec<String>,
}

/// Lists the strings of some facts, each a string or a list of strings.
fn strings<'a>(events: &'a [Event], keys: &'static [&str]) -> impl Iterator<Item = &'a str> {
    let values = events.iter().flat_map(move |e| keys.iter().filter_map(|k| e.facts.get(*k)));
    values.flat_map(|v| match v {
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        one => Vec::from_iter(one.as_str()),
    })
}

impl Experiment {
    /// Reads the events of one experiment; returns none if they are of something else.
    pub fn of(events: &[Event]) -> Option<Experiment> {
        let first = events.first().filter(|e| e.kind == BEGINS)?;
        let fact = |key| first.facts.get(key).and_then(Value::as_str).map(str::to_string);
        // An expectation that only another version understands is shown, but not checked.
        let check = |text: &str| match text.parse::<Expectation>() {
            Ok(e) => {
                let Figure { name, unit, .. } = e.figure;
                let standing = standing::of_figure(events, e.figure, |x| e.bound.holds(x));
                let stand_in =
                    standing.as_ref().and_then(|s| stand_in(e.figure, &s.run.kind, &s.run.options));
                CheckedExpectation {
                    text: e.text,
                    figure: name.to_string(),
                    unit,
                    found: standing.as_ref().map(|s| s.found),
                    holds: standing.as_ref().map(|s| s.holds),
                    golden: standing.and_then(|s| s.golden),
                    stand_in,
                }
            }
            Err(_) => CheckedExpectation { text: text.into(), ..CheckedExpectation::default() },
        };
        let mut bundles: Vec<String> = Vec::new();
        for bundle in strings(events, &["bundles", "bundle"]) {
            if !bundles.iter().any(|b| b == bundle) {
                bundles.push(bundle.into());
            }
        }
        let milestones = events.iter().filter_map(|e| {
            Some(format!("{}: {}", e.time.strftime("%Y-%m-%d"), e.facts.get("milestone")?.as_str()?))
        });
        let expectations: Vec<CheckedExpectation> = strings(events, &["expect"]).map(check).collect();
        Some(Experiment {
            title: fact("title"),
            state: state(events, &expectations),
            bundles,
            replaces: fact("replaces"),
            milestones: milestones.collect(),
            expectations: dedup(expectations),
        })
    }
}

fn dedup(mut list: Vec<CheckedExpectation>) -> Vec<CheckedExpectation> {
    let mut seen = std::collections::HashSet::new();
    list.retain(|e| seen.insert(e.text.clone()));
    list
}

/// Returns the state: a person's, unless a command began later; else the state that follows from commands and expectations.
fn state(events: &[Event], expectations: &[CheckedExpectation]) -> String {
    let said = |e: &Event| e.facts.get("state").and_then(Value::as_str).map(str::to_string);
    let is_run = |e: &Event| e.kind != BEGINS && e.kind != "note";
    let last_run = events.iter().rposition(is_run);
    let spoken = events.iter().enumerate().rev().find_map(|(i, e)| Some((i, said(e)?)));
    if let Some((i, state)) = spoken
        && last_run.is_none_or(|run| run < i)
    {
        return state;
    }
    let newest = standing::deciding_runs(events.iter().filter(|e| is_run(e)));
    let has = |wanted: &[&str]| newest.iter().any(|e| wanted.contains(&e.status.as_str()));
    let fails = expectations.iter().any(|e| e.holds == Some(false));
    let open = expectations.iter().any(|e| e.holds.is_none());
    match () {
        () if newest.is_empty() => "intent",
        () if has(&[status::STARTED]) => "running",
        () if fails || has(&[status::FAIL, status::ERROR]) => "failed",
        () if open => "running",
        () => "passed",
    }
    .into()
}
