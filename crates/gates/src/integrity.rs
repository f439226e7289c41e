//! Verifies that a bundle holds the bytes that its contract names, and that its chain runs.
//!
//! Sizes are always compared. Hashes are computed once per content and machine: the hash of a file is remembered
//! under the file's device, inode, length and times, which change when the content changes.
//!
//! A package that another tool has rewritten, with the same program and weights, is accepted and named.

use anemoe_bundle::{
    CHAIN_FILE, Chain, Error, MANIFEST, file_sha256, package_bytes, package_files, package_sha256,
    package_sha256_with, sha256,
};
use anemoe_convert::build;
use anemoe_convert::checkpoint::SIDE_FILES;
use anemoe_convert::models::token_ids;
use anemoe_io::{OwnedDir, json, locked, open_input, read_input};
use anemoe_mlpackage::package::Package;
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::sampler::SamplingDefaults;
use anemoe_text::chat::ChatTemplate;
use anemoe_text::tokenizer::Tokenizer;
use rayon::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// File of remembered hashes: one line `FINGERPRINT SHA256` per file or package, newest last.
const FILE: &str = "verified.txt";
/// Largest file of remembered hashes that is read, in bytes; a line takes 130 bytes.
const MAX_BYTES: u64 = 4 << 20;
/// Largest file of the host's vectors, in bytes: a few values per channel and layer.
const MAX_VECTORS_BYTES: u64 = 1 << 30;
/// Tokenizer beside the shards, which is opened as a run does.
const TOKENIZER: &str = "tokenizer.json";
/// Generation settings, whose end tokens are compared with the contract.
const GENERATION: &str = "generation_config.json";
/// Chat template, which is parsed.
const TEMPLATE: &str = "chat_template.jinja";
/// Largest side file but the tokenizer that is read, in bytes.
const MAX_SIDE_BYTES: u64 = 16 << 20;
/// Most bytes of a package's manifest that a contract may imply; a manifest has less than one kilobyte.
const LARGEST_MANIFEST: u64 = 1 << 16;
/// Most lines of remembered hashes that are kept.
const MAX_LINES: usize = 16_384;
/// Least age of a file's last change for its hash to be remembered: a younger file may change again under the same
/// time stamp.
const SETTLED: Duration = Duration::from_secs(2);

/// Kind of verification of file contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hashes {
    /// Files are verified by hash, unless this machine has verified the same content before.
    Remembered,
    /// Files are verified by size alone.
    Skipped,
}

/// Compares the sizes of all packages and of the embedding with the contract, then their hashes and the hash of the
/// host's vectors. `done` is called after each package. Returns the packages that another tool has rewritten, with
/// the same program and weights.
///
/// # Errors
/// A file is missing, or its size or content differs from the contract; the error names the file.
pub fn verify(
    bundle: &Path,
    chain: &Chain,
    hashes: Hashes,
    done: &(dyn Fn() + Sync),
) -> Result<Vec<PathBuf>, Error> {
    let sized = |path: &Path, found: u64, wanted: u64| {
        let what = format!("size: {found} bytes where chain.json says {wanted}");
        if found == wanted { Ok(()) } else { Err(find_refused(path).unwrap_or(Error::invalid(path, what))) }
    };
    let folder = OwnedDir::new(bundle);
    build::check_layout(&folder, chain.shards.iter().map(|s| s.file.as_str()))?;
    let embedding = folder.expect(&chain.embedding.file, false)?;
    if let Some(vectors) = &chain.vectors {
        let path = folder.expect(&vectors.file, false)?;
        // A missing file is reported where it is hashed or read.
        let found = path.metadata().map_or(0, |m| m.len());
        if found > MAX_VECTORS_BYTES {
            let what =
                format!("size: {found} bytes, and the host's vectors have at most {MAX_VECTORS_BYTES}");
            return Err(Error::invalid(path, what));
        }
    }
    let found = embedding.metadata().map_err(|e| Error::io(&embedding, e))?.len();
    if let Some((elements, values, offsets)) =
        chain.embedding.storage.stored_sizes(chain.embedding.rows, chain.embedding.cols)
    {
        sized(&embedding, found, elements + values + offsets)?;
    }
    let mut rewritten = Vec::new();
    if let Some(drafter) = &chain.drafter {
        let inside = folder.expect(drafter, true)?;
        let its = Chain::read(&inside)?;
        if its.drafter.is_some() {
            return Err(Error::invalid(inside.join(CHAIN_FILE), "drafter: the drafter has one of its own"));
        }
        rewritten.extend(verify(&inside, &its, hashes, &|| ())?);
    }
    for shard in &chain.shards {
        let path = bundle.join(&shard.file);
        if !path.is_dir() {
            let gone = std::io::Error::new(std::io::ErrorKind::NotFound, "no such package");
            return Err(Error::io(path, gone));
        }
        if let Err(other) = sized(&path, package_bytes(&path)?, shard.bytes) {
            match is_rewritten(&path, shard.bytes, &shard.sha256) {
                true => rewritten.push(path),
                false => return Err(other),
            }
        }
    }
    if hashes == Hashes::Skipped {
        return Ok(rewritten);
    }
    let remembered = Remembered::open();
    let others = Mutex::new(Vec::new());
    let hashed = |file: &str, wanted: &str, package: Option<u64>| {
        let is_package = package.is_some();
        let path = bundle.join(file);
        let print = fingerprint(&path, is_package)?;
        if let Some((print, _)) = &print
            && remembered.get(print).is_some_and(|known| known == wanted)
        {
            return Ok(None);
        }
        let found = if is_package { package_sha256(&path)? } else { file_sha256(&path)? };
        if found != wanted && package.is_some_and(|bytes| is_rewritten(&path, bytes, wanted)) {
            locked(&others).push(path);
            return Ok(None);
        }
        if found != wanted {
            let what = format!("bytes: SHA-256 {found} where chain.json says {wanted}");
            return Err(Error::invalid(path, what));
        }
        Ok(print.filter(|(_, settled)| *settled).map(|(print, _)| (print, found)))
    };
    let new = Mutex::new(Vec::new());
    let keep = |entry: Option<(String, String)>| {
        locked(&new).extend(entry);
    };
    keep(hashed(&chain.embedding.file, &chain.embedding.sha256, None)?);
    if let Some(vectors) = &chain.vectors {
        keep(hashed(&vectors.file, &vectors.sha256, None)?);
    }
    chain.shards.par_iter().try_for_each(|s| {
        keep(hashed(&s.file, &s.sha256, Some(s.bytes))?);
        done();
        Ok::<(), Error>(())
    })?;
    remembered.add(new.into_inner().unwrap_or_else(PoisonError::into_inner));
    rewritten.extend(others.into_inner().unwrap_or_else(PoisonError::into_inner));
    rewritten.sort();
    rewritten.dedup();
    Ok(rewritten)
}

