//! `anemoe journal diff`: the figures of two bundles side by side.

use super::entries::machine;
use super::figures::{self, FigureUnit};
use crate::recorder::{Facts, facts};
use crate::target::expect_begun_bundle;
use crate::ui::{Table, Ui};
use anemoe_bundle::journal::{self, Event, status};
use anemoe_bundle::{CHAIN_FILE, Chain, file_sha256};
use serde::Serialize;
use serde_json::Value;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

/// Compare the newest figures of two bundles: sizes, compression, gates, times.
///
/// Options that differ come first, each once. Works without a journal, from what `chain.json` says.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe journal diff fp16.anemoe lut4.anemoe")]
pub struct Args {
    /// A bundle.
    a: PathBuf,
    /// Another one.
    b: PathBuf,
}

/// What one bundle has to compare.
#[derive(Default)]
struct Side {
    /// From `chain.json`, or from the newest build where there is none yet.
    bundle: Facts,
    /// Newest event of each kind and stage, in the order in which they first appear.
    newest: Vec<Event>,
    /// Seconds of the build, where one run did it all.
    build_seconds: Option<f64>,
    /// Kinds whose newest event is of another `chain.json`.
    stale: Vec<String>,
}

/// An option or a condition that is not the same.
#[derive(Serialize)]
struct Differing {
    /// The first kind of event that has it.
    kind: String,
    option: String,
    a: Option<Value>,
    b: Option<Value>,
}

/// A figure of both.
#[derive(Serialize)]
struct Row {
    figure: String,
    #[serde(skip)]
    unit: FigureUnit,
    a: Option<Value>,
    b: Option<Value>,
    /// b - a.
    difference: Option<f64>,
    /// b / a.
    ratio: Option<f64>,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<()> {
    let (a, b) = (Side::of(&args.a)?, Side::of(&args.b)?);
    let options = differing(&a, &b);
    let rows = rows(&a, &b);
    let mut remarks = Vec::new();
    for (path, side) in [(&args.a, &a), (&args.b, &b)] {
        let name = path.display();
        if side.event("build").is_none() {
            remarks.push(format!(
                "{name}: its journal tells of no finished build, so its options are not known"
            ));
        }
        for kind in &side.stale {
            remarks.push(format!("{name}: its newest {kind} was of another chain.json, and is left out"));
        }
    }
    ui.document(&serde_json::json!({
        "a": args.a.display().to_string(), "b": args.b.display().to_string(), "options": options, "figures": rows, "remarks": remarks,
    }))?;
    ui.line(format!("a: {}\nb: {}\n", args.a.display(), args.b.display()))?;
    if options.is_empty() {
        ui.line("no option that both tell of differs")?;
    } else {
        let mut table = Table::new(&["differing option", "a", "b"]);
        for o in &options {
            let name = format!("{}: {}", o.kind, o.option);
            table.row(vec![
                name,
                cell(o.a.as_ref(), FigureUnit::Plain),
                cell(o.b.as_ref(), FigureUnit::Plain),
            ]);
        }
        table.print(ui)?;
    }
    ui.line("")?;
    let mut table = Table::new(&["figure", "a", "b", "b - a", "b / a"]);
    for r in &rows {
        let difference = match (&r.a, &r.b, r.difference) {
            (_, _, Some(0.0)) => "0".into(),
            (_, _, Some(d)) => figures::real(d, r.unit),
            (Some(a), Some(b), None) if a != b => "differs".into(),
            _ => String::new(),
        };
        let ratio = r.ratio.map_or_else(String::new, |x| format!("{x:.4}"));
        let (a, b) = (cell(r.a.as_ref(), r.unit), cell(r.b.as_ref(), r.unit));
        table.row(vec![r.figure.clone(), a, b, difference, ratio]);
    }
    table.print(ui)?;
    for remark in remarks {
        ui.line(remark)?;
    }
    Ok(())
}

fn cell(value: Option<&Value>, unit: FigureUnit) -> String {
    value.map_or_else(|| "-".into(), |v| figures::text(v, unit).replace('\n', " "))
}

impl Side {
    fn of(path: &Path) -> anyhow::Result<Side> {
        expect_begun_bundle(path)?;
        let events = journal::read(path)?.events;
        let mut side = Side::default();
        let chain_file = path.join(CHAIN_FILE);
        let hash = if chain_file.is_file() {
            side.bundle = facts::bundle(path, &Chain::read(path)?);
            Some(file_sha256(&chain_file)?)
        } else {
            None
        };
        let builds: Vec<&Event> = events.iter().filter(|e| e.kind == "build").collect();
        if let [begun, ended] = builds[..]
            && ended.of.as_ref() == Some(&begun.id)
            && ended.status == status::DONE
            && !ended.facts.contains_key("part")
            && ended.facts.get("reused").and_then(Value::as_u64) == Some(0)
        {
            side.build_seconds = ended.seconds;
        }
        let mut places: HashMap<String, usize> = HashMap::new();
        for event in events {
            if event.kind == "note" || [status::STARTED, status::ERROR].contains(&event.status.as_str()) {
                continue;
            }
            match places.entry(label(&event)) {
                Entry::Occupied(place) => side.newest[*place.get()] = event,
                Entry::Vacant(place) => {
                    place.insert(side.newest.len());
                    side.newest.push(event);
                }
            }
        }
        // A gate of a bundle that has changed since says nothing about this one.
        let is_stale = |e: &Event| {
            let of = e.facts.get("chain_sha256").and_then(Value::as_str);
            hash.as_deref().zip(of).is_some_and(|(now, then)| now != then)
        };
        side.stale = side.newest.iter().filter(|e| is_stale(e)).map(label).collect();
        side.newest.retain(|e| !is_stale(e));
        if hash.is_none()
            && let Some(build) = side.event("build").filter(|e| !e.facts.contains_key("part"))
        {
            side.bundle = build.facts.clone();
        }
        Ok(side)
    }

