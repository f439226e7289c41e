//! Entries: groups of events of a journal, with texts and results under headings.

use crate::journal::{Event, Machine, status};
use anemoe_io::words::{bytes, count, counted};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Events that belong together: a build with its gates, or what was done for one intent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    /// Id of the entry's first event.
    pub id: String,
    /// Time of the entry's first event.
    pub time: String,
    /// Kinds of the entry's events in order, each once.
    pub kinds: Vec<String>,
    /// Texts by heading, see [`HEADINGS`], of people and of the program.
    #[serde(flatten)]
    pub texts: BTreeMap<&'static str, Vec<String>>,
    /// Results of the runs.
    pub result: Vec<RunOutcome>,
    /// The events, unchanged.
    pub events: Vec<Event>,
}

/// Headings of texts in order. `setup` has model, options and machine, `refs` files by their hashes.
pub const HEADINGS: [&str; 7] = ["intent", "setup", "notes", "surprise", "lesson", "next", "refs"];

/// Outcome of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunOutcome {
    /// Id of the event.
    pub id: String,
    /// Time of the event.
    pub time: String,
    /// Kind of the event.
    pub kind: String,
    /// State of the event.
    pub status: String,
    /// Duration, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Figures with their names, as shown.
    pub figures: Vec<String>,
}

/// Groups events, oldest entry first.
///
/// An event that names another event joins the entry of that event. Any other event joins the newest entry, unless both
/// have intents and these differ.
pub fn entries(events: Vec<Event>) -> Vec<Entry> {
    let mut groups: Vec<Vec<Event>> = Vec::new();
    // Intents of the newest group.
    let mut intents: HashSet<String> = HashSet::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for event in events {
        let intent = event.text("intent").map(str::to_string);
        let is_other = |intent: &String| !intents.is_empty() && !intents.contains(intent);
        let begins = groups.is_empty() || intent.as_ref().is_some_and(is_other);
        let named = event.of.as_ref().and_then(|of| places.get(of).copied());
        let place = named.unwrap_or(groups.len() - usize::from(!begins));
        places.entry(event.id.clone()).or_insert(place);
        if place == groups.len() {
            intents.clear();
            groups.push(Vec::new());
        }
        if place + 1 == groups.len() {
            intents.extend(intent);
        }
        groups[place].push(event);
    }
    groups.into_iter().map(entry).collect()
}

/// Returns a fact that is a text.
fn fact<'a>(event: &'a Event, key: &str) -> Option<&'a str> {
    event.facts.get(key).and_then(Value::as_str)
}

/// Formats the time of an event to the second, in UTC.
pub fn time(event: &Event) -> String {
    event.time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string()
}

/// Lists texts in order, without repetitions.
fn distinct(texts: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = HashSet::new();
    texts.filter(|text| !text.is_empty() && seen.insert(text.clone())).collect()
}

fn entry(events: Vec<Event>) -> Entry {
    let said = |name: &'static str| events.iter().filter_map(move |e| Some(e.text(name)?.trim().to_string()));
    let ended: HashSet<(&str, &str)> =
        events.iter().filter_map(|e| Some((e.kind.as_str(), e.of.as_deref()?))).collect();
    let is_open = |e: &Event| e.status == status::STARTED && !ended.contains(&(&e.kind, &e.id));
    // A later table of the same recipe replaces an earlier one.
    let table = events.iter().rfind(|e| e.facts.contains_key("rows")).map(|e| &e.id);
    let is_run = |e: &&Event| e.kind != "note" && (!e.facts.contains_key("rows") || Some(&e.id) == table);
    let runs = || events.iter().filter(is_run);
    let resumed: HashMap<&str, &Event> =
        events.iter().filter_map(|e| Some((fact(e, "resumes")?, e))).collect();
    let surprise = runs().flat_map(|e| surprises(e, resumed.get(e.id.as_str()).copied(), is_open(e)));
    let lessons = events.iter().filter_map(|e| Some(fact(e, "lesson")?.to_string()));
    let mut texts = BTreeMap::from([
        ("setup", setup(&events)),
        ("surprise", surprise.collect()),
        ("lesson", lessons.collect()),
        ("refs", references(&events).collect()),
    ]);
    for heading in HEADINGS {
        let written = said(if heading == "notes" { "note" } else { heading });
        let all = texts.remove(heading).unwrap_or_default().into_iter().chain(written);
        texts.insert(heading, distinct(all));
    }
    Entry {
        id: events[0].id.clone(),
        time: time(&events[0]),
        kinds: distinct(events.iter().map(|e| e.kind.clone())),
        texts,
        result: runs().filter(|e| e.status != status::STARTED || is_open(e)).map(outcome).collect(),
        events,
    }
}

fn outcome(event: &Event) -> RunOutcome {
    let rows = rows(event).map(|[build, figure, ours, unit, book, from, verdict, why, _]| {
        let why = if why.is_empty() { why } else { format!(": {why}") };
        format!("{build}: {figure} {ours} {unit}, the book's {book} ({from}): {verdict}{why}")
    });
    RunOutcome {
        id: event.id.clone(),
        time: time(event),
        kind: event.kind.clone(),
        status: event.status.clone(),
        seconds: event.seconds,
        figures: figures(&event.facts).into_iter().chain(rows).collect(),
    }
}