/// Finds a file that cannot be opened as an input, such as a Git LFS pointer, at `path` or in the folder there.
fn find_refused(path: &Path) -> Option<Error> {
    let files = if path.is_dir() { package_files(path).ok()? } else { vec![path.into()] };
    files.iter().find_map(|file| open_input(file, u64::MAX).err().map(|e| Error::io(file, e)))
}

/// Tells whether a package with other bytes than the contract's holds the same program and weights: with its program
/// encoded as a build encodes it, the package has the wanted hash. Tools that save a package order its protobufs and
/// its manifest in their own way, and add metadata. A build writes no metadata, so the program is also tried without
/// it. Sizes are compared first: a package with other weights is not hashed.
fn is_rewritten(path: &Path, bytes: u64, wanted: &str) -> bool {
    let hash = |package: &Package, metadata: bool| -> Result<Option<String>, Error> {
        let (file, model) = (package.model_file(), package.model_as_written(metadata)?);
        let size = |file: &Path| std::fs::metadata(file).map_or(0, |about| about.len());
        let index = path.join(MANIFEST);
        let others = package_bytes(path)?.saturating_sub(size(&file) + size(&index));
        let manifest = bytes.checked_sub(others.saturating_add(model.len() as u64));
        if manifest.is_none_or(|n| n > LARGEST_MANIFEST) {
            return Ok(None);
        }
        package_sha256_with(path, &file, &model).map(Some)
    };
    let is_wanted = |package: &Package, metadata: bool| {
        hash(package, metadata).is_ok_and(|hash| hash.as_deref() == Some(wanted))
    };
    Package::open(path).is_ok_and(|package| {
        is_wanted(&package, true) || !package.model().metadata.is_empty() && is_wanted(&package, false)
    })
}

/// Runs one call of each token count of the chain, from embedding to logits. A contract can agree with its files and
/// still contradict the shapes in the packages.
///
/// # Errors
/// A package is invalid or does not fit the chain.
pub fn run_once(bundle: &Path) -> anemoe_runtime::Result<()> {
    let mut model = Model::open(bundle, &CpuBackend::default())?;
    model.set_low_memory(true);
    if model.chain().assistant.is_some() {
        return model.step_on_zeros();
    }
    let context = model.chain().model.max_context;
    let mut counts: Vec<usize> = model.chain().tokens.iter().map(|t| t.max.min(context)).collect();
    counts.push(1);
    counts.sort_unstable();
    counts.dedup();
    let mut sequence = model.sequence();
    for tokens in counts {
        sequence.clear();
        model.append(&mut sequence, &vec![0; tokens], Logits::Last, None)?;
    }
    Ok(())
}

