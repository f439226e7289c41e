//! `anemoe doctor`

use crate::command::{Command, CommandReport};
use crate::ui::{Table, Ui, bytes, message};
use anemoe_bundle::journal::Machine;
use anemoe_convert::build::free_space;
use anemoe_gates::integrity::cache_folder;
use anemoe_io::{Error, free_memory, proc_bytes};
use anemoe_kernels::{Isa, Pool, measure_bandwidth};
use anemoe_mac::{CacheUse, is_folder, list_caches};
use serde::Serialize;
use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

/// Bytes that are read to measure bandwidth, if four times as many are free.
const MEMORY: usize = 512 << 20;
/// Bytes that are read to measure bandwidth otherwise.
const LITTLE_MEMORY: usize = 64 << 20;
/// Times that the bytes are read.
const PASSES: usize = 3;
/// Free bytes of a disk below which builds of large models fail.
const LITTLE_ROOM: u64 = 20_000_000_000;

/// Say what this machine has, and what stands in the way.
///
/// System, chip, memory, disks and caches, on any system. Caches are listed with their sizes and owners. --clean lists those that are anemoe's own, asks for each,
/// and deletes only what it names; caches of other programs are never deleted.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe doctor\n  anemoe doctor --json --quick\n  anemoe doctor --clean")]
pub struct Args {
    /// Do not measure the bandwidth of the memory.
    #[arg(long)]
    quick: bool,
    /// Delete caches of anemoe: each is named and asked for.
    #[arg(long)]
    clean: bool,
    /// Delete without asking (--clean).
    #[arg(long, requires = "clean")]
    yes: bool,
    /// Clean only caches of these names, as the list has them.
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', requires = "clean", value_hint = clap::ValueHint::Other)]
    only: Vec<String>,
}

/// Findings of the command.
#[derive(Serialize)]
pub struct DoctorFindings {
    version: &'static str,
    machine: Machine,
    memory_free_bytes: Option<u64>,
    /// Instruction sets that kernels can use here, the best last.
    instructions: Vec<&'static str>,
    /// Features of the processor that matter to the kernels.
    cpu_features: Vec<&'static str>,
    threads: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    read_gb_s: Option<f64>,
    huge_pages: HugePages,
    core_ml: CoreMlFacts,
    disks: Vec<DiskRoom>,
    caches: Vec<CacheUse>,
    /// Advice.
    advice: Vec<String>,
    /// Names of caches that were deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    deleted: Option<Vec<String>>,
}

/// Huge pages, on Linux.
#[derive(Serialize)]
struct HugePages {
    /// `always`, `madvise` or `never`.
    transparent: Option<String>,
    /// Bytes in use by all programs.
    in_use_bytes: Option<u64>,
}

#[derive(Serialize)]
struct CoreMlFacts {
    available: bool,
    /// Build of the system and chip, by which compiled models are kept.
    system: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
}

#[derive(Serialize)]
struct DiskRoom {
    what: &'static str,
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    path: PathBuf,
    free_bytes: Option<u64>,
}

impl Command for Args {
    type Report = DoctorFindings;

    fn run(self, ui: &Ui) -> anyhow::Result<DoctorFindings> {
        let caches = all_caches();
        for name in &self.only {
            let known: Vec<&str> = caches.iter().filter(|c| c.can_delete).map(|c| c.name.as_str()).collect();
            anyhow::ensure!(
                known.contains(&name.as_str()),
                "--only {name}: deletable are: {}",
                known.join(", ")
            );
        }
        if self.clean && !self.yes {
            anyhow::ensure!(
                std::io::stdin().is_terminal(),
                "--clean asks before it deletes, and standard input is no terminal: nothing was deleted; --yes answers for you"
            );
        }
        let mut found = look(caches, self.quick || self.clean);
        if self.clean {
            // What is asked about is shown first.
            found.print(ui)?;
            found.deleted = Some(clean(&found.caches, &self)?);
        }
        Ok(found)
    }
}

fn look(caches: Vec<CacheUse>, quick: bool) -> DoctorFindings {
    let core_ml = match anemoe_coreml::available() {
        Ok(()) => CoreMlFacts { available: true, system: anemoe_coreml::this_system(), why_not: None },
        Err(e) => CoreMlFacts { available: false, system: None, why_not: Some(e.to_string()) },
    };
    let free = free_memory();
    let pool = Pool::global();
    let size = if free.is_some_and(|f| f < 4 * MEMORY as u64) { LITTLE_MEMORY } else { MEMORY };
    let disk = |what, path: PathBuf| DiskRoom { what, free_bytes: free_space(&path).ok(), path };
    let mut disks =
        vec![disk("this folder", PathBuf::from(".")), disk("temporary files", std::env::temp_dir())];
    disks.extend(cache_folder().map(|folder| disk("caches", folder)));
    let mut found = DoctorFindings {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::here(),
        memory_free_bytes: free,
        instructions: Isa::available().map(Isa::name).collect(),
        cpu_features: features(),
        threads: pool.threads(),
        read_gb_s: (!quick).then(|| measure_bandwidth(pool, size, PASSES)),
        huge_pages: huge_pages(),
        core_ml,
        disks,
        caches,
        advice: Vec::new(),
        deleted: None,
    };
    found.advice = advice(&found);
    found
}

