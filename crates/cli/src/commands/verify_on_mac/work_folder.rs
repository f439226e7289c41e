//! Work folder of a verification: bundle, trials, and the record of each stage that was finished.

use crate::mac_report::stage::{StageName, StageRecord};
use anemoe_io::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// File with the settings that the folder's documents depend on.
const SETTINGS: &str = "settings.json";
/// Largest record that is read, in bytes.
const MAX_RECORD_BYTES: u64 = 128 << 20;
/// Largest file of settings that is read, in bytes.
const MAX_SETTINGS_BYTES: u64 = 1 << 20;

/// Folder of one verification.
pub struct WorkFolder {
    path: PathBuf,
}

impl WorkFolder {
    /// Opens or makes the folder. With `again`, deletes the results of other settings.
    ///
    /// # Errors
    /// The folder is no work folder, or was begun with other settings.
    pub fn open(path: &Path, settings: &Value, again: bool) -> Result<WorkFolder> {
        let folder = WorkFolder { path: path.to_path_buf() };
        let file = path.join(SETTINGS);
        let is_empty = path.read_dir().map_or(true, |mut entries| entries.next().is_none());
        if file.is_file() {
            let text = anemoe_io::read_input(&file, MAX_SETTINGS_BYTES).map_err(|e| Error::io(&file, e))?;
            let known: Value = anemoe_io::json::parse(&text).unwrap_or_default();
            if known != *settings {
                let differing = |(key, value): (&String, &Value)| {
                    let old = known.get(key).cloned().unwrap_or_default();
                    (old != *value).then(|| format!("{key} was {old} and is {value}"))
                };
                let changed: Vec<String> =
                    settings.as_object().into_iter().flatten().filter_map(differing).collect();
                if !again {
                    let what = format!("{}; give --again or another --work", changed.join(", "));
                    return Err(not_ours(path, &what));
                }
                folder.forget(&StageName::ALL)?;
            }
        } else if !is_empty {
            return Err(not_ours(path, "a folder that verify-on-mac did not make; give another --work"));
        }
        let stages = path.join("stages");
        std::fs::create_dir_all(&stages).map_err(|e| Error::io(&stages, e))?;
        let text = serde_json::to_vec_pretty(settings).map_err(|e| Error::io(&file, e.into()))?;
        anemoe_bundle::write_atomic(&file, &text)?;
        Ok(folder)
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the bundle.
    pub fn bundle(&self) -> PathBuf {
        self.path.join("bundle.anemoe")
    }

    /// Returns the folder of the trials of forms.
    pub fn trials(&self) -> PathBuf {
        self.path.join("tune")
    }

    /// Returns the file of the forms that were chosen.
    pub fn forms(&self) -> PathBuf {
        self.path.join("forms.toml")
    }

    /// Returns the file of the plan report.
    pub fn plan(&self) -> PathBuf {
        self.path.join("plan.json")
    }

    /// Returns the file of the bench's document.
    pub fn bench(&self) -> PathBuf {
        self.path.join("bench.json")
    }

    /// Returns the file of the golden that is made if the checkpoint has none.
    pub fn golden(&self) -> PathBuf {
        self.path.join("golden.npz")
    }

    fn record_file(&self, stage: StageName) -> PathBuf {
        self.path.join(stage.entry())
    }

    /// Reads the record of a stage; none if it is missing or damaged, or the stage was not finished.
    pub fn record(&self, stage: StageName) -> Option<StageRecord> {
        let text = anemoe_io::read_input(&self.record_file(stage), MAX_RECORD_BYTES).ok()?;
        let record: StageRecord = anemoe_io::json::parse(&text).ok()?;
        (record.stage == stage && record.end.is_finished()).then_some(record)
    }

    /// Writes the record of a stage.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep(&self, record: &StageRecord) -> Result<()> {
        let file = self.record_file(record.stage);
        let text = serde_json::to_vec_pretty(record).map_err(|e| Error::io(&file, e.into()))?;
        anemoe_bundle::write_atomic(&file, &text)
    }

    /// Removes the records of stages and the files that these stages made.
    ///
    /// # Errors
    /// A file or a folder cannot be removed.
    pub fn forget(&self, stages: &[StageName]) -> Result<()> {
        for stage in stages {
            let mut gone = vec![self.record_file(*stage)];
            match stage {
                StageName::Tune => gone.extend([self.forms(), self.trials()]),
                StageName::Build => gone.push(self.bundle()),
                StageName::Check => gone.push(self.plan()),
                StageName::Bench => gone.push(self.bench()),
                _ => {}
            }
            for path in gone {
                let removed =
                    if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
                match removed {
                    Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(&path, e)),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// Makes an error about a work folder.
fn not_ours(path: &Path, what: &str) -> Error {
    Error::invalid(path, format!("work folder: {what}"))
}
