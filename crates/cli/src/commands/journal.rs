//! `anemoe journal`

use crate::command::{Command, CommandReport};
use crate::commands::reproduce::RUN;
use crate::shell::quoted;
use crate::target::expect_begun_bundle;
use crate::ui::Ui;
use anemoe_bundle::journal::{self, Event, JOURNAL_FILE};
use anemoe_bundle::journal_entries::{Entry, entries};
use anemoe_gates::facts;
use anyhow::bail;
use serde::Serialize;
use std::io;
use std::path::{Path, PathBuf};

/// Show what was done to a bundle or in an experiment, or add to it.
///
/// Each entry has Intent, Setup, Result, Surprise, Lesson, Next and Refs. With texts, such as --lesson, nothing is shown: they are
/// added to an entry.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe journal small.anemoe\n  anemoe journal reproduce-exp-35\n  anemoe journal small.anemoe --lesson 'lut4 of the head costs most'"
)]
pub struct Args {
    /// The bundle, or a folder of `reproduce`; `add` or `show` may stand before it.
    #[arg(value_name = "BUNDLE|FOLDER", num_args = 1..=2, required = true)]
    bundle: Vec<PathBuf>,
    /// Entry: its id, or that of an event in it, or the beginning of one [default: all are shown, and the newest is added to].
    #[arg(long, value_name = "ID")]
    entry: Option<String>,
    #[command(flatten)]
    texts: JournalTexts,
}

#[derive(clap::Args, Serialize)]
struct JournalTexts {
    /// Intent: the reason for doing it.
    #[arg(long, value_name = "TEXT")]
    intent: Option<String>,
    /// Surprise: a result that was not expected.
    #[arg(long, value_name = "TEXT")]
    surprise: Option<String>,
    /// Lesson: a conclusion for later.
    #[arg(long, value_name = "TEXT")]
    lesson: Option<String>,
    /// Next step.
    #[arg(long, value_name = "TEXT")]
    next: Option<String>,
    /// References to more about it.
    #[arg(long, value_name = "TEXT")]
    refs: Option<String>,
    /// Note: anything else.
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
}

impl Command for Args {
    type Report = JournalReport;

    fn run(self, _: &Ui) -> anyhow::Result<JournalReport> {
        let folder = match &self.bundle[..] {
            [folder] => folder,
            [word, folder] if ["add", "show"].iter().any(|w| word == Path::new(w)) => folder,
            _ => bail!("one bundle is read at a time: anemoe journal BUNDLE"),
        };
        // A bundle, or any other folder with a journal.
        if folder.join(JOURNAL_FILE).symlink_metadata().is_err() {
            expect_begun_bundle(folder)?;
        }
        let texts = facts::of(serde_json::to_value(&self.texts)?);
        if let Some((name, _)) =
            texts.iter().find(|(_, text)| text.as_str().is_none_or(|t| t.trim().is_empty()))
        {
            bail!("--{name}: there is nothing to add");
        }
        let journal = journal::read(folder)?;
        let mut found = entries(journal.events);
        if let Some(wanted) = &self.entry {
            found = vec![find(found, wanted, folder)?];
        }
        let bundle = folder.display().to_string();
        if texts.is_empty() {
            return Ok(JournalReport::Shown { bundle, torn: journal.torn, entries: found });
        }
        let (of, version) = (found.pop().map(|e| e.id), env!("CARGO_PKG_VERSION").into());
        let event = journal::append(folder, Event { of, version, rest: texts, ..Event::new("note", "") })?;
        let entry = event.of.as_ref().unwrap_or(&event.id).clone();
        Ok(JournalReport::Added { bundle, entry, event: Box::new(event) })
    }
}

/// Entries of a journal, or what was added to one.
#[derive(Serialize)]
#[serde(untagged)]
pub enum JournalReport {
    Shown { bundle: String, torn: bool, entries: Vec<Entry> },
    Added { bundle: String, entry: String, event: Box<Event> },
}

impl CommandReport for JournalReport {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        match self {
            JournalReport::Added { entry, .. } => ui.line(format!("added to entry {entry}")),
            JournalReport::Shown { bundle, torn, entries } => {
                ui.line(format!("# Journal of {bundle}"))?;
                if entries.is_empty() {
                    ui.line(
                        "\nNothing is written yet. build, assemble, check, validate and trace write what they find when they run on a bundle\n(unless --no-journal is given); --lesson and others write the rest.",
                    )?;
                }
                entries.iter().try_for_each(|entry| print(entry, ui))?;
                if *torn {
                    ui.line("\nThe last line was cut off while it was written, and is left out.")?;
                }
                let is_bare = |e: &&Entry| e.lesson.is_empty() || e.next.is_empty() || e.intent.is_empty();
                let Some(Entry { id, .. }) = entries.last().filter(is_bare) else { return Ok(()) };
                let quoted = quoted(Path::new(bundle));
                ui.line(format!("\nTo write the rest: anemoe journal {quoted} --entry {id} --lesson TEXT"))
            }
        }
    }
}

/// Finds the entry with an event whose id begins with `wanted`.
fn find(mut entries: Vec<Entry>, wanted: &str, folder: &Path) -> anyhow::Result<Entry> {
    let ids: Vec<String> = entries.iter().map(|e| e.id.clone()).collect();
    entries.retain(|e| e.events.iter().any(|e| e.id.starts_with(wanted)));
    match entries.pop() {
        Some(one) if entries.is_empty() && !wanted.is_empty() => Ok(one),
        found => {
            let what = if found.is_none() { "names no entry" } else { "names several entries" };
            bail!("{}: --entry {wanted} {what}; there are: {}", folder.display(), ids.join(", "))
        }
    }
}

fn print(entry: &Entry, ui: &Ui) -> io::Result<()> {
    let mut result = Vec::new();
    ui.line(format!("\n## {} {}: {}", entry.time, entry.id, entry.kinds.join(", ")))?;
    for r in &entry.result {
        let status = if r.status.is_empty() { String::new() } else { format!(" {}", r.status) };
        let seconds = r.seconds.map(|s| format!(" in {s:.1} s")).unwrap_or_default();
        let run = format!("{}{status}{seconds}, {}", r.kind, r.time);
        match r.figures.is_empty() {
            true => result.push(run),
            false if r.kind == RUN => result.extend([vec![run], r.figures.clone()].concat()),
            false => result.push(format!("{run}: {}", r.figures.join("; "))),
        }
    }
    result.extend(entry.notes.iter().map(|n| format!("note: {n}")));
    for (heading, lines, none) in [
        ("Intent", &entry.intent, "(nothing written)"),
        ("Setup", &entry.setup, "(nothing written)"),
        ("Result", &result, "(nothing written)"),
        ("Surprise", &entry.surprise, "(none)"),
        ("Lesson", &entry.lesson, "(nothing written)"),
        ("Next", &entry.next, "(nothing written)"),
        ("Refs", &entry.refs, "(nothing written)"),
    ] {
        ui.line(format!("\n### {heading}\n"))?;
        if lines.is_empty() {
            ui.line(none)?;
        }
        lines.iter().try_for_each(|line| ui.line(format!("- {}", line.trim().replace('\n', "\n  "))))?;
    }
    Ok(())
}