fn advice(found: &DoctorFindings) -> Vec<String> {
    let mut all = Vec::new();
    if Isa::best() == Isa::Scalar {
        all.push("the kernels find no vector instructions that they know: everything is slow".into());
    }
    if std::env::var_os("ANEMOE_CPU").is_some() {
        all.push("ANEMOE_CPU limits the instructions of the kernels".into());
    }
    if found.huge_pages.transparent.as_deref() == Some("never") {
        all.push(
            "huge pages are off: large weights are read faster with them (/sys/kernel/mm/transparent_hugepage/enabled)"
                .into(),
        );
    }
    for disk in found.disks.iter().filter(|d| d.free_bytes.is_some_and(|n| n < LITTLE_ROOM)) {
        let free = bytes(disk.free_bytes.unwrap_or(0));
        all.push(format!("{} ({}): {free} are left; large models need more", disk.what, disk.path.display()));
    }
    let stale: Vec<&CacheUse> = found.caches.iter().filter(|cache| cache.is_stale()).collect();
    if !stale.is_empty() {
        let sum = stale.iter().map(|c| c.bytes).sum();
        all.push(format!(
            "{} of compiled models are for other systems or chips: anemoe doctor --clean",
            bytes(sum)
        ));
    }
    all
}

/// Lists the names of the given features that the processor has.
#[allow(unused_macros)]
macro_rules! detected {
    ($detect:ident: $($name:tt)*) => {{
        let mut all = Vec::new();
        $(if std::arch::$detect!($name) { all.push($name); })*
        all
    }};
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    detected!(is_x86_feature_detected: "sse4.1" "avx" "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512vnni" "avxvnni" "avx512bf16" "avx512fp16")
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    detected!(is_aarch64_feature_detected: "neon" "fp16" "dotprod" "i8mm" "bf16" "sve" "sve2")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

fn huge_pages() -> HugePages {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    // The setting is the word in brackets: `always [madvise] never`.
    let chosen = |text: String| Some(text.split_once('[')?.1.split_once(']')?.0.to_string());
    HugePages {
        transparent: setting.ok().and_then(chosen),
        in_use_bytes: proc_bytes("/proc/meminfo", "AnonHugePages"),
    }
}

/// Lists the caches that are this program's or Core ML's, and that of checkpoints.
fn all_caches() -> Vec<CacheUse> {
    let mut all = list_caches();
    if let Ok(settings) = anemoe_hub::HubSettings::from_environment()
        && is_folder(&settings.cache)
    {
        let owner = "libraries of Hugging Face".into();
        all.push(CacheUse::foreign("checkpoints".into(), owner, settings.cache));
    }
    all
}

/// Deletes the caches that were agreed to, and returns their names.
fn clean(caches: &[CacheUse], args: &Args) -> anyhow::Result<Vec<String>> {
    let wanted = |c: &&CacheUse| c.can_delete && (args.only.is_empty() || args.only.contains(&c.name));
    let mut deleted = Vec::new();
    for cache in caches.iter().filter(wanted) {
        if !args.yes {
            message(format!(
                "delete {} ({}, {})? [y/N]",
                cache.name,
                bytes(cache.bytes),
                cache.path.display()
            ));
            let mut answer = String::new();
            std::io::stdin().lock().read_line(&mut answer)?;
            if !matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes") {
                message("kept");
                continue;
            }
        }
        std::fs::remove_dir_all(&cache.path).map_err(|e| Error::io(&cache.path, e))?;
        message(format!("deleted {} ({})", cache.path.display(), bytes(cache.bytes)));
        deleted.push(cache.name.clone());
    }
    if deleted.is_empty() {
        message("nothing was deleted");
    }
    Ok(deleted)
}

impl CommandReport for DoctorFindings {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        if self.deleted.is_some() {
            return Ok(());
        }
        let known = |text: &Option<String>| text.clone().unwrap_or_else(|| "not known".into());
        let amount = |n: Option<u64>| n.map_or_else(|| "not known".into(), bytes);
        let m = &self.machine;
        ui.line(format!("anemoe      {}", self.version))?;
        ui.line(format!("system      {}, {}", known(&m.os), known(&m.arch)))?;
        ui.line(format!("chip        {}, {} threads", known(&m.cpu), self.threads))?;
        ui.line(format!("kernels     {}; {}", self.instructions.join(", "), self.cpu_features.join(" ")))?;
        let free = amount(self.memory_free_bytes);
        let rate = self.read_gb_s.map_or_else(String::new, |gb| format!(", read at {gb:.1} GB/s"));
        ui.line(format!("memory      {}, {free} free{rate}", amount(m.memory_bytes)))?;
        if let Some(transparent) = &self.huge_pages.transparent {
            ui.line(format!("huge pages  {transparent}, {} in use", amount(self.huge_pages.in_use_bytes)))?;
        }
        let core_ml = match (&self.core_ml.system, &self.core_ml.why_not) {
            (_, Some(why)) => why.clone(),
            (system, None) => format!("there; compiled models are kept for {}", known(system)),
        };
        ui.line(format!("Core ML     {core_ml}"))?;
        for disk in &self.disks {
            ui.line(format!(
                "disk        {}: {} free ({})",
                disk.what,
                amount(disk.free_bytes),
                disk.path.display()
            ))?;
        }
        if !self.caches.is_empty() {
            ui.line("")?;
            let row = |c: &CacheUse| {
                vec![c.name.clone(), bytes(c.bytes), c.owner.clone(), c.path.display().to_string()]
            };
            let headings = ["cache", "size", "owner", "path"];
            Table::ending_in_text(&headings).with_rows(self.caches.iter().map(row)).print(ui)?;
        }
        self.advice.iter().try_for_each(|a| ui.line(format!("note: {a}")))
    }
}
