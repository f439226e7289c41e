//! The folder that is being built: locks, records of what is finished, and the files beside the shards.

use super::bundle_layout::{
    self, GATES_PREFIX, HOST_RECORD, LOCK, PLAN_FILE, SEARCH_PREFIX, SOURCE_FILE, VECTORS_FILE, WORK_DIR,
};
use super::differences::differences;
use super::record::{BuildPart, CheckpointOrigin, Quality};
use super::weight_errors::RoleError;
use crate::lower::encode_in_order;
use crate::models::Family;
use crate::plan::{MatrixPlan, Plan, PlanOptions, PlannedShard};
use crate::{Error, Result};
use anemoe_bundle::journal::JOURNAL_FILE;
use anemoe_bundle::{
    CHAIN_FILE, Chain, DRAFTER_DIR, GateResult, Gates, SHARDS_DIR, Shard, Vectors, file_sha256,
    package_bytes, package_sha256, sha256,
};
use anemoe_io::{OwnedDir, TEMPORARY, Temporary, read_input};
use anemoe_npz::Array;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Key that marks a plan's file as one of ours.
const MARKER: &str = "anemoe_build";
/// Version of the records of unfinished builds.
const VERSION: u64 = 1;
/// Largest record that is read, in bytes.
const MAX_RECORD_BYTES: u64 = 256 << 20;
/// A file that macOS leaves in every folder that somebody looked at.
const DS_STORE: &str = ".DS_Store";
/// Most attempts of a part to get a lock that another part holds alone while it sweeps.
const SWEEP_TRIES: usize = 100;
/// Pause between two attempts to get the lock.
const SWEEP_WAIT: Duration = Duration::from_millis(20);
/// Name that the folder of an unfinished build gets before it is removed.
const DONE_DIR: &str = ".anemoe-tmp-build";

/// Record of a finished shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// See [`WorkDir::plan_sha256`].
    plan_sha256: String,
    pub bytes: u64,
    pub sha256: String,
    pub min_weight_cosine: f64,
    pub output_error: f64,
    /// Errors of the shard's matrices; none where an older version wrote the record, or a finished bundle is
    /// repaired.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<RoleError>,
}

/// Record of the files beside the shards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostRecord {
    plan_sha256: String,
    pub embedding: String,
    pub vectors: Option<String>,
    /// Names and hashes of the other files.
    pub files: Vec<(String, String)>,
    /// Lengths of all files by name: a file of another length has changed, and is not read.
    #[serde(default)]
    lengths: BTreeMap<String, u64>,
}

/// Takes the lock in the file `inside` of a folder, alone or shared.
///
/// # Errors
/// Another build holds the lock, or its file cannot be made.
pub fn lock_file(folder: &OwnedDir, inside: &Path, alone: bool) -> Result<File> {
    let file = folder.lock_file(inside)?;
    match if alone { file.try_lock() } else { file.try_lock_shared() } {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(Error::usage(format!("{}: another build is using this folder", folder.root().display())))
        }
        Err(TryLockError::Error(e)) => Err(Error::io(folder.root().join(inside), e)),
    }
}

/// Takes a lock in the folder of the unfinished build.
fn lock_work(folder: &OwnedDir, name: &str, alone: bool) -> Result<File> {
    lock_file(folder, &Path::new(WORK_DIR).join(name), alone)
}

/// Takes the lock, shared with other parts. Another part may hold it alone for the moment in which that part sweeps.
fn shared_lock(folder: &OwnedDir) -> Result<File> {
    for _ in 0..SWEEP_TRIES {
        if let Ok(file) = lock_work(folder, LOCK, false) {
            return Ok(file);
        }
        std::thread::sleep(SWEEP_WAIT);
    }
    lock_work(folder, LOCK, false)
}

/// Content of a folder that is to become a bundle.
enum FolderContent {
    /// Nothing, or leftovers of killed runs.
    Nothing,
    /// An unfinished build, with its plan as written and the names of its shards.
    Unfinished(Vec<u8>, Vec<String>),
    /// A finished bundle.
    Finished,
}

