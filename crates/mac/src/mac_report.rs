//! The report of a verification, which `verify-on-mac` writes and `import-report` reads elsewhere.
//!
//! ```text
//! manifest.json      format and program
//! system.json        system, chip, memory, model
//! packages.json      cells of a table of outcomes that follow from each package's program
//! stages/NAME.json   how a stage ended, and its document
//! plan.json          plan report, as `check --report` reads it
//! bench.json         document of `bench --save`
//! forms.toml         choice of `tune`
//! ```

use crate::child::to_value;
use crate::json_file::{MAX_BYTES, read_json};
use crate::private::PrivateWords;
use crate::stage_list::{BENCH, BUNDLE, FORMS, PACKAGES, PLAN, STAGES, SYSTEM, StageRecord, is_entry};
use anemoe_bundle::{CHAIN_FILE, Chain, sha256};
use anemoe_coreml::SystemFacts;
use anemoe_gates::residency::device::PlanReport;
use anemoe_gates::residency::facts;
use anemoe_gates::residency::outcomes::cells::{OutcomeCells, columns, program_cells};
use anemoe_gates::residency::program_digest::is_digest;
use anemoe_io::{Error, Output, Result};
use anemoe_mlpackage::package::Package;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Cursor, Read, Write};
use std::path::Path;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Version of the format, which an entry has.
const FORMAT: u32 = 1;
const REPORT_MANIFEST: &str = "manifest.json";
/// Chip from whose figures a chip is calibrated that the table of chips lacks.
pub const STAND_IN: &str = "m4-max";
/// Columns that the import fills itself.
const OWN_COLUMNS: [&str; 9] = ["id", "project", "label", "units", "target", "chip", "os", "name", "source"];
/// Number of hexadecimal digits of the digest in a report's name.
const DIGITS: usize = 10;

// Limits: bytes of the file, of all entries (plans have thousands of ops for each function of a large model), of the name
// of a package, a system or a chip, and of a cell; number of packages.
const MAX_REPORT_BYTES: u64 = 64 << 20;
const MAX_TOTAL_BYTES: u64 = 128 << 20;
const MAX_NAME: usize = 200;
const MAX_CELL: usize = 4096;
const MAX_PACKAGES: usize = 10_000;

/// Contents of a report, by their names.
type ReportEntries = BTreeMap<String, Vec<u8>>;
/// Result of a check; the error names the entry.
pub type EntryResult<T> = std::result::Result<T, String>;

/// Format of a report, and the program that wrote it.
#[derive(Serialize, Deserialize)]
struct ReportManifest {
    format: u32,
    generator: String,
}

/// The machine and the model of a report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReportSystem {
    /// System and chip.
    pub system: SystemFacts,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Number of cores.
    pub cores: Option<u64>,
    /// Version of anemoe.
    pub version: String,
    /// Name of the checkpoint, without its folder.
    pub model: String,
    /// Compression that was asked for.
    pub quant: String,
    /// Token counts of the functions.
    pub tokens: Vec<usize>,
}

/// A package of the bundle that a report is about.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DescribedPackage {
    pub name: String,
    pub kind: String,
    pub bytes: u64,
    /// Cells that follow from the package's program.
    pub cells: OutcomeCells,
}

/// A report that was read.
#[derive(Debug)]
pub struct MacReport {
    /// Name of the report: the chip and a digest of its content.
    pub name: String,
    /// Digest of all entries.
    pub digest: String,
    /// Program that wrote the report.
    pub generator: String,
    /// Machine and model.
    pub system: ReportSystem,
    /// Packages of the bundle.
    pub packages: Vec<DescribedPackage>,
    /// Records of all stages, in order.
    pub stages: Vec<StageRecord>,
    /// Plans of the packages' functions.
    pub plan: Option<PlanReport>,
    /// Document of the bench, as it is.
    pub bench: Option<Vec<u8>>,
}

/// Makes the entries of a report from the records of a verification and its work folder, without private words. A file
/// that is no JSON is left out.
///
/// # Errors
/// A package of the bundle is damaged.
pub fn report_entries(
    system: &ReportSystem,
    records: &[(StageRecord, bool)],
    work: &Path,
    words: &PrivateWords,
) -> Result<ReportEntries> {
    let mut entries = ReportEntries::new();
    let mut put = |name: &str, value: Value| {
        let text = serde_json::to_vec_pretty(&words.document(value));
        entries.insert(name.into(), text.map_err(|e| Error::invalid(work.join(name), e.to_string()))?);
        Ok::<(), Error>(())
    };
    put(SYSTEM, to_value(system)?)?;
    for (stage, (record, _)) in STAGES.iter().zip(records) {
        let mut shown = record.clone();
        // Caches and disks of the stage `doctor` tell what else a user has.
        if let Some(map) = shown.ended.document.as_object_mut().filter(|_| stage.name == "doctor") {
            map.retain(|key, _| key != "caches" && key != "disks");
        }
        put(&stage.entry(), to_value(&shown)?)?;
    }
    let bundle = work.join(BUNDLE);
    if bundle.join(CHAIN_FILE).is_file() {
        let describe = |shard: &anemoe_bundle::Shard| {
            let package = Package::open(&bundle.join(&shard.file))?;
            Ok(DescribedPackage {
                name: shard.name.clone(),
                kind: shard.kind.name().into(),
                bytes: shard.bytes,
                cells: program_cells(&facts(package.model())),
            })
        };
        let packages: Vec<_> = Chain::read(&bundle)?.shards.iter().map(describe).collect::<Result<_>>()?;
        put(PACKAGES, to_value(&packages)?)?;
    }
    for name in [PLAN, BENCH] {
        if let Some(value) = read_json(&work.join(name)) {
            put(name, value)?;
        }
    }
    if let Ok(text) = anemoe_io::read_text(&work.join(FORMS), MAX_BYTES) {
        entries.insert(FORMS.into(), words.text(&text).into_bytes());
    }
    Ok(entries)
}

