//! The build: every shard of a plan, once, into a bundle that is complete when its `chain.json` is there.
//!
//! ```text
//! NAME.anemoe/.build/plan.json      what is being built; a rerun goes on only with an equal plan
//!                   /lock           held while a build runs; parts of a build share it
//!                   /lock.1of4      held while that part runs
//!                   /host.json      record of the files beside the shards
//!                   /SHARD.json     one record per finished shard
//! ```
//! The folder `.build` goes when the bundle is complete.

use crate::checkpoint::SIDE_FILES;
use crate::family::Family;
use crate::importance::Importance;
use crate::lower::{Stored, encode_matrix, store_matrix, store_vector};
use crate::plan::{MatrixPlan, Plan, PlannedShard};
use crate::quantize::Metrics;
use crate::{Error, Result};
use anemoe_bundle::journal::JOURNAL_FILE;
use anemoe_bundle::{CHAIN_FILE, SHARDS_DIR, Shard, Vectors, file_sha256, package_sha256, write_atomic};
use anemoe_mlpackage::mil::verify::verify;
use anemoe_mlpackage::package::PackageWriter;
use anemoe_npz::Array;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, TryLockError};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Folder of an unfinished build.
const WORK_DIR: &str = ".build";
/// File of the host's vectors.
const VECTORS_FILE: &str = "vectors.npz";
/// How often, and after which time, a part asks again for a lock that another one sweeps under.
const SWEEP_TRIES: usize = 100;
const SWEEP_WAIT: Duration = Duration::from_millis(20);
/// Record of the files beside the shards, in the folder of an unfinished build.
const HOST_RECORD: &str = "host.json";

/// What happens during a build, for progress bars and logs.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// The folder is this build's own, and the work begins.
    Begun,
    /// A shard is done; `reused` when an earlier run had built it.
    ShardDone {
        /// The shard.
        shard: &'a PlannedShard,
        /// Bytes of its package.
        bytes: u64,
        /// Time it took.
        elapsed: Duration,
        /// Built by an earlier run.
        reused: bool,
    },
}

/// What a build did.
#[derive(Clone, Debug, Serialize)]
pub struct BuildReport {
    /// The bundle.
    pub bundle: PathBuf,
    /// Shards in all.
    pub shards: usize,
    /// Shards that an earlier run had built.
    pub reused: usize,
    /// Bytes of all packages.
    pub package_bytes: u64,
    /// Lowest cosine between a matrix and its compressed form.
    pub min_weight_cosine: f64,
    /// Seconds.
    pub seconds: f64,
}

/// A finished shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Record {
    bytes: u64,
    sha256: String,
    min_weight_cosine: f64,
    output_error: f64,
}

/// One of several processes that build a bundle together: every `of`-th shard from `index` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// From 0; below `of`.
    pub index: usize,
    /// Number of parts.
    pub of: usize,
}

