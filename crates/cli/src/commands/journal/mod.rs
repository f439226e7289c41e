//! `anemoe journal`

pub mod entries;
mod figures;

use crate::command::{Command, CommandReport};
use crate::commands::reproduce::RUN;
use crate::shell::quoted;
use crate::target::expect_begun_bundle;
use crate::ui::Ui;
use anemoe_bundle::journal::{self, Event, JOURNAL_FILE, Prose};
use anyhow::bail;
use entries::Entry;
use serde::Serialize;
use std::io;
use std::path::{Path, PathBuf};

/// Show and add to what was done: to a bundle, or in the folder of an experiment.
#[derive(clap::Args)]
#[command(
    subcommand_negates_reqs = true,
    override_usage = "anemoe journal [OPTIONS] <BUNDLE|FOLDER>\n       anemoe journal <COMMAND>",
    after_help = "Example:\n  anemoe journal small.anemoe\n  anemoe journal reproduce-exp-35\n  anemoe journal add small.anemoe --lesson 'lut4 of the head costs most'\n\n`anemoe journal BUNDLE` is short for `anemoe journal show BUNDLE`; a bundle named `add` is ./add."
)]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    show: Option<ShowArgs>,
}

#[derive(clap::Subcommand)]
enum Action {
    Show(ShowArgs),
    Add(AddArgs),
}

/// Show a journal: Intent, Setup, Result, Surprise, Lesson, Next, Refs of each entry.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe journal show small.anemoe --entry 3fa29c")]
struct ShowArgs {
    /// The bundle, or a folder of `reproduce`.
    #[arg(value_name = "BUNDLE|FOLDER")]
    bundle: PathBuf,
    /// Only this entry: its id, or that of an event in it, or the beginning of one.
    #[arg(long, value_name = "ID")]
    entry: Option<String>,
}

/// Write into an entry what no command can know.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe journal add small.anemoe --surprise 'the head alone costs half' --next 'head in lut6'"
)]
struct AddArgs {
    /// The bundle, or a folder of `reproduce`.
    #[arg(value_name = "BUNDLE|FOLDER")]
    bundle: PathBuf,
    /// Entry: its id, or that of an event in it, or the beginning of one [default: the newest].
    #[arg(long, value_name = "ID")]
    entry: Option<String>,
    #[command(flatten)]
    prose: ProseArgs,
}

#[derive(clap::Args, serde::Serialize)]
struct ProseArgs {
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
        match (self.action, self.show) {
            (Some(Action::Add(args)), None) => add(args),
            (Some(Action::Show(args)), None) | (None, Some(args)) => show(args),
            (Some(_), Some(_)) => bail!("a bundle comes behind show and add: anemoe journal add BUNDLE"),
            (None, None) => bail!("which bundle? anemoe journal BUNDLE"),
        }
    }
}

/// Entries of a journal, or what was added to one.
#[derive(Serialize)]
#[serde(untagged)]
pub enum JournalReport {
    Shown {
        bundle: String,
        torn: bool,
        entries: Vec<Entry>,
        /// Path of the bundle for a command line.
        #[serde(skip)]
        quoted: String,
    },
    Added {
        bundle: String,
        entry: String,
        event: Box<Event>,
    },
}

impl CommandReport for JournalReport {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        match self {
            JournalReport::Shown { bundle, torn, entries, quoted } => {
                print_entries(bundle, *torn, entries, quoted, ui)
            }
            JournalReport::Added { entry, .. } => ui.line(format!("added to entry {entry}")),
        }
    }
}

/// Accepts a bundle, and any other folder with a journal.
fn expect_journal(path: &Path) -> anyhow::Result<()> {
    if path.join(JOURNAL_FILE).symlink_metadata().is_ok() { Ok(()) } else { expect_begun_bundle(path) }
}

fn find<'a>(entries: &'a [Entry], wanted: &str, bundle: &Path) -> anyhow::Result<&'a Entry> {
    let has = |e: &&Entry| e.events.iter().any(|e| e.id.starts_with(wanted));
    let found: Vec<&Entry> = entries.iter().filter(has).collect();
    match found[..] {
        [one] if !wanted.is_empty() => Ok(one),
        _ => {
            let known: Vec<&str> = entries.iter().map(|e| e.id.as_str()).collect();
            let what = if found.is_empty() { "names no entry" } else { "names several entries" };
            bail!("{}: --entry {wanted} {what}; there are: {}", bundle.display(), known.join(", "))
        }
    }
}

