//! Compiles the packages of a bundle, and loads their functions, each in a child process.

use crate::caches::ModelFiles;
use crate::child_work::{LoadSeconds, Work};
use crate::listener::Listener;
use crate::risky_steps::{StepFailure, StepResult, StepShard, Steps};
use anemoe_bundle::{Chain, Shard};
use anemoe_convert::build::check_room;
use anemoe_coreml::causes::is_no_plan;
use anemoe_coreml::{COMPILED, CompiledModels};
use anemoe_io::{Error, Result, Temporary};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Instant;

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
    /// Name of the shard.
    pub package: String,
    /// Bytes of the package.
    pub package_bytes: u64,
    /// Bytes of the compiled model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compiled_bytes: Option<u64>,
    /// Seconds to compile; absent if the package was compiled already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Seconds to load, by function.
    pub load_seconds: LoadSeconds,
}

/// Compiler of a bundle's packages.
pub struct BundleCompiler<'a> {
    /// The bundle.
    pub bundle: &'a Path,
    /// Its contract.
    pub chain: &'a Chain,
    /// Places of its compiled models.
    pub models: &'a CompiledModels,
    /// True if packages are compiled that are compiled already.
    pub again: bool,
    /// True if every function is loaded once.
    pub loads: bool,
    /// Runner of the steps.
    pub steps: Steps,
}

impl BundleCompiler<'_> {
    /// Compiles every package that is not compiled, and loads its functions.
    ///
    /// # Errors
    /// The disk has too little room, a file cannot be written, or no process can be started.
    pub fn run(&self, listener: &dyn Listener) -> Result<CompileReport> {
        let shards = &self.chain.shards;
        let missing: Vec<&Shard> = shards.iter().filter(|s| self.is_missing(s)).collect();
        self.check_room(&missing)?;
        let mut report = CompileReport {
            cache: self.models.folder().map(|folder| folder.display().to_string()),
            of_other_systems: missing.iter().filter(|s| self.models.has_other(&self.package(s))).count(),
            ..CompileReport::default()
        };
        for (i, shard) in shards.iter().enumerate() {
            listener.progress("packages", &shard.name, i, shards.len());
            if let Err(failure) = self.shard(shard, &mut report)? {
                listener.message(&failure.lines());
                report.failures.push(failure);
            }
        }
        listener.progress("packages", "", shards.len(), shards.len());
        report.failed = report.failures.len();
        report.faults = report.failures.iter().map(StepFailure::line).collect();
        Ok(report)
    }

    fn package(&self, shard: &Shard) -> PathBuf {
        self.bundle.join(&shard.file)
    }

    fn is_missing(&self, shard: &Shard) -> bool {
        self.again || self.models.find(&self.package(shard)).is_none()
    }

    /// Checks the room for compiled models, which are about as large as their packages.
    ///
    /// ```text
    /// 1.05 * all packages + the largest package + all packages, if they are loaded
    /// ```
    /// The largest counts twice. The Neural Engine's compiler keeps about as much again for models that are loaded.
    fn check_room(&self, missing: &[&Shard]) -> Result<()> {
        let all: u64 = missing.iter().map(|s| s.bytes).sum();
        let largest = missing.iter().map(|s| s.bytes).max().unwrap_or(0);
        let folder = self.models.folder().unwrap_or(self.bundle);
        let what = format!("the compiled models of {} packages need about", missing.len());
        let loaded = if self.loads { all } else { 0 };
        check_room(folder, &what, all + all / 20 + largest + loaded)
    }

    /// Compiles a package if needed, and loads its functions; compiles it again where the old model is refused with -14.
    fn shard(&self, shard: &Shard, report: &mut CompileReport) -> StepResult<()> {
        let package = self.package(shard);
        let is_missing = self.is_missing(shard);
        let mut loaded = if is_missing { Ok(LoadSeconds::new()) } else { self.load(shard, &package)? };
        let is_stale = loaded.as_ref().is_err_and(|f| is_no_plan(&f.message));
        let mut seconds = None;
        if is_missing || is_stale {
            match self.compile(shard, &package)? {
                Ok(s) => seconds = Some(s),
                Err(failure) => return Ok(Err(failure)),
            }
            loaded = self.load(shard, &package)?;
            report.compiled += 1;
            report.compiled_again += usize::from(is_stale);
        } else {
            report.already_compiled += 1;
        }
        if let Err(failure) = &mut loaded
            && seconds.is_some()
            && is_no_plan(&failure.message)
        {
            failure.rule_out_stale();
        }
        let (load_seconds, end) = match loaded {
            Ok(load_seconds) => (load_seconds, Ok(())),
            Err(failure) => (LoadSeconds::new(), Err(failure)),
        };
        report.packages.push(PackageTimes {
            package: shard.name.clone(),
            package_bytes: shard.bytes,
            compiled_bytes: compiled_bytes(self.models, &package)?,
            seconds,
            load_seconds,
        });
        Ok(end)
    }

    /// Compiles a package in a child process, moves the result to its place, and returns the seconds.
    fn compile(&self, shard: &Shard, package: &Path) -> StepResult<f64> {
        // Beside the package if the system has no name, and therefore no place in the cache.
        let target = self.models.place(package).unwrap_or_else(|| package.with_extension(COMPILED));
        let parent = target.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(|e| Error::io(parent, e))?;
        // The folder is deleted with the leftovers of a child that crashed.
        let folder = Temporary::dir(parent, ".compile").map_err(|e| Error::io(parent, e))?;
        let made = folder.path().join("model").with_extension(COMPILED);
        let started = Instant::now();
        let work = Work::Compile(model_files(shard, package, made.clone()));
        if let Err(failure) = self.steps.run::<()>(StepShard::of(self.chain, shard), &work)? {
            return Ok(Err(failure));
        }
        let seconds = started.elapsed().as_secs_f64();
        if target.symlink_metadata().is_ok() {
            std::fs::rename(&target, folder.path().join("old")).map_err(|e| Error::io(&target, e))?;
        }
        std::fs::rename(&made, &target).map_err(|e| Error::io(&target, e))?;
        Ok(Ok(seconds))
    }

    /// Loads every function in a child process, and returns the seconds by function.
    fn load(&self, shard: &Shard, package: &Path) -> StepResult<LoadSeconds> {
        if !self.loads {
            return Ok(Ok(LoadSeconds::new()));
        }
        let work = Work::Load(model_files(shard, package, self.models.expect(package)?));
        self.steps.run(StepShard::of(self.chain, shard), &work)
    }
}

/// Returns the bytes of a package's compiled model; none without one.
pub(crate) fn compiled_bytes(models: &CompiledModels, package: &Path) -> Result<Option<u64>> {
    models.find(package).map(|path| anemoe_bundle::package_bytes(&path)).transpose()
}

/// Joins the paths of a shard's package and compiled model with the names of its functions.
pub(crate) fn model_files(shard: &Shard, package: &Path, compiled: PathBuf) -> ModelFiles {
    let functions = shard.functions.iter().map(|f| f.name.clone()).collect();
    ModelFiles { package: package.into(), compiled, functions }
}