/// Opens the files beside the shards that a run reads, or that were copied for a run: the tokenizer as `generate`
/// does, the chat template as `chat` does, the others as JSON. The contract decides which tokens end a text: other
/// end tokens in `generation_config.json` would have no effect.
///
/// # Errors
/// A file is damaged, or `generation_config.json` has a setting out of range or end tokens that the contract does not have.
pub fn check_side_files(bundle: &Path, chain: &Chain) -> anemoe_runtime::Result<()> {
    for name in SIDE_FILES {
        let path = bundle.join(name);
        if path.symlink_metadata().is_err() {
            continue;
        }
        if name == TOKENIZER {
            Tokenizer::open(&path)?;
            continue;
        }
        let text = read_input(&path, MAX_SIDE_BYTES).map_err(|e| Error::io(&path, e))?;
        if name == TEMPLATE {
            ChatTemplate::open(bundle, None)?;
            continue;
        }
        let invalid = |what: String| Error::invalid(&path, what);
        let value: Value = json::parse(&text).map_err(|e| invalid(format!("JSON: {e}")))?;
        if name == GENERATION {
            SamplingDefaults::parse(&value).map_err(invalid)?;
            let known = &chain.model.eos_token_ids;
            let ends = token_ids(value.get("eos_token_id"), chain.model.vocab_size);
            if let Some(id) = ends.iter().find(|id| !known.contains(id)) {
                let what = format!(
                    "eos_token_id: {id} ends a text here, and chain.json, which decides, has {known:?}"
                );
                return Err(invalid(what));
            }
        }
    }
    Ok(())
}

/// Identifies the content of a file or package without reading it, and tells whether the last change is at least
/// [`SETTLED`] ago. Returns `None` where the system gives no inodes.
fn fingerprint(path: &Path, is_package: bool) -> Result<Option<(String, bool)>, Error> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let files = if is_package { package_files(path)? } else { vec![path.to_path_buf()] };
        let mut text = String::new();
        let mut newest = 0;
        for file in files {
            let m = file.metadata().map_err(|e| Error::io(&file, e))?;
            let name = file.strip_prefix(path).unwrap_or(Path::new("")).to_string_lossy().into_owned();
            let times = [m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec()];
            text += &format!("{name:?} {} {} {} {times:?}\n", m.dev(), m.ino(), m.len());
            newest = newest.max(m.ctime()).max(m.mtime());
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let settled = u64::try_from(newest).is_ok_and(|at| Duration::from_secs(at) + SETTLED < now);
        Ok(Some((sha256(text.as_bytes()), settled)))
    }
    #[cfg(not(unix))]
    {
        let _ = (path, is_package);
        Ok(None)
    }
}

/// Hashes that this machine has computed before. They save time only: a hash that cannot be read or written is
/// computed again.
struct Remembered {
    folder: Option<OwnedDir>,
    lines: Vec<(String, String)>,
    index: BTreeMap<String, usize>,
}

impl Remembered {
    fn open() -> Remembered {
        let folder = cache_folder().map(|path| OwnedDir::new(&path));
        let text = folder.as_ref().and_then(|f| read_input(&f.path(FILE).ok()?, MAX_BYTES).ok());
        let text = String::from_utf8(text.unwrap_or_default()).unwrap_or_default();
        let is_hash = |s: &&str| s.len() == 64 && s.bytes().all(|b| b.is_ascii_hexdigit());
        let line = |l: &str| {
            let (print, hash) = l.split_once(' ')?;
            (is_hash(&print) && is_hash(&hash)).then(|| (print.to_string(), hash.to_string()))
        };
        let lines: Vec<(String, String)> = text.lines().filter_map(line).collect();
        let index = lines.iter().enumerate().map(|(i, (print, _))| (print.clone(), i)).collect();
        Remembered { folder, lines, index }
    }

    fn get(&self, print: &str) -> Option<&str> {
        self.index.get(print).map(|&i| self.lines[i].1.as_str())
    }

    fn add(mut self, new: Vec<(String, String)>) {
        let Some(folder) = self.folder.filter(|_| !new.is_empty()) else { return };
        self.lines.extend(new);
        let first = self.lines.len().saturating_sub(MAX_LINES);
        let text: String = self.lines[first..].iter().map(|(p, h)| format!("{p} {h}\n")).collect();
        let _ = folder.create_dir("").and_then(|_| folder.write(FILE, text.as_bytes()));
    }
}

/// Returns the user's folder for data that can be computed again: `anemoe` in the user's cache folder. `None` where
/// no home is known.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = set("XDG_CACHE_HOME").or_else(|| {
        let below = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
        Some(set("HOME")?.join(below))
    });
    Some(base?.join("anemoe"))
}