fn show(args: ShowArgs) -> anyhow::Result<JournalReport> {
    expect_journal(&args.bundle)?;
    let journal = journal::read(&args.bundle)?;
    let mut entries = entries::entries(journal.events);
    if let Some(wanted) = &args.entry {
        entries = vec![find(&entries, wanted, &args.bundle)?.clone()];
    }
    let (bundle, quoted) = (args.bundle.display().to_string(), quoted(&args.bundle));
    Ok(JournalReport::Shown { bundle, torn: journal.torn, entries, quoted })
}

fn print_entries(bundle: &str, torn: bool, entries: &[Entry], quoted: &str, ui: &Ui) -> io::Result<()> {
    ui.line(format!("# Journal of {bundle}"))?;
    if entries.is_empty() {
        ui.line(
            "\nNothing is written yet. build, assemble, check, validate and trace write what they find when they run on a bundle\n(unless --no-journal is given); `anemoe journal add` writes the rest.",
        )?;
    }
    for entry in entries {
        print(entry, ui)?;
    }
    if torn {
        ui.line("\nThe last line was cut off while it was written, and is left out.")?;
    }
    let bare = |e: &&Entry| e.lesson.is_empty() || e.next.is_empty() || e.intent.is_empty();
    entries.last().filter(bare).into_iter().try_for_each(|last| {
        ui.line(format!("\nTo write the rest: anemoe journal add {quoted} --entry {} --lesson TEXT", last.id))
    })
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
    let sections = [
        ("Intent", &entry.intent),
        ("Setup", &entry.setup),
        ("Result", &result),
        ("Surprise", &entry.surprise),
        ("Lesson", &entry.lesson),
        ("Next", &entry.next),
        ("Refs", &entry.refs),
    ];
    for (heading, lines) in sections {
        ui.line(format!("\n### {heading}\n"))?;
        if lines.is_empty() {
            ui.line(if heading == "Surprise" { "(none)" } else { "(nothing written)" })?;
        }
        for line in lines {
            ui.line(wrapped(line, WIDTH))?;
        }
    }
    Ok(())
}

/// Longest line of an entry, in characters.
const WIDTH: usize = 110;

/// Wraps an item of a list at `max` characters; its further lines are indented.
pub fn wrapped(text: &str, max: usize) -> String {
    let mut lines = vec![String::from("-")];
    for (i, paragraph) in text.lines().enumerate() {
        lines.extend((i > 0).then(|| " ".into()));
        for word in paragraph.split_whitespace() {
            let width = lines.last().map_or(0, |line| line.chars().count());
            if width > 2 && width + 1 + word.chars().count() > max {
                lines.push(" ".into());
            }
            lines.last_mut().into_iter().for_each(|line| line.extend([" ", word]));
        }
    }
    lines.join("\n")
}

fn add(args: AddArgs) -> anyhow::Result<JournalReport> {
    expect_journal(&args.bundle)?;
    let words = serde_json::to_value(&args.prose)?;
    let mut texts =
        words.as_object().into_iter().flat_map(|w| w.values()).filter_map(|text| text.as_str()).peekable();
    if texts.peek().is_none() || texts.any(|text| text.trim().is_empty()) {
        bail!(
            "there is nothing to add: give --lesson, --surprise, --next, --refs, --note or --intent a text"
        );
    }
    let prose: Prose = serde_json::from_value(words)?;
    let entries = entries::entries(journal::read(&args.bundle)?.events);
    let entry = match &args.entry {
        Some(wanted) => Some(find(&entries, wanted, &args.bundle)?),
        None => entries.last(),
    };
    let of = entry.map(|e| e.id.clone());
    let version = env!("CARGO_PKG_VERSION").into();
    let event = journal::append(&args.bundle, Event { of, version, prose, ..Event::new("note", "") })?;
    let entry = event.of.as_ref().unwrap_or(&event.id).clone();
    Ok(JournalReport::Added { bundle: args.bundle.display().to_string(), entry, event: Box::new(event) })
}
