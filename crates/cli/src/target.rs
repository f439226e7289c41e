//! Checks that a path is a bundle before a command opens it, and names the path's kind if it is not.

use crate::shell::quoted;
use anemoe_bundle::journal::{self, status};
use anemoe_bundle::{CHAIN_FILE, Error, SHARDS_DIR};
use anemoe_convert::path_kind::{PathKind, list};
use std::io;
use std::path::Path;

/// Accepts a finished bundle.
pub fn expect_bundle(path: &Path) -> anyhow::Result<()> {
    match PathKind::at(path) {
        PathKind::Bundle => Ok(()),
        place => Err(not_a_bundle(path, &place).into()),
    }
}

/// Accepts a bundle that is finished or unfinished.
pub fn expect_begun_bundle(path: &Path) -> anyhow::Result<()> {
    match PathKind::at(path) {
        PathKind::Bundle | PathKind::Unfinished => Ok(()),
        place => Err(not_a_bundle(path, &place).into()),
    }
}

/// Accepts a .mlpackage, or a path whose kind is not known.
pub fn expect_package(path: &Path) -> anyhow::Result<()> {
    let name = quoted(path);
    let place = PathKind::at(path);
    let next = match &place {
        PathKind::Bundle => format!(
            "its packages are the folders in {}; anemoe generate {name} runs the whole",
            quoted(&path.join(SHARDS_DIR))
        ),
        PathKind::Unfinished => unfinished(path),
        PathKind::Checkpoint | PathKind::Gguf => {
            format!("build it first: anemoe build {name} -o NAME.anemoe")
        }
        PathKind::Package | PathKind::Nothing => return Ok(()),
        _ => "give the folder of a package, whose name ends in .mlpackage".into(),
    };
    Err(Error::invalid(path, format!("package: this is {}; {next}", place.name())).into())
}

/// Tells whether a text names a checkpoint and is no path.
fn is_checkpoint_name(text: &str) -> bool {
    ["synthetic:", "hf:"].iter().any(|prefix| text.starts_with(prefix))
}

fn not_a_bundle(path: &Path, place: &PathKind) -> Error {
    let name = quoted(path);
    let next = match place {
        PathKind::Nothing if path.to_str().is_some_and(is_checkpoint_name) => {
            let text = path.to_str().unwrap_or_default();
            // The name ends before `@REV` or `?KEY=VALUE`: hf:OWNER/NAME@REV, synthetic:NAME?KEY=VALUE
            let end = text.split(['@', '?']).next().unwrap_or(text).rsplit(['/', ':']).next();
            let out = end.filter(|n| !n.is_empty()).map_or_else(|| "NAME".into(), |n| quoted(Path::new(n)));
            let what = format!(
                "bundle: this names a checkpoint; build it first: anemoe build {name} -o {out}.anemoe"
            );
            return Error::invalid(path, what);
        }
        PathKind::Nothing => {
            let what = format!("no such file or folder; `anemoe build CHECKPOINT -o {name}` makes a bundle");
            return Error::io(path, io::Error::new(io::ErrorKind::NotFound, what));
        }
        PathKind::Checkpoint | PathKind::Gguf => {
            let stem = path.file_stem().filter(|_| *place == PathKind::Gguf).or(path.file_name());
            let out = stem.map_or_else(|| "model".into(), |s| quoted(Path::new(s)));
            format!("build it first: anemoe build {name} -o {out}.anemoe")
        }
        PathKind::Unfinished => return Error::invalid(path, format!("bundle: {}", unfinished(path))),
        PathKind::Package => {
            format!("look at it with `anemoe inspect {name}`, run it with `anemoe predict {name}`")
        }
        PathKind::Safetensors => {
            "build the checkpoint whose folder holds it: anemoe build FOLDER -o NAME.anemoe".into()
        }
        PathKind::Checkpoints(found) => {
            format!("build one of them: anemoe build CHECKPOINT -o NAME.anemoe ({})", list(found))
        }
        PathKind::EmptyFolder => format!("fill it: anemoe build CHECKPOINT -o {name}"),
        PathKind::File if path.file_name() == Some(CHAIN_FILE.as_ref()) => {
            let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let what = format!(
                "bundle: this is the contract of a bundle; give the folder of the bundle: {}",
                quoted(folder)
            );
            return Error::invalid(path, what);
        }
        PathKind::File | PathKind::Folder | PathKind::Bundle => {
            format!("there is no {CHAIN_FILE}; `anemoe build CHECKPOINT -o NAME.anemoe` makes a bundle")
        }
    };
    Error::invalid(path, format!("bundle: this is {}; {next}", place.name()))
}

/// Returns the reason why a build has not finished, as far as its journal tells, and the command that completes it.
fn unfinished(path: &Path) -> String {
    let name = quoted(path);
    let events = journal::read(path).map(|j| j.events).unwrap_or_default();
    let newest = events.iter().rev().find(|e| e.kind == "build");
    if let Some(failed) = newest.filter(|e| e.status == status::FAIL) {
        let gate = failed.facts.get("failed").and_then(|v| v.as_str()).unwrap_or("a gate");
        return format!(
            "this is an unfinished bundle, whose build stopped because a gate failed ({gate}); see `anemoe journal {name}`, \
             then build with other options, or go on by the same build command with --skip-gates"
        );
    }
    if newest.is_some_and(|e| e.facts.get("part").is_some_and(|p| !p.is_null())) {
        return format!(
            "this is an unfinished bundle, which is built in parts; when all parts are built: anemoe assemble {name}"
        );
    }
    format!(
        "this is an unfinished bundle; repeat its build command, which goes on where it stopped (`anemoe journal {name}` \
         shows the options)"
    )
}
