//! Needs of a build before it begins: room on disks, and memory for its jobs.

use super::Build;
use crate::models::Decoder;
use crate::plan::PlannedShard;
use crate::{Error, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Bytes besides those that are counted: records, locks, `chain.json`, and what a file system adds.
const MARGIN: u64 = 1 << 20;

/// Memory allowed for one job, in bytes: pieces of a matrix in f32, its packed elements and its tables. Two jobs of a
/// full-size Gemma build in LUT4 had 58 MB resident together, the program itself included.
const JOB_BYTES: u64 = 64 << 20;

/// Bytes that a build will write, and the room that its disks have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Needs {
    /// The bundle's folder.
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    pub bundle: PathBuf,
    /// Bytes that are still to be written to the bundle.
    pub bundle_bytes: u64,
    /// Bytes that the bundle's disk has left.
    pub bundle_free: u64,
    /// Folder of the gates' temporary files.
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    pub scratch: PathBuf,
    /// Bytes of the gates' temporary files.
    pub scratch_bytes: u64,
    /// Bytes that the disk of the temporary files has left.
    pub scratch_free: u64,
    /// True if the bundle and the temporary files are on one disk.
    pub same_disk: bool,
}

impl Needs {
    /// Counts the needs of `build`, whose gates write the FP16 forms of the shards `references` into `scratch`, or
    /// into the unfinished bundle.
    ///
    /// # Errors
    /// The free room of a disk cannot be read.
    pub fn of(build: &Build<'_>, references: &[&PlannedShard], scratch: Option<&Path>) -> Result<Needs> {
        let bundle = build.bundle().to_path_buf();
        let scratch = scratch.unwrap_or(&bundle).to_path_buf();
        let (on_bundle, on_scratch) = (existing(&bundle), existing(&scratch));
        Ok(Needs {
            bundle_bytes: build.bytes_to_write() + MARGIN,
            bundle_free: free(&on_bundle)?,
            scratch_bytes: references.iter().map(|s| s.in_fp16().package_bytes()).sum(),
            scratch_free: free(&on_scratch)?,
            same_disk: same_disk(&on_bundle, &on_scratch),
            bundle,
            scratch,
        })
    }

    /// Checks that the disks have room for the bundle and the temporary files.
    ///
    /// # Errors
    /// [`Kind::Room`](anemoe_io::Kind::Room) when a disk has too little room.
    pub fn check(&self) -> Result<()> {
        let short = |what: &str, path: &Path, needed: u64, free: u64| {
            let what = format!(
                "{what} {needed} bytes ({:.1} MB), and its disk has {free} left ({:.1} MB)",
                needed as f64 / 1e6,
                free as f64 / 1e6
            );
            Err(Error::room(path, what))
        };
        if self.same_disk {
            let needed = self.bundle_bytes + self.scratch_bytes;
            if needed > self.bundle_free {
                return short(
                    "the bundle with the temporary files of its gates needs",
                    &self.bundle,
                    needed,
                    self.bundle_free,
                );
            }
            return Ok(());
        }
        if self.bundle_bytes > self.bundle_free {
            return short("the bundle needs", &self.bundle, self.bundle_bytes, self.bundle_free);
        }
        if self.scratch_bytes > self.scratch_free {
            return short(
                "the temporary files of the gates need",
                &self.scratch,
                self.scratch_bytes,
                self.scratch_free,
            );
        }
        Ok(())
    }
}

/// Checks that a folder's disk has room for `bytes` bytes of temporary files, before the work.
///
/// # Errors
/// [`Kind::Room`](anemoe_io::Kind::Room) when the disk has too little room; or its free room cannot be read.
pub fn check_scratch(folder: &Path, bytes: u64) -> Result<()> {
    let free = free(&existing(folder))?;
    if bytes <= free {
        return Ok(());
    }
    let what = format!(
        "temporary files need {bytes} bytes ({:.1} MB), and this disk has {free} left ({:.1} MB): give a larger one with \
         --scratch or TMPDIR",
        bytes as f64 / 1e6,
        free as f64 / 1e6
    );
    Err(Error::room(folder, what))
}

/// Checks that the disk of a folder, there or not yet, has room for `bytes` bytes, before the work. `what` begins the
/// error.
///
/// # Errors
/// [`Kind::Room`](anemoe_io::Kind::Room) when the disk has too little room; or its free room cannot be read.
pub fn check_room(folder: &Path, what: &str, bytes: u64) -> Result<()> {
    let free = free_space(folder)?;
    if bytes <= free {
        return Ok(());
    }
    let what = format!(
        "{what} {bytes} bytes ({:.1} MB), and this disk has {free} left ({:.1} MB)",
        bytes as f64 / 1e6,
        free as f64 / 1e6
    );
    Err(Error::room(folder, what))
}

