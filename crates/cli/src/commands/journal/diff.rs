//! `anemoe journal diff`: the figures of two bundles side by side.

use super::entries::machine;
use super::figures::{self, FigureUnit};
use crate::recorder::facts;
use crate::target::expect_begun_bundle;
use crate::ui::{Table, Ui};
use anemoe_bundle::journal::{self, Event, status};
use anemoe_bundle::{CHAIN_FILE, Chain, file_sha256};
use serde_json::{Value, json};
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

/// Values by name, in order.
type Values = Vec<(String, Value)>;
/// A name with the values of both sides.
type Pair = (String, Option<Value>, Option<Value>);

/// Facts of one bundle that are compared.
struct Side {
    /// From `chain.json`, or from the newest build where there is none yet; and how long that took, in one run.
    bundle: Values,
    /// Newest event of each kind and stage, in the order in which they first appear.
    newest: Vec<(String, Event)>,
    remarks: Vec<String>,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<()> {
    let (a, b) = (Side::of(&args.a)?, Side::of(&args.b)?);
    let options = differing(&a, &b);
    let mut rows: Vec<(String, Pair)> = Vec::new();
    rows.extend(pairs(a.bundle.clone(), b.bundle.clone()).map(|pair| (String::new(), pair)));
    for label in labels(&a, &b).filter(|l| l != "build" && l != "assemble") {
        let figures = pairs(a.figures(&label), b.figures(&label));
        rows.extend(figures.map(|pair| (format!("{label}: "), pair)));
    }
    let remarks = [&a.remarks[..], &b.remarks].concat();
    let rows: Vec<(Value, [String; 5])> = rows.into_iter().map(|(prefix, pair)| row(&prefix, pair)).collect();
    let option =
        |(label, (option, a, b)): &(String, Pair)| json!({"kind": label, "option": option, "a": a, "b": b});
    ui.document(&json!({
        "a": args.a.display().to_string(), "b": args.b.display().to_string(),
        "options": options.iter().map(option).collect::<Vec<_>>(),
        "figures": rows.iter().map(|(r, _)| r).collect::<Vec<_>>(), "remarks": remarks,
    }))?;
    ui.line(format!("a: {}\nb: {}\n", args.a.display(), args.b.display()))?;
    if options.is_empty() {
        ui.line("no option that both tell of differs")?;
    } else {
        let mut table = Table::new(&["differing option", "a", "b"]);
        for (label, (option, a, b)) in &options {
            table.row(vec![
                format!("{label}: {option}"),
                cell(a, FigureUnit::Plain),
                cell(b, FigureUnit::Plain),
            ]);
        }
        table.print(ui)?;
    }
    ui.line("")?;
    let mut table = Table::new(&["figure", "a", "b", "b - a", "b / a"]);
    rows.into_iter().for_each(|(_, cells)| table.row(cells.into()));
    table.print(ui)?;
    remarks.into_iter().try_for_each(|remark| ui.line(remark))?;
    Ok(())
}

fn cell(value: &Option<Value>, unit: FigureUnit) -> String {
    value.as_ref().map_or_else(|| "-".into(), |v| figures::text(v, unit).replace('\n', " "))
}

/// A figure of both, for programs and for people.
fn row(prefix: &str, (path, a, b): Pair) -> (Value, [String; 5]) {
    let (name, unit) = figures::known(&path);
    let name = format!("{prefix}{name}");
    let number = |v: &Option<Value>| v.as_ref().and_then(Value::as_f64);
    let both = number(&a).zip(number(&b));
    let difference = both.map(|(a, b)| b - a);
    let ratio = both.filter(|(a, _)| *a != 0.0).map(|(a, b)| b / a).filter(|x| x.is_finite());
    let differs = match difference {
        Some(0.0) => "0".into(),
        Some(d) => figures::real(d, unit),
        None if a.is_some() && b.is_some() && a != b => "differs".into(),
        None => String::new(),
    };
    let of = ratio.map_or_else(String::new, |x| format!("{x:.4}"));
    let cells = [name.clone(), cell(&a, unit), cell(&b, unit), differs, of];
    (json!({"figure": name, "a": a, "b": b, "difference": difference, "ratio": ratio}), cells)
}

impl Side {
    fn of(path: &Path) -> anyhow::Result<Side> {
        expect_begun_bundle(path)?;
        let events = journal::read(path)?.events;
        let chain = path.join(CHAIN_FILE);
        let hash = if chain.is_file() { Some(file_sha256(&chain)?) } else { None };
        let mut remarks = Vec::new();
        let builds: Vec<&Event> = events.iter().filter(|e| e.kind == "build").collect();
        let whole = |e: &&Event| e.status == status::DONE && !e.facts.contains_key("part");
        let seconds = match builds[..] {
            [begun, ended] if ended.of.as_ref() == Some(&begun.id) => Some(ended)
                .filter(whole)
                .filter(|e| e.facts.get("reused") == Some(&json!(0)))
                .and_then(|e| e.seconds),
            _ => None,
        };
        let mut newest: Vec<(String, Event)> = Vec::new();
        let is_over =
            |e: &&Event| e.kind != "note" && ![status::STARTED, status::ERROR].contains(&e.status.as_str());
        for event in events.iter().filter(is_over) {
            let stage = event.facts.get("stage").and_then(Value::as_str).map(|s| format!(" {s}"));
            let label = format!("{}{}", event.kind, stage.unwrap_or_default());
            match newest.iter_mut().find(|(l, _)| *l == label) {
                Some(known) => known.1 = event.clone(),
                None => newest.push((label, event.clone())),
            }
        }
        let name = path.display();
        let build = newest.iter().find(|(l, _)| l == "build").map(|(_, e)| e.facts.clone());
        if build.is_none() {
            remarks.push(format!(
                "{name}: its journal tells of no finished build, so its options are not known"
            ));
        }
        // A gate of a bundle that has changed since says nothing about this one.
        newest.retain(|(label, e)| {
            let then = e.facts.get("chain_sha256").and_then(Value::as_str);
            let stale = hash.as_deref().zip(then).is_some_and(|(now, then)| now != then);
            if stale {
                remarks
                    .push(format!("{name}: its newest {label} was of another chain.json, and is left out"));
            }
            !stale
        });
        let facts = match hash {
            Some(_) => facts::bundle(path, &Chain::read(path)?),
            None => build.filter(|facts| !facts.contains_key("part")).unwrap_or_default(),
        };
        let plain = |key: &str| Some((key.to_string(), facts.get(key)?.clone()));
        let mut bundle: Values = ["family", "source"].into_iter().filter_map(plain).collect();
        bundle.extend(figures::flatten(&facts));
        bundle.extend(seconds.map(|s| ("build_seconds".into(), s.into())));
        Ok(Side { bundle, newest, remarks })
    }

