//! Files of a repository as the hub lists them, and the selection that a checkpoint needs.

use crate::blob_hash::BlobHash;
use crate::safe_name::is_safe_name;
use anemoe_io::split_parts;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Files beside the weights that a build copies or reads, where they exist.
pub const SMALL_FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];
/// Index of weights in several files.
pub const INDEX: &str = "model.safetensors.index.json";
/// Weights in a single file.
pub const SINGLE: &str = "model.safetensors";
/// Most file names in a message.
const MAX_NAMED: usize = 8;

/// One file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Relative path.
    pub name: String,
    /// Length in bytes, where the list tells it.
    pub size: Option<u64>,
    /// Hash, where the list tells it.
    pub hash: Option<BlobHash>,
}

/// A file whose size and hash are known.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct KnownFile {
    /// Relative path.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
    /// Hash of the contents.
    pub hash: BlobHash,
}

/// Reads known files of JSON; `None` where the text is something else.
pub fn read_known(text: &[u8]) -> Option<Vec<KnownFile>> {
    let files: Vec<KnownFile> = serde_json::from_slice(text).ok()?;
    files.iter().all(|file| is_safe_name(&file.name)).then_some(files)
}

/// The files of a repository at one commit.
#[derive(Clone, Debug)]
pub struct Listing {
    /// Commit.
    pub commit: String,
    /// Files with safe names.
    pub files: Vec<RemoteFile>,
}

#[derive(Deserialize)]
struct ListingWritten {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: Option<String>,
    size: Option<u64>,
}

/// Tells whether a text is a commit's hash.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl Listing {
    /// Parses the hub's answer.
    ///
    /// # Errors
    /// The answer is not a list of files.
    pub fn parse(text: &[u8]) -> Result<Listing, String> {
        let written: ListingWritten =
            serde_json::from_slice(text).map_err(|e| match text.trim_ascii_start().starts_with(b"<") {
                true => {
                    "list of files: it is a web page, so that no hub has answered but something on the way"
                        .into()
                }
                false => format!("list of files: {e}"),
            })?;
        if !is_commit(&written.sha) {
            return Err(format!("list of files: `{}` is not a commit", written.sha.escape_debug()));
        }
        let files = written.siblings.into_iter().filter(|s| is_safe_name(&s.rfilename)).map(|s| {
            let large = s.lfs.as_ref();
            let hash = match large {
                Some(l) => l.sha256.as_deref(),
                None => s.blob_id.as_deref(),
            };
            let hash = hash.and_then(BlobHash::parse);
            RemoteFile { size: large.and_then(|l| l.size).or(s.size), hash, name: s.rfilename }
        });
        Ok(Listing { commit: written.sha, files: files.collect() })
    }

    /// Returns a file by its name.
    pub fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|f| f.name == name)
    }

    /// Returns the files beside the weights that exist, see [`SMALL_FILES`].
    pub fn small_files(&self) -> Vec<&RemoteFile> {
        SMALL_FILES.iter().filter_map(|name| self.file(name)).collect()
    }

    /// Returns the GGUF file named `wanted`, or the only model in GGUF files where none is named: all parts of a split one,
    /// the first of them first.
    ///
    /// # Errors
    /// No file has this name, a part is missing, or several models exist and none is named.
    pub fn gguf(&self, wanted: Option<&str>) -> Result<Vec<RemoteFile>, String> {
        let all: Vec<&RemoteFile> =
            self.files.iter().filter(|f| f.name.to_ascii_lowercase().ends_with(".gguf")).collect();
        let names = || {
            let mut names: Vec<&str> = all.iter().take(MAX_NAMED).map(|f| f.name.as_str()).collect();
            if all.len() > MAX_NAMED {
                names.push("...");
            }
            names.join(", ")
        };
        let one = match (wanted, &all[..]) {
            (_, []) => {
                let other = |f: &&RemoteFile| f.name.ends_with(".bin") || f.name.ends_with(".safetensors");
                let other =
                    self.files.iter().find(other).map_or(String::new(), |f| format!(", but {}", f.name));
                return Err(format!(
                    "repository: it holds neither {SINGLE} nor {INDEX} nor a .gguf file{other}"
                ));
            }
            (Some(wanted), _) => wanted,
            (None, [one, rest @ ..]) => {
                let parts = split_parts(&one.name);
                if rest.iter().any(|f| !parts.contains(&f.name)) {
                    let what = "repository: it holds several models; name one as OWNER/NAME/FILE";
                    return Err(format!("{what}: {}", names()));
                }
                &one.name
            }
        };
        let missing = |name: &String| format!("repository: it holds no {name}; there are {}", names());
        split_parts(one).iter().map(|name| self.file(name).cloned().ok_or_else(|| missing(name))).collect()
    }
}

