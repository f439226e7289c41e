//! Opens a checkpoint of the hub without its weights: only the parts of weights that are read are fetched.

use super::fetch::{DownloadProgress, Hub, Snapshot, Target};
use super::hub_cache::{HubCache, MAX_INDEX};
use super::hub_file::HubFile;
use super::hub_spec::HubSpec;
use super::listing::{INDEX, KnownFile, RemoteFile, SINGLE, indexed_files, is_commit};
use crate::http_client::Trouble;
use crate::http_source::RangeFailure;
use crate::{Error, Result};
use anemoe_io::{RangedFile, RangedFiles, read_input};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes fetched first from each file: its header, which has up to about 100 kB.
const HEAD: u64 = 256 << 10;
/// Files whose headers are fetched at the same time.
const AT_ONCE: usize = 8;

/// A checkpoint that was opened without its weights.
pub struct Peeked {
    /// The folder, without weight files that were never downloaded; or the GGUF file.
    pub snapshot: Snapshot,
    /// Weight files that are read in ranges.
    pub weights: RangedFiles,
}

impl Peeked {
    fn whole(snapshot: Snapshot) -> Peeked {
        Peeked { snapshot, weights: RangedFiles::new() }
    }
}

impl Hub {
    /// Fetches a checkpoint like [`Hub::fetch`], but not its weights: weight files that are not in the cache are read
    /// in ranges. GGUF files are downloaded whole, and so is everything from a server without ranges.
    ///
    /// # Errors
    /// Fails like [`Hub::fetch`].
    pub fn peek(
        &self,
        spec: &HubSpec,
        accept: &dyn Fn(&Path) -> Result<()>,
        progress: &mut dyn FnMut(DownloadProgress),
    ) -> Result<Peeked> {
        let cache = HubCache::new(&self.settings().cache, spec);
        let whole = self.whole(spec, &cache);
        if self.settings().offline {
            return match (whole, self.known(spec, &cache)) {
                (Ok(snapshot), _) => Ok(Peeked::whole(snapshot)),
                (Err(_), Some(known)) => Ok(known),
                (Err(missing), None) => Err(self.not_asked(spec, &missing)),
            };
        }
        if is_commit(&spec.revision) {
            if let Some(snapshot) = self.complete_commit(spec, &whole) {
                return Ok(Peeked::whole(snapshot));
            }
            if let Some(known) = self.known(spec, &cache) {
                return Ok(known);
            }
        }
        let listing = match self.list(spec) {
            Ok(listing) => listing,
            Err((Trouble::Passing(why), error)) => {
                let there = whole.ok().map(Peeked::whole).or_else(|| self.known(spec, &cache));
                let mut there = there.ok_or(error)?;
                there.snapshot.warning = Some(format!("{why}; what is in the cache is used"));
                return Ok(there);
            }
            Err((_, error)) => return Err(error),
        };
        let target = Target { spec, cache: &cache, commit: &listing.commit };
        let failed = |e| Error::io(&self.settings().cache, e);
        let mut snapshot = Snapshot {
            path: cache.snapshot(&listing.commit),
            pinned: spec.at(&listing.commit),
            warning: None,
        };
        let mut weights = RangedFiles::new();
        match self.bring_small(&target, &listing, accept, progress)? {
            None => snapshot.path = self.bring(&target, &listing, accept, progress)?,
            Some(files) => {
                let known = self.known_files(&target, &files)?;
                cache.keep_weights(&listing.commit, &known).map_err(failed)?;
                let absent = self.absent(&target, known);
                match self.bring_heads(&absent, progress) {
                    Ok(()) => weights = by_name(absent),
                    Err((_, RangeFailure::WholeOnly)) => {
                        self.bring_files(&target, files, progress)?;
                        let what = "the server sends no parts of files: the weights were fetched whole";
                        snapshot.warning = Some(what.into());
                    }
                    Err((name, RangeFailure::Other(failure))) => {
                        return Err(self.explain(spec, &name, failure));
                    }
                }
            }
        }
        cache.remember(&spec.revision, &listing.commit).map_err(failed)?;
        Ok(Peeked { snapshot, weights })
    }