/// Tells what a folder holds, without changing it.
///
/// # Errors
/// The folder is a file, holds something but no bundle and no build of ours, or something under one of our names in it is not
/// ours.
fn look(folder: &OwnedDir) -> Result<FolderContent> {
    let bundle = folder.root();
    if bundle.symlink_metadata().is_ok() && !bundle.is_dir() {
        return Err(Error::usage(format!("{}: exists and is not a folder", bundle.display())));
    }
    let names = folder.names("")?;
    let has = |name: &str| names.iter().any(|n| n == name);
    bundle_layout::check(folder, [])?;
    folder.expect(JOURNAL_FILE, false)?;
    let work = folder.path(WORK_DIR)?;
    let found = if work.join(PLAN_FILE).symlink_metadata().is_ok() {
        let path = folder.expect(Path::new(WORK_DIR).join(PLAN_FILE), false)?;
        let text = read_input(&path, MAX_RECORD_BYTES).map_err(|e| Error::io(&path, e))?;
        let plan = parse_plan(&path, &text)?;
        FolderContent::Unfinished(text, plan.shards.into_iter().map(|s| s.name).collect())
    } else if has(CHAIN_FILE) {
        let chain = Chain::read(bundle)?;
        bundle_layout::check(folder, chain.shards.iter().map(|s| s.file.as_str()))?;
        FolderContent::Finished
    } else if has(WORK_DIR) {
        return Err(Error::usage(format!(
            "{}: holds no {PLAN_FILE}, without which it is no unfinished build; remove this folder, or choose another name for \
             the bundle",
            work.display()
        )));
    } else {
        let is_ours = |n: &str| n.starts_with(TEMPORARY) || n.starts_with(SEARCH_PREFIX) || n == DS_STORE;
        let foreign = names.iter().find(|n| !is_ours(n));
        if let Some(name) = foreign {
            return Err(Error::usage(format!(
                "{}: holds `{name}`, and is neither a bundle nor an unfinished build; choose another folder",
                bundle.display()
            )));
        }
        FolderContent::Nothing
    };
    if let FolderContent::Unfinished(_, shards) = &found {
        bundle_layout::check_records(folder, shards)?;
        shards.iter().try_for_each(|name| bundle_layout::check_package(folder, &package_file(name)))?;
    }
    Ok(found)
}

/// Checks, without changing it, that a build can begin in a folder or go on there.
///
/// # Errors
/// The folder holds what is not ours.
pub fn check_free(bundle: &Path) -> Result<()> {
    look(&OwnedDir::new(bundle)).map(drop)
}

/// Returns the path of a shard's package in the bundle.
fn package_file(shard: &str) -> String {
    format!("{SHARDS_DIR}/{shard}.mlpackage")
}

/// The folder that is being built, locked.
pub struct WorkDir {
    pub bundle: PathBuf,
    pub work: PathBuf,
    /// Access to the bundle's folder, for every write and deletion.
    pub folder: OwnedDir,
    /// SHA-256 of the plan and of its inputs' identity, which ties a record to them.
    pub plan_sha256: String,
    /// Names of the shards.
    shards: Vec<String>,
    /// True if the bundle was finished before.
    was_finished: bool,
    /// Locks, which are released when they are closed, also by a crash.
    _locks: Vec<File>,
}

