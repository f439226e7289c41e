//! Snapshots of a folder, to compare it before and after a run.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, lchown};
use std::path::{Path, PathBuf};

/// Most bytes of a file that are compared; longer files are compared by length as well.
const COMPARED: u64 = 64 << 20;

/// Entry at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotEntry {
    Folder,
    File { bytes: u64, hash: u64, mode: u32 },
    Link(PathBuf),
    Other,
}

/// Entries below a folder, by relative path. Links are not followed.
pub type FolderSnapshot = BTreeMap<PathBuf, SnapshotEntry>;

/// Takes a snapshot of a folder.
pub fn take(folder: &Path) -> io::Result<FolderSnapshot> {
    let mut all = FolderSnapshot::new();
    walk(folder, Path::new(""), &mut all)?;
    Ok(all)
}

fn walk(root: &Path, inside: &Path, all: &mut FolderSnapshot) -> io::Result<()> {
    for entry in fs::read_dir(root.join(inside))? {
        let name = inside.join(entry?.file_name());
        let path = root.join(&name);
        let meta = fs::symlink_metadata(&path)?;
        let found = if meta.is_dir() {
            walk(root, &name, all)?;
            SnapshotEntry::Folder
        } else if meta.is_symlink() {
            SnapshotEntry::Link(fs::read_link(&path)?)
        } else if meta.file_type().is_fifo() || !meta.is_file() {
            SnapshotEntry::Other
        } else {
            SnapshotEntry::File { bytes: meta.len(), hash: hash(&path)?, mode: meta.mode() }
        };
        all.insert(name, found);
    }
    Ok(())
}

fn hash(path: &Path) -> io::Result<u64> {
    let mut bytes = Vec::new();
    File::open(path)?.take(COMPARED).read_to_end(&mut bytes)?;
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    Ok(hasher.finish())
}

/// Tells whether a name is that of an unfinished file.
pub fn is_unfinished(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with(".tmp") || name.starts_with(".partial") || name.ends_with(".partial")
}

/// Returns the differences between two snapshots, in words, except at allowed paths.
pub fn differences(before: &FolderSnapshot, after: &FolderSnapshot, allowed: &[PathBuf]) -> Vec<String> {
    let is_allowed = |path: &Path| allowed.iter().any(|a| path.starts_with(a));
    let mut found = Vec::new();
    for (path, entry) in before {
        match after.get(path) {
            _ if is_allowed(path) => {}
            None => found.push(format!("deleted {}", path.display())),
            Some(now) if now != entry => found.push(format!("changed {}", path.display())),
            Some(_) => {}
        }
    }
    for path in after.keys().filter(|p| !before.contains_key(*p)) {
        if path.file_name().is_some_and(is_unfinished) {
            found.push(format!("unfinished {}", path.display()));
        } else if !is_allowed(path) {
            found.push(format!("created {}", path.display()));
        }
    }
    found
}

/// Copies a file or a folder; links stay links.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(from)?;
    if meta.is_symlink() {
        return std::os::unix::fs::symlink(fs::read_link(from)?, to);
    }
    if !meta.is_dir() {
        return fs::copy(from, to).map(drop);
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Makes a user the owner of a folder and its contents.
pub fn give(path: &Path, user: u32) -> io::Result<()> {
    lchown(path, Some(user), Some(user))?;
    if fs::symlink_metadata(path)?.is_dir() {
        for entry in fs::read_dir(path)? {
            give(&entry?.path(), user)?;
        }
    }
    Ok(())
}