/// Builds `plan` into the new folder `bundle`, or goes on with what an interrupted run of the same plan left there.
/// `jobs` shards are built at a time.
///
/// # Errors
/// The folder exists and is not an unfinished build of this plan, another build is using it, the checkpoint is wrong, or a
/// file cannot be written. Finished shards stay; nothing half-written does.
pub fn build(
    family: &dyn Family,
    plan: &Plan,
    importance: Option<&Importance>,
    bundle: &Path,
    jobs: usize,
    on_event: &(dyn Fn(Event<'_>) + Sync),
) -> Result<BuildReport> {
    let started = Instant::now();
    let inputs = Inputs { family, importance };
    let site = Site::open(bundle, plan, &inputs.identity(), None)?;
    on_event(Event::Begun);
    let all: Vec<usize> = (0..plan.shards.len()).collect();
    let result = site.write_host(family, plan).and_then(|host| {
        let (records, reused) = site.run(inputs, plan, &all, jobs, on_event)?;
        site.finish(plan, &records, host)?;
        Ok((records, reused))
    });
    if let Err(e) = &result {
        // A full disk or an interruption can be mended and the build go on; a wrong checkpoint cannot.
        let resumable = matches!(e, Error::Io { .. } | Error::Package(_) | Error::Bundle(_));
        site.tidy(!resumable);
    }
    let (records, reused) = result?;
    Ok(report(bundle, &records, reused, started))
}

/// Builds one part of a bundle; other processes may build the others in the same folder at the same time, on this machine or
/// on others that see it. [`assemble`] finishes the bundle.
///
/// # Errors
/// As [`build`]; also when the same part is being built already. What other parts have done is left alone.
pub fn build_part(
    family: &dyn Family,
    plan: &Plan,
    importance: Option<&Importance>,
    bundle: &Path,
    part: Part,
    jobs: usize,
    on_event: &(dyn Fn(Event<'_>) + Sync),
) -> Result<BuildReport> {
    let started = Instant::now();
    let inputs = Inputs { family, importance };
    let site = Site::open(bundle, plan, &inputs.identity(), Some(part))?;
    on_event(Event::Begun);
    let own: Vec<usize> = (part.index..plan.shards.len()).step_by(part.of.max(1)).collect();
    if part.index == 0 {
        site.write_host(family, plan)?;
    }
    let (records, reused) = site.run(inputs, plan, &own, jobs, on_event)?;
    Ok(report(bundle, &records, reused, started))
}

/// Completes a bundle whose parts are all built. It needs neither the checkpoint nor the options.
///
/// # Errors
/// The folder is not an unfinished build, a part is still being built, or a shard is missing or damaged (the error names it).
pub fn assemble(bundle: &Path) -> Result<BuildReport> {
    let started = Instant::now();
    let work = bundle.join(WORK_DIR);
    let plan_file = work.join("plan.json");
    if !plan_file.is_file() {
        let what =
            if bundle.join(CHAIN_FILE).is_file() { "is complete already" } else { "is no unfinished build" };
        return Err(Error::Usage(format!("{}: {what}", bundle.display())));
    }
    let lock = lock_file(&work.join("lock"), true, bundle)?;
    let text = fs::read(&plan_file).map_err(|e| Error::io(&plan_file, e))?;
    #[derive(Deserialize)]
    struct Begun {
        plan: Plan,
    }
    let Begun { plan } =
        serde_json::from_slice(&text).map_err(|e| Error::invalid(&plan_file, format!("plan: {e}")))?;
    let site = Site { bundle: bundle.to_path_buf(), work, _locks: vec![lock] };
    let records = site.records(&plan)?;
    let host = site.host_record(&plan)?;
    site.finish(&plan, &records, host)?;
    Ok(report(bundle, &records, records.len(), started))
}

fn report(bundle: &Path, records: &[Record], reused: usize, started: Instant) -> BuildReport {
    BuildReport {
        bundle: bundle.to_path_buf(),
        shards: records.len(),
        reused,
        package_bytes: records.iter().map(|r| r.bytes).sum(),
        min_weight_cosine: records.iter().map(|r| r.min_weight_cosine).fold(1.0, f64::min),
        seconds: started.elapsed().as_secs_f64(),
    }
}

/// What shards are made from.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    family: &'a dyn Family,
    importance: Option<&'a Importance>,
}

impl Inputs<'_> {
    /// What a build that goes on must have in common with the one that began.
    fn identity(&self) -> serde_json::Value {
        serde_json::json!({
            "checkpoint": self.family.fingerprint(), "importance": self.importance.map(Importance::sha256),
        })
    }
}

/// The files beside the shards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct HostRecord {
    embedding: String,
    vectors: Option<String>,
    files: Vec<String>,
}

/// Takes a lock, alone or shared.
fn lock_file(path: &Path, alone: bool, bundle: &Path) -> Result<File> {
    let file = File::create(path).map_err(|e| Error::io(path, e))?;
    match if alone { file.try_lock() } else { file.try_lock_shared() } {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(Error::Usage(format!("{}: another build is using this folder", bundle.display())))
        }
        Err(TryLockError::Error(e)) => Err(Error::io(path, e)),
    }
}

