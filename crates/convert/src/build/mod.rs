//! Build of a bundle: every shard of a plan, once. The bundle is complete when its `chain.json` is there.
//!
//! ```text
//! NAME.anemoe/.anemoe-build/plan.json      the plan; a rerun goes on only with an equal one
//!                          /lock           held while a build runs; parts of a build share it
//!                          /lock.1of4      held while that part runs
//!                          /host.json      record of the files beside the shards
//!                          /SHARD.json     one record per finished shard
//!                          /gates.1of4     results of that part's gates
//!                          /source         where the checkpoint is, for whoever completes the bundle
//!                          /.anemoe-tmp-scratch-* FP16 forms of shards while a gate needs them
//!            /.anemoe-search-*            what searches for kinds measured, until the bundle is complete
//! ```
//! The folder `.anemoe-build` is removed when the bundle is complete, unless others put something into it. Names of
//! temporary files and folders begin with `.anemoe-tmp-`; a build removes these and what builds wrote, and nothing
//! else.

mod bundle_files;
mod bundle_layout;
mod differences;
mod interrupt;
mod record;
mod share;
mod space;
mod weight_errors;
mod work_dir;

pub use bundle_files::{BundleFiles, PartFiles, bundle_files, plan_file, shard_files, source_file};
pub use bundle_layout::{PLAN_FILE, SEARCH_PREFIX, WORK_DIR, bundle_names, check as check_layout};
pub use interrupt::{check as check_interrupted, request as interrupt};
pub use record::{BuildPart, CheckpointOrigin, Quality};
pub use share::Share;
pub use space::{Needs, check_room, check_scratch, default_jobs, free_space, job_bytes, jobs_within};
pub use weight_errors::{FAR, WeightFault};
pub use work_dir::{check_free, lock_file};

use crate::bank_scales::BankScales;
use crate::importance::Importance;
use crate::lower::{Stored, store_matrix, store_triangle, store_vector};
use crate::models::Family;
use crate::plan::{Plan, PlanOptions, PlannedShard};
use crate::quantize::Metrics;
use crate::shard_program::lower_shard;
use crate::{Error, Result};
use anemoe_bundle::{Chain, Gates, Vectors};
use anemoe_io::{Kind, Scratch, TEMPORARY, locked};
use anemoe_mlpackage::package::PackageWriter;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use weight_errors::Usual;
use work_dir::{HostRecord, Record, WorkDir};

/// Event of a build, for progress bars and logs.
#[derive(Clone, Debug)]
pub enum BuildEvent<'a> {
    /// A shard is done, built by this run or by an earlier one.
    ShardDone {
        /// The shard.
        shard: &'a PlannedShard,
        /// Bytes of its package.
        bytes: u64,
        /// Time that the shard took.
        elapsed: Duration,
        /// True if an earlier run built the shard.
        reused: bool,
    },
}

/// Result of a build.
#[derive(Clone, Debug, Serialize)]
pub struct BuildReport {
    /// Folder of the bundle.
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    pub bundle: PathBuf,
    /// Shards in all.
    pub shards: usize,
    /// Shards that an earlier run had built.
    pub reused: usize,
    /// Bytes of all packages.
    pub package_bytes: u64,
    /// Lowest cosine between a matrix and its compressed form.
    pub min_weight_cosine: f64,
    /// Time of the build in seconds.
    pub seconds: f64,
    /// Results of the gates, where this build had any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gates: Option<Gates>,
}

/// A build under way. One orchestrator takes its steps in order:
/// [`Build::begin`], [`Build::host_files`], [`Build::shards`] (once or more), [`Build::finish`].
pub struct Build<'a> {
    inputs: BuildInputs<'a>,
    plan: &'a Plan,
    site: WorkDir,
    part: Option<BuildPart>,
    host: Option<HostRecord>,
    /// Records of shards that are finished, by index.
    records: Mutex<BTreeMap<usize, Record>>,
    /// Usual errors of weights, from probed shards; other shards are held to these.
    usual: Usual,
    /// First shard whose weights' errors were found to be far from the usual ones.
    fault: Mutex<Option<WeightFault>>,
    reused: AtomicUsize,
    started: Instant,
}