impl WorkDir {
    /// Begins or continues the build of a plan, or of one part of it, and takes its locks.
    ///
    /// # Errors
    /// The folder is none of ours, holds a build or bundle of another plan or other inputs, is locked by another build, or
    /// cannot be written.
    pub fn open(
        bundle: &Path,
        plan: &Plan,
        inputs: &serde_json::Value,
        part: Option<BuildPart>,
    ) -> Result<WorkDir> {
        let folder = OwnedDir::new(bundle);
        let text = plan_text(plan, inputs);
        let records = match look(&folder)? {
            FolderContent::Nothing => Some(Vec::new()),
            FolderContent::Finished => Some(finished_records(bundle, plan, inputs, part, &sha256(&text))?),
            FolderContent::Unfinished(found, _) => {
                refuse_other_plan(bundle, &found, &text)?;
                None
            }
        };
        if let Some(records) = &records {
            let is_new = !bundle.exists();
            begin(&folder, &text, records).inspect_err(|_| {
                if is_new {
                    let _ = fs::remove_dir(bundle);
                }
            })?;
        }
        let mut site = WorkDir::in_folder(folder, &text, plan);
        site.was_finished = records.is_some_and(|records| !records.is_empty());
        match part {
            None => {
                site._locks.push(lock_work(&site.folder, LOCK, true)?);
                site.sweep()?;
            }
            Some(part) => {
                let own = format!("{LOCK}.{}of{}", part.index, part.of);
                site._locks.push(lock_work(&site.folder, &own, true)?);
                site.refuse_other_parts(part)?;
                // While this part holds the lock alone, no other part writes.
                if let Ok(alone) = lock_work(&site.folder, LOCK, true) {
                    site.sweep()?;
                    drop(alone);
                }
                site._locks.push(shared_lock(&site.folder)?);
            }
        }
        // Another process may have begun between the look and the lock.
        refuse_other_plan(bundle, &site.read(PLAN_FILE)?, &text)?;
        if let Err(e) = site.folder.create_dir(SHARDS_DIR) {
            if part.is_none() {
                site.tidy(true);
            }
            return Err(e);
        }
        Ok(site)
    }

    /// Opens an unfinished build to complete it: the folder, locked alone, and its plan.
    ///
    /// # Errors
    /// The folder holds no unfinished build, another build holds its lock, or its plan cannot be read.
    pub fn begun(bundle: &Path) -> Result<(WorkDir, Plan)> {
        let complete = || Error::usage(format!("{}: is complete already", bundle.display()));
        WorkDir::locked(bundle, |folder| lock_work(folder, LOCK, true))?.ok_or_else(complete)
    }

    /// Opens an unfinished build to read from it, while its parts may still be built: the folder and its plan. None
    /// where the bundle is finished.
    ///
    /// # Errors
    /// The folder holds no build and no bundle, another build holds its lock alone, or its plan cannot be read.
    pub fn shared(bundle: &Path) -> Result<Option<(WorkDir, Plan)>> {
        WorkDir::locked(bundle, shared_lock)
    }

    fn locked(bundle: &Path, lock: impl Fn(&OwnedDir) -> Result<File>) -> Result<Option<(WorkDir, Plan)>> {
        let folder = OwnedDir::new(bundle);
        let text = match look(&folder)? {
            FolderContent::Unfinished(text, _) => text,
            FolderContent::Finished => return Ok(None),
            FolderContent::Nothing => {
                return Err(Error::usage(format!("{}: is no unfinished build", bundle.display())));
            }
        };
        let lock = lock(&folder)?;
        let plan = parse_plan(&bundle.join(WORK_DIR).join(PLAN_FILE), &text)?;
        let mut site = WorkDir::in_folder(folder, &text, &plan);
        site._locks.push(lock);
        Ok(Some((site, plan)))
    }

    fn in_folder(folder: OwnedDir, text: &[u8], plan: &Plan) -> WorkDir {
        WorkDir {
            bundle: folder.root().to_path_buf(),
            work: folder.root().join(WORK_DIR),
            folder,
            plan_sha256: sha256(text),
            shards: plan.shards.iter().map(|s| s.name.clone()).collect(),
            was_finished: false,
            _locks: Vec::new(),
        }
    }