    fn event(&self, label: &str) -> Option<&Event> {
        self.newest.iter().find(|e| self::label(e) == label)
    }

    /// What was measured in an event, by path; the first is whether it passed.
    fn figures(&self, kind: &str) -> Vec<(String, Value)> {
        let Some(event) = self.event(kind) else { return Vec::new() };
        let mut found = Vec::new();
        if !event.status.is_empty() && event.status != status::DONE {
            found.push(("gate".into(), event.status.clone().into()));
        }
        found.extend(figures::flatten(&event.facts));
        found.extend(event.seconds.map(|s| ("seconds".into(), s.into())));
        found
    }
}

/// The kind of an event, and the stage of it where there are several.
fn label(event: &Event) -> String {
    match event.facts.get("stage").and_then(Value::as_str) {
        Some(stage) => format!("{} {stage}", event.kind),
        None => event.kind.clone(),
    }
}

/// Kinds of both, in order, without those whose figures are the bundle's.
fn kinds(a: &Side, b: &Side) -> Vec<String> {
    let mut kinds = vec!["check".to_string(), "validate".into(), "trace".into()];
    for event in a.newest.iter().chain(&b.newest) {
        let label = label(event);
        if !kinds.contains(&label) && event.kind != "build" && event.kind != "assemble" {
            kinds.push(label);
        }
    }
    kinds
}

/// Both sides of two lists, in the order of the first and then of what only the second has.
fn joined(
    a: Vec<(String, Value)>,
    b: Vec<(String, Value)>,
) -> impl Iterator<Item = (String, Option<Value>, Option<Value>)> {
    let mut all: Vec<(String, Option<Value>, Option<Value>)> =
        a.into_iter().map(|(k, v)| (k, Some(v), None)).collect();
    for (key, value) in b {
        match all.iter_mut().find(|x| x.0 == key) {
            Some(known) => known.2 = Some(value),
            None => all.push((key, None, Some(value))),
        }
    }
    all.into_iter()
}

/// Options, inputs and machines that differ, of kinds of which both tell.
fn differing(a: &Side, b: &Side) -> Vec<Differing> {
    let mut found = Vec::new();
    for kind in ["build".to_string()].into_iter().chain(kinds(a, b)) {
        let (Some(a), Some(b)) = (a.event(&kind), b.event(&kind)) else { continue };
        let conditions = |e: &Event| {
            let mut all: Vec<(String, Value)> =
                e.options.iter().map(|(k, v)| (k.replace('_', "-"), v.clone())).collect();
            let hash = e.facts.get("golden").and_then(|g| g.get("sha256"));
            all.extend(hash.map(|h| ("sha256 of the golden".into(), h.clone())));
            all.push(("anemoe".into(), e.version.clone().into()));
            all.extend(e.machine.as_ref().map(|m| ("machine".into(), machine(m).into())));
            all
        };
        for (option, x, y) in joined(conditions(a), conditions(b)) {
            // The gates of a build have its options.
            let known = found.iter().any(|d: &Differing| d.option == option && d.a == x && d.b == y);
            if x != y && !known {
                found.push(Differing { kind: kind.clone(), option, a: x, b: y });
            }
        }
    }
    found
}

fn rows(a: &Side, b: &Side) -> Vec<Row> {
    let bundle = |side: &Side| {
        let mut all = Vec::new();
        for key in ["family", "source"] {
            all.extend(side.bundle.get(key).map(|v| (key.to_string(), v.clone())));
        }
        all.extend(figures::flatten(&side.bundle));
        all.extend(side.build_seconds.map(|s| ("build_seconds".into(), s.into())));
        all
    };
    let mut rows: Vec<Row> =
        joined(bundle(a), bundle(b)).map(|(path, a, b)| Row::new("", &path, a, b)).collect();
    for kind in kinds(a, b) {
        let prefix = format!("{kind}: ");
        rows.extend(
            joined(a.figures(&kind), b.figures(&kind)).map(|(path, a, b)| Row::new(&prefix, &path, a, b)),
        );
    }
    rows
}

impl Row {
    fn new(prefix: &str, path: &str, a: Option<Value>, b: Option<Value>) -> Row {
        let (name, unit) = figures::known(path);
        let number = |v: &Option<Value>| v.as_ref().and_then(Value::as_f64);
        let both = number(&a).zip(number(&b));
        Row {
            figure: format!("{prefix}{name}"),
            unit,
            difference: both.map(|(a, b)| b - a),
            ratio: both.filter(|(a, _)| *a != 0.0).map(|(a, b)| b / a).filter(|x| x.is_finite()),
            a,
            b,
        }
    }
}
