//! Recognizes what lies at a path, for messages to users who named the wrong thing.

use crate::checkpoint::is_gguf;
use anemoe_bundle::CHAIN_FILE;
use anemoe_bundle::journal::JOURNAL_FILE;
use std::path::{Path, PathBuf};

/// Most entries of a folder that are looked at.
const MAX_ENTRIES: usize = 1000;
/// Most checkpoints of a folder that are listed.
const MAX_LISTED: usize = 20;

/// Kind of thing at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// Nothing.
    Nothing,
    /// A finished bundle.
    Bundle,
    /// A bundle whose build did not finish.
    Unfinished,
    /// A Core ML package, or a model by itself.
    Package,
    /// A checkpoint in the Hugging Face layout.
    Checkpoint,
    /// A GGUF file.
    Gguf,
    /// A `.safetensors` file by itself.
    Safetensors,
    /// Another file.
    File,
    /// A folder with nothing in it.
    EmptyFolder,
    /// A folder that holds checkpoints, sorted.
    Checkpoints(Vec<PathBuf>),
    /// Another folder.
    Folder,
}

/// Suggests the hub's name for a path that is not there: `; on the hub it would be hf:OWNER/NAME`. Returns an empty
/// text where the path looks like no model's name or address.
pub fn hub_hint(path: &Path) -> String {
    let text = path.to_string_lossy();
    let starts = ["https://huggingface.co/", "huggingface.co/", "HF:"];
    let name = starts.into_iter().find_map(|start| text.strip_prefix(start)).unwrap_or(&text);
    let is_word = |word: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !word.is_empty() && !word.starts_with('.') && word.chars().all(known)
    };
    match name.trim_end_matches('/').split('/').collect::<Vec<_>>().as_slice() {
        [owner, model] if is_word(owner) && is_word(model) => {
            format!("; on the hub it would be hf:{owner}/{model}")
        }
        _ => String::new(),
    }
}

impl PathKind {
    /// Tells the kind of thing at a path. A thing that cannot be read counts as a plain file or folder.
    pub fn at(path: &Path) -> PathKind {
        let has = |name: &str| path.join(name).symlink_metadata().is_ok();
        let ends = |end: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(end));
        if !path.is_dir() {
            return match path.symlink_metadata() {
                Err(_) => PathKind::Nothing,
                Ok(_) if is_gguf(path) => PathKind::Gguf,
                Ok(_) if ends("safetensors") => PathKind::Safetensors,
                Ok(_) if ends("mlmodel") => PathKind::Package,
                Ok(_) => PathKind::File,
            };
        }
        if has(CHAIN_FILE) {
            return PathKind::Bundle;
        }
        let plan = Path::new(crate::build::WORK_DIR).join(crate::build::PLAN_FILE);
        if path.join(plan).symlink_metadata().is_ok() || has(JOURNAL_FILE) {
            return PathKind::Unfinished;
        }
        if ends("mlpackage") || ends("mlmodelc") || has("Manifest.json") {
            return PathKind::Package;
        }
        if has("config.json") {
            return PathKind::Checkpoint;
        }
        let Ok(entries) = std::fs::read_dir(path) else { return PathKind::Folder };
        let mut entries: Vec<PathBuf> =
            entries.take(MAX_ENTRIES).filter_map(|e| Some(e.ok()?.path())).collect();
        if entries.is_empty() {
            return PathKind::EmptyFolder;
        }
        entries.retain(|p| p.join("config.json").is_file() || (p.is_file() && is_gguf(p)));
        entries.sort();
        entries.truncate(MAX_LISTED);
        if entries.is_empty() { PathKind::Folder } else { PathKind::Checkpoints(entries) }
    }

    /// Names the kind: `a GGUF file`.
    pub fn name(&self) -> &'static str {
        match self {
            PathKind::Nothing => "nothing",
            PathKind::Bundle => "a finished bundle",
            PathKind::Unfinished => "an unfinished bundle",
            PathKind::Package => "a .mlpackage",
            PathKind::Checkpoint => "a Hugging Face checkpoint",
            PathKind::Gguf => "a GGUF file",
            PathKind::Safetensors => "a .safetensors file by itself",
            PathKind::File => "a file of another kind",
            PathKind::EmptyFolder => "an empty folder",
            PathKind::Checkpoints(_) => "a folder of checkpoints",
            PathKind::Folder => "a folder of another kind",
        }
    }
}

