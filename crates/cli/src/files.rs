//! Files that commands write, and folders for intermediate results.

use anemoe_io::{Output, PathError, Scratch};
use std::path::Path;

/// The permission to replace files.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Overwrite {
    /// Replace a file or package that exists already; an input is never replaced.
    #[arg(long)]
    pub force: bool,
}

impl Overwrite {
    /// Checks, before any work, that `path` may be written, and is none of `inputs`.
    ///
    /// # Errors
    /// It exists and `--force` is not given, or it is an input.
    pub fn output(self, path: &Path, inputs: &[&Path]) -> anyhow::Result<Output> {
        Ok(Output::new(path, self.force, inputs).map_err(|source| PathError { path: path.into(), source })?)
    }
}

/// Makes a folder for intermediate results in the folder `--scratch` names, or in the system's folder of temporary files. It
/// goes with its last user, after Ctrl-C too.
///
/// # Errors
/// There is no such folder, or it cannot be written.
pub fn scratch(folder: Option<&Path>) -> anyhow::Result<Scratch> {
    let system = std::env::temp_dir();
    let folder = folder.unwrap_or(&system);
    Ok(Scratch::new(folder).map_err(|source| PathError { path: folder.into(), source })?)
}
