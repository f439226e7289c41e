//! Opens a checkpoint of the hub: whole, or without its weights, of which only the parts that are read are fetched.

use super::fetch::{Hub, Snapshot, Target};
use super::hub_cache::HubCache;
use super::hub_file::HubFile;
use super::hub_spec::HubSpec;
use super::listing::{KnownFile, SINGLE, is_commit};
use crate::http_client::Trouble;
use crate::parallel::for_each;
use crate::progress::TransferProgress;
use crate::{Error, Result};
use anemoe_io::{RangedFile, RangedFiles, locked};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

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
    /// Fetches a checkpoint into the cache. `accept` checks the folder once its `config.json` is there, before any
    /// large download.
    ///
    /// # Errors
    /// The checkpoint is not in the cache and cannot be fetched, `accept` refuses it, or the disk has too little room.
    pub fn fetch(
        &self,
        spec: &HubSpec,
        accept: &dyn Fn(&Path) -> Result<()>,
        progress: &mut (dyn FnMut(TransferProgress) + Send),
    ) -> Result<Snapshot> {
        Ok(self.open(spec, false, accept, progress)?.snapshot)
    }

    /// Fetches a checkpoint like [`Hub::fetch`], but not its weights: weight files that are not in the cache are read
    /// in ranges. GGUF files are downloaded whole, and so is everything from a server without ranges.
    ///
    /// # Errors
    /// Fails like [`Hub::fetch`].
    pub fn peek(
        &self,
        spec: &HubSpec,
        accept: &dyn Fn(&Path) -> Result<()>,
        progress: &mut (dyn FnMut(TransferProgress) + Send),
    ) -> Result<Peeked> {
        self.open(spec, true, accept, progress)
    }

    fn open(
        &self,
        spec: &HubSpec,
        in_ranges: bool,
        accept: &dyn Fn(&Path) -> Result<()>,
        progress: &mut (dyn FnMut(TransferProgress) + Send),
    ) -> Result<Peeked> {
        let cache = HubCache::new(&self.settings().cache, spec);
        let whole = self.whole(spec, &cache);
        let known = || if in_ranges { self.known(spec, &cache) } else { None };
        // The checkpoint as it is in the cache, or the name of a missing part.
        let there = || match &whole {
            Ok(snapshot) => Ok(Peeked::whole(snapshot.clone())),
            Err(missing) => known().ok_or(missing),
        };
        if self.settings().offline {
            return there().map_err(|missing| self.not_asked(spec, missing));
        }
        if is_commit(&spec.revision) {
            let has_all = |path: &Path| path.is_file() || path.join("tokenizer.json").is_file();
            match &whole {
                Ok(snapshot) if has_all(&snapshot.path) => return Ok(Peeked::whole(snapshot.clone())),
                _ => {}
            }
            if let Some(known) = known() {
                return Ok(known);
            }
        }
        let listing = match self.list(spec) {
            Ok(listing) => listing,
            Err((Trouble::Passing(why), error)) => {
                let mut there = there().map_err(|_| error)?;
                there.snapshot.warning = Some(format!("{why}; what is in the cache is used"));
                return Ok(there);
            }
            Err((_, error)) => return Err(error),
        };
        let target = Target { spec, cache: &cache, commit: &listing.commit };
        let failed = |e| Error::io(&self.settings().cache, e);
        let mut peeked = Peeked::whole(Snapshot {
            path: cache.snapshot(&listing.commit),
            pinned: spec.at(&listing.commit),
            warning: None,
        });
        match self.bring_small(&target, &listing, accept, progress)? {
            None => {
                let invalid = |what: String| Error::invalid(spec.to_string(), what);
                let files = listing.gguf(spec.file.as_deref()).map_err(invalid)?;
                peeked.snapshot.path.push(&files[0].name);
                self.bring_files(&target, files, progress)?;
            }
            Some(files) if in_ranges => {
                let known = files.iter().map(|file| self.known_file(&target, file.clone()));
                let known: Vec<KnownFile> = known.collect::<Result<_>>()?;
                cache.keep_weights(&listing.commit, &known).map_err(failed)?;
                let absent = self.absent(&target, known);
                if self.bring_heads(spec, &absent, progress)? {
                    peeked.weights = by_name(absent);
                } else {
                    self.bring_files(&target, files, progress)?;
                    let what = "the server sends no parts of files: the weights were fetched whole";
                    peeked.snapshot.warning = Some(what.into());
                }
            }
            Some(files) => self.bring_files(&target, files, progress)?,
        }
        cache.remember(&spec.revision, &listing.commit).map_err(failed)?;
        Ok(peeked)
    }

    /// Returns the checkpoint as an earlier peek left it in the cache.
    fn known(&self, spec: &HubSpec, cache: &HubCache) -> Option<Peeked> {
        let commit = cache.commit(&spec.revision).filter(|_| spec.file.is_none())?;
        let folder = cache.snapshot(&commit);
        let files = cache.weights(&commit)?;
        let is_whole = files.iter().any(|f| f.name == SINGLE);
        let names = cache.weight_names(&commit, is_whole).ok()?;
        let complete = folder.join("config.json").is_file()
            && names.iter().all(|name| files.iter().any(|f| f.name == *name));
        let target = Target { spec, cache, commit: &commit };
        let files = files.into_iter().filter(|f| names.contains(&f.name)).collect();
        complete.then(|| Peeked {
            snapshot: Snapshot { path: folder, pinned: spec.at(&commit), warning: None },
            weights: by_name(self.absent(&target, files)),
        })
    }

    /// Returns the files that are not in the cache. Files whose contents came under another commit are linked into this
    /// commit's folder.
    fn absent(&self, target: &Target, files: Vec<KnownFile>) -> Vec<(String, HubFile)> {
        let folder = target.cache.snapshot(target.commit);
        let mut absent = Vec::new();
        for file in files {
            let found = folder.join(&file.name).metadata();
            let is_there = found.is_ok_and(|m| m.is_file() && m.len() == file.size)
                || (target.cache.has(&file)
                    && target.cache.link(target.commit, &file.name, &file.hash).is_ok());
            if !is_there {
                let name = file.name.clone();
                absent.push((name, HubFile::new(self, target, file)));
            }
        }
        absent
    }

    /// Fetches the headers of files, several at a time. Returns false where the server sends only whole files.
    fn bring_heads(
        &self,
        spec: &HubSpec,
        files: &[(String, HubFile)],
        progress: &mut (dyn FnMut(TransferProgress) + Send),
    ) -> Result<bool> {
        let total: u64 = files.iter().map(|(_, file)| file.bytes().min(HEAD)).sum();
        let (told, sends_ranges) = (Mutex::new((0, progress)), AtomicBool::new(true));
        for_each(files, AT_ONCE, &|(name, file)| {
            if !sends_ranges.load(Ordering::Relaxed) {
                return Ok(());
            }
            let came = file.bring_head(HEAD).map_err(|failure| self.explain(spec, name, failure))?;
            sends_ranges.fetch_and(came, Ordering::Relaxed);
            let (done, progress) = &mut *locked(&told);
            *done += file.bytes().min(HEAD);
            progress(TransferProgress { file: name, done: *done, total });
            Ok(())
        })?;
        Ok(sends_ranges.into_inner())
    }
}

fn by_name(files: Vec<(String, HubFile)>) -> RangedFiles {
    files.into_iter().map(|(name, file)| (name, Arc::new(file) as Arc<dyn RangedFile>)).collect()
}