/// Names the bundle or package that a path belongs to, or would belong to: `the bundle small.anemoe`. Links are
/// followed. A file in a bundle's folder belongs to the bundle only under names that bundles use.
pub fn owner(path: &Path) -> Option<String> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let new = || Some(folder.canonicalize().ok()?.join(path.file_name()?));
    let file = path.canonicalize().ok().or_else(new)?;
    for folder in file.ancestors().skip(1) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(".mlpackage") && folder.join("Manifest.json").exists() {
            return Some(format!("the package {name}"));
        }
        let is_bundle = [CHAIN_FILE, crate::build::WORK_DIR].iter().any(|n| folder.join(n).exists());
        let inside = file.strip_prefix(folder).ok()?.components().next()?.as_os_str().to_str();
        if is_bundle && inside.is_some_and(|name| crate::build::bundle_names().any(|n| n == name)) {
            return Some(format!("the bundle {name}"));
        }
    }
    None
}

/// Joins paths with commas, in one line.
pub fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Writes paths into JSON: as text, or as a list of bytes where they are not UTF-8.
pub mod lossless {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::path::{Path, PathBuf};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum TextOrBytes {
        Text(PathBuf),
        #[cfg(unix)]
        Bytes(Vec<u8>),
    }

    /// Writes a path: as text, or as a list of bytes where it is not UTF-8.
    ///
    /// # Errors
    /// The serializer fails.
    pub fn serialize<S: Serializer>(path: &Path, s: S) -> Result<S::Ok, S::Error> {
        #[cfg(unix)]
        if path.to_str().is_none() {
            use std::os::unix::ffi::OsStrExt;
            return path.as_os_str().as_bytes().serialize(s);
        }
        s.collect_str(&path.display())
    }

    /// Reads a path that [`serialize`] wrote.
    ///
    /// # Errors
    /// The value is neither a text nor a list of bytes.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<PathBuf, D::Error> {
        Ok(match TextOrBytes::deserialize(d)? {
            TextOrBytes::Text(path) => path,
            #[cfg(unix)]
            TextOrBytes::Bytes(bytes) => {
                use std::os::unix::ffi::OsStringExt;
                std::ffi::OsString::from_vec(bytes).into()
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn files_of_bundles_and_packages_have_an_owner() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("b.anemoe/shards/x.mlpackage/Data")).unwrap();
        fs::write(at("b.anemoe/chain.json"), "{}").unwrap();
        fs::write(at("b.anemoe/shards/x.mlpackage/Manifest.json"), "{}").unwrap();
        for name in ["chain.json", "embed.bin", "tokenizer.json", "journal.jsonl", "shards/foo"] {
            assert_eq!(owner(&at("b.anemoe").join(name)).as_deref(), Some("the bundle b.anemoe"), "{name}");
        }
        let inside = at("b.anemoe/shards/x.mlpackage/Data/a.npz");
        assert_eq!(owner(&inside).as_deref(), Some("the package x.mlpackage"));
        for name in ["b.anemoe/golden.npz", "chain.json", "no/such/folder/f", "b.anemoe"] {
            assert_eq!(owner(&at(name)), None, "{name}");
        }
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(at("b.anemoe/chain.json"), at("link")).unwrap();
            assert_eq!(owner(&at("link")).as_deref(), Some("the bundle b.anemoe"));
        }
    }

    #[test]
    fn every_kind_is_recognized() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| PathKind::at(&dir.path().join(name));
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (name, text) in [
            ("bundle/chain.json", "{}"),
            ("begun/.anemoe-build/plan.json", "{}"),
            ("one.mlpackage/Manifest.json", "{}"),
            ("models/b/config.json", "{}"),
            ("models/a.gguf", "GGUF"),
            ("models/notes.txt", "x"),
            ("other/notes.txt", "x"),
            ("w.safetensors", "x"),
            ("m.mlmodel", "x"),
            ("m.mlmodelc/x", "x"),
        ] {
            file(name, text);
        }
        fs::create_dir(dir.path().join("empty")).unwrap();
        assert_eq!(at("none"), PathKind::Nothing);
        assert_eq!(at("bundle"), PathKind::Bundle);
        assert_eq!(at("begun"), PathKind::Unfinished);
        assert_eq!(at("one.mlpackage"), PathKind::Package);
        assert_eq!((at("m.mlmodel"), at("m.mlmodelc")), (PathKind::Package, PathKind::Package));
        assert_eq!(at("models/b"), PathKind::Checkpoint);
        assert_eq!(at("models/a.gguf"), PathKind::Gguf);
        assert_eq!(at("w.safetensors"), PathKind::Safetensors);
        assert_eq!(at("other/notes.txt"), PathKind::File);
        assert_eq!(at("empty"), PathKind::EmptyFolder);
        assert_eq!(at("other"), PathKind::Folder);
        let models = dir.path().join("models");
        assert_eq!(at("models"), PathKind::Checkpoints(vec![models.join("a.gguf"), models.join("b")]));
    }
}