/// Writes a report. The same entries give the same bytes.
///
/// # Errors
/// The file cannot be written; no partial file stays behind.
pub fn write_archive(output: &Output, entries: &ReportEntries) -> Result<()> {
    let pack = || -> std::io::Result<Vec<u8>> {
        let generator = concat!("anemoe ", env!("CARGO_PKG_VERSION")).to_string();
        let manifest = serde_json::to_vec_pretty(&ReportManifest { format: FORMAT, generator })?;
        let manifest = (REPORT_MANIFEST.to_string(), manifest);
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            .last_modified_time(zip::DateTime::default())
            .unix_permissions(0o644);
        for (name, bytes) in std::iter::once((&manifest.0, &manifest.1)).chain(entries) {
            zip.start_file(name.as_str(), options)?;
            zip.write_all(bytes)?;
        }
        Ok(zip.finish()?.into_inner())
    };
    let written = pack().and_then(|bytes| output.write(|file| file.write_all(&bytes)));
    written.map_err(|e| Error::io(output.path(), e))
}

/// Reads a zip archive: only entries of known names, within bounds, whose bytes have the checksums of the archive.
fn read_archive(bytes: &[u8]) -> EntryResult<ReportEntries> {
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(|e| format!("no zip archive: {e}"))?;
    let mut entries = ReportEntries::new();
    let mut left = MAX_TOTAL_BYTES;
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).map_err(|e| format!("entry {i}: {e}"))?;
        let name = entry.name().to_string();
        let of = |what: &str| format!("entry `{}`: {what}", name.escape_debug());
        if name != REPORT_MANIFEST && !is_entry(&name) {
            return Err(of("no report has an entry of this name"));
        }
        let mut content = Vec::new();
        // One byte more shows that there is more.
        let read = (&mut entry).take(left + 1).read_to_end(&mut content).map_err(|e| of(&e.to_string()))?;
        let too_large = || of(&format!("too large: all entries have {MAX_TOTAL_BYTES} bytes at most"));
        left = left.checked_sub(read as u64).ok_or_else(too_large)?;
        entries.insert(name, content);
    }
    Ok(entries)
}

/// Reads an entry of JSON; none without the entry.
fn json<T: DeserializeOwned>(entries: &ReportEntries, name: &str) -> EntryResult<Option<T>> {
    let parsed = entries.get(name).map(|bytes| anemoe_io::json::parse(bytes)).transpose();
    parsed.map_err(|e| format!("entry `{name}`: {e}"))
}

/// Reads an entry of JSON that every report has.
fn expect_json<T: DeserializeOwned>(entries: &ReportEntries, name: &str) -> EntryResult<T> {
    json(entries, name)?.ok_or_else(|| format!("entry `{name}` is missing"))
}

impl MacReport {
    /// Reads a report.
    ///
    /// # Errors
    /// The file is no report, or an entry is missing or is not as expected; the message names it.
    pub fn read(path: &Path) -> Result<MacReport> {
        let invalid = |what: String| Error::invalid(path, format!("report: {what}"));
        let bytes = anemoe_io::read_input(path, MAX_REPORT_BYTES).map_err(|e| Error::io(path, e))?;
        let mut entries = read_archive(&bytes).map_err(invalid)?;
        let manifest: ReportManifest = expect_json(&entries, REPORT_MANIFEST).map_err(invalid)?;
        if manifest.format != FORMAT {
            let what = format!("entry `{REPORT_MANIFEST}`: format {}, {FORMAT} is read", manifest.format);
            return Err(Error::unsupported(path, format!("report: {what}")));
        }
        entries.remove(REPORT_MANIFEST);
        MacReport::of(entries, &manifest.generator).map_err(invalid)
    }

