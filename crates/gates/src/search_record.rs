//! Folder of a search for kinds: what it has measured and compressed, so that a search that was ended goes on there.
//!
//! ```text
//! .anemoe-search-HASH/measured.jsonl   {"of": SHA-256 of the question, "found": answer}, a line per measurement
//!                    /lut3/            matrices that were compressed for a text in this kind
//!                    /lock             held while a search runs
//! ```

use crate::{Error, Result};
use anemoe_convert::build::{SEARCH_PREFIX, lock_file};
use anemoe_io::{Kind, OwnedDir, json, locked};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// File of the measurements.
const MEASURED: &str = "measured.jsonl";
/// Digits of the identity's hash in the folder's name.
const DIGITS: usize = 16;

/// Folder of one search, locked.
pub struct SearchRecord {
    parent: OwnedDir,
    name: String,
    /// True if this search made the parent, which goes with the record if nothing else is in it.
    made_parent: bool,
    measured: Mutex<Measured>,
    _lock: File,
}

/// Measurements by the hash of their question, and the file that new ones are appended to.
struct Measured {
    known: BTreeMap<String, Value>,
    /// None after a line could not be written: the search goes on without a record.
    file: Option<File>,
}

/// Line of the file of measurements.
#[derive(Serialize, Deserialize)]
struct Line {
    of: String,
    found: Value,
}

impl SearchRecord {
    /// Opens or makes the folder, in `parent`, of the search with this identity: the SHA-256 of all that decides what
    /// the search measures. A line that a killed search left half-written is dropped.
    ///
    /// # Errors
    /// Another process holds the lock, or the folder cannot be made or read.
    pub fn open(parent: &Path, identity: &str) -> Result<SearchRecord> {
        let made_parent = !parent.exists();
        let name = format!("{SEARCH_PREFIX}{}", &identity[..DIGITS.min(identity.len())]);
        let parent = OwnedDir::new(parent);
        parent.create_dir(&name)?;
        let lock = lock_file(&parent, &Path::new(&name).join("lock"), true)?;
        let path = parent.expect(format!("{name}/{MEASURED}"), false)?;
        let failed = |e| Error::io(&path, e);
        let text = fs::read(&path).or_else(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Ok(Vec::new()),
            _ => Err(failed(e)),
        })?;
        let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        let lines = text[..whole].split(|b| *b == b'\n');
        let known = lines.filter_map(|line| json::parse::<Line>(line).ok());
        let known = known.map(|line| (line.of, line.found)).collect();
        let file = File::options().create(true).append(true).open(&path).map_err(failed)?;
        file.set_len(whole as u64).map_err(failed)?;
        let measured = Mutex::new(Measured { known, file: Some(file) });
        Ok(SearchRecord { parent, name, made_parent, measured, _lock: lock })
    }

    /// Returns the folder.
    pub fn folder(&self) -> PathBuf {
        self.parent.root().join(&self.name)
    }

    /// Returns the answer to a question, if it was measured before.
    pub fn known<T: DeserializeOwned>(&self, question: &impl Serialize) -> Option<T> {
        let found = locked(&self.measured).known.get(&hash(question)).cloned();
        found.and_then(|found| serde_json::from_value(found).ok())
    }

    /// Returns the answer to a question: as measured before, or from `measure`, and then written down if there is room.
    ///
    /// # Errors
    /// `measure` fails.
    pub fn once<T: Serialize + DeserializeOwned>(
        &self,
        question: &impl Serialize,
        measure: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if let Some(known) = self.known(question) {
            return Ok(known);
        }
        let found = measure()?;
        let line = Line { of: hash(question), found: serde_json::to_value(&found).unwrap_or_default() };
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        text.push(b'\n');
        let mut measured = locked(&self.measured);
        let written =
            measured.file.as_mut().map(|file| file.write_all(&text).and_then(|()| file.sync_data()));
        if matches!(written, Some(Err(_))) {
            measured.file = None;
        }
        measured.known.insert(line.of, line.found);
        Ok(found)
    }

    /// Removes the folder, as far as the system allows.
    pub fn remove(&self) {
        let _ = self.parent.remove(&self.name);
        if self.made_parent {
            let _ = fs::remove_dir(self.parent.root());
        }
    }

    /// Removes the folder after an error that the same search would meet again, or if it could not be written.
    pub fn remove_after(&self, e: &Error) {
        let is_passing = matches!(e.kind(), Kind::Interrupted | Kind::Io | Kind::Room);
        if !is_passing || locked(&self.measured).file.is_none() {
            self.remove();
        }
    }
}

/// Returns the SHA-256 of a question's JSON.
fn hash(question: &impl Serialize) -> String {
    anemoe_bundle::sha256(&serde_json::to_vec(question).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_measured_once() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let identity = "0123456789abcdef0123";
        let answers = [0.1f64, 1.0 / 3.0, 5e-324, -0.0];
        let record = SearchRecord::open(&out, identity).unwrap();
        assert_eq!(record.known::<[f64; 4]>(&"q"), None);
        assert_eq!(record.once(&"q", || Ok(answers)).unwrap(), answers);
        let err = record.once::<f64>(&"failed", || Err(Error::usage("no"))).unwrap_err();
        assert_eq!(err.what(), "no");
        let busy = SearchRecord::open(&out, identity).map(drop).unwrap_err();
        assert!(busy.what().contains("another build"), "{busy}");
        drop(record);
        // A killed search leaves half a line.
        let path = out.join(".anemoe-search-0123456789abcdef").join(MEASURED);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, [&whole, &whole[..whole.len() / 2]].concat()).unwrap();
        let record = SearchRecord::open(&out, identity).unwrap();
        let again = record.once::<[f64; 4]>(&"q", || panic!("was measured before")).unwrap();
        assert_eq!(again.map(f64::to_bits), answers.map(f64::to_bits));
        assert_eq!(record.once(&"r", || Ok(2)).unwrap(), 2);
        drop(record);
        let record = SearchRecord::open(&out, identity).unwrap();
        assert_eq!(record.known(&"r"), Some(2));
        record.remove();
        assert!(out.is_dir() && fs::read_dir(&out).unwrap().next().is_none());
    }

    #[test]
    fn a_search_that_fails_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let record = SearchRecord::open(&out, "0").unwrap();
        record.remove_after(&Error::interrupted());
        assert!(record.folder().is_dir());
        record.remove_after(&Error::usage("cannot be reached"));
        assert!(!out.exists());
    }
}
