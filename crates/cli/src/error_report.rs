//! Errors as the user and other programs see them.

use crate::ui;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Bad usage, or input that is invalid or unsupported.
const INVALID: u8 = 2;

/// Prints clap's own message. Help and version are no errors.
pub fn usage(e: &clap::Error) -> ExitCode {
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

fn print_json(kind: &str, message: &str, path: Option<PathBuf>) {
    let document = serde_json::json!({"error": {"kind": kind, "message": message, "path": path.map(|p| p.display().to_string())}});
    let _ = writeln!(std::io::stdout(), "{document}");
}

/// Kind of an error that is none.
const INTERRUPTED: &str = "interrupted";

/// `io`, `invalid`, `unsupported`, `input`, `usage` or `interrupted`, and the file concerned.
type Kind = (&'static str, Option<PathBuf>);

fn owned(path: &Path) -> Option<PathBuf> {
    Some(path.to_path_buf())
}

/// `io` where the system refused, `invalid` where a file is not what it should be.
fn of_system(source: &std::io::Error, path: &Path) -> Kind {
    match source.kind() {
        ErrorKind::InvalidData | ErrorKind::InvalidInput if source.raw_os_error().is_none() => {
            ("invalid", owned(path))
        }
        _ => ("io", owned(path)),
    }
}

fn of_package(e: &anemoe_mlpackage::Error) -> Kind {
    use anemoe_mlpackage::Error as E;
    match e {
        E::Io { path, source } => of_system(source, path),
        E::InvalidFile { path, .. } => ("invalid", owned(path)),
        E::Unsupported(_) => ("unsupported", None),
        _ => ("invalid", None),
    }
}

fn of_bundle(e: &anemoe_bundle::Error) -> Kind {
    use anemoe_bundle::Error as E;
    match e {
        E::Io { path, source } => of_system(source, path),
        E::Invalid { path, .. } => ("invalid", owned(path)),
    }
}

fn of_npz(e: &anemoe_npz::Error) -> Kind {
    use anemoe_npz::Error as E;
    match e {
        E::Io { path, source } => of_system(source, path),
        E::Invalid { path, .. } => ("invalid", owned(path)),
        E::Unsupported { path, .. } => ("unsupported", owned(path)),
    }
}

fn of_convert(e: &anemoe_convert::Error) -> Kind {
    use anemoe_convert::Error as E;
    match e {
        E::Io { path, source } => of_system(source, path),
        E::Room { path, .. } => ("io", owned(path)),
        E::Invalid { path, .. } => ("invalid", owned(path)),
        E::Unsupported { path, .. } => ("unsupported", owned(path)),
        E::Usage(_) => ("usage", None),
        E::Interrupted => (INTERRUPTED, None),
        E::Package(e) => of_package(e),
        E::Bundle(e) => of_bundle(e),
        E::Npz(e) => of_npz(e),
    }
}

fn of_runtime(e: &anemoe_runtime::Error) -> Kind {
    use anemoe_runtime::Error as E;
    match e {
        E::Io { path, source } => of_system(source, path),
        E::Invalid { path, .. } => ("invalid", owned(path)),
        E::Unsupported { path, .. } => ("unsupported", owned(path)),
        E::Input(_) => ("input", None),
        E::Package(e) => of_package(e),
        E::Bundle(e) => of_bundle(e),
        E::Npz(e) => of_npz(e),
    }
}

fn classify(e: &anyhow::Error) -> Kind {
    for cause in e.chain() {
        if let Some(e) = cause.downcast_ref::<anemoe_io::PathError>() {
            return of_system(&e.source, &e.path);
        }
        if let Some(e) = cause.downcast_ref::<anemoe_mlpackage::Error>() {
            return of_package(e);
        }
        if let Some(e) = cause.downcast_ref::<anemoe_bundle::Error>() {
            return of_bundle(e);
        }
        if let Some(e) = cause.downcast_ref::<anemoe_npz::Error>() {
            return of_npz(e);
        }
        if let Some(e) = cause.downcast_ref::<anemoe_convert::Error>() {
            return of_convert(e);
        }
        if let Some(e) = cause.downcast_ref::<anemoe_runtime::Error>() {
            return of_runtime(e);
        }
        if let Some(e) = cause.downcast_ref::<anemoe_gates::Error>() {
            use anemoe_gates::Error as E;
            return match e {
                E::Io { path, source } => of_system(source, path),
                E::Usage(_) => ("usage", None),
                E::Convert(e) => of_convert(e),
                E::Runtime(e) => of_runtime(e),
                E::Package(e) => of_package(e),
            };
        }
    }
    match e.chain().any(|cause| cause.is::<std::io::Error>()) {
        true => ("io", None),
        false => ("usage", None),
    }
}