    fn of(mut entries: ReportEntries, generator: &str) -> EntryResult<MacReport> {
        let system: ReportSystem = expect_json(&entries, SYSTEM)?;
        check_system(&system)?;
        let mut stages = Vec::new();
        for stage in STAGES {
            let name = stage.entry();
            let record: StageRecord = expect_json(&entries, &name)?;
            if record.stage != stage.name || !record.seconds.is_finite() || record.seconds < 0.0 {
                let stage = record.stage.escape_debug();
                return Err(format!("entry `{name}`: stage {stage} in {} s", record.seconds));
            }
            stages.push(record);
        }
        let packages: Vec<DescribedPackage> = json(&entries, PACKAGES)?.unwrap_or_default();
        check_packages(&packages)?;
        let plan = entries.get(PLAN).map(|bytes| PlanReport::parse(bytes)).transpose();
        // It does not depend on the packing of the entries.
        let hashes = entries.iter().map(|(name, bytes)| format!("{name} {}\n", sha256(bytes)));
        let digest = sha256(hashes.collect::<String>().as_bytes());
        Ok(MacReport {
            name: format!("{}-{}", chip_slug(&system.system.chip), &digest[..DIGITS]),
            generator: generator.chars().take(MAX_NAME).collect(),
            system,
            packages,
            stages,
            plan: plan.map_err(|e| format!("entry `{PLAN}`: {e}"))?,
            bench: entries.remove(BENCH),
            digest,
        })
    }

    /// Reads the document of a stage; the default where it has none.
    pub fn document<T: DeserializeOwned + Default>(&self, stage: &str) -> EntryResult<T> {
        let document = self.stages.iter().find(|r| r.stage == stage).map(|r| r.ended.document.clone());
        let Some(document) = document.filter(|d| !d.is_null()) else { return Ok(T::default()) };
        serde_json::from_value(document)
            .map_err(|e| format!("entry `stages/{stage}.json`: {}", anemoe_io::json::JsonError::from(e)))
    }

    /// Tells whether the report has a package of this name.
    pub fn expect_package(&self, name: &str, entry: &str) -> EntryResult<()> {
        let known = self.packages.iter().any(|p| p.name == name);
        let what = || format!("entry `{entry}`: package `{}` is not in packages.json", name.escape_debug());
        known.then_some(()).ok_or_else(what)
    }
}

fn check_system(system: &ReportSystem) -> EntryResult<()> {
    let s = &system.system;
    let texts = [&s.os, &s.build, &s.chip, &system.model, &system.version, &system.quant];
    for (what, text) in ["os", "build", "chip", "model", "version", "quant"].into_iter().zip(texts) {
        if text.trim().is_empty() || text.len() > MAX_NAME || text.chars().any(char::is_control) {
            return Err(format!("entry `{SYSTEM}`: `{what}` is not 1 to {MAX_NAME} plain characters"));
        }
    }
    if chip_slug(&s.chip).is_empty() {
        return Err(format!("entry `{SYSTEM}`: chip `{}` has neither letters nor digits", s.chip));
    }
    Ok(())
}

fn check_packages(packages: &[DescribedPackage]) -> EntryResult<()> {
    if packages.len() > MAX_PACKAGES {
        return Err(format!("entry `{PACKAGES}`: {} packages, more than {MAX_PACKAGES}", packages.len()));
    }
    let columns: BTreeSet<&str> = columns().filter(|c| !OWN_COLUMNS.contains(c)).collect();
    let mut names = BTreeSet::new();
    for p in packages {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let wrong = if p.name.is_empty() || p.name.len() > MAX_NAME || !p.name.chars().all(plain) {
            "a name of letters, digits, `.`, `_` and `-` is expected".to_string()
        } else if !names.insert(p.name.as_str()) {
            "it is there twice".into()
        } else if let Some(column) = p.cells.keys().find(|c| !columns.contains(c.as_str())) {
            format!("no column is named `{}`", column.escape_debug())
        } else if let Some((column, _)) = p.cells.iter().find(|(_, cell)| cell.len() > MAX_CELL) {
            format!("`{column}` has more than {MAX_CELL} bytes")
        } else if !p.cells.get("program").is_some_and(|digest| is_digest(digest)) {
            "`program` is no digest".into()
        } else {
            continue;
        };
        return Err(format!("entry `{PACKAGES}`: package `{}`: {wrong}", p.name.escape_debug()));
    }
    Ok(())
}

/// Returns the short name of a chip, as tables of chips have it: `m4-max` for `Apple M4 Max`.
pub fn chip_slug(chip: &str) -> String {
    let name = chip.trim().trim_start_matches("Apple ").to_ascii_lowercase();
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    name.chars().map(plain).collect::<String>().trim_matches('-').chars().take(24).collect()
}

#[cfg(test)]
mod tests {
    use super::chip_slug;

    #[test]
    fn chips_have_short_names() {
        for (chip, slug) in
            [("Apple M4 Max", "m4-max"), ("Apple M1", "m1"), ("M5 Pro ", "m5-pro"), ("../x", "x")]
        {
            assert_eq!(chip_slug(chip), slug);
        }
    }
}
