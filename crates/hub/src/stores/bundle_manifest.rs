//! Manifests: the files of a bundle or of a part of one, by path, length and hash.

use super::object::Contents;
use crate::safe_name::is_safe_name;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};

/// Version of manifests.
const VERSION: u64 = 1;
/// Most files of a bundle: a model has hundreds of packages of three files each.
const MAX_FILES: usize = 200_000;
/// Most nested folders; a package has four.
const MAX_DEPTH: usize = 12;
/// Prefix of names, beginning with a dot, of folders that anemoe makes.
const OURS: &str = ".anemoe-";

/// A file of a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestFile {
    /// Relative path with slashes.
    pub path: String,
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

impl ManifestFile {
    /// Returns the length and hash of the file's contents.
    pub fn contents(&self) -> Contents {
        Contents { bytes: self.bytes, sha256: self.sha256.clone() }
    }
}

/// A part of a build by several processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestPart {
    /// Index of the part, from 0, less than `of`.
    pub index: usize,
    /// Number of parts.
    pub of: usize,
    /// Hash of the plan and its inputs: only parts of one plan make a bundle.
    pub plan_sha256: String,
    /// True if the part has all its shards, and its gates passed or were skipped.
    pub finished: bool,
}

/// Files of a bundle or of a part of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BundleManifest {
    /// Version of the format.
    anemoe_store: u64,
    /// The part; `None` for a finished bundle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<ManifestPart>,
    /// Files, sorted by path.
    pub files: Vec<ManifestFile>,
    /// SHA-256 of the list of files, see [`list_hash`]; none in manifests of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    files_sha256: Option<String>,
}

impl BundleManifest {
    /// Makes a manifest of these files.
    pub fn new(part: Option<ManifestPart>, mut files: Vec<ManifestFile>) -> BundleManifest {
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let files_sha256 = Some(list_hash(&files));
        BundleManifest { anemoe_store: VERSION, part, files, files_sha256 }
    }

    /// Returns the key of the manifest of a bundle, or of a part (index, number of parts) of it.
    pub fn key(name: &str, part: Option<(usize, usize)>) -> String {
        match part {
            None => format!("bundles/{name}/bundle.json"),
            Some((index, of)) => format!("bundles/{name}/part-{index}of{of}.json"),
        }
    }

    /// Parses the name of a part's manifest in a bundle's folder: index, and number of parts.
    pub fn part_of_key(name: &str) -> Option<(usize, usize)> {
        let (index, of) = name.strip_prefix("part-")?.strip_suffix(".json")?.split_once("of")?;
        let part = (index.parse().ok()?, of.parse().ok()?);
        (BundleManifest::key("", Some(part)).ends_with(name) && part.0 < part.1).then_some(part)
    }