    /// Writes a record into the folder of the unfinished build.
    fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.folder.write(Path::new(WORK_DIR).join(name), bytes)
    }

    /// Reads a record from the folder of the unfinished build.
    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.work.join(name);
        read_input(&path, MAX_RECORD_BYTES).map_err(|e| Error::io(&path, e))
    }

    /// Removes half-written files of killed runs; nobody else writes here while the lock is held.
    fn sweep(&self) -> Result<()> {
        for inside in ["", SHARDS_DIR, WORK_DIR] {
            self.folder.sweep(inside)?;
        }
        Ok(())
    }

    /// Refuses to go on while a part of another count is being built: it shares out the shards differently, and two
    /// processes would write the same shard.
    fn refuse_other_parts(&self, part: BuildPart) -> Result<()> {
        let suffix = format!("of{}", part.of);
        for name in self.folder.names(WORK_DIR)? {
            if name.starts_with("lock.") && !name.ends_with(&suffix) {
                lock_work(&self.folder, &name, true)?;
            }
        }
        Ok(())
    }

    /// Cleans up after a failure: leaves finished shards unless `all` is to go, and nothing at all when no shard is
    /// finished. A bundle that was finished before stays an unfinished build, which can go on.
    pub fn tidy(&self, all: bool) {
        let is_built = |file: &str| self.bundle.join(file).exists();
        let is_calibrated = |name: &String| name.starts_with(crate::compressed::PREFIX);
        let done = is_built(DRAFTER_DIR)
            || self.shards.iter().any(|name| is_built(&package_file(name)))
            || self.folder.names(WORK_DIR).is_ok_and(|names| names.iter().any(is_calibrated));
        if self.was_finished || done && !all {
            return;
        }
        // Files of others stay. The folder that proves that the bundle is ours is removed last but one.
        for name in
            bundle_layout::bundle_names().filter(|name| ![CHAIN_FILE, SHARDS_DIR, WORK_DIR].contains(name))
        {
            let _ = self.folder.remove(name);
        }
        for name in &self.shards {
            let _ = self.remove_package(&package_file(name));
        }
        let _ = self.folder.sweep(SHARDS_DIR);
        let _ = fs::remove_dir(self.bundle.join(SHARDS_DIR));
        let _ = self.remove_records();
        let _ = fs::remove_dir(&self.bundle);
    }

    /// Removes a package, unless something that is no part of it lies in it.
    ///
    /// # Errors
    /// Something else lies in the package, or the package cannot be removed.
    pub fn remove_package(&self, file: &str) -> Result<()> {
        bundle_layout::check_package(&self.folder, file)?;
        self.folder.remove(file)
    }

    /// Removes the records, and their folder where nothing else is in it.
    fn remove_records(&self) -> Result<()> {
        for name in self.folder.names("")?.iter().filter(|name| name.starts_with(SEARCH_PREFIX)) {
            self.folder.remove(name)?;
        }
        let names = self.folder.names(WORK_DIR)?;
        if names.iter().all(|name| bundle_layout::is_record(name, &self.shards)) {
            // The folder is removed at once, not file by file: half of it would look like another unfinished build.
            self.folder.remove(DONE_DIR)?;
            self.folder.rename(WORK_DIR, DONE_DIR)?;
            return self.folder.remove(DONE_DIR);
        }
        // Without its plan the folder is no unfinished build any more.
        self.folder.remove(Path::new(WORK_DIR).join(PLAN_FILE))?;
        self.folder.sweep(WORK_DIR)?;
        for name in names.iter().filter(|name| bundle_layout::is_record(name, &self.shards)) {
            self.folder.remove(Path::new(WORK_DIR).join(name))?;
        }
        Ok(())
    }

    /// Returns the record of a finished shard; none where its package is not as the record says.
    pub fn record(&self, shard: &PlannedShard) -> Option<Record> {
        let path = self.bundle.join(shard.package_file());
        let text = self.read(&format!("{}.json", shard.name)).ok()?;
        let record: Record = anemoe_io::json::parse(&text).ok()?;
        (record.plan_sha256 == self.plan_sha256
            && path.is_dir()
            && package_bytes(&path).is_ok_and(|bytes| bytes == record.bytes)
            && package_sha256(&path).is_ok_and(|hash| hash == record.sha256))
        .then_some(record)
    }

    /// Returns the records of all shards, after a check that each package is as its record says.
    ///
    /// # Errors
    /// A shard has no record, or other bytes than its record.
    pub fn records(&self, plan: &Plan) -> Result<Vec<Record>> {
        let records: Vec<Option<Record>> = plan.shards.par_iter().map(|s| self.record(s)).collect();
        let missing: Vec<&str> = plan
            .shards
            .iter()
            .zip(&records)
            .filter(|(_, r)| r.is_none())
            .map(|(s, _)| s.name.as_str())
            .collect();
        if !missing.is_empty() {
            let has_record = |name: &str| self.work.join(format!("{name}.json")).is_file();
            let (changed, absent): (Vec<&str>, Vec<&str>) =
                missing.iter().copied().partition(|n| has_record(n));
            let list = |what: &str, names: &[&str]| {
                let first = names.iter().take(3).copied().collect::<Vec<_>>().join(", ");
                let more = if names.len() > 3 { ", .." } else { "" };
                (!names.is_empty()).then(|| {
                    format!("{} of {} shards {what} ({first}{more})", names.len(), plan.shards.len())
                })
            };
            let lists = [
                list("are not built", &absent),
                list("are missing or have other bytes than their records", &changed),
            ];
            return Err(Error::usage(format!(
                "{}: {}; run the parts that lack them again",
                self.bundle.display(),
                lists.into_iter().flatten().collect::<Vec<_>>().join(", ")
            )));
        }
        Ok(records.into_iter().flatten().collect())
    }

    /// Returns the contract of the finished bundle.
    ///
    /// # Errors
    /// The plan that the build began with cannot be read.
    pub fn chain(&self, plan: &Plan, records: &[Record], host: &HostRecord) -> Result<Chain> {
        let mut chain = plan.chain.clone();
        chain.embedding.sha256 = host.embedding.clone();
        chain.vectors = host.vectors.clone().map(vectors);
        [chain.checkpoint_sha256, chain.importance, chain.calibration] = self.begun_inputs()?;
        chain.shards = plan
            .shards
            .iter()
            .zip(records)
            .map(|(s, r)| Shard {
                bytes: r.bytes,
                sha256: r.sha256.clone(),
                min_weight_cosine: r.min_weight_cosine,
                output_error: r.output_error,
                ..s.chain_entry()
            })
            .collect();
        Ok(chain)
    }

    /// Completes the bundle: writes `chain.json` and removes the records.
    ///
    /// # Errors
    /// `chain.json` cannot be written, or a record cannot be removed.
    pub fn finish(&self, chain: &Chain) -> Result<()> {
        self.folder.path(CHAIN_FILE)?;
        chain.write(&self.bundle)?;
        self.remove_records()
    }

    /// Writes and returns the record of a finished shard.
    ///
    /// # Errors
    /// The package cannot be read, or the record cannot be written.
    pub fn write_record(&self, shard: &PlannedShard, quality: &Quality) -> Result<Record> {
        let path = self.bundle.join(shard.package_file());
        let record = Record {
            plan_sha256: self.plan_sha256.clone(),
            bytes: package_bytes(&path)?,
            sha256: package_sha256(&path)?,
            min_weight_cosine: quality.min_cosine,
            output_error: quality.all.output_error(),
            roles: quality.roles.clone(),
        };
        self.write(&format!("{}.json", shard.name), &to_json(&record))?;
        Ok(record)
    }

    /// Writes where the checkpoint is, for whoever completes the bundle.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_source(&self, source: &CheckpointOrigin) -> Result<()> {
        self.write(SOURCE_FILE, &to_json(source))
    }

    /// Returns the origin of the checkpoint, as the last build noted it; none where no build did.
    pub fn source(&self) -> Option<CheckpointOrigin> {
        anemoe_io::json::parse(&self.read(SOURCE_FILE).ok()?).ok()
    }

    /// Writes the results of a part's gates.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_gates(&self, part: BuildPart, gates: &Gates) -> Result<()> {
        self.write(&format!("{GATES_PREFIX}{}of{}", part.index, part.of), &to_json(gates))
    }

    /// Returns the worst result of the parts' gates, and whether no part had any gates. A part without results was
    /// not gated.
    pub fn part_gates(&self) -> (Gates, bool) {
        let not_run =
            Gates { representative: GateResult::NotRun, full_stack: GateResult::NotRun, cosine_bound: None };
        let names = self.folder.names(WORK_DIR).unwrap_or_default();
        let read =
            |name: &str| self.read(name).ok().and_then(|text| anemoe_io::json::parse::<Gates>(&text).ok());
        let count = |name: &str| name.strip_prefix(GATES_PREFIX)?.split_once("of")?.1.parse::<usize>().ok();
        let counts: BTreeSet<usize> = names.iter().filter_map(|n| count(n)).collect();
        // Each number of parts whose results are all there speaks for all shards.
        let said = counts.into_iter().filter_map(|of| {
            (0..of).map(|i| read(&format!("{GATES_PREFIX}{i}of{of}"))).collect::<Option<Vec<Gates>>>()
        });
        let severity = |g: &Gates| match g.representative {
            GateResult::Passed => 0,
            GateResult::Undecided => 1,
            GateResult::Skipped => 2,
            GateResult::NotRun => 3,
            GateResult::Failed => 4,
        };
        let worst = said.filter_map(|all| {
            let none_had = all.iter().all(|g| g.representative == GateResult::Skipped);
            Some((all.into_iter().max_by_key(severity)?, none_had))
        });
        match worst.min_by_key(|(g, _)| severity(g)) {
            Some((worst, none_had)) => (Gates { full_stack: GateResult::NotRun, ..worst }, none_had),
            None => (not_run, false),
        }
    }

    /// Reads the hashes of the checkpoint, the importances and the calibration's tokens that the build began with.
    fn begun_inputs(&self) -> Result<[Option<String>; 3]> {
        let path = self.work.join(PLAN_FILE);
        let begun: serde_json::Value = anemoe_io::json::parse(&self.read(PLAN_FILE)?)
            .map_err(|e| Error::invalid(&path, format!("plan: {e}")))?;
        let hash = |name: &str| begun["inputs"][name].as_str().map(str::to_string);
        Ok(["checkpoint", "importance", "calibration"].map(hash))
    }

    /// Reads the record of the files beside the shards, and checks that all files are as it says.
    ///
    /// # Errors
    /// The record or one of the files is missing or changed.
    pub fn host_record(&self, plan: &Plan) -> Result<HostRecord> {
        let wrong = |file: &str| {
            let what = format!("{}: {file} is missing or changed; run part 0 again", self.bundle.display());
            Error::usage(what)
        };
        let text = self.read(HOST_RECORD).map_err(|_| wrong(&plan.chain.embedding.file))?;
        let record: HostRecord =
            anemoe_io::json::parse(&text).map_err(|_| wrong(&plan.chain.embedding.file))?;
        let is = |file: &str, hash: &str| {
            let path = self.bundle.join(file);
            let length = record.lengths.get(file);
            let same = |m: fs::Metadata| length.is_none_or(|n| *n == m.len());
            path.metadata().is_ok_and(same) && file_sha256(&path).is_ok_and(|h| h == hash)
        };
        if !is(&plan.chain.embedding.file, &record.embedding) {
            return Err(wrong(&plan.chain.embedding.file));
        }
        if let Some(hash) = record.vectors.as_ref().filter(|hash| !is(VECTORS_FILE, hash)) {
            return Err(wrong(&format!("{VECTORS_FILE} ({hash})")));
        }
        match record.files.iter().find(|(file, hash)| !is(file, hash)) {
            Some((file, _)) => Err(wrong(file)),
            None if record.plan_sha256 != self.plan_sha256 => Err(wrong(&plan.chain.embedding.file)),
            None => Ok(record),
        }
    }

    /// Writes the files beside the shards, unless an earlier run has.
    ///
    /// # Errors
    /// The checkpoint cannot be read, or a file cannot be written.
    pub fn write_host(&self, family: &Family, plan: &Plan) -> Result<HostRecord> {
        if let Ok(record) = self.host_record(plan) {
            return Ok(record);
        }
        // Side files are read first, so that a wrong tokenizer is found before the work.
        let files = family.checked.checkpoint.side_files()?;
        self.folder.path(VECTORS_FILE)?;
        let vectors = write_vectors(family, &plan.options, &self.bundle)?;
        let embedding = self.write_embedding(family, plan)?;
        let mut hashes = Vec::new();
        for (name, file) in files {
            let bytes = file.read()?;
            self.folder.write(name, &bytes)?;
            hashes.push((name.to_string(), sha256(&bytes)));
        }
        let plan_sha256 = self.plan_sha256.clone();
        let names = hashes.iter().map(|(name, _)| name.as_str());
        let names =
            names.chain([plan.chain.embedding.file.as_str()]).chain(vectors.as_ref().map(|_| VECTORS_FILE));
        let length = |name: &str| Some((name.to_string(), self.bundle.join(name).metadata().ok()?.len()));
        let lengths = names.filter_map(length).collect();
        let record = HostRecord { plan_sha256, embedding, vectors, files: hashes, lengths };
        self.write(HOST_RECORD, &to_json(&record))?;
        Ok(record)
    }

    /// Writes the host's embedding in the format [`anemoe_bundle::Embedding::storage`], and returns the file's hash.
    fn write_embedding(&self, family: &Family, plan: &Plan) -> Result<String> {
        let embedding = &plan.chain.embedding;
        let path = self.folder.path(&embedding.file)?;
        let (temporary, file) = Temporary::file(&self.work).map_err(|e| Error::io(&path, e))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let matrix = MatrixPlan {
            name: "embedding".into(),
            part: "embedding".into(),
            tensor: family.decoder.tensor(None, "embedding"),
            offset: 0,
            rows: embedding.rows,
            cols: embedding.cols,
            taps: 1,
            bank: false,
            quant: plan.embedding,
        };
        let failed = |e: std::io::Error| Error::io(&path, e);
        // No importances: each row belongs to one token, and the head's importances say nothing about it.
        let order = family.token_ordering()?;
        let side = encode_in_order(&family.checked, &matrix, order.as_deref(), &mut |bytes| {
            out.write_all(bytes).map_err(failed)
        })?;
        let values = side.values.iter().flat_map(|v| v.to_le_bytes());
        let tail: Vec<u8> = values.chain(side.offsets.iter().map(|&o| o as u8)).collect();
        out.write_all(&tail).map_err(failed)?;
        out.flush().and_then(|()| out.get_ref().sync_all()).map_err(failed)?;
        temporary.persist(&path).map_err(failed)?;
        file_sha256(&path)
    }
}

