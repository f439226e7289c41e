//! `anemoe journal`

pub mod entries;
mod figures;

use crate::experiment::{self, Expectation, ExperimentPath, facts_of, texts};
use crate::outcome::Outcome;
use crate::shell::quoted;
use crate::target::expect_begun_bundle;
use crate::ui::{Table, Ui};
use anemoe_bundle::journal::{self, BOOK_FILE, Event, Prose};
use anemoe_convert::path_kind::PathKind;
use anyhow::bail;
use clap::ValueEnum;
use entries::Entry;
use std::path::{Path, PathBuf};

/// Keep a book of experiments, and show and add to what was done to bundles.
///
/// A book is a folder of experiments, each begun by `new` with its intent and what is expected, before anything is built. Commands
/// with --experiment BOOK/ID write their figures there. A bundle has a journal of its own.
#[derive(clap::Args)]
#[command(
    subcommand_negates_reqs = true,
    override_usage = "anemoe journal [OPTIONS] <BUNDLE|BOOK>\n       anemoe journal <COMMAND>",
    after_help = "Example:\n  anemoe journal new book/e35 --intent 'LUT4 halves the bytes' --expect 'shard_mb<110' --expect 'decode_tok_s>8.59'\n  anemoe build models/small-gemma4 -o e35.anemoe --experiment book/e35\n  anemoe journal book\n  anemoe journal small.anemoe\n  anemoe journal add small.anemoe --lesson 'lut4 of the head costs most'\n\n`anemoe journal BUNDLE` is short for `anemoe journal show BUNDLE`; a bundle named `add` is ./add."
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
    New(NewArgs),
    Add(AddArgs),
}

/// Show a journal: Intent, Setup, Result, Surprise, Lesson, Next, Refs of each entry; of a book, a table of all first.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe journal show small.anemoe --entry 3fa29c\n  anemoe journal show book --table"
)]
struct ShowArgs {
    /// The bundle, or a book.
    #[arg(value_name = "BUNDLE|BOOK")]
    bundle: PathBuf,
    /// Only this entry: its id, or that of an event in it, or the beginning of one.
    #[arg(long, value_name = "ID")]
    entry: Option<String>,
    /// Only the table of all experiments, for a book.
    #[arg(long, conflicts_with = "entry")]
    table: bool,
}

/// Begin an experiment: why, and what is expected.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe journal new book/e35 --replaces e34 --intent 'LUT4 halves the bytes' --expect 'shard_mb<110'\n\n`anemoe reproduce --figures` lists the figures."
)]
struct NewArgs {
    /// The book, a folder, and the id of the experiment.
    #[arg(value_name = "BOOK/ID", value_hint = clap::ValueHint::Other)]
    experiment_path: PathBuf,
    /// Intent: the reason for doing it.
    #[arg(long, value_name = "TEXT")]
    intent: String,
    /// A name for people.
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
    #[command(flatten)]
    more: ExperimentArgs,
    /// Id of the experiment that this one replaces.
    #[arg(long, value_name = "ID")]
    replaces: Option<String>,
}

#[derive(clap::Args)]
struct ExperimentArgs {
    /// A figure of an experiment and what it is expected to be, in its unit: shard_mb<110, decode_tok_s>8.59, moe_shards=40.
    #[arg(long, value_name = "FIGURE<X")]
    expect: Vec<Expectation>,
    /// A bundle that belongs to an experiment.
    #[arg(long, value_name = "BUNDLE", value_hint = clap::ValueHint::Other)]
    link: Vec<PathBuf>,
}

