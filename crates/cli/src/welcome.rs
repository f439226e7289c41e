//! `anemoe` without a command prints a few lines about the next commands to type.

use crate::error_report::{self, INVALID};
use crate::shell::quoted;
use crate::ui;
use anemoe_convert::path_kind::PathKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Most entries of the current folder that are read.
const MAX_ENTRIES: usize = 200;

/// Bundle and checkpoint in the current folder, for the commands shown.
#[derive(Default)]
struct Surroundings {
    bundle: Option<PathBuf>,
    checkpoint: Option<PathBuf>,
}

impl Surroundings {
    /// Finds the first bundle and the first checkpoint of a folder, by name.
    fn of(folder: &Path) -> Surroundings {
        let Ok(entries) = std::fs::read_dir(folder) else { return Surroundings::default() };
        let mut names: Vec<PathBuf> =
            entries.take(MAX_ENTRIES).filter_map(|e| Some(e.ok()?.file_name().into())).collect();
        names.sort();
        let first = |wanted: fn(&PathKind) -> bool| {
            names.iter().find(|name| wanted(&PathKind::at(&folder.join(name)))).cloned()
        };
        Surroundings {
            bundle: first(|kind| *kind == PathKind::Bundle),
            checkpoint: first(|kind| matches!(kind, PathKind::Checkpoint | PathKind::Gguf)),
        }
    }
}

/// Prints the lines on standard error and returns the status of bad usage, since a script has to give a command.
pub fn print(json: bool) -> ExitCode {
    if json {
        error_report::print_json("usage", "no command; `anemoe help` lists them", None, None);
    }
    ui::message(text(&Surroundings::of(Path::new("."))));
    ExitCode::from(INVALID)
}

fn text(around: &Surroundings) -> String {
    let checkpoint = around.checkpoint.as_deref().map_or_else(|| "CHECKPOINT".into(), quoted);
    let bundle = around.bundle.as_deref().map_or_else(|| "my.anemoe".into(), quoted);
    let mut rows = Vec::new();
    if around.bundle.is_some() {
        rows.push((format!("anemoe chat {bundle}"), "talk with the model that is here"));
        rows.push((format!("anemoe serve {bundle}"), "serve it as OpenAI's API does"));
    }
    if around.bundle.is_none() || around.checkpoint.is_some() {
        rows.push((format!("anemoe inspect {checkpoint}"), "see what a checkpoint holds"));
        rows.push((
            format!("anemoe build {checkpoint} -o my.anemoe"),
            "make Core ML packages of it, and check them",
        ));
    }
    if around.bundle.is_none() {
        rows.push(("anemoe chat my.anemoe".into(), "talk with the model"));
        rows.push(("anemoe quickstart".into(), "all of that on a small model, in a clone of the repository"));
    }
    rows.push(("anemoe help".into(), "all commands"));
    let width = rows.iter().map(|(command, _)| command.chars().count()).max().unwrap_or(0);
    let mut text = String::from(
        "anemoe takes language models, dense and Mixture-of-Experts, to the Apple Neural Engine, and to any CPU. Type next:\n",
    );
    for (command, purpose) in rows {
        let fill = " ".repeat(width - command.chars().count());
        text += &format!("\n  {command}{fill}   {purpose}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_folder_stand_in_the_commands() {
        let empty = text(&Surroundings::default());
        assert!(
            empty.contains("anemoe quickstart") && empty.contains("anemoe build CHECKPOINT -o my.anemoe")
        );
        let bundle = Some(PathBuf::from("my model.anemoe"));
        let found = text(&Surroundings { bundle, ..Surroundings::default() });
        assert!(found.contains("anemoe chat 'my model.anemoe'") && !found.contains("quickstart"), "{found}");
        let checkpoint = Some(PathBuf::from("model.gguf"));
        let found = text(&Surroundings { checkpoint, ..Surroundings::default() });
        assert!(found.contains("anemoe build model.gguf -o my.anemoe"), "{found}");
        assert!(found.lines().count() <= 10, "{found}");
    }
}
