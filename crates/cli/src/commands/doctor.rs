//! `anemoe doctor`

use crate::machine;
use crate::outcome::Outcome;
use crate::ui::{Table, Ui, bytes, message};
use anemoe_bundle::journal::Machine;
use anemoe_convert::build::free_space;
use anemoe_gates::integrity::cache_folder;
use anemoe_io::{Error, TEMPORARY, free_memory};
use anemoe_kernels::{Isa, Pool, measure_bandwidth};
use serde::Serialize;
use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

/// Bytes that are read to measure bandwidth, if four times as many are free.
const MEMORY: usize = 512 << 20;
/// Bytes that are read to measure bandwidth otherwise.
const LITTLE_MEMORY: usize = 64 << 20;
/// Times that the bytes are read.
const PASSES: usize = 3;
/// Free bytes of a disk below which builds of large models fail.
const LITTLE_ROOM: u64 = 20_000_000_000;
/// Name of the folder of compiled models in the user's cache.
const COMPILED: &str = "compiled";
/// Name of this program's folder among the caches.
const OWN_FOLDER: &str = "anemoe";
/// Name of the cache that Core ML keeps for each program.
const OF_CORE_ML: &str = "com.apple.e5rt.e5bundlecache";

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
struct DoctorFindings {
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

/// A cache on this machine.
#[derive(Serialize)]
struct CacheUse {
    name: String,
    owner: String,
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    path: PathBuf,
    bytes: u64,
    /// True if `--clean` may delete the cache.
    can_delete: bool,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let caches = caches();
    for name in &args.only {
        let known: Vec<&str> = caches.iter().filter(|c| c.can_delete).map(|c| c.name.as_str()).collect();
        anyhow::ensure!(known.contains(&name.as_str()), "--only {name}: deletable are: {}", known.join(", "));
    }
    if args.clean && !args.yes {
        anyhow::ensure!(
            std::io::stdin().is_terminal(),
            "--clean asks before it deletes, and standard input is no terminal: nothing was deleted; --yes answers for you"
        );
    }
    let mut found = look(caches, args.quick || args.clean);
    print(&found, ui)?;
    if args.clean {
        found.deleted = Some(clean(&found.caches, &args)?);
    }
    ui.document(&found)?;
    Ok(Outcome::Done)
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
        machine: machine::this(),
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
    let own = found.core_ml.system.clone();
    let stale = found.caches.iter().filter(|c| c.can_delete && c.name.starts_with(COMPILED));
    let stale: Vec<&CacheUse> =
        stale.filter(|c| own.as_ref().is_none_or(|own| c.name != format!("{COMPILED}/{own}"))).collect();
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
    let read = |path: &str| std::fs::read_to_string(path).ok();
    // The setting is the word in brackets: `always [madvise] never`.
    let chosen = |text: String| Some(text.split_once('[')?.1.split_once(']')?.0.to_string());
    let kilobytes = |text: String| {
        let line = text.lines().find_map(|l| l.strip_prefix("AnonHugePages:")).map(str::to_string)?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    HugePages {
        transparent: read("/sys/kernel/mm/transparent_hugepage/enabled").and_then(chosen),
        in_use_bytes: read("/proc/meminfo").and_then(kilobytes),
    }
}

/// Lists the caches that this program fills, or that are filled for it.
fn caches() -> Vec<CacheUse> {
    let mut all = Vec::new();
    if let Some(own) = cache_folder() {
        for folder in folders(&own.join(COMPILED)) {
            let name = format!("{COMPILED}/{}", name_of(&folder));
            let can_delete = is_compiled_folder(&folder);
            all.push(CacheUse {
                name,
                owner: "anemoe".into(),
                bytes: size(&folder),
                path: folder,
                can_delete,
            });
        }
    }
    all.extend(of_core_ml(&core_ml_folders()));
    if cfg!(target_os = "macos") {
        let folder = PathBuf::from("/Library/Caches/com.apple.aned");
        if is_folder(&folder) {
            all.push(foreign("com.apple.aned".into(), "the Neural Engine's service".into(), folder));
        }
    }
    if let Ok(settings) = anemoe_hub::HubSettings::from_environment()
        && is_folder(&settings.cache)
    {
        all.push(foreign("checkpoints".into(), "libraries of Hugging Face".into(), settings.cache));
    }
    all
}

/// Lists the folders that have a subfolder for each program, in which Core ML keeps a cache: `~/Library/Caches` on macOS,
/// which no variable moves, and the parent of this program's cache folder.
fn core_ml_folders() -> Vec<PathBuf> {
    let own = cache_folder().and_then(|own| own.parent().map(Path::to_path_buf));
    let home = std::env::var_os("HOME").map(PathBuf::from).filter(|_| cfg!(target_os = "macos"));
    let mut all: Vec<PathBuf> = home.map(|home| home.join("Library/Caches")).into_iter().collect();
    all.extend(own.filter(|own| !all.contains(own)));
    all
}

/// Lists the caches that Core ML keeps below some folders. Only this program's can be deleted; others are shown and left
/// alone.
fn of_core_ml(below: &[PathBuf]) -> Vec<CacheUse> {
    let mut all: Vec<CacheUse> = Vec::new();
    for program in below.iter().flat_map(|folder| folders(folder)) {
        let cache = program.join(OF_CORE_ML);
        if !is_folder(&cache) {
            continue;
        }
        let owner = name_of(&program);
        if owner == OWN_FOLDER {
            let seen = all.iter().filter(|c| c.can_delete).count();
            // A name stands for one cache, so further caches have a number.
            let name = if seen == 0 { OF_CORE_ML.to_string() } else { format!("{OF_CORE_ML}.{}", seen + 1) };
            let owner = "Core ML, for anemoe".into();
            all.push(CacheUse { name, owner, bytes: size(&cache), path: cache, can_delete: true });
        } else {
            all.push(foreign(format!("{OF_CORE_ML} of {owner}"), owner, cache));
        }
    }
    all
}

fn foreign(name: String, owner: String, path: PathBuf) -> CacheUse {
    CacheUse { name, owner, bytes: size(&path), path, can_delete: false }
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Tells whether a path is a folder and no link.
fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_dir())
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = path.read_dir().into_iter().flatten().flatten().map(|e| e.path());
    let mut all: Vec<PathBuf> = entries.filter(|p| is_folder(p)).collect();
    all.sort();
    all
}

/// Tells whether a folder holds nothing but compiled models, their records and temporary files.
fn is_compiled_folder(path: &Path) -> bool {
    let is_own =
        |name: &str| name.ends_with(".mlmodelc") || name.ends_with(".json") || name.starts_with(TEMPORARY);
    path.read_dir().is_ok_and(|all| all.flatten().all(|e| is_own(&e.file_name().to_string_lossy())))
}

/// Returns the bytes of all files in a folder, without links.
fn size(folder: &Path) -> u64 {
    let of = |entry: std::fs::DirEntry| match entry.path().symlink_metadata() {
        Ok(m) if m.is_dir() => size(&entry.path()),
        Ok(m) if m.is_file() => m.len(),
        _ => 0,
    };
    folder.read_dir().into_iter().flatten().flatten().map(of).sum()
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

fn print(found: &DoctorFindings, ui: &Ui) -> anyhow::Result<()> {
    let known = |text: &Option<String>| text.clone().unwrap_or_else(|| "not known".into());
    let amount = |n: Option<u64>| n.map_or_else(|| "not known".into(), bytes);
    let m = &found.machine;
    ui.line(format!("anemoe      {}", found.version))?;
    ui.line(format!("system      {}, {}", known(&m.os), known(&m.arch)))?;
    ui.line(format!("chip        {}, {} threads", known(&m.cpu), found.threads))?;
    ui.line(format!("kernels     {}; {}", found.instructions.join(", "), found.cpu_features.join(" ")))?;
    let free = amount(found.memory_free_bytes);
    let rate = found.read_gb_s.map_or_else(String::new, |gb| format!(", read at {gb:.1} GB/s"));
    ui.line(format!("memory      {}, {free} free{rate}", amount(m.memory_bytes)))?;
    if let Some(transparent) = &found.huge_pages.transparent {
        ui.line(format!("huge pages  {transparent}, {} in use", amount(found.huge_pages.in_use_bytes)))?;
    }
    let core_ml = match (&found.core_ml.system, &found.core_ml.why_not) {
        (_, Some(why)) => why.clone(),
        (system, None) => format!("there; compiled models are kept for {}", known(system)),
    };
    ui.line(format!("Core ML     {core_ml}"))?;
    for disk in &found.disks {
        ui.line(format!(
            "disk        {}: {} free ({})",
            disk.what,
            amount(disk.free_bytes),
            disk.path.display()
        ))?;
    }
    if !found.caches.is_empty() {
        ui.line("")?;
        let mut table = Table::ending_in_text(&["cache", "size", "owner", "path"]);
        for c in &found.caches {
            let path = c.path.display().to_string();
            table.row(vec![c.name.clone(), bytes(c.bytes), c.owner.clone(), path]);
        }
        table.print(ui)?;
    }
    found.advice.iter().try_for_each(|a| ui.line(format!("note: {a}")))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_of_core_ml_are_found_in_the_systems_folder_too() {
        let dir = tempfile::tempdir().unwrap();
        let (system, moved) = (dir.path().join("Library/Caches"), dir.path().join("xdg"));
        for (folder, program, bytes) in
            [(&system, "anemoe", 1000), (&system, "com.others.app", 500), (&moved, "anemoe", 10)]
        {
            let cache = folder.join(program).join(OF_CORE_ML);
            std::fs::create_dir_all(&cache).unwrap();
            std::fs::write(cache.join("x"), vec![0; bytes]).unwrap();
        }
        std::fs::create_dir_all(system.join("without")).unwrap();
        let found = of_core_ml(&[system.clone(), moved, dir.path().join("none")]);
        let shown: Vec<(&str, u64, bool)> =
            found.iter().map(|c| (c.name.as_str(), c.bytes, c.can_delete)).collect();
        let name = |end: &str| format!("{OF_CORE_ML}{end}");
        let wanted =
            [(name(""), 1000, true), (name(" of com.others.app"), 500, false), (name(".2"), 10, true)];
        assert!(shown.iter().map(|(n, b, d)| (n.to_string(), *b, *d)).eq(wanted), "{shown:?}");
        assert_eq!(found[0].path, system.join("anemoe").join(OF_CORE_ML));
    }
}
