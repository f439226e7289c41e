//! The folder that is being built: locks, records of what is finished, and the files beside the shards.

use super::differences::differences;
use super::{Part, Quality, Source};
use crate::checkpoint::SIDE_FILES;
use crate::family::Family;
use crate::lower::encode_matrix;
use crate::plan::{MatrixPlan, Plan, PlannedShard};
use crate::{Error, Result};
use anemoe_bundle::journal::JOURNAL_FILE;
use anemoe_bundle::{
    CHAIN_FILE, Chain, GateResult, Gates, SHARDS_DIR, Shard, Vectors, file_sha256, package_sha256, sha256,
    write_atomic,
};
use anemoe_npz::Array;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Folder of an unfinished build.
pub const WORK_DIR: &str = ".build";
/// File of the host's vectors.
const VECTORS_FILE: &str = "vectors.npz";
/// How often, and after which time, a part asks again for a lock that another one sweeps under.
const SWEEP_TRIES: usize = 100;
const SWEEP_WAIT: Duration = Duration::from_millis(20);
/// What the folder of an unfinished build becomes before it is removed.
const DONE_DIR: &str = ".tmp-build";
/// Where the checkpoint is.
const SOURCE_FILE: &str = "source";
/// Records of what the gates of parts said.
const GATES_PREFIX: &str = "gates.";
/// Record of the files beside the shards, in the folder of an unfinished build.
const HOST_RECORD: &str = "host.json";

/// A finished shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// See [`Site::plan_sha256`].
    plan_sha256: String,
    pub bytes: u64,
    pub sha256: String,
    pub min_weight_cosine: f64,
    pub output_error: f64,
}

/// The files beside the shards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostRecord {
    plan_sha256: String,
    pub embedding: String,
    pub vectors: Option<String>,
    /// With their hashes.
    pub files: Vec<(String, String)>,
}

/// Takes a lock, alone or shared.
pub fn lock_file(path: &Path, alone: bool, bundle: &Path) -> Result<File> {
    let file = File::create(path).map_err(|e| Error::io(path, e))?;
    match if alone { file.try_lock() } else { file.try_lock_shared() } {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(Error::Usage(format!("{}: another build is using this folder", bundle.display())))
        }
        Err(TryLockError::Error(e)) => Err(Error::io(path, e)),
    }
}

/// Shares the lock with other parts. One of them may hold it alone for the moment in which it sweeps.
fn shared_lock(path: &Path, bundle: &Path) -> Result<File> {
    for _ in 0..SWEEP_TRIES {
        if let Ok(file) = lock_file(path, false, bundle) {
            return Ok(file);
        }
        std::thread::sleep(SWEEP_WAIT);
    }
    lock_file(path, false, bundle)
}

/// The folder that is being built, locked.
pub struct Site {
    pub bundle: PathBuf,
    pub work: PathBuf,
    /// Of the plan and the identity of its inputs: what ties a record to them.
    pub plan_sha256: String,
    /// Released when they are closed, also by a crash.
    pub _locks: Vec<File>,
}

