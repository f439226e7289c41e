//! Files that commands write, and folders for intermediate results.

use crate::given::Given;
use anemoe_convert::path_kind;
use anemoe_io::{Error, Output, Scratch};
use std::io;
use std::path::{Path, PathBuf};

/// The permission to replace files.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Overwrite {
    /// Replace a file or package that exists already; an input is never replaced.
    #[arg(long)]
    pub force: bool,
}

impl Overwrite {
    /// Checks, before any work, that `path` may be written and is none of the inputs on the command line.
    pub fn output(self, path: &Path) -> anyhow::Result<Output> {
        self.output_beside(path, &[])
    }

    /// Opens an output like [`Overwrite::output`], with more `inputs`, whose paths are only parts of
    /// arguments.
    pub fn output_beside(self, path: &Path, inputs: &[&Path]) -> anyhow::Result<Output> {
        let failed = |source| Error::io(path, source);
        let named = Given::here().into_iter().flat_map(|given| &given.inputs).map(PathBuf::as_path);
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
pub fn scratch(folder: Option<&Path>) -> anyhow::Result<Scratch> {
    let system = std::env::temp_dir();
    let folder = folder.unwrap_or(&system);
    Ok(Scratch::new(folder).map_err(|source| Error::io(folder, source))?)
}
