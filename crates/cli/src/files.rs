//! Files that commands write, and folders for intermediate results.

use anemoe_convert::path_kind;
use anemoe_io::{Error, Output, Scratch};
use clap::{ArgMatches, Command, ValueHint};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Options that name an output. Every other path on a command line is an input, which no output may replace. An output that
/// is missing here shows, since a second run cannot replace its file; no input can be forgotten.
const OUTPUTS: [&str; 3] = ["out", "outputs", "save"];

/// Inputs of the running command.
static INPUTS: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Keeps the inputs that the command line names, for [`Overwrite::output`].
pub fn remember(command: &Command, matches: &ArgMatches) {
    let Some((name, given)) = matches.subcommand() else { return };
    let Some(command) = command.find_subcommand(name) else { return };
    let mut inputs = Vec::new();
    for id in input_options(command) {
        inputs.extend(given.try_get_raw(id).ok().flatten().into_iter().flatten().map(PathBuf::from));
    }
    // Standard input, if a shell opened it from a file (`< notes.txt`).
    let stdin = Path::new("/dev/stdin");
    if cfg!(unix) && stdin.metadata().is_ok_and(|m| m.is_file()) {
        inputs.push(stdin.into());
    }
    let _ = INPUTS.set(inputs);
}

/// Lists the options and arguments of a command that name files to read.
fn input_options(command: &Command) -> impl Iterator<Item = &str> {
    let paths = command.get_arguments().filter(|arg| arg.get_value_hint() == ValueHint::AnyPath);
    paths.map(|arg| arg.get_id().as_str()).filter(|id| !OUTPUTS.contains(id))
}

/// The permission to replace files.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Overwrite {
    /// Replace a file or package that exists already; an input is never replaced.
    #[arg(long)]
    pub force: bool,
}

impl Overwrite {
    /// Checks, before any work, that `path` may be written and is none of the inputs on the command line.
    ///
    /// # Errors
    /// `path` exists and `--force` is not given, it is an input, or it is a file of a bundle or a package.
    pub fn output(self, path: &Path) -> anyhow::Result<Output> {
        self.output_beside(path, &[])
    }

    /// Opens an output like [`Overwrite::output`], with more `inputs`, whose paths are only parts of
    /// arguments.
    ///
    /// # Errors
    /// Fails like [`Overwrite::output`].
    pub fn output_beside(self, path: &Path, inputs: &[&Path]) -> anyhow::Result<Output> {
        let failed = |source| Error::io(path, source);
        let named = INPUTS.get().into_iter().flatten().map(PathBuf::as_path);
        let inputs: Vec<&Path> = inputs.iter().copied().chain(named).collect();
        let output = Output::new(path, self.force, &inputs).map_err(failed)?;
        if let Some(owner) = path_kind::owner(path) {
            let what = format!("this is a file of {owner}; choose another name");
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, what)).into());
        }
        Ok(output)
    }
}

/// Makes a folder for intermediate results in `folder`, or in the system's folder of temporary files. The folder is deleted
/// with its last user, after Ctrl-C too.
///
/// # Errors
/// The outer folder does not exist, or cannot be written.
pub fn scratch(folder: Option<&Path>) -> anyhow::Result<Scratch> {
    let system = std::env::temp_dir();
    let folder = folder.unwrap_or(&system);
    Ok(Scratch::new(folder).map_err(|source| Error::io(folder, source))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_of_a_command_line_is_an_input_but_outputs() {
        let mut root = <crate::Cli as clap::CommandFactory>::command();
        root.build();
        let of = |name: &str| -> Vec<String> {
            let mut ids: Vec<String> =
                input_options(root.find_subcommand(name).unwrap()).map(str::to_string).collect();
            ids.sort();
            ids
        };
        for (name, inputs) in [
            ("bench", &["bundle", "compiled"][..]),
            ("calibrate", &["checkpoint", "text"]),
            ("golden", &["checkpoint", "prompt_file"]),
            ("plan", &["auto_text", "checkpoint", "evidence", "forms", "importance"]),
            ("predict", &["inputs", "package"]),
            ("quantize", &["importance", "tensor"]),
        ] {
            assert_eq!(of(name), inputs, "{name}");
        }
        // Outputs of files and folders: a new one is added here, and takes its path from `Overwrite::output`.
        let mut outputs = Vec::new();
        for command in root.get_subcommands() {
            let paths = command.get_arguments().filter(|a| a.get_value_hint() == ValueHint::AnyPath);
            let written = paths.filter(|a| OUTPUTS.contains(&a.get_id().as_str()));
            outputs.extend(written.map(|a| format!("{} --{}", command.get_name(), a.get_id())));
        }
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