/// Writes the vectors that host steps name, where there are any, and returns the file's hash.
///
/// # Errors
/// The checkpoint cannot be read, or the file cannot be written.
pub fn write_vectors(family: &Family, options: &PlanOptions, folder: &Path) -> Result<Option<String>> {
    let vectors = family.host_vectors(options)?;
    if vectors.is_empty() {
        return Ok(None);
    }
    let arrays: Vec<(String, Array)> = vectors
        .into_iter()
        .filter_map(|(name, values)| Some((name, Array::new(vec![values.len()], values)?)))
        .collect();
    let path = folder.join(VECTORS_FILE);
    anemoe_npz::write_npz(&path, &arrays)?;
    Ok(Some(file_sha256(&path)?))
}

/// Writes the plan of a build and the identity of its inputs as JSON, as the build's folder holds them.
pub fn plan_text(plan: &Plan, inputs: &serde_json::Value) -> Vec<u8> {
    to_json(&serde_json::json!({MARKER: VERSION, "inputs": inputs, "plan": plan}))
}

/// Refuses to go on with an unfinished build of another plan or of other inputs; the error lists the differences.
fn refuse_other_plan(bundle: &Path, found: &[u8], wanted: &[u8]) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    let [found, wanted] =
        [found, wanted].map(|text| anemoe_io::json::parse(text).unwrap_or(serde_json::Value::Null));
    let differs = differences(
        (&found["plan"]["chain"], &found["inputs"]),
        (&wanted["plan"]["chain"], &wanted["inputs"]),
    );
    Err(Error::usage(format!(
        "{}: holds an unfinished build with other options or of another checkpoint ({differs}); remove it or repeat those options",
        bundle.display()
    )))
}

