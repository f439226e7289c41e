//! `anemoe journal`

pub mod entries;
mod figures;

use crate::outcome::Outcome;
use crate::shell::quoted;
use crate::target::expect_begun_bundle;
use crate::ui::Ui;
use anemoe_bundle::journal::{self, Event, Prose};
use anyhow::bail;
use entries::Entry;
use std::path::{Path, PathBuf};

/// Show and add to what was done to a bundle.
#[derive(clap::Args)]
#[command(
    subcommand_negates_reqs = true,
    override_usage = "anemoe journal [OPTIONS] <BUNDLE>\n       anemoe journal <COMMAND>",
    after_help = "Example:\n  anemoe journal small.anemoe\n  anemoe journal add small.anemoe --lesson 'lut4 of the head costs most'\n\n`anemoe journal BUNDLE` is short for `anemoe journal show BUNDLE`; a bundle named `add` is ./add."
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
    /// The bundle.
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
    /// The bundle.
    bundle: PathBuf,
    /// Entry: its id, or that of an event in it, or the beginning of one [default: the newest].
    #[arg(long, value_name = "ID")]
    entry: Option<String>,
    #[command(flatten)]
    prose: ProseArgs,
}

#[derive(clap::Args)]
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

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    match (args.action, args.show) {
        (Some(Action::Add(args)), None) => add(args, ui)?,
        (Some(Action::Show(args)), None) | (None, Some(args)) => show(args, ui)?,
        (Some(_), Some(_)) => bail!("a bundle comes behind show and add: anemoe journal add BUNDLE"),
        (None, None) => bail!("which bundle? anemoe journal BUNDLE"),
    }
    Ok(Outcome::Done)
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

/// Document that `--json` prints.
#[derive(serde::Serialize)]
struct Document<'a> {
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    bundle: &'a Path,
    /// True if the last line was cut off.
    torn: bool,
    entries: &'a [Entry],
}

fn show(args: ShowArgs, ui: &Ui) -> anyhow::Result<()> {
    expect_begun_bundle(&args.bundle)?;
    let journal = journal::read(&args.bundle)?;
    let mut entries = entries::entries(journal.events);
    if let Some(wanted) = &args.entry {
        entries = vec![find(&entries, wanted, &args.bundle)?.clone()];
    }
    ui.document(&Document { bundle: &args.bundle, torn: journal.torn, entries: &entries })?;
    let name = args.bundle.display();
    ui.line(format!("# Journal of {name}"))?;
    if entries.is_empty() {
        ui.line(
            "\nNothing is written yet. build, assemble, check, validate and trace write what they find when they run on a bundle\n(unless --no-journal is given); `anemoe journal add` writes the rest.",
        )?;
    }
    for entry in &entries {
        print(entry, ui)?;
    }
    if journal.torn {
        ui.line("\nThe last line was cut off while it was written, and is left out.")?;
    }
    let bare = |e: &Entry| e.lesson.is_empty() || e.next.is_empty() || e.intent.is_empty();
    if let Some(last) = entries.last().filter(|e| bare(e)) {
        ui.line(format!(
            "\nTo write the rest: anemoe journal add {} --entry {} --lesson TEXT",
            quoted(&args.bundle),
            last.id
        ))?;
    }
    Ok(())
}

fn print(entry: &Entry, ui: &Ui) -> std::io::Result<()> {
    let mut result = Vec::new();
    ui.line(format!("\n## {} {}: {}", entry.time, entry.id, entry.kinds.join(", ")))?;
    for r in &entry.result {
        let status = if r.status.is_empty() { String::new() } else { format!(" {}", r.status) };
        let seconds = r.seconds.map(|s| format!(" in {s:.1} s")).unwrap_or_default();
        let colon = if r.figures.is_empty() { "" } else { ": " };
        result.push(format!("{}{status}{seconds}, {}{colon}{}", r.kind, r.time, r.figures.join("; ")));
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

fn add(args: AddArgs, ui: &Ui) -> anyhow::Result<()> {
    expect_begun_bundle(&args.bundle)?;
    let p = args.prose;
    let prose = Prose {
        intent: p.intent,
        note: p.note,
        surprise: p.surprise,
        lesson: p.lesson,
        next: p.next,
        refs: p.refs,
    };
    let all = [&prose.intent, &prose.note, &prose.surprise, &prose.lesson, &prose.next, &prose.refs];
    if all.iter().all(|t| t.is_none()) || all.into_iter().flatten().any(|t| t.trim().is_empty()) {
        bail!(
            "there is nothing to add: give --lesson, --surprise, --next, --refs, --note or --intent a text"
        );
    }
    let entries = entries::entries(journal::read(&args.bundle)?.events);
    let entry = match &args.entry {
        Some(wanted) => Some(find(&entries, wanted, &args.bundle)?),
        None => entries.last(),
    };
    let of = entry.map(|e| e.id.clone());
    let version = env!("CARGO_PKG_VERSION").into();
    let event = journal::append(&args.bundle, Event { of, version, prose, ..Event::new("note", "") })?;
    let entry = event.of.as_ref().unwrap_or(&event.id);
    ui.document(
        &serde_json::json!({"bundle": args.bundle.display().to_string(), "entry": entry, "event": event}),
    )?;
    ui.line(format!("added to entry {entry}"))?;
    Ok(())
}
