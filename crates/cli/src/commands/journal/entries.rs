//! Entries: groups of events of a journal, with texts and results under headings.

use super::figures;
use crate::ui;
use anemoe_bundle::journal::{Event, Machine, Prose, status};
use serde::Serialize;
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Events that belong together: a build with its gates, or what was done for one intent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    /// Id of the entry's first event.
    pub id: String,
    /// Time of the entry's first event.
    pub time: String,
    /// Kinds of the entry's events in order, each once.
    pub kinds: Vec<String>,
    /// Intents.
    pub intent: Vec<String>,
    /// Setup: model, options and machine.
    pub setup: Vec<String>,
    /// Results of the entry's runs.
    pub result: Vec<RunOutcome>,
    /// Other notes.
    pub notes: Vec<String>,
    /// Surprises, found by the program or written by people.
    pub surprise: Vec<String>,
    /// Lessons.
    pub lesson: Vec<String>,
    /// Next steps.
    pub next: Vec<String>,
    /// Files by their hashes, and references that people gave.
    pub refs: Vec<String>,
    /// The events, unchanged.
    pub events: Vec<Event>,
}

impl Entry {
    /// Returns the texts of people and of the program, under their headings.
    pub fn texts(&self) -> [(&'static str, &[String]); 6] {
        [
            ("intent", &self.intent),
            ("setup", &self.setup),
            ("notes", &self.notes),
            ("surprise", &self.surprise),
            ("lesson", &self.lesson),
            ("next", &self.next),
        ]
    }
}

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
        let named = event.of.as_ref().and_then(|of| places.get(of).copied());
        let is_other = |intent: &String| !intents.is_empty() && !intents.contains(intent);
        let begins = groups.is_empty() || event.prose.intent.as_ref().is_some_and(is_other);
        let place = match named {
            Some(place) => place,
            None if begins => groups.len(),
            None => groups.len() - 1,
        };
        if place == groups.len() {
            intents.clear();
        }
        if place + 1 >= groups.len() {
            intents.extend(event.prose.intent.clone());
        }
        places.entry(event.id.clone()).or_insert(place);
        match groups.get_mut(place) {
            Some(group) => group.push(event),
            None => groups.push(vec![event]),
        }
    }
    groups.into_iter().map(entry).collect()
}

/// Formats the time of an event to the second, in UTC.
pub fn time(event: &Event) -> String {
    event.time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string()
}

/// Texts in order, without repetitions.
#[derive(Default)]
struct DistinctTexts {
    list: Vec<String>,
    seen: HashSet<String>,
}

impl DistinctTexts {
    fn push(&mut self, text: String) {
        if !text.is_empty() && self.seen.insert(text.clone()) {
            self.list.push(text);
        }
    }
}

fn entry(events: Vec<Event>) -> Entry {
    let prose = |pick: fn(&Prose) -> &Option<String>| {
        let mut found = DistinctTexts::default();
        for text in events.iter().filter_map(|e| pick(&e.prose).as_ref()) {
            found.push(text.trim().into());
        }
        found.list
    };
    let mut kinds = DistinctTexts::default();
    for event in &events {
        kinds.push(event.kind.clone());
    }
    let ended: HashSet<(&str, &str)> =
        events.iter().filter_map(|e| Some((e.kind.as_str(), e.of.as_deref()?))).collect();
    let is_open = |e: &Event| e.status == status::STARTED && !ended.contains(&(&e.kind, &e.id));
    let is_run = |e: &&Event| e.kind != "note";
    let shown = events.iter().filter(is_run).filter(|e| e.status != status::STARTED || is_open(e));
    let result = shown.map(outcome).collect();
    let resumed: HashMap<&str, &Event> =
        events.iter().filter_map(|e| Some((e.facts.get("resumes")?.as_str()?, e))).collect();
    let mut surprise = DistinctTexts::default();
    for event in &events {
        surprises(event, resumed.get(event.id.as_str()).copied(), is_open(event), &mut surprise);
    }
    let mut surprise = surprise.list;
    surprise.extend(prose(|p| &p.surprise));
    let mut refs = references(&events);
    refs.extend(prose(|p| &p.refs));
    Entry {
        id: events[0].id.clone(),
        time: time(&events[0]),
        kinds: kinds.list,
        intent: prose(|p| &p.intent),
        setup: setup(&events),
        result,
        notes: prose(|p| &p.note),
        surprise,
        lesson: prose(|p| &p.lesson),
        next: prose(|p| &p.next),
        refs,
        events,
    }
}