    /// Returns the checkpoint as an earlier peek left it in the cache.
    fn known(&self, spec: &HubSpec, cache: &HubCache) -> Option<Peeked> {
        let commit = cache.commit(&spec.revision).filter(|_| spec.file.is_none())?;
        let folder = cache.snapshot(&commit);
        let files = cache.weights(&commit)?;
        let names = match folder.join(INDEX).is_file() {
            true => indexed_files(&read_input(&folder.join(INDEX), MAX_INDEX).ok()?).ok()?,
            false => [SINGLE.to_string()].into(),
        };
        let complete = folder.join("config.json").is_file()
            && names.iter().all(|name| files.iter().any(|f| f.name == *name));
        let target = Target { spec, cache, commit: &commit };
        let files = files.into_iter().filter(|f| names.contains(&f.name)).collect();
        complete.then(|| Peeked {
            snapshot: Snapshot { path: folder, pinned: spec.at(&commit), warning: None },
            weights: by_name(self.absent(&target, files)),
        })
    }

    /// Returns the weight files with their sizes and hashes, asking the hub for unknown ones.
    fn known_files(&self, target: &Target, files: &[RemoteFile]) -> Result<Vec<KnownFile>> {
        let known = |file: &RemoteFile| {
            let (size, hash) = match (file.size, file.hash.clone()) {
                (Some(size), Some(hash)) => (size, hash),
                _ => self.request_size_and_hash(target, file)?,
            };
            Ok(KnownFile { name: file.name.clone(), size, hash })
        };
        files.iter().map(known).collect()
    }

    /// Returns the files that are not in the cache. Files whose contents came under another commit are linked into this
    /// commit's folder.
    fn absent(&self, target: &Target, files: Vec<KnownFile>) -> Vec<(String, HubFile)> {
        let folder = target.cache.snapshot(target.commit);
        let has_size = |path: &Path, size: u64| path.metadata().is_ok_and(|m| m.is_file() && m.len() == size);
        let mut absent = Vec::new();
        for file in files {
            let is_there = has_size(&folder.join(&file.name), file.size)
                || (has_size(&target.cache.blob(&file.hash), file.size)
                    && target.cache.link(target.commit, &file.name, &file.hash).is_ok());
            if !is_there {
                let name = file.name.clone();
                absent.push((name, HubFile::new(self, target.spec, target.cache, target.commit, file)));
            }
        }
        absent
    }

    /// Fetches the headers of files, several at a time.
    fn bring_heads(
        &self,
        files: &[(String, HubFile)],
        progress: &mut dyn FnMut(DownloadProgress),
    ) -> std::result::Result<(), (String, RangeFailure)> {
        let total: u64 = files.iter().map(|(_, file)| file.bytes().min(HEAD)).sum();
        let (next, (send, ended)) = (AtomicUsize::new(0), std::sync::mpsc::channel());
        std::thread::scope(|scope| {
            for i in 0..AT_ONCE.min(files.len()) {
                let (send, next) = (send.clone(), &next);
                let work = move || {
                    while let Some((name, file)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let ended = file.bring_head(HEAD);
                        let failed = ended.is_err();
                        // After a failure nobody receives any more.
                        if send.send((name, file.bytes().min(HEAD), ended)).is_err() || failed {
                            next.store(files.len(), Ordering::Relaxed);
                        }
                    }
                };
                if std::thread::Builder::new().spawn_scoped(scope, work.clone()).is_err() {
                    if i == 0 {
                        work();
                    }
                    break;
                }
            }
            drop(send);
            let mut done = 0;
            for (name, bytes, ended) in ended {
                ended.map_err(|failure| (name.clone(), failure))?;
                done += bytes;
                progress(DownloadProgress { file: name, done, total });
            }
            Ok(())
        })
    }
}

fn by_name(files: Vec<(String, HubFile)>) -> RangedFiles {
    files.into_iter().map(|(name, file)| (name, Arc::new(file) as Arc<dyn RangedFile>)).collect()
}