/// Makes the folder of an unfinished build, with its plan and `records`. The folder gets its name once it is whole.
fn begin(folder: &OwnedDir, text: &[u8], records: &[(String, Record)]) -> Result<()> {
    let bundle = folder.create_dir("")?;
    let at = |e| Error::io(&bundle, e);
    for _ in 0..SWEEP_TRIES {
        let made = Temporary::dir(&bundle, "").map_err(at)?;
        let inside = OwnedDir::new(made.path());
        let written = records
            .iter()
            .try_for_each(|(name, record)| inside.write(format!("{name}.json"), &to_json(record)))
            .and_then(|()| inside.write(PLAN_FILE, text));
        let work = folder.path(WORK_DIR)?;
        match written.map_err(std::io::Error::from).and_then(|()| made.persist(&work)) {
            Ok(()) => return Ok(()),
            Err(e) if matches!(e.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists) => {
                if work.join(PLAN_FILE).exists() {
                    // Another part was first.
                    return Ok(());
                }
                // The folder holds files of others. The plan comes last: it makes the folder an unfinished build.
                let inside = OwnedDir::new(&work);
                for (name, record) in records {
                    inside.write(format!("{name}.json"), &to_json(record))?;
                }
                return inside.write(PLAN_FILE, text);
            }
            // Another part took the new folder for the remains of a killed run.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(at(e)),
        }
    }
    Err(Error::usage(format!("{}: another build is using this folder", bundle.display())))
}