    /// Parses a manifest and checks every entry: a path may not leave the bundle or occur twice, and the total length
    /// may not overflow.
    ///
    /// # Errors
    /// The text breaks the format; the error says how.
    pub fn parse(text: &[u8]) -> Result<BundleManifest, String> {
        let value: serde_json::Value = anemoe_io::json::parse(text).map_err(|e| format!("manifest: {e}"))?;
        if !value.is_object() {
            return Err("manifest: expected an object".into());
        }
        if let Some(version) = value["anemoe_store"].as_u64().filter(|v| *v != VERSION) {
            return Err(format!("manifest: version {version} where {VERSION} is read"));
        }
        let mut manifest: BundleManifest = serde_json::from_value(value)
            .map_err(|e| format!("manifest: {}", anemoe_io::json::JsonError::from(e)))?;
        manifest.check().map_err(|what| format!("manifest: {what}"))?;
        manifest.files.sort_by(|a, b| a.path.cmp(&b.path));
        if manifest.files_sha256.as_ref().is_some_and(|hash| *hash != list_hash(&manifest.files)) {
            return Err("manifest: `files` is not the list that `files_sha256` was made of".into());
        }
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        if self.files.len() > MAX_FILES {
            return Err(format!("{} files, more than {MAX_FILES}", self.files.len()));
        }
        let is_hash =
            |text: &str| text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if let Some(part) = self.part.as_ref().filter(|p| p.index >= p.of || !is_hash(&p.plan_sha256)) {
            return Err(format!(
                "part {} of {} of a plan `{}`",
                part.index,
                part.of,
                part.plan_sha256.escape_debug()
            ));
        }
        // On disks that ignore case, two names that differ in case only are one file.
        let mut paths = BTreeSet::new();
        let (mut total, mut lengths) = (0u64, BTreeMap::new());
        for file in &self.files {
            let shown = file.path.escape_debug();
            let inside = match file.path.strip_prefix(OURS).and_then(|rest| rest.split_once('/')) {
                Some((folder, inside)) if is_safe_name(folder) && !folder.contains('/') => inside,
                _ => &file.path,
            };
            if !is_safe_name(inside) || file.path.split('/').count() > MAX_DEPTH {
                return Err(format!("`{shown}` is not a path in a bundle"));
            }
            if !is_hash(&file.sha256) {
                return Err(format!("{shown}: `{}` is not a SHA-256", file.sha256.escape_debug()));
            }
            if lengths.insert(&file.sha256, file.bytes).is_some_and(|bytes| bytes != file.bytes) {
                return Err(format!("{shown}: two lengths for the same SHA-256"));
            }
            total = total.checked_add(file.bytes).ok_or("more bytes than can be counted")?;
            if !paths.insert(file.path.to_ascii_lowercase()) {
                return Err(format!("{shown} is there twice"));
            }
        }
        for path in &paths {
            let above = path.match_indices('/').map(|(at, _)| &path[..at]);
            if let Some(file) = above.into_iter().find(|folder| paths.contains(*folder)) {
                return Err(format!("{} is a file and a folder", file.escape_debug()));
            }
        }
        Ok(())
    }

    /// Returns the manifest as JSON text.
    pub fn to_text(&self) -> Vec<u8> {
        // Strings and numbers only, which JSON can always represent.
        let mut text = serde_json::to_vec_pretty(self).expect("manifests are representable in JSON");
        text.push(b'\n');
        text
    }

    /// Returns the bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }
}

/// Returns the SHA-256, in hexadecimal, of a list of files: of each its path, a zero byte, its length as 8 little-endian
/// bytes, and its own SHA-256 in hexadecimal.
fn list_hash(files: &[ManifestFile]) -> String {
    let mut hash = Sha256::new();
    for file in files {
        hash.update(&file.path);
        hash.update([0]);
        hash.update(file.bytes.to_le_bytes());
        hash.update(&file.sha256);
    }
    anemoe_io::hex(hash.finalize())
}

/// The files of all parts of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergedParts {
    /// The merged manifest, each path once.
    pub manifest: BundleManifest,
    /// Other contents of paths that may differ from part to part.
    pub others: Vec<ManifestFile>,
}

