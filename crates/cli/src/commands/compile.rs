//! `anemoe compile`

use crate::args::runner::CompiledArgs;
use crate::bundle::Verify;
use crate::child_work::{ChildFailure, LoadSeconds, Risky, RiskyArgs, Work};
use crate::outcome::Outcome;
use crate::target::expect_bundle;
use crate::ui::{Table, Ui, bytes, message};
use anemoe_bundle::{Chain, Shard, ShardKind};
use anemoe_convert::build::check_room;
use anemoe_convert::form::ShardForm;
use anemoe_coreml::causes::is_no_plan;
use anemoe_coreml::{COMPILED, CompiledModels, CompiledRecord};
use anemoe_io::{Error, Temporary};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Compile a bundle for the Neural Engine of this Mac.
///
/// Compiled models lie in a cache, by content, version of the system and chip: what is compiled already stays as it is. Every
/// function is loaded once, because the Neural Engine's own compiler runs then. Each package is compiled and loaded in a process
/// of its own; one that fails, crashes or hangs is reported with likely causes, and the others go on. Exit status 1 when some
/// package failed.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe compile small.anemoe\n  anemoe compile small.anemoe --timeout 120"
)]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// Compile again what is compiled. What is refused with error -14 is compiled again anyway.
    #[arg(long)]
    again: bool,
    /// Load no function: mistakes of a form then show when the bundle runs.
    #[arg(long)]
    no_load: bool,
    #[command(flatten)]
    risky: RiskyArgs,
    #[command(flatten)]
    cache: CompiledArgs,
    #[command(flatten)]
    verify: Verify,
}

/// Results of a compilation.
#[derive(Default, Serialize)]
struct CompileReport {
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    bundle: PathBuf,
    /// Folder of this system and chip in the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache: Option<String>,
    compiled: usize,
    already_compiled: usize,
    /// Packages whose compiled model was refused with -14, and that are compiled again.
    compiled_again: usize,
    /// Packages with compiled models of other systems or chips.
    of_other_systems: usize,
    failed: usize,
    packages: Vec<CompiledPackage>,
    failures: Vec<ChildFailure>,
}

#[derive(Serialize)]
struct CompiledPackage {
    package: String,
    package_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    compiled_bytes: Option<u64>,
    /// Seconds to compile; absent if the package was compiled already.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    /// Seconds to load, by function.
    load_seconds: LoadSeconds,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    anemoe_coreml::available()?;
    expect_bundle(&args.bundle)?;
    let chain = args.verify.open(&args.bundle, ui)?;
    let models = args.cache.models(&args.bundle, &chain);
    let compiler = BundleCompiler { args: &args, chain: &chain, models: &models, risky: args.risky.runner() };
    let missing: Vec<&Shard> = chain.shards.iter().filter(|s| compiler.is_missing(s)).collect();
    compiler.check_room(&missing)?;
    let mut report = CompileReport {
        bundle: args.bundle.clone(),
        cache: models.folder().map(|folder| folder.display().to_string()),
        of_other_systems: missing.iter().filter(|s| models.has_other(&compiler.package(s))).count(),
        ..CompileReport::default()
    };
    let bar = ui.bar(chain.shards.len() as u64, "packages");
    for shard in &chain.shards {
        bar.set_message(shard.name.clone());
        if let Err(trouble) = compiler.shard(shard, &mut report)? {
            bar.suspend(|| trouble.lines().iter().for_each(message));
            report.failures.push(trouble);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    report.failed = report.failures.len();
    ui.document(&report)?;
    print(&report, ui)?;
    Ok(if report.failed == 0 { Outcome::Done } else { Outcome::GateFailed })
}

/// Compiler of a bundle's packages.
struct BundleCompiler<'a> {
    args: &'a Args,
    chain: &'a Chain,
    models: &'a CompiledModels,
    risky: Risky,
}

impl BundleCompiler<'_> {
    fn package(&self, shard: &Shard) -> PathBuf {
        self.args.bundle.join(&shard.file)
    }

    fn is_missing(&self, shard: &Shard) -> bool {
        self.args.again || self.models.find(&self.package(shard)).is_none()
    }

    /// Checks the room for compiled models, which are about as large as their packages.
    ///
    /// ```text
    /// 1.05 * all packages + the largest package + all packages, if they are loaded
    /// ```
    /// The largest counts twice. The Neural Engine's compiler keeps about as much again for models that are loaded.
    fn check_room(&self, missing: &[&Shard]) -> anyhow::Result<()> {
        let all: u64 = missing.iter().map(|s| s.bytes).sum();
        let largest = missing.iter().map(|s| s.bytes).max().unwrap_or(0);
        let folder = self.models.folder().unwrap_or(&self.args.bundle);
        let what = format!("the compiled models of {} packages need about", missing.len());
        let loaded = if self.args.no_load { 0 } else { all };
        Ok(check_room(folder, &what, all + all / 20 + largest + loaded)?)
    }