/// Lists the rows of a recipe's table.
fn rows(event: &Event) -> impl Iterator<Item = [String; 9]> {
    let all = event.facts.get("rows").and_then(Value::as_array).into_iter().flatten();
    let keys = ["build", "figure", "ours", "unit", "book", "from", "verdict", "why", "explained"];
    all.map(move |row| keys.map(|key| plain(&row[key])))
}

/// Formats a machine in one line.
fn machine(m: &Machine) -> String {
    let parts = [
        m.cpu.clone(),
        m.cores.map(|n| counted(n, "core")),
        m.memory_bytes.map(|n| format!("{} of memory", bytes(n))),
        m.os.clone(),
        m.arch.clone(),
        m.isa.clone(),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn setup(events: &[Event]) -> Vec<String> {
    // The options of a gate of a build are those of the build.
    let has_own_options = |e: &Event| !e.options.is_empty() && !e.options.contains_key("command");
    let sources = events.iter().filter_map(|e| {
        Some(format!("{} of {}", fact(e, "title").or(fact(e, "family"))?, fact(e, "source")?))
    });
    let options = events.iter().filter(|e| has_own_options(e)).map(|e| {
        let options = e.options.iter().map(|(key, v)| format!("{} {}", key.replace('_', "-"), plain(v)));
        format!("{}: {}", e.kind, options.collect::<Vec<_>>().join(", "))
    });
    let machines = events
        .iter()
        .filter_map(|e| Some(format!("anemoe {} on {}", e.version, machine(e.machine.as_ref()?))));
    sources.chain(options).chain(machines).collect()
}

fn references(events: &[Event]) -> impl Iterator<Item = String> {
    events.iter().flat_map(|e| {
        let golden = e.facts.get("golden").and_then(|g| g["file"].as_str().zip(g["sha256"].as_str()));
        let files = [
            ("chain.json", "chain_sha256"),
            ("importance", "importance_sha256"),
            ("recipe", "recipe_sha256"),
        ];
        let files = files.map(|(file, key)| Some((file, fact(e, key)?)));
        files.into_iter().flatten().chain(golden).map(|(file, hash)| format!("{file}, sha256 {hash}"))
    })
}

/// Lists surprises: runs that failed, were interrupted or have no end, and rows that differ. People write all others.
fn surprises(event: &Event, resumed: Option<&Event>, open: bool) -> Vec<String> {
    let part = fact(event, "part").map(|p| format!(" of part {p}")).unwrap_or_default();
    let run = format!("{}{part}", event.kind);
    let began = format!("the {run} that began at {}", time(event));
    let stage = fact(event, "stage").map(|stage| format!(": {stage}")).unwrap_or_default();
    let said = match (event.status.as_str(), open, resumed) {
        (status::ERROR, ..) => {
            Some(format!("{run} ended by an error: {}", fact(event, "error").unwrap_or("no message")))
        }
        (status::FAIL, ..) => Some(format!("{run} failed{stage}")),
        (_, true, Some(next)) => {
            Some(format!("{began} was interrupted; the one that began at {} went on with it", time(next)))
        }
        (_, true, None) => Some(format!("{began} has no end: it runs still, or was killed")),
        (_, false, _) => None,
    };
    let differing = rows(event).filter(|row| row[8] == "no");
    let differing = differing.map(|[build, figure, ours, unit, book, ..]| {
        format!("{build}: {figure} {ours} {unit}, where {book} was expected")
    });
    said.into_iter().chain(differing).collect()
}

/// Facts that are no figures: an entry shows them in other places.
const ELSEWHERE: &str = "family source title pass strict conditions golden cosine_map cosine_map_layers \
    chain_sha256 resumes error lesson gate again";

/// Lists every figure with its path: members of objects and lists of plain values, without hashes.
fn figures(facts: &Map<String, Value>) -> Vec<String> {
    let mut found = Vec::new();
    for (key, value) in facts.iter().filter(|(key, _)| !ELSEWHERE.split_whitespace().any(|e| e == *key)) {
        walk(key, value, &mut found);
    }
    found
}

fn walk(path: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) if path == "figures" => map.iter().for_each(|(k, v)| walk(k, v, found)),
        Value::Object(map) => map.iter().for_each(|(k, v)| walk(&format!("{path}.{k}"), v, found)),
        Value::Array(list) if list.is_empty() || list.iter().any(|v| v.is_object() || v.is_array()) => {}
        Value::Array(list) => {
            found.push(format!("{path} {}", list.iter().map(plain).collect::<Vec<_>>().join(", ")));
        }
        Value::Null => {}
        _ if path.ends_with("sha256") => {}
        Value::Number(n) if n.is_u64() => {
            let n = n.as_u64().unwrap_or(0);
            let shown = if path.ends_with("bytes") { bytes(n) } else { count(n) };
            found.push(format!("{path} {shown}"));
        }
        plainly => found.push(format!("{path} {}", plain(plainly))),
    }
}