/// Makes the records of a finished bundle, if it is of this very plan and checkpoint: then packages that are missing
/// or changed can be built again, and nothing else.
fn finished_records(
    bundle: &Path,
    plan: &Plan,
    inputs: &serde_json::Value,
    part: Option<BuildPart>,
    plan_sha256: &str,
) -> Result<Vec<(String, Record)>> {
    let finished = |what: &str| {
        let what = format!(
            "{}: is a finished bundle already{what}; remove it or choose another name",
            bundle.display()
        );
        Err(Error::usage(what))
    };
    if part.is_some() {
        return finished("");
    }
    let chain = Chain::read(bundle)?;
    // A chain without what a build adds.
    let planned = |chain: &Chain| Chain {
        checkpoint_sha256: None,
        importance: None,
        calibration: None,
        gates: None,
        vectors: None,
        shards: Vec::new(),
        embedding: anemoe_bundle::Embedding { sha256: String::new(), ..chain.embedding.clone() },
        ..chain.clone()
    };
    let same = |name: &str, hash: &Option<String>| inputs[name].as_str() == hash.as_deref();
    let ours = planned(&chain) == planned(&plan.chain)
        && chain.shards.iter().map(|s| &s.name).eq(plan.shards.iter().map(|s| &s.name))
        && same("checkpoint", &chain.checkpoint_sha256)
        && same("importance", &chain.importance)
        && same("calibration", &chain.calibration);
    if !ours {
        let built = serde_json::json!({"checkpoint": chain.checkpoint_sha256, "importance": chain.importance, "calibration": chain.calibration});
        let differs = differences((&to_value(&chain), &built), (&to_value(&plan.chain), inputs));
        return finished(&format!(", with other options or of another checkpoint ({differs})"));
    }
    let record = |s: &Shard| Record {
        plan_sha256: plan_sha256.to_string(),
        bytes: s.bytes,
        sha256: s.sha256.clone(),
        min_weight_cosine: s.min_weight_cosine,
        output_error: s.output_error,
        roles: Vec::new(),
    };
    Ok(chain.shards.iter().map(|s| (s.name.clone(), record(s))).collect())
}

/// Parses the plan that an unfinished build began with.
fn parse_plan(path: &Path, text: &[u8]) -> Result<Plan> {
    #[derive(Deserialize)]
    struct Begun {
        #[serde(rename = "anemoe_build")]
        version: u64,
        plan: Plan,
    }
    let begun: Begun = anemoe_io::json::parse(text)
        .map_err(|e| Error::invalid(path, format!("plan of an unfinished build: {e}")))?;
    if begun.version != VERSION {
        let what = format!("plan of an unfinished build: version {} where {VERSION} is read", begun.version);
        return Err(Error::unsupported(path, what));
    }
    Ok(begun.plan)
}

/// Makes the chain's entry of the host's vectors, from the hash of their file.
pub fn vectors(sha256: String) -> Vectors {
    Vectors { file: VECTORS_FILE.into(), sha256 }
}

fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    // Plans and records hold only what JSON can: no maps with other keys than strings, no non-finite numbers.
    serde_json::to_vec_pretty(value).expect("plans and records are representable in JSON")
}

fn to_value(chain: &Chain) -> serde_json::Value {
    serde_json::to_value(chain).unwrap_or_default()
}