/// Returns the bytes that are left on the disk of a folder, there or not yet.
///
/// # Errors
/// The free room of the disk cannot be read.
pub fn free_space(folder: &Path) -> Result<u64> {
    free(&existing(folder))
}

/// Finds the nearest folder that exists, from `path` upwards.
fn existing(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    absolute.ancestors().find(|p| p.is_dir()).map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

fn free(path: &Path) -> Result<u64> {
    fs4::available_space(path).map_err(|e| Error::io(path, e))
}

#[cfg(unix)]
fn same_disk(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => a.dev() == b.dev(),
        _ => true,
    }
}

#[cfg(not(unix))]
fn same_disk(_: &Path, _: &Path) -> bool {
    true
}

/// Returns the memory allowed for one job of a model: more where whole rotated matrices are in memory.
pub fn job_bytes(d: &Decoder) -> u64 {
    let widths = d.layers.iter().map(|l| {
        let experts = l.experts.map_or(0, |e| e.width);
        l.attention.q_size().max(l.dense.unwrap_or(0)).max(experts)
    });
    let rotated = if d.is_rotated { 2 * 4 * d.hidden * widths.max().unwrap_or(0) } else { 0 };
    JOB_BYTES + rotated as u64
}

/// Returns the default number of shards that are built at a time: one per processor, at most 8, within half of the
/// memory that is free, where a job takes `bytes`.
pub fn default_jobs(bytes: u64) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
    jobs_within(processors, anemoe_io::free_memory().map(|free| free / 2), bytes)
}

/// Returns the number of jobs that a memory budget in bytes allows, where a job takes `bytes`: at most `jobs`, and at least
/// one.
pub fn jobs_within(jobs: usize, budget: Option<u64>, bytes: u64) -> usize {
    let fit = budget.map_or(usize::MAX, |budget| usize::try_from(budget / bytes).unwrap_or(usize::MAX));
    jobs.min(fit).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(bundle: (u64, u64), scratch: (u64, u64), same_disk: bool) -> Needs {
        Needs {
            bundle: "b".into(),
            bundle_bytes: bundle.0,
            bundle_free: bundle.1,
            scratch: "s".into(),
            scratch_bytes: scratch.0,
            scratch_free: scratch.1,
            same_disk,
        }
    }

    #[test]
    fn too_little_room_is_refused_with_figures() {
        assert!(needs((5, 10), (5, 10), true).check().is_ok());
        assert!(needs((6, 10), (5, 10), true).check().unwrap_err().to_string().contains("needs 11 bytes"));
        assert!(needs((6, 10), (5, 10), false).check().is_ok());
        let e = needs((11, 10), (5, 10), false).check().unwrap_err().to_string();
        assert!(e.starts_with("b: the bundle needs 11"), "{e}");
        let e = needs((5, 10), (11, 10), false).check().unwrap_err().to_string();
        assert!(e.starts_with("s: the temporary files of the gates need"), "{e}");
    }

    #[test]
    fn scratch_that_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(check_scratch(dir.path(), 1 << 10).is_ok());
        let e = check_scratch(&dir.path().join("not/there"), u64::MAX).unwrap_err();
        assert_eq!(e.kind(), anemoe_io::Kind::Room);
        assert!(e.to_string().contains("--scratch"), "{e}");
    }

    #[test]
    fn work_that_does_not_fit_a_disk_is_refused_before_it_begins() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("not/there");
        let free = free_space(&folder).unwrap();
        assert!(check_room(&folder, "models need", 1 << 10).is_ok());
        let e = check_room(&folder, "models need", u64::MAX).unwrap_err();
        assert_eq!(e.kind(), anemoe_io::Kind::Room);
        assert!(e.to_string().contains(&format!("models need {} bytes", u64::MAX)), "{e}");
        assert!(free > 0 && !folder.exists());
    }

    #[test]
    fn jobs_fit_the_memory() {
        assert_eq!(jobs_within(8, None, JOB_BYTES), 8);
        assert_eq!(jobs_within(8, Some(3 * JOB_BYTES + 1), JOB_BYTES), 3);
        assert_eq!(jobs_within(8, Some(1), JOB_BYTES), 1);
        assert!(default_jobs(JOB_BYTES) >= 1);
    }

    #[test]
    fn disks_say_how_much_is_left() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free(&existing(&dir.path().join("not/there"))).unwrap() > 0);
        assert!(same_disk(dir.path(), dir.path()));
    }
}