impl<'a> Build<'a> {
    /// Begins to build `plan` into the new folder `bundle`, or goes on with what an interrupted run of the same plan left
    /// there. With `part`, other processes may build the other parts in the same folder at the same time, on this machine or on
    /// others that see it, and [`assemble`] finishes the bundle.
    ///
    /// # Errors
    /// The folder exists and is not an unfinished build of this plan, or another build is using it.
    pub fn begin(
        family: &'a Family,
        plan: &'a Plan,
        importance: Option<&'a Importance>,
        bundle: &Path,
        part: Option<BuildPart>,
    ) -> Result<Build<'a>> {
        let started = Instant::now();
        let inputs = BuildInputs { family, importance };
        let site = WorkDir::open(bundle, plan, &inputs.identity()?, part)?;
        let (records, usual, fault) = (Mutex::default(), Usual::default(), Mutex::default());
        let reused = AtomicUsize::new(0);
        Ok(Build { inputs, plan, site, part, host: None, records, usual, fault, reused, started })
    }

    /// Notes where the checkpoint is, for [`Assembly::source`]; the finished bundle does not contain the note.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn remember(&self, source: &CheckpointOrigin) -> Result<()> {
        self.site.write_source(source)
    }

    /// Returns the plan.
    pub fn plan(&self) -> &'a Plan {
        self.plan
    }

    /// Returns the checkpoint that the shards are made from.
    pub fn family(&self) -> &'a Family {
        self.inputs.family
    }

    /// Returns the importances, where the weights are compressed with any.
    pub fn importance(&self) -> Option<&'a Importance> {
        self.inputs.importance
    }

    /// Returns the bundle's folder.
    pub fn bundle(&self) -> &Path {
        &self.site.bundle
    }

    /// Returns the folder of the unfinished build.
    pub fn folder(&self) -> &Path {
        &self.site.work
    }

    /// Returns the path of a shard's package, written or not.
    pub fn package(&self, shard: &PlannedShard) -> PathBuf {
        self.site.bundle.join(shard.package_file())
    }

    /// Returns the indices of the shards that this process builds.
    pub fn own_shards(&self) -> Vec<usize> {
        let (index, of) = self.part.map_or((0, 1), |p| (p.index, p.of.max(1)));
        (index..self.plan.shards.len()).step_by(of).collect()
    }

    /// Returns the index of the first own shard of each type.
    pub fn representatives(&self) -> Vec<usize> {
        let mut seen = std::collections::BTreeSet::new();
        self.own_shards().into_iter().filter(|&i| seen.insert(self.plan.shards[i].signature())).collect()
    }

    /// Counts the bytes of own shards that are not built yet, and of the files beside the shards.
    pub fn bytes_to_write(&self) -> u64 {
        let shards = self.own_shards().into_iter().map(|i| &self.plan.shards[i]);
        let missing =
            shards.filter(|s| !self.package(s).is_dir()).map(PlannedShard::package_bytes).sum::<u64>();
        let embedding = self.site.bundle.join(&self.plan.chain.embedding.file);
        if embedding.is_file() {
            return missing;
        }
        let files = self.inputs.family.checked.checkpoint.side_files().unwrap_or_default();
        missing + self.plan.totals.embedding_bytes + files.iter().map(|(_, f)| f.bytes()).sum::<u64>()
    }

    /// Writes the files beside the shards, unless an earlier run has. Of several parts, the one with index 0 writes
    /// them.
    ///
    /// # Errors
    /// The checkpoint is wrong, or a file cannot be written.
    pub fn host_files(&mut self) -> Result<()> {
        if self.part.is_none_or(|p| p.index == 0) {
            self.host = Some(self.site.write_host(self.inputs.family, self.plan)?);
        }
        Ok(())
    }

    /// Builds the shards of `which` that are not built yet, `jobs` at a time.
    ///
    /// # Errors
    /// The checkpoint is wrong, a file cannot be written, or [`interrupt()`] was called. Finished shards stay;
    /// nothing half-written does.
    pub fn shards(
        &self,
        which: &[usize],
        jobs: usize,
        on_event: &(dyn Fn(BuildEvent<'_>) + Sync),
    ) -> Result<()> {
        let next = AtomicUsize::new(0);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let failed = || locked(&failure).is_some() || locked(&self.fault).is_some();
        let work = || {
            while !failed() {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(&index) = which.get(i) else { break };
                if let Err(e) = self.shard(index, on_event) {
                    locked(&failure).get_or_insert(e);
                }
            }
        };
        std::thread::scope(|scope| {
            // This thread works, too, so that a shard is built where no other thread starts.
            for _ in 1..jobs.min(which.len()) {
                if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
        failure.into_inner().unwrap_or_else(|p| p.into_inner()).map_or(Ok(()), Err)
    }

    /// Holds the shards that are built from now on to the weights' errors of the shards `probed`, which are built.
    /// [`Build::shards`] ends at the first shard that is far from these errors.
    pub fn compare_with(&mut self, probed: &[usize]) {
        let records = locked(&self.records);
        let usual = Usual::of(probed.iter().filter_map(|i| records.get(i)).map(|r| r.roles.as_slice()));
        drop(records);
        self.usual = usual;
    }

    /// Returns the shard at which [`Build::shards`] ended because its weights' errors are far from the usual ones.
    pub fn weight_fault(&self) -> Option<WeightFault> {
        locked(&self.fault).clone()
    }

    /// Finishes one shard: its record is known, or an earlier run built it, or it is built now.
    fn shard(&self, index: usize, on_event: &(dyn Fn(BuildEvent<'_>) + Sync)) -> Result<()> {
        if locked(&self.records).contains_key(&index) {
            return Ok(());
        }
        interrupt::check()?;
        let shard = &self.plan.shards[index];
        let started = Instant::now();
        let found = self.site.record(shard);
        let reused = found.is_some();
        let record = match found {
            Some(record) => record,
            None => {
                // A killed run may have put the package in place without writing its record.
                self.site.remove_package(&shard.package_file())?;
                let path = self.site.folder.path(shard.package_file())?;
                let quality = write_shard(self.inputs.family, shard, self.inputs.importance, &path)?;
                self.site.write_record(shard, &quality)?
            }
        };
        self.reused.fetch_add(usize::from(reused), Ordering::Relaxed);
        if let Some(fault) = self.usual.fault(shard, &record.roles) {
            locked(&self.fault).get_or_insert(fault);
        }
        on_event(BuildEvent::ShardDone { shard, bytes: record.bytes, elapsed: started.elapsed(), reused });
        locked(&self.records).insert(index, record);
        Ok(())
    }

    /// Returns the contract as it will be written, once every shard is built; for gates that run before that.
    ///
    /// # Errors
    /// A shard is not built, or this is a part.
    pub fn chain(&self) -> Result<Chain> {
        let records: Vec<Record> = locked(&self.records).values().cloned().collect();
        match &self.host {
            Some(host) if records.len() == self.plan.shards.len() => {
                self.site.chain(self.plan, &records, host)
            }
            _ => Err(Error::usage(format!("{}: not every shard is built", self.bundle().display()))),
        }
    }

    /// Returns the folder where gates find the host's vectors, and the vectors' entry in a chain. The folder is the
    /// bundle, or `scratch` where another part writes the bundle's vectors.
    ///
    /// # Errors
    /// The checkpoint is wrong, or the vectors cannot be written.
    pub fn vectors<'s>(&'s self, scratch: &'s Path) -> Result<(&'s Path, Option<Vectors>)> {
        let (folder, hash) = match &self.host {
            Some(host) => (self.bundle(), host.vectors.clone()),
            None => (scratch, work_dir::write_vectors(self.inputs.family, &self.plan().options, scratch)?),
        };
        Ok((folder, hash.map(work_dir::vectors)))
    }

    /// Returns the contract as far as it is known before the shards are built, with the shards `which`.
    pub fn draft(&self, which: impl Iterator<Item = usize>) -> Chain {
        Chain {
            shards: which.map(|i| self.plan.shards[i].chain_entry()).collect(),
            ..self.plan.chain.clone()
        }
    }

    /// Writes `chain.json` with the results of the gates, and ends the build. A part writes only the results of its
    /// gates.
    ///
    /// # Errors
    /// A shard is not built, or a file cannot be written.
    pub fn finish(self, gates: Gates) -> Result<BuildReport> {
        match self.part {
            None => self.site.finish(&Chain { gates: Some(gates), ..self.chain()? })?,
            Some(part) => self.site.write_gates(part, &gates)?,
        }
        let records: Vec<Record> =
            self.records.into_inner().unwrap_or_else(|p| p.into_inner()).into_values().collect();
        let reused = self.reused.into_inner();
        Ok(BuildReport { gates: Some(gates), ..report(&self.site.bundle, &records, reused, self.started) })
    }

    /// Cleans up after a failure. Finished shards stay where the build can go on, which it cannot with a wrong
    /// checkpoint.
    pub fn abandon(self, e: &Error) {
        // A part leaves alone what other parts have done.
        if self.part.is_none() {
            // An error about files that this build wrote, shards or files of a gate, says nothing of the checkpoint.
            let is_temporary = |part: Component| part.as_os_str().to_string_lossy().starts_with(TEMPORARY);
            let ours = |path: &Path| path.starts_with(self.bundle()) || path.components().any(is_temporary);
            let is_refused = matches!(e.kind(), Kind::Invalid | Kind::Unsupported);
            self.site.tidy(is_refused && e.path().is_some_and(|path| !ours(path)));
        }
    }

    /// Makes a new folder for temporary files of a gate, in the unfinished bundle or in `parent`. Folders that killed
    /// builds left there are removed.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub fn scratch(&self, parent: Option<&Path>) -> Result<Scratch> {
        let parent = parent.unwrap_or(&self.site.work);
        Scratch::new(parent).map_err(|e| Error::io(parent, e))
    }

    /// Notes that a part has no gates, before the part begins: its shards count as not gated even if it is
    /// interrupted.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn note_skipped(&self) -> Result<()> {
        self.part.map_or(Ok(()), |part| self.site.write_gates(part, &Gates::skipped()))
    }
}

/// Computes the hash of a plan and the identity of its inputs: builds go on with each other's shards only if it is
/// equal.
///
/// # Errors
/// The checkpoint cannot be read.
pub fn plan_sha256(family: &Family, plan: &Plan, importance: Option<&Importance>) -> Result<String> {
    let inputs = BuildInputs { family, importance };
    Ok(anemoe_bundle::sha256(&work_dir::plan_text(plan, &inputs.identity()?)))
}

/// Writes the vectors that the host needs into a folder, where the family has any.
///
/// # Errors
/// The checkpoint is wrong, or the vectors cannot be written.
pub fn write_host_vectors(family: &Family, options: &PlanOptions, folder: &Path) -> Result<Option<Vectors>> {
    Ok(work_dir::write_vectors(family, options, folder)?.map(work_dir::vectors))
}

/// Builds `plan` without any gate.
///
/// # Errors
/// Fails like a step of [`Build`]. Finished shards stay; nothing half-written does.
pub fn build(
    family: &Family,
    plan: &Plan,
    importance: Option<&Importance>,
    bundle: &Path,
    jobs: usize,
    on_event: &(dyn Fn(BuildEvent<'_>) + Sync),
) -> Result<BuildReport> {
    let mut build = Build::begin(family, plan, importance, bundle, None)?;
    match build.host_files().and_then(|()| build.shards(&build.own_shards(), jobs, on_event)) {
        Ok(()) => build.finish(Gates::skipped()),
        Err(e) => {
            build.abandon(&e);
            Err(e)
        }
    }
}

/// A bundle whose parts are all built, but which is not complete yet.
pub struct Assembly {
    site: WorkDir,
    plan: Plan,
    records: Vec<Record>,
    host: HostRecord,
    started: Instant,
}

/// Opens a bundle whose parts are all built. That needs neither the checkpoint nor the options.
///
/// # Errors
/// The folder is not an unfinished build, a part is still being built, or a shard is missing or damaged (the error names it).
pub fn assemble(bundle: &Path) -> Result<Assembly> {
    let started = Instant::now();
    let (site, plan) = WorkDir::begun(bundle)?;
    let records = site.records(&plan)?;
    let host = site.host_record(&plan)?;
    Ok(Assembly { site, plan, records, host, started })
}

impl Assembly {
    /// Returns the contract as it will be written.
    ///
    /// # Errors
    /// The record of the build cannot be read.
    pub fn chain(&self) -> Result<Chain> {
        self.site.chain(&self.plan, &self.records, &self.host)
    }

    /// Returns the bundle's folder.
    pub fn bundle(&self) -> &Path {
        &self.site.bundle
    }

    /// Returns the plan that the parts were built by.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the origin of the checkpoint, as the last build noted it.
    pub fn source(&self) -> Option<CheckpointOrigin> {
        self.site.source()
    }

    /// Returns the worst result of the parts' gates on their representative shards, and true if no part had any
    /// gates.
    pub fn part_gates(&self) -> (Gates, bool) {
        self.site.part_gates()
    }

    /// Writes `chain.json` with the results of the gates.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn finish(self, gates: Gates) -> Result<BuildReport> {
        self.site.finish(&Chain { gates: Some(gates), ..self.chain()? })?;
        let report = report(&self.site.bundle, &self.records, self.records.len(), self.started);
        Ok(BuildReport { gates: Some(gates), ..report })
    }
}

fn report(bundle: &Path, records: &[Record], reused: usize, started: Instant) -> BuildReport {
    BuildReport {
        bundle: bundle.to_path_buf(),
        shards: records.len(),
        reused,
        package_bytes: records.iter().map(|r| r.bytes).sum(),
        min_weight_cosine: records.iter().map(|r| r.min_weight_cosine).fold(1.0, f64::min),
        seconds: started.elapsed().as_secs_f64(),
        gates: None,
    }
}

/// Inputs of a build.
#[derive(Clone, Copy)]
struct BuildInputs<'a> {
    family: &'a Family,
    importance: Option<&'a Importance>,
}

impl BuildInputs<'_> {
    /// Returns the identity of the inputs: a build goes on only with inputs of the identity that it began with.
    fn identity(&self) -> Result<serde_json::Value> {
        let mut identity = serde_json::json!({
            "checkpoint": self.family.checked.checkpoint.fingerprint()?, "importance": self.importance.map(Importance::sha256),
        });
        if let Some(hash) = &self.family.calibration {
            identity["calibration"] = hash.as_str().into();
        }
        Ok(identity)
    }
}

/// Writes the package of one shard and returns the errors of its matrices.
///
/// # Errors
/// The checkpoint is wrong, or the package cannot be written; nothing stays behind then.
pub fn write_shard(
    family: &Family,
    shard: &PlannedShard,
    importance: Option<&Importance>,
    path: &Path,
) -> Result<Quality> {
    let checkpoint = &family.checked;
    let mut writer = PackageWriter::create(path)?;
    let mut stored = Stored::default();
    let mut quality = Quality { min_cosine: 1.0, all: Metrics::default(), roles: Vec::new() };
    let mut errors = Vec::new();
    let mut banks = BankScales::default();
    for matrix in &shard.matrices {
        interrupt::check()?;
        let scale = banks.of(family, shard, matrix)?;
        let metrics = store_matrix(writer.weights(), checkpoint, matrix, importance, scale, &mut stored)?;
        // Plain fp16 has no errors to count.
        if metrics.count > 0 {
            quality.min_cosine = quality.min_cosine.min(metrics.cosine());
            quality.all.merge(&metrics);
            errors.push((matrix, metrics));
        }
    }
    quality.roles = weight_errors::by_role(&errors);
    for vector in &shard.vectors {
        store_vector(writer.weights(), checkpoint, vector, &mut stored)?;
    }
    if let Some(n) = shard.triangle {
        store_triangle(writer.weights(), n, &mut stored)?;
    }
    writer.finish(&lower_shard(family, shard, &stored)?)?;
    Ok(quality)
}