/// Formats a value; a number with six digits.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".into(),
        Value::Bool(yes) => (if *yes { "yes" } else { "no" }).into(),
        Value::Number(n) if n.is_f64() => {
            // A sum of nothing is -0.
            let x = n.as_f64().unwrap_or(0.0) + 0.0;
            if x != 0.0 && !(1e-4..1e15).contains(&x.abs()) {
                return format!("{x:.3e}");
            }
            let digits = (6.0 - x.abs().log10().ceil()).clamp(0.0, 9.0) as usize;
            let text = format!("{x:.digits$}");
            if digits > 0 { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn event(line: Value) -> Event {
        let mut all = json!({"time": "2026-01-02T03:04:05.678Z", "version": "1.2.3"});
        all.as_object_mut().unwrap().extend(line.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
    }

    fn ids(entries: &[Entry]) -> Vec<Vec<&str>> {
        entries.iter().map(|e| e.events.iter().map(|e| e.id.as_str()).collect()).collect()
    }

    #[test]
    fn a_build_and_its_gates_are_one_entry() {
        let list = entries(vec![
            event(json!({"id": "a", "kind": "build", "status": "started", "intent": "why"})),
            event(json!({"id": "b", "kind": "build", "status": "done", "of": "a"})),
            event(json!({"id": "c", "kind": "validate", "status": "pass"})),
            event(json!({"id": "d", "kind": "trace", "status": "done", "intent": "why"})),
            event(json!({"id": "e", "kind": "validate", "status": "pass", "intent": "another"})),
            event(json!({"id": "f", "kind": "check", "status": "pass"})),
            event(json!({"id": "g", "kind": "note", "of": "c", "lesson": "learned"})),
            event(json!({"id": "h", "kind": "note", "of": "gone"})),
        ]);
        assert_eq!(ids(&list), [vec!["a", "b", "c", "d", "g"], vec!["e", "f", "h"]]);
        assert_eq!(list[0].texts["intent"], ["why"]);
        assert_eq!(list[0].texts["lesson"], ["learned"]);
        assert_eq!(list[0].time, "2026-01-02 03:04:05 UTC");
        // A beginning with an end is not shown by itself, nor is a note.
        let shown: Vec<&str> = list[0].result.iter().map(|r| r.id.as_str()).collect();
        assert_eq!(shown, ["b", "c", "d"]);
        assert!(list[0].texts["surprise"].is_empty());
        assert!(entries(Vec::new()).is_empty());
    }

    #[test]
    fn an_intent_joins_an_entry_without_one() {
        let list = entries(vec![
            event(json!({"id": "a", "kind": "build", "status": "done"})),
            event(json!({"id": "b", "kind": "validate", "status": "pass", "intent": "why"})),
        ]);
        assert_eq!(ids(&list), [vec!["a", "b"]]);
    }

    #[test]
    fn ends_that_surprise() {
        let list = entries(vec![
            event(json!({"id": "a", "kind": "build", "status": "started"})),
            event(json!({"id": "b", "kind": "build", "status": "started", "facts": {"resumes": "a"}})),
            event(
                json!({"id": "c", "kind": "build", "status": "error", "of": "b", "facts": {"error": "disk full"}}),
            ),
            event(json!({"id": "d", "kind": "build", "status": "started", "facts": {"part": "1/2"}})),
            event(json!({"id": "e", "kind": "gate", "status": "fail", "facts": {"stage": "weights"}})),
            event(json!({"id": "g", "kind": "dream", "status": "fail"})),
        ]);
        let said = list[0].texts["surprise"].join("\n");
        for text in [
            "the build that began at 2026-01-02 03:04:05 UTC was interrupted; the one that",
            "build ended by an error: disk full",
            "the build of part 1/2 that began at 2026-01-02 03:04:05 UTC has no end",
            "gate failed: weights",
            "dream failed",
        ] {
            assert!(said.contains(text), "`{text}` is not in\n{said}");
        }
    }

    #[test]
    fn figures_have_their_paths_and_six_digits() {
        let facts = json!({
            "ops": {"ane": 1200}, "rules": [{"rule": "x"}], "list": [1, 2], "watts": 4.5, "golden": {"sha256": "a"},
            "importance_sha256": "b", "none": null, "figures": {"decode_tok_s": 9.25}, "pass": true, "done": true,
            "package_bytes": 8_400_000, "min_cosine": 0.99999912, "relative": 3.3e-8, "seconds": 123456.789, "zero": 0.0
        });
        let mut found = figures(facts.as_object().unwrap());
        found.sort();
        assert_eq!(
            found,
            [
                "decode_tok_s 9.25",
                "done yes",
                "list 1, 2",
                "min_cosine 0.999999",
                "ops.ane 1,200",
                "package_bytes 8.4 MB",
                "relative 3.300e-8",
                "seconds 123457",
                "watts 4.5",
                "zero 0",
            ]
        );
    }
}