impl Site {
    pub fn open(bundle: &Path, plan: &Plan, inputs: &serde_json::Value, part: Option<Part>) -> Result<Site> {
        let work = bundle.join(WORK_DIR);
        let plan_file = work.join("plan.json");
        let exists = bundle.symlink_metadata().is_ok();
        if exists && !bundle.is_dir() {
            return Err(Error::Usage(format!("{}: exists and is not a folder", bundle.display())));
        }
        if exists && bundle.join(CHAIN_FILE).exists() && !work.exists() {
            sweep(bundle);
            reopen(bundle, plan, inputs, part)?;
        }
        if exists
            && !work.exists()
            && fs::read_dir(bundle).map_err(|e| Error::io(bundle, e))?.next().is_some()
        {
            return Err(Error::Usage(format!("{}: exists and is not an unfinished build", bundle.display())));
        }
        let create = |dir: &Path| fs::create_dir_all(dir).map_err(|e| Error::io(dir, e));
        create(&work)?;
        let lock = work.join("lock");
        let text = to_json(&serde_json::json!({"inputs": inputs, "plan": plan}));
        let plan_sha256 = sha256(&text);
        let mut site = Site { bundle: bundle.to_path_buf(), work, plan_sha256, _locks: Vec::new() };
        match part {
            None => {
                site._locks.push(lock_file(&lock, true, bundle)?);
                site.sweep();
            }
            Some(part) => {
                let own = site.work.join(format!("lock.{}of{}", part.index, part.of));
                site._locks.push(lock_file(&own, true, bundle)?);
                site.refuse_other_parts(part)?;
                // Nobody writes while one holds the lock alone.
                if let Ok(alone) = lock_file(&lock, true, bundle) {
                    site.sweep();
                    drop(alone);
                }
                site._locks.push(shared_lock(&lock, bundle)?);
            }
        }
        match fs::read(&plan_file) {
            Ok(found) if found == text => {}
            Ok(found) => {
                let found: serde_json::Value = serde_json::from_slice(&found).unwrap_or_default();
                let begun = (&found["plan"]["chain"], &found["inputs"]);
                return Err(Error::Usage(format!(
                    "{}: holds an unfinished build with other options or of another checkpoint ({}); remove it or repeat those options",
                    bundle.display(),
                    differences(begun, (&to_value(&plan.chain), inputs))
                )));
            }
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(&plan_file, e)),
            Err(_) => {
                let started =
                    create(&bundle.join(SHARDS_DIR)).and_then(|()| Ok(write_atomic(&plan_file, &text)?));
                if started.is_err() && part.is_none() {
                    site.tidy(true);
                }
                started?;
            }
        }
        Ok(site)
    }

    /// Removes what a killed run was in the middle of writing; nobody else writes here while the lock is held.
    fn sweep(&self) {
        for dir in [self.bundle.clone(), self.bundle.join(SHARDS_DIR), self.work.clone()] {
            sweep(&dir);
        }
    }

    /// Parts of another count share out the shards differently: two of them would write the same one.
    fn refuse_other_parts(&self, part: Part) -> Result<()> {
        let suffix = format!("of{}", part.of);
        for entry in fs::read_dir(&self.work).map_err(|e| Error::io(&self.work, e))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("lock.") && !name.ends_with(&suffix) {
                lock_file(&entry.path(), true, &self.bundle)?;
            }
        }
        Ok(())
    }

    /// After a failure: leaves finished shards unless `all` is to go, and nothing at all when there is none.
    pub fn tidy(&self, all: bool) {
        let shards = self.bundle.join(SHARDS_DIR);
        let done = fs::read_dir(&shards).is_ok_and(|mut d| d.next().is_some());
        if all || !done {
            // What cannot be removed now is recognised as an unfinished build by the next run.
            let _ = fs::remove_dir_all(&self.work);
            for file in SIDE_FILES.iter().chain(&["embed.bin", VECTORS_FILE, JOURNAL_FILE]) {
                let _ = fs::remove_file(self.bundle.join(file));
            }
            let _ = fs::remove_dir_all(&shards);
            let _ = fs::remove_dir(&self.bundle);
        }
    }

    /// The record of a finished shard whose package is what it says.
    pub fn record(&self, shard: &PlannedShard) -> Option<Record> {
        let path = self.bundle.join(shard.package_file());
        let text = fs::read(self.work.join(format!("{}.json", shard.name))).ok()?;
        let record: Record = serde_json::from_slice(&text).ok()?;
        (record.plan_sha256 == self.plan_sha256
            && path.is_dir()
            && package_sha256(&path).is_ok_and(|hash| hash == record.sha256))
        .then_some(record)
    }

    /// Records of all shards, whose packages are what they say.
    pub fn records(&self, plan: &Plan) -> Result<Vec<Record>> {
        let records: Vec<Option<Record>> = plan.shards.par_iter().map(|s| self.record(s)).collect();
        let missing: Vec<&str> = plan
            .shards
            .iter()
            .zip(&records)
            .filter(|(_, r)| r.is_none())
            .map(|(s, _)| s.name.as_str())
            .collect();
        if !missing.is_empty() {
            let has_record = |name: &str| self.work.join(format!("{name}.json")).is_file();
            let (changed, absent): (Vec<&str>, Vec<&str>) =
                missing.iter().copied().partition(|n| has_record(n));
            let list = |what: &str, names: &[&str]| {
                let first = names.iter().take(3).copied().collect::<Vec<_>>().join(", ");
                let more = if names.len() > 3 { ", .." } else { "" };
                (!names.is_empty()).then(|| {
                    format!("{} of {} shards {what} ({first}{more})", names.len(), plan.shards.len())
                })
            };
            let lists = [
                list("are not built", &absent),
                list("are missing or have other bytes than their records", &changed),
            ];
            return Err(Error::Usage(format!(
                "{}: {}; run the parts that lack them again",
                self.bundle.display(),
                lists.into_iter().flatten().collect::<Vec<_>>().join(", ")
            )));
        }
        Ok(records.into_iter().flatten().collect())
    }

    /// The contract of the finished bundle.
    pub fn chain(&self, plan: &Plan, records: &[Record], host: &HostRecord) -> Result<Chain> {
        let mut chain = plan.chain.clone();
        chain.embedding.sha256 = host.embedding.clone();
        chain.vectors = host.vectors.clone().map(vectors);
        (chain.checkpoint_sha256, chain.importance) = self.begun_inputs()?;
        chain.shards = plan
            .shards
            .iter()
            .zip(records)
            .map(|(s, r)| Shard {
                bytes: r.bytes,
                sha256: r.sha256.clone(),
                min_weight_cosine: r.min_weight_cosine,
                output_error: r.output_error,
                ..s.draft()
            })
            .collect();
        Ok(chain)
    }

    /// Completes the bundle.
    pub fn finish(&self, chain: &Chain) -> Result<()> {
        chain.write(&self.bundle)?;
        // At once, not file by file: half of it would look like another unfinished build.
        let done = self.bundle.join(DONE_DIR);
        fs::rename(&self.work, &done).map_err(|e| Error::io(&self.work, e))?;
        fs::remove_dir_all(&done).map_err(|e| Error::io(&done, e))
    }

    /// Writes down that a shard is finished.
    pub fn write_record(&self, shard: &PlannedShard, quality: &Quality) -> Result<Record> {
        let path = self.bundle.join(shard.package_file());
        let record = Record {
            plan_sha256: self.plan_sha256.clone(),
            bytes: directory_bytes(&path)?,
            sha256: package_sha256(&path)?,
            min_weight_cosine: quality.min_cosine,
            output_error: quality.all.output_error(),
        };
        write_atomic(&self.work.join(format!("{}.json", shard.name)), &to_json(&record))?;
        Ok(record)
    }

    /// Writes down where the checkpoint is, for whoever completes the bundle.
    pub fn write_source(&self, source: &Source) -> Result<()> {
        Ok(write_atomic(&self.work.join(SOURCE_FILE), &to_json(source))?)
    }

    /// Where the checkpoint is, as the last build said.
    pub fn source(&self) -> Option<Source> {
        serde_json::from_slice(&fs::read(self.work.join(SOURCE_FILE)).ok()?).ok()
    }

    /// Writes down what the gates of a part said.
    pub fn write_gates(&self, part: Part, gates: &Gates) -> Result<()> {
        let name = format!("{GATES_PREFIX}{}of{}", part.index, part.of);
        Ok(write_atomic(&self.work.join(name), &to_json(gates))?)
    }

    /// The worst that the gates of the parts said, and whether none of them had any. A part that said nothing was not gated.
    pub fn part_gates(&self) -> (Gates, bool) {
        let not_run =
            Gates { representative: GateResult::NotRun, full_stack: GateResult::NotRun, min_cosine: None };
        let entries = fs::read_dir(&self.work).into_iter().flatten().flatten();
        let names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        let read = |name: &str| {
            fs::read(self.work.join(name)).ok().and_then(|t| serde_json::from_slice::<Gates>(&t).ok())
        };
        let count = |name: &str| name.strip_prefix(GATES_PREFIX)?.split_once("of")?.1.parse::<usize>().ok();
        let counts: BTreeSet<usize> = names.iter().filter_map(|n| count(n)).collect();
        // Of several counts whose parts are all there, any speaks for all shards.
        let said = counts.into_iter().filter_map(|of| {
            (0..of).map(|i| read(&format!("{GATES_PREFIX}{i}of{of}"))).collect::<Option<Vec<Gates>>>()
        });
        let severity = |g: &Gates| match g.representative {
            GateResult::Passed => 0,
            GateResult::Undecided => 1,
            GateResult::Skipped => 2,
            GateResult::NotRun => 3,
            GateResult::Failed => 4,
        };
        let worst = said.filter_map(|all| {
            let none_had = all.iter().all(|g| g.representative == GateResult::Skipped);
            Some((all.into_iter().max_by_key(severity)?, none_had))
        });
        match worst.min_by_key(|(g, _)| severity(g)) {
            Some((worst, none_had)) => (Gates { full_stack: GateResult::NotRun, ..worst }, none_had),
            None => (not_run, false),
        }
    }

    /// Hashes of the checkpoint and the importances that the build began with.
    fn begun_inputs(&self) -> Result<(Option<String>, Option<String>)> {
        let path = self.work.join("plan.json");
        let text = fs::read(&path).map_err(|e| Error::io(&path, e))?;
        let begun: serde_json::Value =
            serde_json::from_slice(&text).map_err(|e| Error::invalid(&path, format!("plan: {e}")))?;
        let hash = |name: &str| begun["inputs"][name].as_str().map(str::to_string);
        Ok((hash("checkpoint"), hash("importance")))
    }

    /// The record of the files beside the shards, all of which are what it says.
    pub fn host_record(&self, plan: &Plan) -> Result<HostRecord> {
        let wrong = |file: &str| {
            let what = format!("{}: {file} is missing or changed; run part 0 again", self.bundle.display());
            Error::Usage(what)
        };
        let text = fs::read(self.work.join(HOST_RECORD)).map_err(|_| wrong(&plan.chain.embedding.file))?;
        let record: HostRecord =
            serde_json::from_slice(&text).map_err(|_| wrong(&plan.chain.embedding.file))?;
        let is = |file: &str, hash: &str| file_sha256(&self.bundle.join(file)).is_ok_and(|h| h == hash);
        if !is(&plan.chain.embedding.file, &record.embedding) {
            return Err(wrong(&plan.chain.embedding.file));
        }
        if let Some(hash) = record.vectors.as_ref().filter(|hash| !is(VECTORS_FILE, hash)) {
            return Err(wrong(&format!("{VECTORS_FILE} ({hash})")));
        }
        match record.files.iter().find(|(file, hash)| !is(file, hash)) {
            Some((file, _)) => Err(wrong(file)),
            None if record.plan_sha256 != self.plan_sha256 => Err(wrong(&plan.chain.embedding.file)),
            None => Ok(record),
        }
    }

    /// Writes the files beside the shards, unless an earlier run has.
    pub fn write_host(&self, family: &dyn Family, plan: &Plan) -> Result<HostRecord> {
        if let Ok(record) = self.host_record(plan) {
            return Ok(record);
        }
        // First, so that a tokenizer that is wrong is found before the work.
        let files = family.opened().checkpoint.side_files()?;
        let vectors = write_vectors(family, &self.bundle)?;
        let embedding = self.write_embedding(family, plan)?;
        let mut hashes = Vec::new();
        for (name, file) in files {
            let bytes = file.read()?;
            write_atomic(&self.bundle.join(name), &bytes)?;
            hashes.push((name.to_string(), sha256(&bytes)));
        }
        let plan_sha256 = self.plan_sha256.clone();
        let record = HostRecord { plan_sha256, embedding, vectors, files: hashes };
        write_atomic(&self.work.join(HOST_RECORD), &to_json(&record))?;
        Ok(record)
    }

    /// Writes the host's embedding as [`anemoe_bundle::Storage`] says, and gives the file's hash.
    fn write_embedding(&self, family: &dyn Family, plan: &Plan) -> Result<String> {
        let embedding = &plan.chain.embedding;
        let path = self.bundle.join(&embedding.file);
        let temporary = self.work.join("embed.tmp");
        let file = File::create(&temporary).map_err(|e| Error::io(&temporary, e))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let matrix = MatrixPlan {
            name: "embedding".into(),
            part: "embedding".into(),
            tensor: family.embedding_tensor().into(),
            offset: 0,
            rows: embedding.rows,
            cols: embedding.cols,
            taps: 1,
            quant: plan.embedding,
        };
        let failed = |e: std::io::Error| Error::io(&temporary, e);
        // A row is one token's: which of its channels matter for the head says nothing here.
        let side = encode_matrix(family, &matrix, None, &mut |bytes| out.write_all(bytes).map_err(failed))?;
        let values = side.values.iter().flat_map(|v| v.to_le_bytes());
        let tail: Vec<u8> = values.chain(side.offsets.iter().map(|&o| o as u8)).collect();
        out.write_all(&tail).map_err(failed)?;
        out.flush().and_then(|()| out.get_ref().sync_all()).map_err(failed)?;
        fs::rename(&temporary, &path).map_err(|e| Error::io(&path, e))?;
        Ok(file_sha256(&path)?)
    }
}