/// Shares the lock with other parts. One of them may hold it alone for the moment in which it sweeps.
fn shared_lock(path: &Path, bundle: &Path) -> Result<File> {
    for _ in 0..SWEEP_TRIES {
        if let Ok(file) = lock_file(path, false, bundle) {
            return Ok(file);
        }
        std::thread::sleep(SWEEP_WAIT);
    }
    lock_file(path, false, bundle)
}

/// The folder that is being built, locked.
struct Site {
    bundle: PathBuf,
    work: PathBuf,
    /// Released when they are closed, also by a crash.
    _locks: Vec<File>,
}

impl Site {
    fn open(bundle: &Path, plan: &Plan, inputs: &serde_json::Value, part: Option<Part>) -> Result<Site> {
        let work = bundle.join(WORK_DIR);
        let plan_file = work.join("plan.json");
        let exists = bundle.symlink_metadata().is_ok();
        if exists && !bundle.is_dir() {
            return Err(Error::Usage(format!("{}: exists and is not a folder", bundle.display())));
        }
        if exists && bundle.join(CHAIN_FILE).exists() && !work.exists() {
            return Err(Error::Usage(format!(
                "{}: is a finished bundle already; remove it or choose another name",
                bundle.display()
            )));
        }
        if exists
            && !work.exists()
            && fs::read_dir(bundle).map_err(|e| Error::io(bundle, e))?.next().is_some()
        {
            return Err(Error::Usage(format!("{}: exists and is not an unfinished build", bundle.display())));
        }
        let create = |dir: &Path| fs::create_dir_all(dir).map_err(|e| Error::io(dir, e));
        create(&work)?;
        let lock = work.join("lock");
        let mut site = Site { bundle: bundle.to_path_buf(), work, _locks: Vec::new() };
        match part {
            None => {
                site._locks.push(lock_file(&lock, true, bundle)?);
                site.sweep();
            }
            Some(part) => {
                let own = site.work.join(format!("lock.{}of{}", part.index, part.of));
                site._locks.push(lock_file(&own, true, bundle)?);
                // Nobody writes while one holds the lock alone.
                if let Ok(alone) = lock_file(&lock, true, bundle) {
                    site.sweep();
                    drop(alone);
                }
                site._locks.push(shared_lock(&lock, bundle)?);
            }
        }
        let text = to_json(&serde_json::json!({"inputs": inputs, "plan": plan}));
        match fs::read(&plan_file) {
            Ok(found) if found == text => {}
            Ok(_) => {
                return Err(Error::Usage(format!(
                    "{}: holds an unfinished build with other options or of another checkpoint; remove it or repeat those options",
                    bundle.display()
                )));
            }
            Err(_) => {
                let started =
                    create(&bundle.join(SHARDS_DIR)).and_then(|()| Ok(write_atomic(&plan_file, &text)?));
                if started.is_err() && part.is_none() {
                    site.tidy(true);
                }
                started?;
            }
        }
        Ok(site)
    }