/// Returns the weight files that an index names, sorted.
///
/// # Errors
/// The text is no index, or names a file outside its folder.
pub fn indexed_files(text: &[u8]) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index: Index =
        serde_json::from_slice(anemoe_io::without_mark(text)).map_err(|e| format!("{INDEX}: {e}"))?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    match files.iter().find(|name| !is_safe_name(name) || name.contains('/')) {
        Some(name) => Err(format!("{INDEX}: it names the file `{}`", name.escape_debug())),
        None => Ok(files),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_unsafe_names_left_out() {
        let sha = "a".repeat(40);
        let text = format!(
            r#"{{"sha": "{sha}", "siblings": [
            {{"rfilename": "config.json", "size": 3, "blobId": "{}"}},
            {{"rfilename": "model.safetensors", "size": 9, "blobId": "{sha}", "lfs": {{"sha256": "{}", "size": 9}}}},
            {{"rfilename": "../evil"}}, {{"rfilename": "/etc/passwd"}}, {{"rfilename": ".git/config"}}, {{"rfilename": "a//b"}}
        ]}}"#,
            "b".repeat(40),
            "c".repeat(64)
        );
        let listing = Listing::parse(text.as_bytes()).unwrap();
        assert_eq!(listing.files.len(), 2);
        assert_eq!(listing.file("config.json").unwrap().hash, Some(BlobHash::Git("b".repeat(40))));
        assert_eq!(listing.file(SINGLE).unwrap().hash, Some(BlobHash::Sha256("c".repeat(64))));
        assert!(listing.gguf(None).unwrap_err().contains("neither"));
        for wrong in ["", "{}", r#"{"sha": "main", "siblings": []}"#, r#"{"sha": 7}"#] {
            assert!(Listing::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn one_gguf_is_taken_and_several_have_to_be_named() {
        let file = |name: &str| RemoteFile { name: name.into(), size: None, hash: None };
        let one = Listing { commit: String::new(), files: vec![file("x.gguf"), file("README.md")] };
        let named = |of: &Listing, wanted: Option<&str>| -> Vec<String> {
            of.gguf(wanted).unwrap().into_iter().map(|f| f.name).collect()
        };
        assert_eq!(named(&one, None), ["x.gguf"]);
        assert!(one.gguf(Some("y.gguf")).unwrap_err().contains("x.gguf"));
        let two = Listing { files: vec![file("x.gguf"), file("y.GGUF")], ..one };
        assert!(two.gguf(None).unwrap_err().contains("x.gguf, y.GGUF"));
        assert_eq!(named(&two, Some("y.GGUF")), ["y.GGUF"]);
        let (first, second) = ("q4/m-00001-of-00002.gguf", "q4/m-00002-of-00002.gguf");
        let split = Listing { files: vec![file(second), file(first)], ..two };
        for wanted in [None, Some(first), Some(second)] {
            assert_eq!(named(&split, wanted), [first, second]);
        }
        let cut = Listing { files: vec![file(second)], ..split };
        assert!(cut.gguf(None).unwrap_err().contains(&format!("holds no {first}")));
    }

    #[test]
    fn an_index_names_files_of_its_folder() {
        let files = indexed_files(
            br#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}"#,
        );
        assert_eq!(files.unwrap().len(), 2);
        for wrong in [r#"{"weight_map": {"a": "../x"}}"#, r#"{"weight_map": {"a": "b/x"}}"#, "{}", "[]"] {
            assert!(indexed_files(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
