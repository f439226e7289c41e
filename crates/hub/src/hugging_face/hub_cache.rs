//! The cache in the layout of Hugging Face's libraries.
//!
//! ```text
//! CACHE/models--OWNER--NAME/
//!   blobs/HASH                     contents; HASH.incomplete while they come
//!   refs/REVISION                  a commit
//!   snapshots/COMMIT/FILE       -> ../../blobs/HASH
//!   ranges/HASH                    parts of contents that were never fetched whole; only anemoe writes and reads them
//!   ranges/COMMIT.json             sizes and hashes of weight files
//! CACHE/.locks/models--OWNER--NAME/HASH.lock
//! ```

use super::hub_spec::HubSpec;
use super::listing::{INDEX, KnownFile, SINGLE, indexed_files, is_commit, read_known};
use crate::blob_hash::BlobHash;
use anemoe_io::{open_regular, read_input, read_text, split_parts, write_atomic};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Most bytes of an index that is read.
const MAX_INDEX: u64 = 32 << 20;
/// Most bytes of a reference: a commit and a line end.
const MAX_REF: u64 = 64;
/// Most bytes of a list of weight files.
const MAX_WEIGHTS: u64 = 16 << 20;

/// Folder of one repository in the cache.
#[derive(Clone, Debug)]
pub struct HubCache {
    repository: PathBuf,
    locks: PathBuf,
}

impl HubCache {
    /// Makes the cache of a repository.
    pub fn new(cache: &Path, spec: &HubSpec) -> HubCache {
        let name = format!("models--{}--{}", spec.owner, spec.name);
        HubCache { repository: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    /// Returns the commit that a revision pointed to when it was last fetched.
    pub fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.into());
        }
        let text = read_text(&self.repository.join("refs").join(revision), MAX_REF).ok()?;
        Some(text.trim().to_string()).filter(|commit| is_commit(commit))
    }

    /// Records the commit that a revision points to.
    pub fn remember(&self, revision: &str, commit: &str) -> io::Result<()> {
        if is_commit(revision) {
            return Ok(());
        }
        let path = self.repository.join("refs").join(revision);
        fs::create_dir_all(path.parent().unwrap_or(&self.repository))?;
        write_atomic(&path, |file| file.write_all(commit.as_bytes()))
    }

    /// Returns the folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.repository.join("snapshots").join(commit)
    }

    /// Returns the path of contents.
    pub fn blob(&self, hash: &BlobHash) -> PathBuf {
        self.repository.join("blobs").join(hash.hex())
    }

    /// Returns the path of contents while they come.
    pub fn partial(&self, hash: &BlobHash) -> PathBuf {
        self.blob(hash).with_extension("incomplete")
    }

    /// Tells whether the contents of a file are there.
    pub fn has(&self, file: &KnownFile) -> bool {
        self.blob(&file.hash).metadata().is_ok_and(|m| m.is_file() && m.len() == file.size)
    }

    /// Returns the path of the log that keeps parts of contents.
    pub fn ranges(&self, hash: &BlobHash) -> PathBuf {
        self.repository.join("ranges").join(hash.hex())
    }

    fn weights_path(&self, commit: &str) -> PathBuf {
        self.repository.join("ranges").join(format!("{commit}.json"))
    }

    /// Records a commit's weight files.
    pub fn keep_weights(&self, commit: &str, files: &[KnownFile]) -> io::Result<()> {
        let path = self.weights_path(commit);
        fs::create_dir_all(path.parent().unwrap_or(&self.repository))?;
        let text = serde_json::to_vec(files).map_err(io::Error::other)?;
        write_atomic(&path, |file| file.write_all(&text))
    }

    /// Returns a commit's weight files, where they were recorded.
    pub fn weights(&self, commit: &str) -> Option<Vec<KnownFile>> {
        read_known(&read_input(&self.weights_path(commit), MAX_WEIGHTS).ok()?)
    }

    /// Waits until no other process downloads these contents. Returns the lock.
    pub fn lock(&self, hash: &BlobHash) -> io::Result<File> {
        fs::create_dir_all(&self.locks)?;
        let path = self.locks.join(format!("{}.lock", hash.hex()));
        let file = open_regular(&path, File::options().create(true).truncate(false).write(true))?;
        fs4::fs_std::FileExt::lock_exclusive(&file)?;
        Ok(file)
    }

    /// Puts a file into a snapshot: a link to its contents, or a copy on systems without links.
    pub fn link(&self, commit: &str, name: &str, hash: &BlobHash) -> io::Result<()> {
        let path = self.snapshot(commit).join(name);
        fs::create_dir_all(path.parent().unwrap_or(&path))?;
        if path.symlink_metadata().is_ok() {
            fs::remove_file(&path)?;
        }
        #[cfg(unix)]
        {
            let up = "../".repeat(2 + name.matches('/').count());
            std::os::unix::fs::symlink(format!("{up}blobs/{}", hash.hex()), &path)
        }
        #[cfg(not(unix))]
        fs::copy(self.blob(hash), &path).map(|_| ())
    }

    /// Returns the folder of a complete checkpoint, or its GGUF file; the name of a missing part as the error.
    pub fn complete(&self, commit: &str, file: Option<&str>) -> Result<PathBuf, String> {
        let folder = self.snapshot(commit);
        let lacks = |name: &String| !folder.join(name).is_file();
        if let Some(file) = file {
            let parts = split_parts(file);
            return match parts.iter().find(|part| lacks(part)) {
                Some(missing) => Err(missing.clone()),
                None => Ok(folder.join(&parts[0])),
            };
        }
        let is_whole = folder.join(SINGLE).is_file();
        let names = self.weight_names(commit, is_whole).map_err(|_| INDEX.to_string())?;
        let missing = ["config.json".to_string()].into_iter().chain(names).find(lacks);
        match missing {
            None => Ok(folder),
            Some(missing) => self.only_gguf(commit).filter(|_| lacks(&INDEX.into())).ok_or(missing),
        }
    }

    /// Returns the names of a checkpoint's weight files, by the index in a commit's folder. Where there is a whole file, as
    /// `is_whole` says, an index of other files is left over from shards that were merged.
    ///
    /// # Errors
    /// The index cannot be read, or is none.
    pub fn weight_names(&self, commit: &str, is_whole: bool) -> Result<BTreeSet<String>, String> {
        match read_input(&self.snapshot(commit).join(INDEX), MAX_INDEX) {
            Ok(text) => {
                let names = indexed_files(&text)?;
                let is_old = is_whole && !names.contains(SINGLE);
                Ok(if is_old { [SINGLE.to_string()].into() } else { names })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok([SINGLE.to_string()].into()),
            Err(e) => Err(format!("{INDEX}: {e}")),
        }
    }

    /// Returns the GGUF file of a commit's folder, the first part of a split one; `None` unless there is exactly one model.
    fn only_gguf(&self, commit: &str) -> Option<PathBuf> {
        let folder = self.snapshot(commit);
        let entries = fs::read_dir(&folder).ok()?;
        let mut found: Vec<String> = entries
            .filter_map(|e| e.ok()?.file_name().into_string().ok())
            .filter(|name| name.to_ascii_lowercase().ends_with(".gguf") && folder.join(name).is_file())
            .collect();
        found.sort();
        (found == split_parts(found.first()?)).then(|| folder.join(&found[0]))
    }
}