/// Write into an entry what no command can know.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe journal add small.anemoe --surprise 'the head alone costs half' --next 'head in lut6'\n  anemoe journal add book --entry e34 --state dead-end --lesson 'outliers'"
)]
struct AddArgs {
    /// The bundle, or a book.
    #[arg(value_name = "BUNDLE|BOOK")]
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
    /// State of an experiment, where commands and expectations cannot tell.
    #[arg(long, value_enum)]
    state: Option<StateArg>,
    /// Milestone that an experiment has reached.
    #[arg(long, value_name = "TEXT")]
    milestone: Option<String>,
    #[command(flatten)]
    more: ExperimentArgs,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum StateArg {
    Intent,
    Running,
    Passed,
    Failed,
    DeadEnd,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    match (args.action, args.show) {
        (Some(Action::New(args)), None) => new(args, ui)?,
        (Some(Action::Add(args)), None) => add(args, ui)?,
        (Some(Action::Show(args)), None) | (None, Some(args)) => show(args, ui)?,
        (Some(_), Some(_)) => bail!("a bundle comes behind show and add: anemoe journal add BUNDLE"),
        (None, None) => bail!("which bundle or book? anemoe journal BUNDLE"),
    }
    Ok(Outcome::Done)
}

/// Accepts a book or a bundle, and tells whether it is a book.
fn expect_journal(path: &Path) -> anyhow::Result<bool> {
    let is_book = path.join(BOOK_FILE).symlink_metadata().is_ok();
    if !is_book {
        expect_begun_bundle(path)?;
    }
    Ok(is_book)
}

/// Returns the bundles of `--link` as text.
fn links(bundles: &[PathBuf]) -> Vec<String> {
    bundles.iter().map(|bundle| bundle.display().to_string()).collect()
}

fn new(args: NewArgs, ui: &Ui) -> anyhow::Result<()> {
    let at = ExperimentPath::split(&args.experiment_path)?;
    if args.intent.trim().is_empty() {
        bail!("--intent: an experiment begins with why it is done");
    }
    let kind = PathKind::at(&at.book);
    let fits = [PathKind::Nothing, PathKind::EmptyFolder, PathKind::Folder].contains(&kind);
    if !fits && !matches!(kind, PathKind::Checkpoints(_)) {
        bail!("{}: this is {}; a book is a folder of its own", at.book.display(), kind.name());
    }
    let expect = texts(&args.more.expect);
    let facts = serde_json::json!({"title": args.title, "replaces": args.replaces, "expect": expect, "bundles": links(&args.more.link)});
    experiment::begin(&at, args.intent, facts)?;
    ui.document(&serde_json::json!({"book": at.book.display().to_string(), "experiment": at.id}))?;
    ui.line(format!(
        "{} has begun; next: anemoe build CHECKPOINT -o BUNDLE --experiment {}",
        at.id,
        quoted(&args.experiment_path)
    ))?;
    Ok(())
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
    let is_book = expect_journal(&args.bundle)?;
    let journal = journal::read(&args.bundle)?;
    let mut entries = entries::entries(journal.events);
    if let Some(wanted) = &args.entry {
        entries = vec![find(&entries, wanted, &args.bundle)?.clone()];
    }
    ui.document(&Document { bundle: &args.bundle, torn: journal.torn, entries: &entries })?;
    let name = args.bundle.display();
    ui.line(format!("# {} {name}", if is_book { "Book of experiments in" } else { "Journal of" }))?;
    if is_book && args.entry.is_none() {
        // Markdown leaves a block of code unchanged.
        let fence = |end| if args.table { Ok(()) } else { ui.line(format!("{end}```")) };
        fence("\n")?;
        table(&entries, ui)?;
        fence("")?;
    }
    if args.table {
        return Ok(());
    }
    if entries.is_empty() && !is_book {
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

/// Prints all experiments of a book.
fn table(entries: &[Entry], ui: &Ui) -> std::io::Result<()> {
    let mut table =
        Table::ending_in_text(&["experiment", "state", "expectations", "begun", "replaces", "intent"]);
    for (entry, x) in entries.iter().filter_map(|e| Some((e, e.experiment.as_ref()?))) {
        let holding = x.expectations.iter().filter(|e| e.holds == Some(true)).count();
        let n = x.expectations.len();
        let expected = if n == 0 { "-".into() } else { format!("{holding} of {n} hold") };
        let intent = x.title.as_ref().or(entry.intent.first());
        let intent = intent.and_then(|t| t.lines().next()).unwrap_or_default().to_string();
        let day = entry.time.split(' ').next().unwrap_or_default().to_string();
        let replaces = x.replaces.clone().unwrap_or_else(|| "-".into());
        table.row(vec![entry.id.clone(), x.state.clone(), expected, day, replaces, intent]);
    }
    table.print(ui)
}

fn print(entry: &Entry, ui: &Ui) -> std::io::Result<()> {
    let mut result = Vec::new();
    match &entry.experiment {
        None => ui.line(format!("\n## {} {}: {}", entry.time, entry.id, entry.kinds.join(", ")))?,
        Some(x) => {
            let title = x.title.as_ref().map(|t| format!(": {t}")).unwrap_or_default();
            ui.line(format!("\n## {}{title} ({}), {}", entry.id, x.state, entry.time))?;
            for e in &x.expectations {
                let said = e.holds.map_or("", |holds| if holds { ": holds" } else { ": fails" });
                result.push(format!("expected {}: {}{said}", e.text, e.found_text()));
            }
            result.extend(x.milestones.iter().map(|m| format!("milestone, {m}")));
        }
    }
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
    let is_book = expect_journal(&args.bundle)?;
    let p = args.prose;
    let facts = facts_of(serde_json::json!({
        "state": p.state.and_then(|s| Some(s.to_possible_value()?.get_name().replace('-', " "))), "milestone": p.milestone, "expect": texts(&p.more.expect), "bundles": links(&p.more.link),
    }));
    if let Some(fact) = facts.keys().next().filter(|_| !is_book) {
        bail!("{}: only experiments of a book have a {fact}", args.bundle.display());
    }
    let prose = Prose {
        intent: p.intent,
        note: p.note,
        surprise: p.surprise,
        lesson: p.lesson,
        next: p.next,
        refs: p.refs,
    };
    let all = [&prose.intent, &prose.note, &prose.surprise, &prose.lesson, &prose.next, &prose.refs];
    let is_written = all.iter().any(|t| t.is_some()) || !facts.is_empty();
    if !is_written || all.into_iter().flatten().any(|t| t.trim().is_empty()) {
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
    if is_book && of.is_none() {
        bail!("{}: the book has no experiment yet; `anemoe journal new` begins one", args.bundle.display());
    }
    let event = journal::append(&args.bundle, Event { of, version, prose, facts, ..Event::new("note", "") })?;
    let entry = event.of.as_ref().unwrap_or(&event.id);
    ui.document(
        &serde_json::json!({"bundle": args.bundle.display().to_string(), "entry": entry, "event": event}),
    )?;
    ui.line(format!("added to entry {entry}"))?;
    Ok(())
}
