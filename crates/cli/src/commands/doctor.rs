//! `anemoe doctor`

use crate::command::{Command, CommandReport, Page};
use crate::ui::{Table, Ui, bytes, message};
use anemoe_bundle::journal::Machine;
use anemoe_convert::build::free_space;
use anemoe_gates::integrity::cache_folder;
use anemoe_io::{Error, free_memory, proc_bytes};
use anemoe_kernels::{Isa, Pool, measure_bandwidth};
use anemoe_mac::{CacheUse, is_folder, list_caches};
use serde::Serialize;
use serde_json::json;
use std::io::{BufRead, IsTerminal};
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

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
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
        let mut found = look(&caches, self.quick || self.clean);
        if self.clean {
            // What is asked about is shown first.
            found.print(ui)?;
            found.lines.clear();
            found.document["deleted"] = json!(clean(&caches, &self)?);
        }
        Ok(found)
    }
}

fn look(caches: &[CacheUse], quick: bool) -> Page {
    let free = free_memory();
    let pool = Pool::global();
    let size = if free.is_some_and(|f| f < 4 * MEMORY as u64) { LITTLE_MEMORY } else { MEMORY };
    let mut disks = vec![("this folder", PathBuf::from(".")), ("temporary files", std::env::temp_dir())];
    disks.extend(cache_folder().map(|folder| ("caches", folder)));
    let disks: Vec<DiskRoom> = disks
        .into_iter()
        .map(|(what, path)| DiskRoom { what, free_bytes: free_space(&path).ok(), path })
        .collect();
    let read_gb_s = (!quick).then(|| measure_bandwidth(pool, size, PASSES));
    // The setting is the word in brackets: `always [madvise] never`.
    let chosen = |text: String| Some(text.split_once('[')?.1.split_once(']')?.0.to_string());
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let (transparent, in_use) = (setting.ok().and_then(chosen), proc_bytes("/proc/meminfo", "AnonHugePages"));
    let known = |text: &Option<String>| text.clone().unwrap_or_else(|| "not known".into());
    let amount = |n: Option<u64>| n.map_or_else(|| "not known".into(), bytes);
    let (core_ml_line, core_ml) = match anemoe_coreml::available() {
        Ok(()) => {
            // The build of the system and the chip, by which compiled models are kept.
            let system = anemoe_coreml::this_system();
            let line = format!("there; compiled models are kept for {}", known(&system));
            (line, json!({"available": true, "system": system}))
        }
        Err(e) => (e.to_string(), json!({"available": false, "system": null, "why_not": e.to_string()})),
    };
    // The best instruction set is the last one.
    let instructions: Vec<&str> = Isa::available().map(Isa::name).collect();
    let (version, m, threads, features) =
        (env!("CARGO_PKG_VERSION"), Machine::here(), pool.threads(), features());
    let advice = advice(transparent.as_deref(), &disks, caches);
    let rate = read_gb_s.map_or_else(String::new, |gb| format!(", read at {gb:.1} GB/s"));
    let mut lines = vec![
        format!("anemoe      {version}"),
        format!("system      {}, {}", known(&m.os), known(&m.arch)),
        format!("chip        {}, {threads} threads", known(&m.cpu)),
        format!("kernels     {}; {}", instructions.join(", "), features.join(" ")),
        format!("memory      {}, {} free{rate}", amount(m.memory_bytes), amount(free)),
    ];
    lines.extend(transparent.iter().map(|how| format!("huge pages  {how}, {} in use", amount(in_use))));
    lines.push(format!("Core ML     {core_ml_line}"));
    lines.extend(disks.iter().map(|DiskRoom { what, path, free_bytes }| {
        format!("disk        {what}: {} free ({})", amount(*free_bytes), path.display())
    }));
    if !caches.is_empty() {
        lines.push(String::new());
        let row = |c: &CacheUse| {
            vec![c.name.clone(), bytes(c.bytes), c.owner.clone(), c.path.display().to_string()]
        };
        let table = Table::ending_in_text(&["cache", "size", "owner", "path"]);
        lines.extend(table.with_rows(caches.iter().map(row)).lines());
    }
    lines.extend(advice.iter().map(|a| format!("note: {a}")));
    let mut document = json!({
        "version": version, "machine": m, "memory_free_bytes": free, "instructions": instructions, "cpu_features": features,
        "threads": threads, "read_gb_s": read_gb_s, "huge_pages": {"transparent": transparent, "in_use_bytes": in_use},
        "core_ml": core_ml, "disks": disks, "caches": caches, "advice": advice,
    });
    if let Some(all) = document.as_object_mut().filter(|_| quick) {
        all.shift_remove("read_gb_s");
    }
    Page::new(document, lines)
}

/// Room on a disk.
#[derive(Serialize)]
struct DiskRoom {
    what: &'static str,
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    path: PathBuf,
    free_bytes: Option<u64>,
}

fn advice(huge_pages: Option<&str>, disks: &[DiskRoom], caches: &[CacheUse]) -> Vec<String> {
    let mut all = Vec::new();
    if Isa::best() == Isa::Scalar {
        all.push("the kernels find no vector instructions that they know: everything is slow".into());
    }
    if std::env::var_os("ANEMOE_CPU").is_some() {
        all.push("ANEMOE_CPU limits the instructions of the kernels".into());
    }
    if huge_pages == Some("never") {
        all.push(
            "huge pages are off: large weights are read faster with them (/sys/kernel/mm/transparent_hugepage/enabled)"
                .into(),
        );
    }
    for disk in disks.iter().filter(|d| d.free_bytes.is_some_and(|n| n < LITTLE_ROOM)) {
        let free = bytes(disk.free_bytes.unwrap_or(0));
        all.push(format!("{} ({}): {free} are left; large models need more", disk.what, disk.path.display()));
    }
    let stale: Vec<&CacheUse> = caches.iter().filter(|cache| cache.is_stale()).collect();
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