/// Writes the vectors that host steps name, where there are any, and gives the file's hash.
pub fn write_vectors(family: &dyn Family, folder: &Path) -> Result<Option<String>> {
    let vectors = family.host_vectors()?;
    if vectors.is_empty() {
        return Ok(None);
    }
    let arrays: Vec<(String, Array)> = vectors
        .into_iter()
        .filter_map(|(name, values)| Some((name, Array::new(vec![values.len()], values)?)))
        .collect();
    let path = folder.join(VECTORS_FILE);
    anemoe_npz::write_npz(&path, &arrays)?;
    Ok(Some(file_sha256(&path)?))
}

/// Makes an unfinished build of a finished bundle again, if it is one of this very plan and checkpoint: then what is missing or
/// changed can be built again, and nothing else.
fn reopen(bundle: &Path, plan: &Plan, inputs: &serde_json::Value, part: Option<Part>) -> Result<()> {
    let finished = |what: &str| {
        let what = format!(
            "{}: is a finished bundle already{what}; remove it or choose another name",
            bundle.display()
        );
        Err(Error::Usage(what))
    };
    if part.is_some() {
        return finished("");
    }
    let chain = Chain::read(bundle)?;
    // All but what a build adds.
    let planned = |chain: &Chain| Chain {
        checkpoint_sha256: None,
        importance: None,
        gates: None,
        vectors: None,
        shards: Vec::new(),
        embedding: anemoe_bundle::Embedding { sha256: String::new(), ..chain.embedding.clone() },
        ..chain.clone()
    };
    let same = |name: &str, hash: &Option<String>| inputs[name].as_str() == hash.as_deref();
    let ours = planned(&chain) == planned(&plan.chain)
        && chain.shards.iter().map(|s| &s.name).eq(plan.shards.iter().map(|s| &s.name))
        && same("checkpoint", &chain.checkpoint_sha256)
        && same("importance", &chain.importance);
    if !ours {
        let built =
            serde_json::json!({"checkpoint": chain.checkpoint_sha256, "importance": chain.importance});
        let differs = differences((&to_value(&chain), &built), (&to_value(&plan.chain), inputs));
        return finished(&format!(", with other options or of another checkpoint ({differs})"));
    }
    let text = to_json(&serde_json::json!({"inputs": inputs, "plan": plan}));
    let plan_sha256 = sha256(&text);
    // Beside its place until it is whole: half of it would lack records.
    let work =
        tempfile::Builder::new().prefix(".tmp-").tempdir_in(bundle).map_err(|e| Error::io(bundle, e))?;
    for s in &chain.shards {
        let record = Record {
            plan_sha256: plan_sha256.clone(),
            bytes: s.bytes,
            sha256: s.sha256.clone(),
            min_weight_cosine: s.min_weight_cosine,
            output_error: s.output_error,
        };
        write_atomic(&work.path().join(format!("{}.json", s.name)), &to_json(&record))?;
    }
    write_atomic(&work.path().join("plan.json"), &text)?;
    let place = bundle.join(WORK_DIR);
    fs::rename(work.keep(), &place).map_err(|e| Error::io(&place, e))
}