    /// Compiles a package if needed, and loads its functions.
    fn shard(&self, shard: &Shard, report: &mut CompileReport) -> anyhow::Result<Result<(), ChildFailure>> {
        let package = self.package(shard);
        let mut seconds = None;
        if self.is_missing(shard) {
            match self.compile(shard, &package)? {
                Ok(s) => seconds = Some(s),
                Err(trouble) => return Ok(Err(trouble)),
            }
        }
        let mut loaded = self.load(shard, &package)?;
        if seconds.is_none() && loaded.as_ref().is_err_and(|t| is_no_plan(&t.message)) {
            match self.compile(shard, &package)? {
                Ok(s) => seconds = Some(s),
                Err(trouble) => return Ok(Err(trouble)),
            }
            report.compiled_again += 1;
            loaded = self.load(shard, &package)?;
        }
        match seconds {
            Some(_) => report.compiled += 1,
            None => report.already_compiled += 1,
        }
        let compiled_bytes = match self.models.find(&package) {
            Some(path) => Some(anemoe_bundle::package_bytes(&path)?),
            None => None,
        };
        let (load_seconds, trouble) = match loaded {
            Ok(load_seconds) => (load_seconds, None),
            Err(mut trouble) => {
                if seconds.is_some() && is_no_plan(&trouble.message) {
                    trouble.rule_out_stale();
                }
                (LoadSeconds::new(), Some(trouble))
            }
        };
        self.record(shard, &package, compiled_bytes, seconds)?;
        report.packages.push(CompiledPackage {
            package: shard.name.clone(),
            package_bytes: shard.bytes,
            compiled_bytes,
            seconds,
            load_seconds,
        });
        Ok(trouble.map_or(Ok(()), Err))
    }

    /// Compiles a package in a child process, moves the result to its place, and returns the seconds.
    fn compile(&self, shard: &Shard, package: &Path) -> anyhow::Result<Result<f64, ChildFailure>> {
        // Beside the package if the system has no name, and therefore no place in the cache.
        let target = self.models.place(package).unwrap_or_else(|| package.with_extension(COMPILED));
        let parent = target.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(|e| Error::io(parent, e))?;
        // The folder is deleted with the leftovers of a child that crashed.
        let folder = Temporary::dir(parent, ".compile").map_err(|e| Error::io(parent, e))?;
        let made = folder.path().join("model").with_extension(COMPILED);
        let started = Instant::now();
        let work = Work::Compile { package: package.to_path_buf(), target: made.clone() };
        if let Err(trouble) = self.risky.step(&shard.name, &work, Some(self.form(shard)))? {
            return Ok(Err(trouble));
        }
        let seconds = started.elapsed().as_secs_f64();
        if target.symlink_metadata().is_ok() {
            std::fs::rename(&target, folder.path().join("old")).map_err(|e| Error::io(&target, e))?;
        }
        std::fs::rename(&made, &target).map_err(|e| Error::io(&target, e))?;
        Ok(Ok(seconds))
    }

    /// Loads every function in a child process, and returns the seconds by function.
    fn load(&self, shard: &Shard, package: &Path) -> anyhow::Result<Result<LoadSeconds, ChildFailure>> {
        if self.args.no_load {
            return Ok(Ok(LoadSeconds::new()));
        }
        let compiled = self.models.expect(package)?;
        let functions = shard.functions.iter().map(|f| f.name.clone()).collect();
        let work = Work::Load { package: package.to_path_buf(), compiled, functions };
        Ok(match self.risky.step(&shard.name, &work, Some(self.form(shard)))? {
            Ok(seconds) => Ok(serde_json::from_value(seconds)?),
            Err(trouble) => Err(trouble),
        })
    }

    /// Writes the size of a compiled model to a record beside it; a model outside the cache has no record.
    fn record(
        &self,
        shard: &Shard,
        package: &Path,
        compiled_bytes: Option<u64>,
        seconds: Option<f64>,
    ) -> anyhow::Result<()> {
        let (Some(place), Some(compiled_bytes)) = (self.models.record_place(package), compiled_bytes) else {
            return Ok(());
        };
        // A compiled model beside its package was made by someone else, perhaps on another system.
        if self.models.find(package) != self.models.place(package) {
            return Ok(());
        }
        if seconds.is_none() && place.is_file() {
            return Ok(());
        }
        let record = CompiledRecord {
            package: shard.name.clone(),
            package_bytes: shard.bytes,
            compiled_bytes,
            seconds,
            generator: concat!("anemoe ", env!("CARGO_PKG_VERSION")).into(),
        };
        Ok(anemoe_bundle::write_atomic(&place, &serde_json::to_vec_pretty(&record)?)?)
    }

    fn form(&self, shard: &Shard) -> (ShardKind, ShardForm) {
        (shard.kind, form_of(self.chain, shard.kind))
    }
}

/// Returns the form in which a bundle has shards of a kind.
pub fn form_of(chain: &Chain, kind: ShardKind) -> ShardForm {
    let own = chain.options.get("forms").and_then(|forms| forms.get(kind.name()));
    let form = own.or_else(|| chain.options.get("form")).cloned();
    form.and_then(|f| serde_json::from_value(f).ok()).unwrap_or_default()
}

fn print(report: &CompileReport, ui: &Ui) -> anyhow::Result<()> {
    let CompileReport { compiled, already_compiled, compiled_again, failed, .. } = report;
    if report.of_other_systems > 0 {
        ui.line(format!("{} were compiled for another system or chip", report.of_other_systems))?;
    }
    let mut table = Table::new(&["package", "bytes", "compiled", "compile s", "load s"]);
    for p in report.packages.iter().filter(|p| p.seconds.is_some()) {
        let number = |s: Option<f64>| s.map_or_else(String::new, |s| format!("{s:.1}"));
        table.row(vec![
            p.package.clone(),
            bytes(p.package_bytes),
            p.compiled_bytes.map_or_else(String::new, bytes),
            number(p.seconds),
            number((!p.load_seconds.is_empty()).then(|| p.load_seconds.values().sum())),
        ]);
    }
    if *compiled > 0 {
        table.print(ui)?;
    }
    let again =
        if *compiled_again > 0 { format!(" ({compiled_again} again, after -14)") } else { String::new() };
    ui.line(format!(
        "{compiled} packages compiled{again}, {already_compiled} were already, {failed} failed"
    ))?;
    Ok(())
}
