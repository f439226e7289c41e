//! Errors as the user and other programs see them.

use crate::ui;
use anemoe_io::Kind;
use clap::error::{ContextKind, ContextValue};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Bad usage, or input that is invalid or unsupported.
pub const INVALID: u8 = 2;

/// Words of other tools, and the commands that do here what they do there.
const MEANT: [(&str, &[&str]); 13] = [
    ("generate", &["run", "infer", "complete", "completion", "prompt"]),
    ("build", &["convert", "export", "create", "make", "package"]),
    ("serve", &["server", "start", "api"]),
    ("validate", &["eval", "evaluate", "test", "verify"]),
    ("bench", &["benchmark", "perf", "speed"]),
    ("inspect", &["info", "show", "list", "ls", "print"]),
    ("perplexity", &["ppl", "score"]),
    ("golden", &["reference", "logits"]),
    ("journal", &["log", "history"]),
    ("report", &["diff", "compare"]),
    ("push", &["upload", "publish", "send"]),
    ("pull", &["download", "fetch"]),
    ("man", &["manual", "manpage", "docs"]),
];

/// Adds the command that was meant by a word of another tool; clap may know one that merely sounds like it.
pub fn with_command_meant(mut e: clap::Error) -> clap::Error {
    if let Some(ContextValue::String(said)) = e.get(ContextKind::InvalidSubcommand)
        && let Some((command, _)) = MEANT.iter().find(|(_, words)| words.contains(&said.as_str()))
    {
        let meant = ContextValue::Strings(vec![command.to_string()]);
        e.insert(ContextKind::SuggestedSubcommand, meant);
    }
    e
}

/// Prints clap's own message. Help and version are no errors.
pub fn usage(e: clap::Error) -> ExitCode {
    let json = std::env::args_os().any(|a| a == "--json");
    if e.use_stderr() && json {
        let message = e.to_string();
        let first = message.lines().next().unwrap_or_default().trim_start_matches("error: ");
        print_json("usage", first, None);
    }
    // Nothing is left to do when the terminal is gone. Colours are for what holds no control characters of its own.
    let plain = e.render().to_string();
    if ui::printable(&plain) == plain {
        let _ = e.print();
    } else {
        ui::message(plain.trim_end());
    }
    if e.use_stderr() { ExitCode::from(INVALID) } else { ExitCode::SUCCESS }
}

/// Prints an error and gives the exit status.
pub fn report(e: &anyhow::Error, json: bool) -> ExitCode {
    // A reader that went away (`anemoe inspect | head`) is no fault.
    if e.chain().any(|c| {
        c.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    }) {
        return ExitCode::SUCCESS;
    }
    // An error that shows its cause itself is not followed by it once more.
    let mut message = String::new();
    for cause in e.chain().map(ToString::to_string).filter(|c| !c.is_empty()) {
        match message.is_empty() {
            true => message = cause,
            false if message.ends_with(&cause) => {}
            false => message = format!("{message}: {cause}"),
        }
    }
    let (kind, path) = classify(e);
    if json {
        print_json(kind, &message, path);
    }
    if kind == INTERRUPTED {
        ui::message("interrupted; what is finished stays, and the same command goes on from there");
        return ExitCode::from(crate::signals::status());
    }
    ui::message(format!("error: {message}"));
    ExitCode::from(INVALID)
}

/// Says that a command was interrupted that has nothing to go on from.
pub fn interrupted(json: bool) {
    if json {
        print_json(INTERRUPTED, INTERRUPTED, None);
    }
    ui::message(INTERRUPTED);
}

pub fn print_json(kind: &str, message: &str, path: Option<PathBuf>) {
    let document = serde_json::json!({"error": {"kind": kind, "message": message, "path": path.map(|p| p.display().to_string())}});
    let _ = writeln!(std::io::stdout(), "{document}");
}

/// Kind of an error that is none.
const INTERRUPTED: &str = "interrupted";

/// Gives `io`, `invalid`, `unsupported`, `input`, `usage` or `interrupted`, and the file concerned.
fn classify(e: &anyhow::Error) -> (&'static str, Option<PathBuf>) {
    let Some(e) = e.chain().find_map(|cause| cause.downcast_ref::<anemoe_io::Error>()) else {
        let is_io = e.chain().any(|cause| cause.is::<std::io::Error>());
        return (if is_io { "io" } else { "usage" }, None);
    };
    // Where the system was not asked, as the file is not what it should be.
    let is_refused = |e: &std::io::Error| {
        matches!(e.kind(), ErrorKind::InvalidData | ErrorKind::InvalidInput) && e.raw_os_error().is_none()
    };
    let kind = match e.kind() {
        Kind::Io if e.io_error().is_some_and(is_refused) => "invalid",
        Kind::Io | Kind::Room => "io",
        Kind::Invalid => "invalid",
        Kind::Unsupported => "unsupported",
        Kind::Input => "input",
        Kind::Usage => "usage",
        Kind::Interrupted => INTERRUPTED,
    };
    (kind, e.path().map(Path::to_path_buf))
}