fn outcome(event: &Event) -> RunOutcome {
    let figures = figures::flatten(&event.facts)
        .iter()
        .map(|(path, value)| {
            let (name, unit) = figures::known(path);
            format!("{name} {}", figures::text(value, unit))
        })
        .collect();
    RunOutcome {
        id: event.id.clone(),
        time: time(event),
        kind: event.kind.clone(),
        status: event.status.clone(),
        seconds: event.seconds,
        figures,
    }
}

/// Formats a machine in one line.
pub fn machine(m: &Machine) -> String {
    let parts = [
        m.cpu.clone(),
        m.cores.map(|n| format!("{n} {}", if n == 1 { "core" } else { "cores" })),
        m.memory_bytes.map(|n| format!("{} of memory", ui::bytes(n))),
        m.os.clone(),
        m.arch.clone(),
        m.isa.clone(),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Formats the options that were given or have a default.
fn options(event: &Event) -> String {
    let one = |(key, value): (&String, &Value)| {
        let name = key.replace('_', "-");
        format!("{name} {}", figures::text(value, figures::FigureUnit::Plain))
    };
    event.options.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn setup(events: &[Event]) -> Vec<String> {
    let mut lines = DistinctTexts::default();
    for event in events {
        let fact = |key| event.facts.get(key).and_then(Value::as_str);
        if let (Some(family), Some(source)) = (fact("family"), fact("source")) {
            lines.push(format!("{family} of {source}"));
        }
    }
    for event in events.iter().filter(|e| !e.options.is_empty()) {
        lines.push(format!("{}: {}", event.kind, options(event)));
    }
    for event in events {
        let place = event.machine.as_ref().map(|m| format!("anemoe {} on {}", event.version, machine(m)));
        place.into_iter().for_each(|place| lines.push(place));
    }
    lines.list
}

fn references(events: &[Event]) -> Vec<String> {
    let mut found = DistinctTexts::default();
    for event in events {
        let text = |v: Option<&Value>| v.and_then(Value::as_str).map(str::to_string);
        let golden = event.facts.get("golden");
        let name = text(golden.and_then(|g| g.get("file")));
        for (name, hash) in [
            (Some("chain.json".into()), text(event.facts.get("chain_sha256"))),
            (name, text(golden.and_then(|g| g.get("sha256")))),
            (Some("importance".into()), text(event.facts.get("importance_sha256"))),
        ] {
            name.zip(hash).into_iter().for_each(|(name, hash)| found.push(format!("{name}, sha256 {hash}")));
        }
    }
    found.list
}

/// Finds surprises: runs that failed, were interrupted or have no end. People write all other surprises.
fn surprises(event: &Event, resumed: Option<&Event>, open: bool, found: &mut DistinctTexts) {
    let fact = |key| event.facts.get(key).and_then(Value::as_str);
    let part = fact("part").map(|p| format!(" of part {p}")).unwrap_or_default();
    let run = format!("{}{part}", event.kind);
    let began = format!("the {run} that began at {}", time(event));
    let said = match (event.status.as_str(), resumed) {
        (status::ERROR, _) => format!("{run} ended by an error: {}", fact("error").unwrap_or("no message")),
        (status::FAIL, _) => {
            format!("{run} failed{}", fact("stage").map(|s| format!(": {s}")).unwrap_or_default())
        }
        (_, Some(next)) if open => {
            format!("{began} was interrupted; the one that began at {} went on with it", time(next))
        }
        _ if open => format!("{began} has no end: it runs still, or was killed"),
        _ => return,
    };
    found.push(said);
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
        assert_eq!(list[0].intent, ["why"]);
        assert_eq!(list[0].lesson, ["learned"]);
        assert_eq!(list[0].time, "2026-01-02 03:04:05 UTC");
        // A beginning with an end is not shown by itself, nor is a note.
        let shown: Vec<&str> = list[0].result.iter().map(|r| r.id.as_str()).collect();
        assert_eq!(shown, ["b", "c", "d"]);
        assert!(list[0].surprise.is_empty());
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
        let said = list[0].surprise.join("\n");
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
}
