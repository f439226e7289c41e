//! Errors as the user and other programs see them.

use crate::ui;
use anemoe_io::Kind;
use serde_json::{Value, json};
use std::fmt::{self, Display, Formatter};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit status for bad usage, and for invalid or unsupported input.
pub const INVALID: u8 = 2;

/// Prints clap's own message and returns the exit status. Help and version are no errors.
pub fn usage(e: clap::Error) -> ExitCode {
    let json = std::env::args_os().any(|a| a == "--json");
    if e.use_stderr() && json {
        let message = e.to_string();
        // What is missing stands in lines of its own, before an empty one.
        let lines = message.lines().map(str::trim).take_while(|line| !line.is_empty());
        let first = lines.collect::<Vec<_>>().join(" ");
        print_json("usage", first.trim_start_matches("error: "), None, None);
    }
    // A terminal that is gone is no error. Colours are printed only if the message has no control characters of its own.
    let plain = e.render().to_string();
    if ui::printable(&plain) == plain {
        let _ = e.print();
    } else {
        ui::message(plain.trim_end());
    }
    if e.use_stderr() { ExitCode::from(INVALID) } else { ExitCode::SUCCESS }
}

/// Prints an error and returns the exit status.
pub fn report(e: &anyhow::Error, json: bool) -> ExitCode {
    // A reader that closed the pipe (`anemoe inspect | head`) is no error.
    if e.chain().any(|c| {
        c.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    }) {
        return ExitCode::SUCCESS;
    }
    let message = sentence(e);
    let (kind, path) = classify(e);
    if json {
        print_json(kind, &message, path, e.downcast_ref());
    }
    if kind == INTERRUPTED {
        ui::message("interrupted; what is finished stays, and the same command goes on from there");
        return ExitCode::from(crate::signals::status());
    }
    ui::message(format!("error: {message}"));
    ExitCode::from(INVALID)
}

/// Joins an error and its causes to one sentence, without a cause that the error before it already shows.
pub fn sentence(e: &anyhow::Error) -> String {
    let mut message = String::new();
    for cause in e.chain().map(ToString::to_string).filter(|c| !c.is_empty()) {
        match message.is_empty() {
            true => message = cause,
            false if message.ends_with(&cause) => {}
            false => message = format!("{message}: {cause}"),
        }
    }
    message
}

/// Document of a command that ended in an error half-way. As context of the error, it adds its keys to the error's document.
#[derive(Debug)]
pub struct PartialDocument(pub Value);

impl Display for PartialDocument {
    /// Adds nothing to the error's sentence.
    fn fmt(&self, _: &mut Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

/// Reports the interruption of a command that cannot be resumed.
pub fn interrupted(json: bool) {
    if json {
        print_json(INTERRUPTED, INTERRUPTED, None, None);
    }
    ui::message(INTERRUPTED);
}

/// Prints the document of an error, with the results before it.
pub fn print_json(kind: &str, message: &str, path: Option<PathBuf>, before: Option<&PartialDocument>) {
    let mut document = before.map_or_else(|| json!({}), |before| before.0.clone());
    document["error"] =
        json!({"kind": kind, "message": message, "path": path.map(|p| p.display().to_string())});
    let _ = writeln!(std::io::stdout(), "{document}");
}

/// Kind of an interruption, which is no error.
const INTERRUPTED: &str = "interrupted";

/// Returns the kind of an error (`io`, `invalid`, `unsupported`, `input`, `usage` or `interrupted`), and the file concerned.
fn classify(e: &anyhow::Error) -> (&'static str, Option<PathBuf>) {
    let Some(e) = e.chain().find_map(|cause| cause.downcast_ref::<anemoe_io::Error>()) else {
        let is_io = e.chain().any(|cause| cause.is::<std::io::Error>());
        return (if is_io { "io" } else { "usage" }, None);
    };
    // An error without a code of the system: the file is not what it should be.
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
