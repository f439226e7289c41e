//! `anemoe journal`

use crate::command::{Command, Page};
use crate::commands::reproduce::RUN;
use crate::shell::quoted;
use crate::target::expect_begun_bundle;
use crate::ui::Ui;
use anemoe_bundle::journal::{self, Event, JOURNAL_FILE};
use anemoe_bundle::journal_entries::{Entry, HEADINGS, entries};
use anemoe_gates::facts;
use anyhow::bail;
use serde::Serialize;
use serde_json::{Value, json};
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
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
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
        let is_empty = |text: &Value| text.as_str().is_none_or(|t| t.trim().is_empty());
        if let Some((name, _)) = texts.iter().find(|(_, text)| is_empty(text)) {
            bail!("--{name}: there is nothing to add");
        }
        let journal = journal::read(folder)?;
        let mut found = entries(journal.events);
        if let Some(wanted) = &self.entry {
            found = vec![find(found, wanted, folder)?];
        }
        let bundle = folder.display().to_string();
        if !texts.is_empty() {
            let (of, version) = (found.pop().map(|e| e.id), env!("CARGO_PKG_VERSION").into());
            let event = Event { of, version, rest: texts, ..Event::new("note", "") };
            let event = journal::append(folder, event)?;
            let entry = event.of.as_ref().unwrap_or(&event.id);
            let line = format!("added to entry {entry}");
            return Ok(Page::new(json!({"bundle": bundle, "entry": entry, "event": event}), [line]));
        }
        let mut lines = vec![format!("# Journal of {bundle}")];
        if found.is_empty() {
            lines.push(NOTHING.into());
        }
        lines.extend(found.iter().flat_map(entry_lines));
        if journal.torn {
            lines.push("\nThe last line was cut off while it was written, and is left out.".into());
        }
        let is_bare = |e: &&Entry| ["intent", "lesson", "next"].iter().any(|text| e.texts[text].is_empty());
        let bare = found.last().filter(is_bare);
        lines.extend(bare.map(|Entry { id, .. }| {
            let quoted = quoted(folder);
            format!("\nTo write the rest: anemoe journal {quoted} --entry {id} --lesson TEXT")
        }));
        Ok(Page::new(json!({"bundle": bundle, "torn": journal.torn, "entries": found}), lines))
    }
}

/// Text of an empty journal.
const NOTHING: &str = "\nNothing is written yet. build, assemble, check, validate and trace write what they find when they run on a \
    bundle\n(unless --no-journal is given); --lesson and others write the rest.";

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

fn entry_lines(entry: &Entry) -> Vec<String> {
    let mut result = Vec::new();
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
    result.extend(entry.texts["notes"].iter().map(|n| format!("note: {n}")));
    let mut lines = vec![format!("\n## {} {}: {}", entry.time, entry.id, entry.kinds.join(", "))];
    for (heading, name) in
        HEADINGS.into_iter().zip(["Intent", "Setup", "Result", "Surprise", "Lesson", "Next", "Refs"])
    {
        let texts = if heading == "notes" { &result } else { &entry.texts[heading] };
        lines.push(format!("\n### {name}\n"));
        lines.extend(texts.iter().map(|text| format!("- {}", text.trim().replace('\n', "\n  "))));
        if texts.is_empty() {
            lines.push(if heading == "surprise" { "(none)".into() } else { "(nothing written)".into() });
        }
    }
    lines
}
