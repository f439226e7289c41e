//! Documents of the commands that a recipe ran, in a file, so that an interrupted run goes on where it was.

use super::command::GateCommand;
use anemoe_io::Error;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name of the file.
const FILE: &str = "reproduce.json";
/// Largest file that is read, in bytes; a document of a check of a large model has some megabytes.
const MAX_BYTES: u64 = 1 << 30;

/// Identity of a run; documents of another run say nothing about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RunIdentity {
    pub version: String,
    pub source: String,
    pub recipe: String,
}

/// Documents of commands, by build and command.
#[derive(Serialize, Deserialize)]
pub(super) struct RunRecord {
    run: RunIdentity,
    builds: BTreeMap<String, BTreeMap<String, Value>>,
    #[serde(skip)]
    folder: Option<PathBuf>,
}

impl RunRecord {
    /// Makes a record that is kept in memory.
    pub fn in_memory(run: RunIdentity) -> RunRecord {
        RunRecord { run, builds: BTreeMap::new(), folder: None }
    }

    /// Opens the record in a folder, with the documents that an earlier run of the same identity left; makes the folder if
    /// needed.
    ///
    /// # Errors
    /// The folder cannot be written, or holds another run or something else.
    pub fn open(folder: &Path, run: RunIdentity) -> anyhow::Result<RunRecord> {
        let file = folder.join(FILE);
        if file.symlink_metadata().is_ok() {
            let text = anemoe_io::read_input(&file, MAX_BYTES).map_err(|e| Error::io(&file, e))?;
            let mut read: RunRecord = anemoe_io::json::parse(&text)
                .map_err(|e| Error::invalid(&file, format!("record of a recipe: {e}")))?;
            let (was, now) = (&read.run, &run);
            if was != now {
                let differs = if was.source != now.source {
                    format!("of {}, and this is of {}", was.source, now.source)
                } else if was.recipe != now.recipe {
                    "of a recipe with another text".into()
                } else {
                    format!("by version {}", was.version)
                };
                anyhow::bail!(
                    "{}: holds a run {differs}; name another folder with --out, or remove it",
                    folder.display()
                );
            }
            read.folder = Some(folder.to_path_buf());
            return Ok(read);
        }
        if std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
            anyhow::bail!(
                "{}: is not empty, and holds no run of a recipe; name another folder with --out",
                folder.display()
            );
        }
        std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        let new = RunRecord { folder: Some(folder.to_path_buf()), ..RunRecord::in_memory(run) };
        new.write()?;
        Ok(new)
    }

    /// Returns the document of a command about a build.
    pub fn get(&self, build: &str, command: GateCommand) -> Option<&Value> {
        self.builds.get(build)?.get(command.name())
    }

    /// Adds the document of a command, and writes the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add(&mut self, build: &str, command: GateCommand, document: Value) -> anyhow::Result<()> {
        self.builds.entry(build.into()).or_default().insert(command.name().into(), document);
        self.write()
    }

    fn write(&self) -> anyhow::Result<()> {
        if let Some(folder) = &self.folder {
            anemoe_bundle::write_atomic(&folder.join(FILE), &serde_json::to_vec(self)?)?;
        }
        Ok(())
    }
}
