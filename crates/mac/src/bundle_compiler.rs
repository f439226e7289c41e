//! Compiles the packages of a bundle, and loads their functions, each in a child process.

use crate::caches::ModelFiles;
use crate::child::{LoadSeconds, Work};
use crate::risky_steps::{Listener, StepError, StepFailure, StepResult, finding, form_of, run_step};
use anemoe_bundle::{Chain, Shard};
use anemoe_convert::build::check_room;
use anemoe_coreml::causes::is_no_plan;
use anemoe_coreml::{COMPILED, CompiledModels};
use anemoe_io::{Error, Result, Temporary};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Results of a compilation.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CompileReport {
    /// Folder of this system and chip in the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache: Option<String>,
    /// Number of packages that were compiled.
    pub compiled: usize,
    /// Number of packages that were compiled already.
    pub already_compiled: usize,
    /// Number of packages whose compiled model was refused with -14, and that are compiled again.
    pub compiled_again: usize,
    /// Number of packages with compiled models of other systems or chips.
    pub of_other_systems: usize,
    /// Number of packages that failed.
    pub failed: usize,
    /// Packages with a compiled model.
    pub packages: Vec<PackageTimes>,
    /// Failures.
    pub failures: Vec<StepFailure>,
    /// The failures, a line each.
    faults: Vec<String>,
}

/// Sizes of a package and its compiled model, and times.
#[derive(Debug, Serialize, Deserialize)]
pub struct PackageTimes {
    pub package: String,
    pub package_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compiled_bytes: Option<u64>,
    /// Seconds to compile; absent if the package was compiled already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    pub load_seconds: LoadSeconds,
}

/// A bundle whose packages are compiled, loaded and planned, each in a child process.
pub struct BundleSteps<'a> {
    /// The bundle.
    pub bundle: &'a Path,
    /// Its contract.
    pub chain: &'a Chain,
    /// Places of its compiled models.
    pub models: &'a CompiledModels,
    /// Time that a step may take.
    pub limit: Duration,
}

impl BundleSteps<'_> {
    pub(crate) fn package(&self, shard: &Shard) -> PathBuf {
        self.bundle.join(&shard.file)
    }

    /// Runs a step with a shard's package, whose compiled model is at `compiled`.
    pub(crate) fn run<T: DeserializeOwned>(
        &self,
        shard: &Shard,
        compiled: PathBuf,
        work: impl FnOnce(ModelFiles) -> Work,
    ) -> StepResult<T> {
        let functions = shard.functions.iter().map(|f| f.name.clone()).collect();
        let package = self.package(shard);
        let model = ModelFiles { shard: shard.name.clone(), package, compiled, functions };
        run_step(self.limit, form_of(self.chain, shard), &work(model))
    }

    fn is_missing(&self, shard: &Shard, again: bool) -> bool {
        again || self.models.find(&self.package(shard)).is_none()
    }

    /// Compiles every package that is not compiled, or all `again`, and loads its functions if asked to.
    ///
    /// # Errors
    /// The disk has too little room, a file cannot be written, or no process can be started.
    pub fn compile(&self, again: bool, loads: bool, listener: &dyn Listener) -> Result<CompileReport> {
        let shards = &self.chain.shards;
        let missing: Vec<&Shard> = shards.iter().filter(|s| self.is_missing(s, again)).collect();
        self.check_room(&missing, loads)?;
        let mut report = CompileReport {
            cache: self.models.folder().map(|folder| folder.display().to_string()),
            of_other_systems: missing.iter().filter(|s| self.models.has_other(&self.package(s))).count(),
            ..CompileReport::default()
        };
        for (i, shard) in shards.iter().enumerate() {
            listener.progress("packages", &shard.name, i, shards.len());
            if let Err(failure) = finding(self.shard(shard, again, loads, &mut report))? {
                listener.message(&failure.lines());
                report.failures.push(failure);
            }
        }
        listener.progress("packages", "", shards.len(), shards.len());
        report.failed = report.failures.len();
        report.faults = report.failures.iter().map(StepFailure::line).collect();
        Ok(report)
    }

    /// Checks the room for compiled models, which are about as large as their packages; the largest counts twice. The Neural
    /// Engine's compiler keeps about as much again for models that are loaded.
    fn check_room(&self, missing: &[&Shard], loads: bool) -> Result<()> {
        let all: u64 = missing.iter().map(|s| s.bytes).sum();
        let largest = missing.iter().map(|s| s.bytes).max().unwrap_or(0);
        let folder = self.models.folder().unwrap_or(self.bundle);
        let what = format!("the compiled models of {} packages need about", missing.len());
        check_room(folder, &what, all + all / 20 + largest + if loads { all } else { 0 })
    }

    /// Compiles a package if needed, and loads its functions; compiles it again where the old model is refused with -14.
    fn shard(&self, shard: &Shard, again: bool, loads: bool, report: &mut CompileReport) -> StepResult<()> {
        let load = || -> Result<std::result::Result<LoadSeconds, StepFailure>> {
            if !loads {
                return Ok(Ok(LoadSeconds::new()));
            }
            finding(self.run(shard, self.models.expect(&self.package(shard))?, Work::Load))
        };
        let is_missing = self.is_missing(shard, again);
        let mut loaded = if is_missing { Ok(LoadSeconds::new()) } else { load()? };
        let is_stale = loaded.as_ref().is_err_and(|f| is_no_plan(&f.message));
        let mut seconds = None;
        if is_missing || is_stale {
            seconds = Some(self.compile_one(shard)?);
            loaded = load()?.map_err(StepFailure::of_new_model);
            report.compiled += 1;
            report.compiled_again += usize::from(is_stale);
        } else {
            report.already_compiled += 1;
        }
        let compiled = self.models.find(&self.package(shard));
        report.packages.push(PackageTimes {
            package: shard.name.clone(),
            package_bytes: shard.bytes,
            compiled_bytes: compiled.map(|path| anemoe_bundle::package_bytes(&path)).transpose()?,
            seconds,
            load_seconds: loaded.as_ref().cloned().unwrap_or_default(),
        });
        loaded.map(drop).map_err(|failure| StepError::Finding(Box::new(failure)))
    }

    /// Compiles a package, moves the result to its place, and returns the seconds.
    fn compile_one(&self, shard: &Shard) -> StepResult<f64> {
        // Beside the package if the system has no name, and therefore no place in the cache.
        let package = self.package(shard);
        let target = self.models.place(&package).unwrap_or_else(|| package.with_extension(COMPILED));
        let parent = target.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(|e| Error::io(parent, e))?;
        // The folder is deleted with the leftovers of a child that crashed.
        let folder = Temporary::dir(parent, ".compile").map_err(|e| Error::io(parent, e))?;
        let made = folder.path().join("model").with_extension(COMPILED);
        let started = Instant::now();
        self.run::<()>(shard, made.clone(), Work::Compile)?;
        let seconds = started.elapsed().as_secs_f64();
        if target.symlink_metadata().is_ok() {
            std::fs::rename(&target, folder.path().join("old")).map_err(|e| Error::io(&target, e))?;
        }
        std::fs::rename(&made, &target).map_err(|e| Error::io(&target, e))?;
        Ok(seconds)
    }
}
