//! The zip file of a report: written at once, and checked when it is read.

use crate::stage_list::is_entry;
use anemoe_bundle::sha256;
use anemoe_io::{Error, Output, Result};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{Cursor, Read, Write};
use std::path::Path;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Version of the format.
const FORMAT: u32 = 1;
/// Entry with the list of all other entries.
const REPORT_MANIFEST: &str = "manifest.json";
/// Largest report that is read, in bytes.
const MAX_REPORT_BYTES: u64 = 64 << 20;
/// Largest sum of all entries, in bytes: plans have thousands of ops for each function of a large model.
const MAX_TOTAL_BYTES: u64 = 128 << 20;
/// Most bytes of an entry for each byte of it in the file; reports are packed 5 to 40 times.
const MAX_PACKED: u64 = 200;
/// Bytes in the file below which an entry may be packed tighter.
const MIN_PACKED: u64 = 4096;
/// Most bytes that the parsed entries of documents take together: a large model's check has a few MB.
const MAX_PARSED_BYTES: u64 = 64 << 20;

/// List of a report's entries, by name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReportManifest {
    format: u32,
    /// Program that wrote the report.
    pub generator: String,
    entries: BTreeMap<String, ListedEntry>,
}

/// Size and hash of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListedEntry {
    bytes: u64,
    sha256: String,
}

/// Lists entries for a manifest.
fn listed(entries: &BTreeMap<String, Vec<u8>>) -> BTreeMap<String, ListedEntry> {
    let one = |bytes: &Vec<u8>| ListedEntry { bytes: bytes.len() as u64, sha256: sha256(bytes) };
    entries.iter().map(|(name, bytes)| (name.clone(), one(bytes))).collect()
}

/// A report that was read and agrees with its manifest.
#[derive(Debug)]
pub struct ReportArchive {
    /// List of the entries.
    pub manifest: ReportManifest,
    /// Digest of all entries, which does not depend on their packing.
    pub digest: String,
    entries: BTreeMap<String, Vec<u8>>,
    /// Bytes that documents may still take, parsed.
    left: Cell<u64>,
}

/// Writes a report. The same entries give the same bytes.
///
/// # Errors
/// The file cannot be written; no partial file stays behind.
pub fn write_archive(output: &Output, entries: &BTreeMap<String, Vec<u8>>) -> Result<()> {
    let failed = |e: std::io::Error| Error::io(output.path(), e);
    let generator = concat!("anemoe ", env!("CARGO_PKG_VERSION")).to_string();
    let manifest = ReportManifest { format: FORMAT, generator, entries: listed(entries) };
    let manifest = serde_json::to_vec_pretty(&manifest).map_err(|e| failed(e.into()))?;
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

/// Reads a report: only entries of known names, within bounds, and as the manifest lists them.
pub fn read_archive(path: &Path) -> Result<ReportArchive> {
    let invalid = |what: String| Error::invalid(path, format!("report: {what}"));
    let bytes = anemoe_io::read_input(path, MAX_REPORT_BYTES).map_err(|e| Error::io(path, e))?;
    let mut archive =
        ZipArchive::new(Cursor::new(&bytes)).map_err(|e| invalid(format!("no zip archive: {e}")))?;
    // The zip reader keeps one entry of each name, and drops others silently.
    if entries_in_directory(&bytes, archive.comment().len()) != Some(archive.len()) {
        return Err(invalid(format!("more entries than {} names; one is there twice", archive.len())));
    }
    let mut entries = BTreeMap::new();
    let mut total = 0u64;
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).map_err(|e| invalid(format!("entry {i}: {e}")))?;
        let name = entry.name().to_string();
        let of = |what: &str| invalid(format!("entry `{}`: {what}", name.escape_debug()));
        if name != REPORT_MANIFEST && !is_entry(&name) {
            return Err(of("no report has an entry of this name"));
        }
        let claimed = entry.size();
        total = total.saturating_add(claimed);
        if total > MAX_TOTAL_BYTES {
            return Err(of(&format!("{claimed} bytes, where all entries have {MAX_TOTAL_BYTES} at most")));
        }
        let packed = entry.compressed_size();
        if claimed > MAX_PACKED * packed.max(MIN_PACKED) {
            return Err(of(&format!("{claimed} bytes, packed in {packed}, which no report is")));
        }
        let mut content = Vec::new();
        // The claimed size may be wrong: one byte more shows that.
        let read = (&mut entry).take(claimed + 1).read_to_end(&mut content);
        read.map_err(|e| of(&e.to_string()))?;
        if content.len() as u64 != claimed {
            return Err(of(&format!("it does not hold the {claimed} bytes that are claimed")));
        }
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
    let found = listed(&entries);
    for name in manifest.entries.keys().chain(found.keys()) {
        let what = match (manifest.entries.get(name), found.get(name)) {
            (None, _) => "the manifest does not list it",
            (_, None) => "it is missing, and the manifest lists it",
            (wanted, own) if wanted != own => "its bytes are others than the manifest says",
            _ => continue,
        };
        return Err(invalid(format!("entry `{}`: {what}", name.escape_debug())));
    }
    let digest: String = found.iter().map(|(name, e)| format!("{name} {}\n", e.sha256)).collect();
    let left = Cell::new(MAX_PARSED_BYTES);
    Ok(ReportArchive { manifest, digest: sha256(digest.as_bytes()), entries, left })
}

impl ReportArchive {
    /// Returns the bytes of an entry; none without the entry.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.entries.get(name).map(Vec::as_slice)
    }

    /// Reads an entry of JSON; none without the entry.
    pub fn json<T: serde::de::DeserializeOwned>(&self, name: &str) -> std::result::Result<Option<T>, String> {
        let Some(bytes) = self.bytes(name) else { return Ok(None) };
        let mut left = self.left.get();
        let parsed = anemoe_io::json::parse_within(bytes, &mut left);
        self.left.set(left);
        parsed.map(Some).map_err(|e| format!("entry `{name}`: {e}"))
    }
}

/// Returns the number of entries that the end of the central directory states (APPNOTE 4.3.16); none without such an
/// end at the end of the file.
fn entries_in_directory(bytes: &[u8], comment: usize) -> Option<usize> {
    let end = bytes.get(bytes.len().checked_sub(22 + comment)?..)?;
    let total: [u8; 2] = end.get(10..12)?.try_into().ok()?;
    end.starts_with(b"PK\x05\x06").then_some(u16::from_le_bytes(total).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage_list::SYSTEM;

    #[test]
    fn what_is_written_is_read_and_named_by_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.zip");
        let soak = "stages/soak.json";
        let entries: BTreeMap<String, Vec<u8>> =
            [(SYSTEM.to_string(), b"{}".to_vec()), (soak.to_string(), b"[1]".to_vec())].into();
        let output = Output::new(&path, false, &[]).unwrap();
        write_archive(&output, &entries).unwrap();
        let read = read_archive(&path).unwrap();
        assert_eq!(read.bytes(SYSTEM), Some(&b"{}"[..]));
        assert_eq!(read.json::<Vec<u8>>(soak).unwrap(), Some(vec![1]));
        assert!(read.json::<Vec<u8>>(SYSTEM).unwrap_err().contains("entry `system.json`"));
        let again = dir.path().join("again.zip");
        write_archive(&Output::new(&again, false, &[]).unwrap(), &entries).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&again).unwrap());
        assert_eq!(read.digest, read_archive(&again).unwrap().digest);
    }
}
