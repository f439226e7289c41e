//! The zip file of a report: written at once, and checked when it is read.

use crate::stage_list::is_entry;
use anemoe_bundle::sha256;
use anemoe_io::{Error, Output, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{Cursor, Read, Write};
use std::path::Path;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Version of the format.
const FORMAT: u32 = 1;
/// Entry with the format.
const REPORT_MANIFEST: &str = "manifest.json";
/// Largest report that is read, in bytes.
const MAX_REPORT_BYTES: u64 = 64 << 20;
/// Largest sum of all entries, in bytes: plans have thousands of ops for each function of a large model.
const MAX_TOTAL_BYTES: u64 = 128 << 20;

/// Format of a report, and the program that wrote it.
#[derive(Debug, Serialize, Deserialize)]
struct ReportManifest {
    format: u32,
    generator: String,
}

/// Entries of a report that was read.
#[derive(Debug)]
pub struct ReportArchive {
    /// Program that wrote the report.
    pub generator: String,
    entries: BTreeMap<String, Vec<u8>>,
}

/// Writes a report. The same entries give the same bytes.
///
/// # Errors
/// The file cannot be written; no partial file stays behind.
pub fn write_archive(output: &Output, entries: &BTreeMap<String, Vec<u8>>) -> Result<()> {
    let failed = |e: std::io::Error| Error::io(output.path(), e);
    let generator = concat!("anemoe ", env!("CARGO_PKG_VERSION")).to_string();
    let manifest = serde_json::to_vec_pretty(&ReportManifest { format: FORMAT, generator });
    let manifest = manifest.map_err(|e| failed(e.into()))?;
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Deflated)
        .last_modified_time(zip::DateTime::default())
        .unix_permissions(0o644);
    let all =
        std::iter::once((REPORT_MANIFEST, &manifest)).chain(entries.iter().map(|(n, b)| (n.as_str(), b)));
    for (name, bytes) in all {
        zip.start_file(name, options).map_err(|e| failed(e.into()))?;
        zip.write_all(bytes).map_err(failed)?;
    }
    let bytes = zip.finish().map_err(|e| failed(e.into()))?.into_inner();
    output.write(|file| file.write_all(&bytes)).map_err(failed)
}

/// Reads a report: only entries of known names, within bounds, whose bytes have the checksums of the archive.
pub fn read_archive(path: &Path) -> Result<ReportArchive> {
    let invalid = |what: String| Error::invalid(path, format!("report: {what}"));
    let bytes = anemoe_io::read_input(path, MAX_REPORT_BYTES).map_err(|e| Error::io(path, e))?;
    let archive = ZipArchive::new(Cursor::new(&bytes));
    let mut archive = archive.map_err(|e| invalid(format!("no zip archive: {e}")))?;
    let mut entries = BTreeMap::new();
    let mut left = MAX_TOTAL_BYTES;
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).map_err(|e| invalid(format!("entry {i}: {e}")))?;
        let name = entry.name().to_string();
        let of = |what: &str| invalid(format!("entry `{}`: {what}", name.escape_debug()));
        if name != REPORT_MANIFEST && !is_entry(&name) {
            return Err(of("no report has an entry of this name"));
        }
        let mut content = Vec::new();
        // One byte more shows that there is more.
        let read = (&mut entry).take(left + 1).read_to_end(&mut content);
        read.map_err(|e| of(&e.to_string()))?;
        left = left
            .checked_sub(content.len() as u64)
            .ok_or_else(|| of(&format!("too large: all entries have {MAX_TOTAL_BYTES} bytes at most")))?;
        entries.insert(name, content);
    }
    let of_manifest = |what: String| invalid(format!("entry `{REPORT_MANIFEST}`{what}"));
    let text = entries.remove(REPORT_MANIFEST).ok_or_else(|| of_manifest(" is missing".into()))?;
    let manifest: ReportManifest =
        anemoe_io::json::parse(&text).map_err(|e| of_manifest(format!(": {e}")))?;
    if manifest.format != FORMAT {
        let what = format!("entry `{REPORT_MANIFEST}`: format {}, {FORMAT} is read", manifest.format);
        return Err(Error::unsupported(path, format!("report: {what}")));
    }
    Ok(ReportArchive { generator: manifest.generator, entries })
}

impl ReportArchive {
    /// Computes the digest of all entries, which does not depend on their packing.
    pub fn digest(&self) -> String {
        let all = self.entries.iter().map(|(name, bytes)| format!("{name} {}\n", sha256(bytes)));
        sha256(all.collect::<String>().as_bytes())
    }

    /// Returns the bytes of an entry; none without the entry.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.entries.get(name).map(Vec::as_slice)
    }

    /// Reads an entry of JSON; none without the entry.
    pub fn json<T: serde::de::DeserializeOwned>(&self, name: &str) -> std::result::Result<Option<T>, String> {
        let parsed = self.bytes(name).map(anemoe_io::json::parse).transpose();
        parsed.map_err(|e| format!("entry `{name}`: {e}"))
    }
}