    /// Removes what a killed run was in the middle of writing; nobody else writes here while the lock is held.
    fn sweep(&self) {
        for dir in [self.bundle.clone(), self.bundle.join(SHARDS_DIR), self.work.clone()] {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let name = name.to_string_lossy();
                if name.starts_with(".partial-") {
                    let _ = fs::remove_dir_all(entry.path());
                } else if name.starts_with(".tmp") {
                    let _ = fs::remove_file(entry.path()).or_else(|_| fs::remove_dir_all(entry.path()));
                }
            }
        }
    }

    /// After a failure: leaves finished shards unless `all` is to go, and nothing at all when there is none.
    fn tidy(&self, all: bool) {
        let shards = self.bundle.join(SHARDS_DIR);
        let done = fs::read_dir(&shards).is_ok_and(|mut d| d.next().is_some());
        if all || !done {
            // What cannot be removed now is recognised as an unfinished build by the next run.
            let _ = fs::remove_dir_all(&self.work);
            for file in SIDE_FILES.iter().chain(&["embed.bin", VECTORS_FILE, JOURNAL_FILE]) {
                let _ = fs::remove_file(self.bundle.join(file));
            }
            let _ = fs::remove_dir_all(&shards);
            let _ = fs::remove_dir(&self.bundle);
        }
    }

    /// Builds the shards `which`; gives their records, and how many of them were there already.
    fn run(
        &self,
        inputs: Inputs<'_>,
        plan: &Plan,
        which: &[usize],
        jobs: usize,
        on_event: &(dyn Fn(Event<'_>) + Sync),
    ) -> Result<(Vec<Record>, usize)> {
        let next = AtomicUsize::new(0);
        let reused = AtomicUsize::new(0);
        let results: Mutex<Vec<Option<Record>>> = Mutex::new(vec![None; which.len()]);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let failed = || failure.lock().unwrap_or_else(|p| p.into_inner()).is_some();
        std::thread::scope(|scope| {
            for _ in 0..jobs.clamp(1, which.len().max(1)) {
                scope.spawn(|| {
                    while !failed() {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        let Some(&shard) = which.get(i) else { break };
                        let shard = &plan.shards[shard];
                        let started = Instant::now();
                        match self.shard(inputs, shard) {
                            Ok((record, again)) => {
                                reused.fetch_add(usize::from(again), Ordering::Relaxed);
                                let elapsed = started.elapsed();
                                on_event(Event::ShardDone {
                                    shard,
                                    bytes: record.bytes,
                                    elapsed,
                                    reused: again,
                                });
                                results.lock().unwrap_or_else(|p| p.into_inner())[i] = Some(record);
                            }
                            Err(e) => {
                                failure.lock().unwrap_or_else(|p| p.into_inner()).get_or_insert(e);
                            }
                        }
                    }
                });
            }
        });
        if let Some(e) = failure.into_inner().unwrap_or_else(|p| p.into_inner()) {
            return Err(e);
        }
        let records = results.into_inner().unwrap_or_else(|p| p.into_inner()).into_iter().flatten().collect();
        Ok((records, reused.into_inner()))
    }

    /// The record of a finished shard whose package is what it says.
    fn record(&self, shard: &PlannedShard) -> Option<Record> {
        let path = self.bundle.join(package_file(&shard.name));
        let text = fs::read(self.work.join(format!("{}.json", shard.name))).ok()?;
        let record: Record = serde_json::from_slice(&text).ok()?;
        (path.is_dir() && package_sha256(&path).is_ok_and(|hash| hash == record.sha256)).then_some(record)
    }

    /// Records of all shards, whose packages are what they say.
    fn records(&self, plan: &Plan) -> Result<Vec<Record>> {
        let records: Vec<Option<Record>> = plan.shards.par_iter().map(|s| self.record(s)).collect();
        let missing: Vec<&str> = plan
            .shards
            .iter()
            .zip(&records)
            .filter(|(_, r)| r.is_none())
            .map(|(s, _)| s.name.as_str())
            .collect();
        if !missing.is_empty() {
            let first = missing.iter().take(3).copied().collect::<Vec<_>>().join(", ");
            let more = if missing.len() > 3 { ", .." } else { "" };
            return Err(Error::Usage(format!(
                "{}: {} of {} shards are not built ({first}{more}); run the parts that lack them again",
                self.bundle.display(),
                missing.len(),
                plan.shards.len()
            )));
        }
        Ok(records.into_iter().flatten().collect())
    }

    /// Writes `chain.json` once everything is there.
    fn finish(&self, plan: &Plan, records: &[Record], host: HostRecord) -> Result<()> {
        let mut chain = plan.chain.clone();
        chain.embedding.sha256 = host.embedding;
        chain.vectors = host.vectors.map(|sha256| Vectors { file: VECTORS_FILE.into(), sha256 });
        chain.importance = self.begun_importance()?;
        chain.shards = plan
            .shards
            .iter()
            .zip(records)
            .map(|(s, r)| Shard {
                name: s.name.clone(),
                file: package_file(&s.name),
                kind: s.kind,
                layer: s.layer,
                functions: s.functions.clone(),
                quant: s.quant.clone(),
                weights: s.weights,
                bytes: r.bytes,
                sha256: r.sha256.clone(),
                min_weight_cosine: r.min_weight_cosine,
                output_error: r.output_error,
            })
            .collect();
        chain.write(&self.bundle)?;
        fs::remove_dir_all(&self.work).map_err(|e| Error::io(&self.work, e))
    }

    /// Hash of the importances that the build began with.
    fn begun_importance(&self) -> Result<Option<String>> {
        let path = self.work.join("plan.json");
        let text = fs::read(&path).map_err(|e| Error::io(&path, e))?;
        let begun: serde_json::Value =
            serde_json::from_slice(&text).map_err(|e| Error::invalid(&path, format!("plan: {e}")))?;
        Ok(begun["inputs"]["importance"].as_str().map(str::to_string))
    }

    /// The record of the files beside the shards, all of which are what it says.
    fn host_record(&self, plan: &Plan) -> Result<HostRecord> {
        let wrong = |file: &str| {
            let what = format!("{}: {file} is not written; run part 0 again", self.bundle.display());
            Error::Usage(what)
        };
        let text = fs::read(self.work.join(HOST_RECORD)).map_err(|_| wrong(&plan.chain.embedding.file))?;
        let record: HostRecord =
            serde_json::from_slice(&text).map_err(|_| wrong(&plan.chain.embedding.file))?;
        let is = |file: &str, hash: &str| file_sha256(&self.bundle.join(file)).is_ok_and(|h| h == hash);
        if !is(&plan.chain.embedding.file, &record.embedding) {
            return Err(wrong(&plan.chain.embedding.file));
        }
        if let Some(hash) = record.vectors.as_ref().filter(|hash| !is(VECTORS_FILE, hash)) {
            return Err(wrong(&format!("{VECTORS_FILE} ({hash})")));
        }
        match record.files.iter().find(|f| !self.bundle.join(f).is_file()) {
            Some(file) => Err(wrong(file)),
            None => Ok(record),
        }
    }

    /// Writes the files beside the shards, unless an earlier run has.
    fn write_host(&self, family: &dyn Family, plan: &Plan) -> Result<HostRecord> {
        if let Ok(record) = self.host_record(plan) {
            return Ok(record);
        }
        // First, so that a tokenizer that is wrong is found before the work.
        let files = family.opened().checkpoint.side_files()?;
        let vectors = self.write_vectors(family)?;
        let embedding = self.write_embedding(family, plan)?;
        let mut names = Vec::new();
        for (name, file) in files {
            write_atomic(&self.bundle.join(name), &file.read()?)?;
            names.push(name.to_string());
        }
        let record = HostRecord { embedding, vectors, files: names };
        write_atomic(&self.work.join(HOST_RECORD), &to_json(&record))?;
        Ok(record)
    }

    /// One shard: found finished, or built. True when it was found.
    fn shard(&self, inputs: Inputs<'_>, shard: &PlannedShard) -> Result<(Record, bool)> {
        if let Some(record) = self.record(shard) {
            return Ok((record, true));
        }
        let path = self.bundle.join(package_file(&shard.name));
        if path.is_dir() {
            // Renamed into place, but its record was not written any more.
            fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
        }
        let quality = write_shard(inputs.family, shard, inputs.importance, &path)?;
        let record = Record {
            bytes: directory_bytes(&path)?,
            sha256: package_sha256(&path)?,
            min_weight_cosine: quality.min_cosine,
            output_error: quality.all.output_error(),
        };
        write_atomic(&self.work.join(format!("{}.json", shard.name)), &to_json(&record))?;
        Ok((record, false))
    }

    /// Writes the vectors that host steps name, where there are any, and gives the file's hash.
    fn write_vectors(&self, family: &dyn Family) -> Result<Option<String>> {
        let vectors = family.host_vectors()?;
        if vectors.is_empty() {
            return Ok(None);
        }
        let arrays: Vec<(String, Array)> = vectors
            .into_iter()
            .filter_map(|(name, values)| Some((name, Array::new(vec![values.len()], values)?)))
            .collect();
        let path = self.bundle.join(VECTORS_FILE);
        anemoe_npz::write_npz(&path, &arrays)?;
        Ok(Some(file_sha256(&path)?))
    }

    /// Writes the host's embedding as [`anemoe_bundle::Storage`] says, and gives the file's hash.
    fn write_embedding(&self, family: &dyn Family, plan: &Plan) -> Result<String> {
        let embedding = &plan.chain.embedding;
        let path = self.bundle.join(&embedding.file);
        let temporary = self.work.join("embed.tmp");
        let file = File::create(&temporary).map_err(|e| Error::io(&temporary, e))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let matrix = MatrixPlan {
            name: "embedding".into(),
            part: "embedding".into(),
            tensor: family.embedding_tensor().into(),
            offset: 0,
            rows: embedding.rows,
            cols: embedding.cols,
            taps: 1,
            quant: plan.embedding,
        };
        let failed = |e: std::io::Error| Error::io(&temporary, e);
        // A row is one token's: which of its channels matter for the head says nothing here.
        let side = encode_matrix(family, &matrix, None, &mut |bytes| out.write_all(bytes).map_err(failed))?;
        let values = side.values.iter().flat_map(|v| v.to_le_bytes());
        let tail: Vec<u8> = values.chain(side.offsets.iter().map(|&o| o as u8)).collect();
        out.write_all(&tail).map_err(failed)?;
        out.flush().and_then(|()| out.get_ref().sync_all()).map_err(failed)?;
        fs::rename(&temporary, &path).map_err(|e| Error::io(&path, e))?;
        Ok(file_sha256(&path)?)
    }
}

/// How far the matrices of a shard are from the originals.
#[derive(Clone, Copy, Debug)]
pub struct Quality {
    /// Lowest cosine between a matrix and its compressed form.
    pub min_cosine: f64,
    /// Over all matrices that are compressed.
    pub all: Metrics,
}

/// Where a shard lies in its bundle.
fn package_file(name: &str) -> String {
    format!("{SHARDS_DIR}/{name}.mlpackage")
}

fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    // Plans and records hold only what JSON can: no maps with other keys than strings, no non-finite numbers.
    serde_json::to_vec_pretty(value).expect("plans and records are representable in JSON")
}

