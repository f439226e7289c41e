//! Recorder of commands: a [`Recorder`] per run, facts from [`facts`].
//!
//! The journal never changes the outcome of a command: if nothing can be written, a warning says so and the command goes on.

pub mod facts;

use crate::machine;
use anemoe_bundle::journal::{self, Event, JOURNAL_FILE, Prose, status};
use anemoe_bundle::{CHAIN_FILE, file_sha256};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Facts of an event.
pub type Facts = Map<String, Value>;

/// Options of the commands that write into the journal of a bundle.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Journal")]
pub struct JournalArgs {
    /// Intent: the reason for doing this, for the bundle's journal.
    #[arg(long, value_name = "TEXT")]
    pub intent: Option<String>,
    /// Note: anything else that the journal should say about it.
    #[arg(long, value_name = "TEXT")]
    pub note: Option<String>,
    /// Write nothing into the journal.
    #[arg(long, conflicts_with_all = ["intent", "note"])]
    pub no_journal: bool,
}

/// Arguments that do not change what is done: the bundle itself, and the display of results.
const LEFT_OUT: &str = "json offline ops help version bundle path out intent note no_journal";

/// Command line with its defaults, one per process.
static GIVEN: OnceLock<Given> = OnceLock::new();

struct Given {
    command: String,
    options: Map<String, Value>,
}

/// Keeps the options of the running command, for its events.
pub fn remember(command: &Command, matches: &ArgMatches) {
    let Some((name, given)) = matches.subcommand() else { return };
    let Some(command) = command.find_subcommand(name) else { return };
    let mut options = Map::new();
    for arg in command.get_arguments() {
        let id = arg.get_id().as_str();
        let source = given.try_contains_id(id).ok().and_then(|_| given.value_source(id));
        if LEFT_OUT.split(' ').any(|left_out| left_out == id) || source.is_none() {
            continue;
        }
        let Ok(Some(values)) = given.try_get_raw(id) else { continue };
        let texts: Vec<String> = values.map(|v| v.to_string_lossy().into_owned()).collect();
        let flag = !arg.get_action().takes_values();
        if flag && source == Some(ValueSource::DefaultValue) {
            continue;
        }
        let value = match &texts[..] {
            _ if flag => Value::Bool(true),
            // A checkpoint named 7 is no number.
            [one] if !arg.is_positional() => one.parse().map_or_else(|_| one.clone().into(), Value::Number),
            _ => texts.join(",").into(),
        };
        options.insert(id.into(), value);
    }
    let _ = GIVEN.set(Given { command: name.into(), options });
}

/// Writes the events of one run of a command.
pub struct Recorder {
    args: JournalArgs,
    kind: &'static str,
    started: Instant,
    /// Id of the event that records the beginning.
    begun: OnceLock<String>,
    warned: AtomicBool,
}

impl Recorder {
    /// Makes a recorder of a run that begins now.
    pub fn new(args: &JournalArgs, kind: &'static str) -> Recorder {
        Recorder {
            args: args.clone(),
            kind,
            started: Instant::now(),
            begun: OnceLock::new(),
            warned: AtomicBool::new(false),
        }
    }

    /// Writes that the run has begun, for runs that may be killed. If an earlier run of the same `part` has no end, the
    /// event names that run.
    pub fn begin(&self, bundle: &Path, mut facts: Facts) {
        if self.args.no_journal {
            return;
        }
        if let Some(id) = self.interrupted(bundle, facts.get("part")) {
            facts.insert("resumes".into(), id.into());
        }
        let event = Event { facts, ..self.event(self.kind, status::STARTED) };
        if let Some(id) = self.append(bundle, event) {
            let _ = self.begun.set(id);
        }
    }

    /// Returns the id of the newest event of this kind that began the same part and never ended.
    fn interrupted(&self, bundle: &Path, part: Option<&Value>) -> Option<String> {
        // If the journal cannot be read, the append says why.
        let events = journal::read(bundle).ok()?.events;
        let newest = events
            .iter()
            .rev()
            .find(|e| e.kind == self.kind && e.status == status::STARTED && e.facts.get("part") == part)?;
        let ended = events.iter().any(|e| e.kind == self.kind && e.of.as_ref() == Some(&newest.id));
        (!ended).then(|| newest.id.clone())
    }

    /// Writes the result of the run.
    pub fn end(&self, bundle: &Path, status: &str, facts: Facts) {
        let seconds = self.started.elapsed().as_secs_f64();
        self.also(bundle, self.kind, status, Some(seconds), facts);
    }

    /// Ends a gate's run like [`Recorder::end`].
    pub fn gate(&self, bundle: &Path, pass: bool, facts: Facts) {
        self.end(bundle, if pass { status::PASS } else { status::FAIL }, facts);
    }

    /// Writes another event of this run, for instance a gate of a build.
    pub fn also(&self, bundle: &Path, kind: &str, status: &str, seconds: Option<f64>, mut facts: Facts) {
        if self.args.no_journal {
            return;
        }
        if let Ok(hash) = file_sha256(&bundle.join(CHAIN_FILE)) {
            facts.insert("chain_sha256".into(), hash.into());
        }
        let seconds = seconds.map(|s| (s * 1e3).round() / 1e3);
        self.append(bundle, Event { seconds, facts, ..self.event(kind, status) });
    }

    fn event(&self, kind: &str, status: &str) -> Event {
        let mut event = Event::new(kind, status);
        event.version = env!("CARGO_PKG_VERSION").into();
        event.machine = Some(machine::this());
        event.of = self.begun.get().cloned();
        if let Some(Given { command, options, .. }) = GIVEN.get() {
            event.options = options.clone();
            if command != kind {
                event.options.insert("command".into(), command.clone().into());
            }
        }
        if event.of.is_none() {
            event.prose =
                Prose { intent: self.args.intent.clone(), note: self.args.note.clone(), ..Prose::default() };
        }
        event
    }

    fn append(&self, bundle: &Path, event: Event) -> Option<String> {
        match journal::append(bundle, event) {
            Ok(event) => Some(event.id),
            Err(e) => {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    crate::ui::message(format!("warning: {e}; nothing was written down in {JOURNAL_FILE}"));
                }
                None
            }
        }
    }
}