/// Merges the parts of a build. Paths in `differing`, such as journals, may have other contents in each part: the first
/// part's contents go into the manifest.
///
/// # Errors
/// Parts are missing or not finished, belong to different plans, or have different contents under one path; the error says which.
pub fn merge_parts(mut parts: Vec<BundleManifest>, differing: &[&str]) -> Result<MergedParts, String> {
    let number = |m: &BundleManifest| m.part.as_ref().map_or((0, 0), |p| (p.of, p.index));
    parts.sort_by_key(number);
    let known: Vec<&ManifestPart> = parts.iter().filter_map(|m| m.part.as_ref()).collect();
    let Some(first) = known.first() else { return Err("no part of it is there".into()) };
    let named = |p: &ManifestPart| format!("{}/{}", p.index, p.of);
    if let Some(other) = known.iter().find(|p| p.plan_sha256 != first.plan_sha256) {
        return Err(format!(
            "parts {} and {} were built with other options, of another checkpoint or by another version; push them under another \
             --name, or remove the manifests of the older ones",
            named(first),
            named(other)
        ));
    }
    let counts: BTreeSet<usize> = known.iter().map(|p| p.of).collect();
    let finished =
        |of: usize, index: usize| known.iter().any(|p| (p.of, p.index) == (of, index) && p.finished);
    // Parts of several divisions may exist: one complete division is enough.
    let lacking = |of: usize| (0..of).filter(|i| !finished(of, *i)).collect::<Vec<_>>();
    let fewest = counts.into_iter().map(|of| (of, lacking(of))).min_by_key(|(_, missing)| missing.len());
    let (of, missing) = fewest.unwrap_or_default();
    if !missing.is_empty() {
        let shown: Vec<String> = missing.iter().take(8).map(|i| format!("{i}/{of}")).collect();
        let more = if missing.len() > shown.len() { ", .." } else { "" };
        return Err(format!(
            "{} of {of} parts are not there or not finished ({}{more}); run them again",
            missing.len(),
            shown.join(", ")
        ));
    }
    let mut files: BTreeMap<String, ManifestFile> = BTreeMap::new();
    let mut others = Vec::new();
    for manifest in parts.iter().filter(|m| m.part.as_ref().is_some_and(|p| p.of == of)) {
        for file in &manifest.files {
            match files.get(&file.path) {
                None => {
                    files.insert(file.path.clone(), file.clone());
                }
                Some(there) if there == file => {}
                Some(_) if differing.contains(&file.path.as_str()) => others.push(file.clone()),
                Some(_) => return Err(format!("{}: parts have different files of this name", file.path)),
            }
        }
    }
    let manifest = BundleManifest::new(None, files.into_values().collect());
    manifest.check()?;
    Ok(MergedParts { manifest, others })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn hash(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    fn file(path: &str, bytes: u64, digit: char) -> ManifestFile {
        ManifestFile { path: path.into(), bytes, sha256: hash(digit) }
    }

    fn part(index: usize, of: usize, finished: bool, files: Vec<ManifestFile>) -> BundleManifest {
        BundleManifest::new(Some(ManifestPart { index, of, plan_sha256: hash('a'), finished }), files)
    }

    #[test]
    fn manifests_are_read_as_they_were_written() {
        let files = vec![
            file("shards/L00.ffn.p0of8.mlpackage/Data/com.apple.CoreML/weights/weight.bin", 7, 'b'),
            file("chain.json", 3, 'c'),
            file(".anemoe-build/L00.attn.json", 3, 'c'),
        ];
        let manifest = part(1, 3, true, files);
        assert_eq!(BundleManifest::parse(&manifest.to_text()).unwrap(), manifest);
        assert_eq!((manifest.bytes(), manifest.files[0].path.as_str()), (13, ".anemoe-build/L00.attn.json"));
        let without = |part: &str| {
            let mut value: serde_json::Value = serde_json::from_slice(&manifest.to_text()).unwrap();
            value["files"].as_array_mut().unwrap().retain(|f| f["path"] != part);
            BundleManifest::parse(value.to_string().as_bytes())
        };
        assert!(without("none of them").is_ok());
        assert!(without("chain.json").unwrap_err().contains("`files_sha256`"));
        assert_eq!(BundleManifest::part_of_key("part-1of3.json"), Some((1, 3)));
        for wrong in ["part-3of3.json", "part-01of3.json", "part-1of3", "bundle.json", "part--1of3.json"] {
            assert_eq!(BundleManifest::part_of_key(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn hostile_manifests_are_refused() {
        let with = |files: serde_json::Value| json!({"anemoe_store": 1, "files": files}).to_string();
        let one = |path: &str| with(json!([{"path": path, "bytes": 1, "sha256": hash('a')}]));
        let long = format!("a/{}", "b".repeat(300));
        let deep = vec!["a"; 20].join("/");
        for path in [
            "../x",
            "/etc/passwd",
            "a/../../x",
            "a//b",
            "",
            ".",
            "a/.",
            "a\\..\\b",
            "C:/x",
            "a\u{0}b",
            "a\nb",
            ".ssh/x",
            ".anemoe-/../x",
            ".anemoe-build/../../x",
            ".anemoe-build",
            "shards/.hidden",
            "-rf",
            "a/\u{202e}b",
            "~/x",
            "a ",
            &long,
            &deep,
        ] {
            let refused = BundleManifest::parse(one(path).as_bytes()).unwrap_err();
            assert!(refused.contains("is not a path in a bundle"), "{path}: {refused}");
        }
        let entry =
            |path: &str, bytes: u64, digit| json!({"path": path, "bytes": bytes, "sha256": hash(digit)});
        for (text, says) in [
            (with(json!([entry("a", 1, 'a'), entry("a", 1, 'a')])), "a is there twice"),
            (with(json!([entry("a", 1, 'a'), entry("A", 1, 'b')])), "A is there twice"),
            (with(json!([entry("a", 1, 'a'), entry("a/b", 1, 'b')])), "a is a file and a folder"),
            (with(json!([entry("a", u64::MAX, 'a'), entry("b", 1, 'b')])), "more bytes than can be counted"),
            (with(json!([entry("a", 1, 'a'), entry("b", 2, 'a')])), "two lengths"),
            (with(json!([{"path": "a", "bytes": 1, "sha256": "../../x"}])), "not a SHA-256"),
            (with(json!([{"path": "a", "bytes": -1, "sha256": hash('a')}])), "whole number from 0"),
            (with(json!([{"path": "a", "bytes": 1, "sha256": hash('a'), "link": "/etc"}])), "link"),
            (json!({"anemoe_store": 2, "files": []}).to_string(), "version 2"),
            (json!({"files": []}).to_string(), "anemoe_store"),
            (r#"{"anemoe_store": 1, "files": [], "files": []}"#.into(), "twice"),
            ("[]".into(), "expected an object"),
            (String::new(), "manifest"),
        ] {
            let refused = BundleManifest::parse(text.as_bytes()).unwrap_err();
            assert!(refused.contains(says), "{text}: {refused}");
        }
    }

    #[test]
    fn parts_make_a_whole_or_say_why_not() {
        let common = || vec![file("plan", 1, '1'), file("journal", 2, '2')];
        let with = |more: ManifestFile, journal: char| {
            let mut files = common();
            files[1] = file("journal", 2, journal);
            files.push(more);
            files
        };
        let a = part(0, 2, true, with(file("s/0", 5, '5'), '3'));
        let b = part(1, 2, true, with(file("s/1", 6, '6'), '4'));
        let merged = merge_parts(vec![b.clone(), a.clone()], &["journal"]).unwrap();
        let paths: Vec<&str> = merged.manifest.files.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(paths, ["journal", "plan", "s/0", "s/1"]);
        assert_eq!(merged.manifest.files[0], file("journal", 2, '3'));
        assert_eq!(merged.others, [file("journal", 2, '4')]);
        let refused = |parts: Vec<BundleManifest>| merge_parts(parts, &[]).unwrap_err();
        assert!(refused(vec![a.clone(), b.clone()]).contains("journal: parts have different files"));
        assert!(refused(vec![]).contains("no part"));
        assert!(refused(vec![a.clone()]).contains("1 of 2 parts are not there or not finished (1/2)"));
        let half = part(1, 2, false, vec![]);
        assert!(refused(vec![a.clone(), half]).contains("(1/2)"));
        let mut other = b.clone();
        other.part.as_mut().unwrap().plan_sha256 = hash('b');
        assert!(refused(vec![a.clone(), other]).contains("parts 0/2 and 1/2 were built with other options"));
        // Some parts of another division exist, which does not matter.
        let merged = merge_parts(vec![part(1, 3, true, vec![]), a, b], &["journal"]).unwrap();
        assert_eq!(merged.manifest.files.len(), 4);
    }
}