/// Removes what begins like something that was being written.
fn sweep(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(".partial-") || name.starts_with(".tmp") {
            let _ = fs::remove_file(entry.path()).or_else(|_| fs::remove_dir_all(entry.path()));
        }
    }
}

/// The plan that an unfinished build began with, and its hash.
pub fn begun_plan(path: &Path) -> Result<(Plan, String)> {
    #[derive(Deserialize)]
    struct Begun {
        plan: Plan,
    }
    let text = fs::read(path).map_err(|e| Error::io(path, e))?;
    let begun: Begun =
        serde_json::from_slice(&text).map_err(|e| Error::invalid(path, format!("plan: {e}")))?;
    Ok((begun.plan, sha256(&text)))
}

/// The host's vectors in a chain.
pub fn vectors(sha256: String) -> Vectors {
    Vectors { file: VECTORS_FILE.into(), sha256 }
}

fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    // Plans and records hold only what JSON can: no maps with other keys than strings, no non-finite numbers.
    serde_json::to_vec_pretty(value).expect("plans and records are representable in JSON")
}

fn to_value(chain: &Chain) -> serde_json::Value {
    serde_json::to_value(chain).unwrap_or_default()
}

fn directory_bytes(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).map_err(|e| Error::io(dir, e))? {
        let entry = entry.map_err(|e| Error::io(dir, e))?;
        let meta = entry.metadata().map_err(|e| Error::io(entry.path(), e))?;
        bytes += if meta.is_dir() { directory_bytes(&entry.path())? } else { meta.len() };
    }
    Ok(bytes)
}