/// Writes the package of one shard.
///
/// # Errors
/// The checkpoint is wrong, or the package cannot be written; nothing stays behind then.
pub fn write_shard(
    family: &dyn Family,
    shard: &PlannedShard,
    importance: Option<&Importance>,
    path: &Path,
) -> Result<Quality> {
    let mut writer = PackageWriter::create(path)?;
    let mut stored = Stored::default();
    let mut quality = Quality { min_cosine: 1.0, all: Metrics::default() };
    for matrix in &shard.matrices {
        let metrics = store_matrix(writer.weights(), family, matrix, importance, &mut stored)?;
        // Plain fp16 has no figures.
        if metrics.count > 0 {
            quality.min_cosine = quality.min_cosine.min(metrics.cosine());
            quality.all.merge(&metrics);
        }
    }
    for vector in &shard.vectors {
        store_vector(writer.weights(), family, vector, &mut stored)?;
    }
    let mut functions = Vec::new();
    for function in &shard.functions {
        functions.push((function.name.clone(), family.lower(shard, function, &stored)?));
    }
    let default = shard.functions.first().map(|f| f.name.clone()).unwrap_or_default();
    let model = anemoe_mlpackage::mil::builder::model(crate::lower::OPSET, functions, &default)?;
    // A fault of the lowering, caught before anything is written that a compiler would refuse.
    if let Some(finding) = verify(&model).first() {
        return Err(
            anemoe_mlpackage::Error::InvalidProgram(format!("shard {}: {finding}", shard.name)).into()
        );
    }
    writer.finish(&model)?;
    Ok(quality)
}

fn directory_bytes(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).map_err(|e| Error::io(dir, e))? {
        let entry = entry.map_err(|e| Error::io(dir, e))?;
        let meta = entry.metadata().map_err(|e| Error::io(entry.path(), e))?;
        bytes += if meta.is_dir() { directory_bytes(&entry.path())? } else { meta.len() };
    }
    Ok(bytes)
}