    fn event(&self, label: &str) -> Option<&Event> {
        self.newest.iter().find(|(l, _)| l == label).map(|(_, e)| e)
    }

    /// Figures of an event, by path; the first says if it passed.
    fn figures(&self, label: &str) -> Values {
        let Some(event) = self.event(label) else { return Vec::new() };
        let gate = Some(&event.status).filter(|s| !s.is_empty() && *s != status::DONE);
        let mut found: Values = gate.map(|s| ("gate".into(), s.clone().into())).into_iter().collect();
        found.extend(figures::flatten(&event.facts));
        found.extend(event.seconds.map(|s| ("seconds".into(), s.into())));
        found
    }
}

/// Kinds and stages of both, in order.
fn labels(a: &Side, b: &Side) -> impl Iterator<Item = String> {
    let mut labels: Vec<String> = ["build", "check", "validate", "trace"].map(String::from).into();
    for (label, _) in a.newest.iter().chain(&b.newest) {
        if !labels.contains(label) {
            labels.push(label.clone());
        }
    }
    labels.into_iter()
}

/// Both sides of two lists, in the order of the first and then of what only the second has.
fn pairs(a: Values, b: Values) -> impl Iterator<Item = Pair> {
    let mut all: Vec<Pair> = a.into_iter().map(|(k, v)| (k, Some(v), None)).collect();
    for (key, value) in b {
        match all.iter_mut().find(|x| x.0 == key) {
            Some(known) => known.2 = Some(value),
            None => all.push((key, None, Some(value))),
        }
    }
    all.into_iter()
}

/// Options, inputs and machines that differ, of kinds of which both tell, each once: the gates of a build have its options.
fn differing(a: &Side, b: &Side) -> Vec<(String, Pair)> {
    let conditions = |e: &Event| {
        let mut all: Values = e.options.iter().map(|(k, v)| (k.replace('_', "-"), v.clone())).collect();
        let hash = e.facts.get("golden").and_then(|g| g.get("sha256"));
        all.extend(hash.map(|h| ("sha256 of the golden".into(), h.clone())));
        all.push(("anemoe".into(), e.version.clone().into()));
        all.extend(e.machine.as_ref().map(|m| ("machine".into(), machine(m).into())));
        all
    };
    let mut found: Vec<(String, Pair)> = Vec::new();
    for label in labels(a, b) {
        let (Some(x), Some(y)) = (a.event(&label), b.event(&label)) else { continue };
        for pair in pairs(conditions(x), conditions(y)) {
            if pair.1 != pair.2 && !found.iter().any(|(_, known)| *known == pair) {
                found.push((label.clone(), pair));
            }
        }
    }
    found
}
