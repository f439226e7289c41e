//! Recorder of commands: a [`Recorder`] per run, with [`Facts`] from its report.
//!
//! The journal never changes the outcome of a command: if nothing can be written, a warning says so and the command goes on.

use crate::given::Given;
use anemoe_bundle::journal::{self, Event, JOURNAL_FILE, Machine, status};
use anemoe_bundle::{CHAIN_FILE, file_sha256};
use anemoe_gates::facts::Facts;
use serde_json::Value;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

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
        let (begun, warned) = (OnceLock::new(), AtomicBool::new(false));
        Recorder { args: args.clone(), kind, started: Instant::now(), begun, warned }
    }

    /// Writes that the run has begun, for runs that may be killed. If an earlier run of the same `part` has no end, the
    /// event names that run.
    pub fn begin(&self, bundle: &Path, mut facts: Facts) {
        let resumed = self.interrupted(bundle, facts.get("part"));
        facts.extend(resumed.map(|id| ("resumes".into(), id.into())));
        if let Some(id) = self.append(bundle, Event { facts, ..Event::new(self.kind, status::STARTED) }) {
            let _ = self.begun.set(id);
        }
    }

    /// Returns the id of the newest event of this kind that began the same part and never ended.
    fn interrupted(&self, bundle: &Path, part: Option<&Value>) -> Option<String> {
        // If the journal cannot be read, the append says why.
        let events = journal::read(bundle).ok()?.events;
        let own = || events.iter().filter(|e| e.kind == self.kind);
        let newest = own().rfind(|e| e.status == status::STARTED && e.facts.get("part") == part)?;
        let is_ended = own().any(|e| e.of.as_ref() == Some(&newest.id));
        (!is_ended).then(|| newest.id.clone())
    }

    /// Writes the result of the run.
    pub fn end(&self, bundle: &Path, status: &str, facts: Facts) {
        self.also(bundle, self.kind, status, Some(self.started.elapsed().as_secs_f64()), facts);
    }

    /// Ends a gate's run like [`Recorder::end`].
    pub fn gate(&self, bundle: &Path, pass: bool, facts: Facts) {
        self.end(bundle, if pass { status::PASS } else { status::FAIL }, facts);
    }

    /// Writes another event of this run, for instance a gate of a build.
    pub fn also(&self, bundle: &Path, kind: &str, status: &str, seconds: Option<f64>, mut facts: Facts) {
        if let Ok(hash) = file_sha256(&bundle.join(CHAIN_FILE)) {
            facts.insert("chain_sha256".into(), hash.into());
        }
        let seconds = seconds.map(|s| (s * 1e3).round() / 1e3);
        self.append(bundle, Event { seconds, facts, ..Event::new(kind, status) });
    }

    /// Appends an event, and returns its id.
    fn append(&self, bundle: &Path, mut event: Event) -> Option<String> {
        if self.args.no_journal {
            return None;
        }
        event.version = env!("CARGO_PKG_VERSION").into();
        event.machine = Some(Machine::here());
        event.of = self.begun.get().cloned();
        if let Some(given) = Given::here() {
            event.options = given.options.clone();
            let other = (given.command != event.kind).then(|| given.command.clone().into());
            event.options.extend(other.map(|command| ("command".into(), command)));
        }
        let texts = [("intent", &self.args.intent), ("note", &self.args.note)];
        let texts = texts.into_iter().filter_map(|(name, text)| Some((name.into(), text.clone()?.into())));
        event.rest.extend(texts.filter(|_| event.of.is_none()));
        let written = journal::append(bundle, event).map(|event| event.id);
        let failed = written.as_ref().err().filter(|_| !self.warned.swap(true, Ordering::Relaxed));
        if let Some(e) = failed {
            crate::ui::message(format!("warning: {e}; nothing was written down in {JOURNAL_FILE}"));
        }
        written.ok()
    }
}
