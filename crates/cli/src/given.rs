//! The command line of this process: options for journals, and inputs that no output may replace.

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, ValueHint};
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Arguments that do not change what is done: the bundle itself, and the display of results.
const LEFT_OUT: &str = "json offline ops help version bundle path out intent note no_journal";

/// Options that name an output. Every other path on a command line is an input, which no output may replace. An output that
/// is missing here shows, since a second run cannot replace its file; no input can be forgotten.
const OUTPUTS: [&str; 3] = ["out", "outputs", "save"];

/// Words of the command line, sorted by their use.
#[derive(Default)]
pub struct Given {
    /// Name of the command.
    pub command: String,
    /// Options with their defaults, for the journal.
    pub options: Map<String, Value>,
    /// Files to read.
    pub inputs: Vec<PathBuf>,
}

static GIVEN: OnceLock<Given> = OnceLock::new();

impl Given {
    /// Returns what was given to this process; none before [`remember`].
    pub fn here() -> Option<&'static Given> {
        GIVEN.get()
    }
}

/// Replaces the `~` of `--OPTION=~/PATH` by the home folder, which shells do only where a word begins with it.
pub fn with_home(command: &Command, words: Vec<OsString>, home: Option<PathBuf>) -> Vec<OsString> {
    let Some(command) = words.iter().find_map(|word| command.find_subcommand(word)) else { return words };
    let expanded = |word: &OsString| {
        let (name, rest) = word.to_str()?.strip_prefix("--")?.split_once("=~")?;
        let arg = command.get_arguments().find(|arg| arg.get_long() == Some(name))?;
        let path = rest.strip_prefix('/').or(rest.is_empty().then_some(""))?;
        let path = home.as_ref().filter(|_| is_path(arg))?.join(path);
        let mut word = OsString::from(format!("--{name}="));
        word.push(path);
        Some(word)
    };
    words.into_iter().map(|word| expanded(&word).unwrap_or(word)).collect()
}

/// Keeps the options and the inputs of the running command.
pub fn remember(command: &Command, matches: &ArgMatches) {
    let Some((name, words)) = matches.subcommand() else { return };
    let Some(command) = command.find_subcommand(name) else { return };
    let mut given = Given { command: name.into(), ..Given::default() };
    for arg in command.get_arguments() {
        let id = arg.get_id().as_str();
        let Ok(Some(values)) = words.try_get_raw(id) else { continue };
        if is_path(arg) && !OUTPUTS.contains(&id) {
            given.inputs.extend(values.clone().map(PathBuf::from));
        }
        let source = words.value_source(id);
        let is_flag = !arg.get_action().takes_values();
        let is_idle = is_flag && source == Some(ValueSource::DefaultValue);
        if LEFT_OUT.split(' ').any(|left_out| left_out == id) || source.is_none() || is_idle {
            continue;
        }
        let texts: Vec<String> = values.map(|v| v.to_string_lossy().into_owned()).collect();
        let value = match &texts[..] {
            _ if is_flag => Value::Bool(true),
            // A checkpoint named 7 is no number.
            [one] if !arg.is_positional() => one.parse().map_or_else(|_| one.clone().into(), Value::Number),
            _ => texts.join(",").into(),
        };
        given.options.insert(id.into(), value);
    }
    // Standard input, if a shell opened it from a file (`< notes.txt`).
    let stdin = Path::new("/dev/stdin");
    if cfg!(unix) && stdin.metadata().is_ok_and(|m| m.is_file()) {
        given.inputs.push(stdin.into());
    }
    let _ = GIVEN.set(given);
}

fn is_path(arg: &Arg) -> bool {
    arg.get_value_hint() == ValueHint::AnyPath
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_home_folder_stands_for_a_tilde_in_a_path_behind_an_option() {
        let command = <crate::Cli as clap::CommandFactory>::command();
        for (word, expected) in [
            ("--out=~/x", "--out=/home/u/x"),
            ("--out=~", "--out=/home/u/"),
            ("--out=~other/x", "--out=~other/x"),
            ("--out=a~/x", "--out=a~/x"),
            ("--prompt=~/x", "--prompt=~/x"),
            ("--none=~/x", "--none=~/x"),
            ("~/x", "~/x"),
        ] {
            let line = |word: &str| ["anemoe", "golden", word].map(OsString::from).to_vec();
            assert_eq!(with_home(&command, line(word), Some("/home/u".into())), line(expected));
            assert_eq!(with_home(&command, line(word), None), line(word));
        }
    }

    #[test]
    fn every_path_of_a_command_line_is_an_input_but_outputs() {
        let mut root = <crate::Cli as clap::CommandFactory>::command();
        root.build();
        let paths = |command: &Command, are_outputs: bool| -> Vec<String> {
            let ids = command.get_arguments().filter(|a| is_path(a)).map(|a| a.get_id().to_string());
            ids.filter(|id| OUTPUTS.contains(&id.as_str()) == are_outputs).collect()
        };
        for (name, inputs) in [
            ("bench", &["bundle", "compiled"][..]),
            ("calibrate", &["checkpoint", "text"]),
            ("golden", &["checkpoint", "prompt_file"]),
            ("plan", &["auto_text", "checkpoint", "evidence", "forms", "importance"]),
            ("predict", &["inputs", "package"]),
            ("quantize", &["importance", "tensor"]),
        ] {
            let mut found = paths(root.find_subcommand(name).unwrap(), false);
            found.sort();
            assert_eq!(found, inputs, "{name}");
        }
        // Outputs of files and folders: a new one is added here, and takes its path from `Overwrite::output`.
        let written = |c: &Command| {
            let name = c.get_name().to_string();
            paths(c, true).into_iter().map(move |id| format!("{name} --{id}"))
        };
        let mut outputs: Vec<String> = root.get_subcommands().flat_map(written).collect();
        outputs.sort();
        let known = [
            "bench --save",
            "build --out",
            "calibrate --out",
            "check --save",
            "golden --out",
            "man --out",
            "plan --out",
            "predict --outputs",
            "quantize --out",
            "quickstart --out",
            "report --out",
            "reproduce --out",
            "tune --out",
            "verify-on-mac --out",
        ];
        assert_eq!(outputs, known);
    }
}
