//! Fetches files of the hub into the cache: files that are there are used, missing files are downloaded.

use super::hub_cache::HubCache;
use super::hub_settings::HubSettings;
use super::hub_spec::HubSpec;
use super::listing::{INDEX, KnownFile, Listing, RemoteFile, SINGLE};
use crate::blob_hash::BlobHash;
use crate::download::{DownloadFailure, download};
use crate::http_client::{Answer, HttpClient, HttpRequest, Tries, Trouble, is_passing, shown};
use crate::http_source::HttpSource;
use crate::progress::TransferProgress;
use crate::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use url::Url;

/// Tries of a request for a list of files, or for what the list does not tell of a file.
const LIST_TRIES: u32 = 3;
/// Most bytes of a list of files.
const MAX_LISTING: u64 = 16 << 20;
/// Most bytes of a file beside the weights; Gemma's tokenizer has 32 MB.
const MAX_SMALL_FILE: u64 = 512 << 20;

/// A checkpoint in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder, or the GGUF file.
    pub path: PathBuf,
    /// Name of the checkpoint, with the commit in place of a branch.
    pub pinned: HubSpec,
    /// Reason why the hub was not asked, unless the user wanted that.
    pub warning: Option<String>,
}

/// Access to the hub, by settings.
#[derive(Clone)]
pub struct Hub {
    settings: HubSettings,
    client: Arc<HttpClient>,
}

/// A repository and the commit that is fetched.
pub(super) struct Target<'a> {
    pub spec: &'a HubSpec,
    pub cache: &'a HubCache,
    pub commit: &'a str,
}

impl Hub {
    /// Makes access to the hub by these settings.
    ///
    /// # Errors
    /// The certificates cannot be read.
    pub fn new(settings: HubSettings) -> Result<Hub> {
        let client = Arc::new(HttpClient::new(settings.certificates.as_deref())?);
        Ok(Hub { settings, client })
    }

    pub(super) fn settings(&self) -> &HubSettings {
        &self.settings
    }

    /// Makes the error about something that the cache lacks while the hub may not be asked.
    pub(super) fn not_asked(&self, spec: &HubSpec, missing: &str) -> Error {
        let what = format!(
            "the hub is not asked (--offline or HF_HUB_OFFLINE), and {missing} is not in {}",
            self.settings.cache.display()
        );
        Error::io(spec.to_string(), io::Error::new(io::ErrorKind::NotFound, what))
    }

    /// Returns the complete checkpoint in the cache, or the name of a missing part as the error.
    pub(super) fn whole(&self, spec: &HubSpec, cache: &HubCache) -> std::result::Result<Snapshot, String> {
        let commit = cache.commit(&spec.revision).ok_or_else(|| format!("revision {}", spec.revision))?;
        let path = cache.complete(&commit, spec.file.as_deref())?;
        Ok(Snapshot { path, pinned: spec.at(&commit), warning: None })
    }

    fn address(&self, parts: &[&str]) -> Url {
        let mut url = self.settings.endpoint.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(parts);
        }
        url
    }

    /// Sends a request, again after passing faults, for a few seconds at most.
    fn ask(&self, method: &'static str, url: &Url, follow: bool) -> std::result::Result<Answer, Trouble> {
        let token = self.settings.token.as_ref();
        let request = HttpRequest { method, url, from: 0, to: None, token, follow };
        let mut tries = Tries::new(LIST_TRIES);
        loop {
            let ended = self.client.send(&request);
            let why = match &ended {
                Ok(answer) if is_passing(answer.status, None) => {
                    format!("{} answers with status {}", shown(url), answer.status)
                }
                Err(Trouble::Passing(why)) => why.clone(),
                _ => return ended,
            };
            if !tries.pause(&why) {
                return ended;
            }
        }
    }

    /// Lists the files of a revision.
    pub(super) fn list(&self, spec: &HubSpec) -> std::result::Result<Listing, (Trouble, Error)> {
        let mut url = self.address(&["api", "models", &spec.owner, &spec.name, "revision", &spec.revision]);
        url.set_query(Some("blobs=true"));
        let lasting = |error: Error| (Trouble::Lasting(String::new()), error);
        let failed = |trouble: Trouble| {
            let error = Error::io(spec.to_string(), io::Error::other(trouble.to_string()));
            (trouble, error)
        };
        let answer = self.ask("GET", &url, true).map_err(failed)?;
        match answer.status {
            200 => {}
            status if is_passing(status, None) => {
                let mut why = format!("{} answers with status {status}", shown(&url));
                if status == 429 {
                    why += ": too many requests; wait some minutes, or set HF_TOKEN, which allows more";
                }
                return Err(failed(Trouble::Passing(why)));
            }
            status => {
                let code = answer.header("x-error-code");
                return Err(lasting(self.refused(spec, None, status, code)));
            }
        }
        let text = answer.read(MAX_LISTING).map_err(failed)?;
        Listing::parse(&text).map_err(|what| lasting(Error::invalid(spec.to_string(), what)))
    }

    /// Makes the error for a status, with its meaning and what to do about it.
    fn refused(&self, spec: &HubSpec, file: Option<&str>, status: u16, code: Option<&str>) -> Error {
        let page = shown(&self.address(&[&spec.owner, &spec.name]));
        let of = file.map_or(String::new(), |file| format!("{file}: "));
        let what = match (status, code) {
            (_, Some("RevisionNotFound")) => format!("there is no revision `{}` of {page}", spec.revision),
            (403, _) | (_, Some("GatedRepo")) => {
                format!(
                    "{of}{page} is open to some only: accept its terms there, and set HF_TOKEN to a token of that account"
                )
            }
            (401, _) if self.settings.token.is_some() => {
                format!("{of}there is no {page}, or the token (HF_TOKEN) may not see it")
            }
            (401, _) => format!("{of}there is no {page}, or it is private: HF_TOKEN gives a token"),
            (404, _) => format!("{of}there is no {page}, or not at revision `{}`", spec.revision),
            _ => format!("{of}{page} answers with status {status}"),
        };
        Error::io(spec.to_string(), io::Error::other(what))
    }

    /// Fetches the files beside the weights. Returns the weight files, or `None` for a GGUF file, which holds everything.
    pub(super) fn bring_small(
        &self,
        target: &Target,
        listing: &Listing,
        accept: &dyn Fn(&Path) -> Result<()>,
        progress: &mut dyn FnMut(TransferProgress),
    ) -> Result<Option<Vec<RemoteFile>>> {
        let invalid = |what: String| Error::invalid(target.spec.to_string(), what);
        let folder = target.cache.snapshot(target.commit);
        let (index, is_whole) = (listing.file(INDEX), listing.file(SINGLE).is_some());
        if target.spec.file.is_some() || (index.is_none() && !is_whole) {
            return Ok(None);
        }
        let small: Vec<RemoteFile> = listing.small_files().into_iter().chain(index).cloned().collect();
        if let Some(large) = small.iter().find(|f| f.size.is_some_and(|n| n > MAX_SMALL_FILE)) {
            return Err(invalid(format!("{}: it has more than {MAX_SMALL_FILE} bytes", large.name)));
        }
        self.bring_files(target, small, progress)?;
        accept(&folder)?;
        let names = target.cache.weight_names(target.commit, is_whole).map_err(invalid)?;
        let files = names.iter().map(|name| {
            listing
                .file(name)
                .cloned()
                .ok_or_else(|| invalid(format!("{INDEX}: it names {name}, which is not there")))
        });
        files.collect::<Result<_>>().map(Some)
    }

    /// Downloads the files that are not in the cache.
    pub(super) fn bring_files(
        &self,
        target: &Target,
        files: Vec<RemoteFile>,
        progress: &mut dyn FnMut(TransferProgress),
    ) -> Result<()> {
        let folder = target.cache.snapshot(target.commit);
        let failed = |e: io::Error| Error::io(&self.settings.cache, e);
        let mut missing = Vec::new();
        for file in files {
            let there = folder.join(&file.name).metadata().ok().filter(|m| m.is_file()).map(|m| m.len());
            if there.is_none_or(|bytes| file.size.is_some_and(|size| size != bytes)) {
                missing.push(self.known_file(target, file)?);
            }
        }
        let wanted: Vec<&KnownFile> = missing.iter().filter(|file| !target.cache.has(file)).collect();
        let total = wanted.iter().fold(0u64, |n, file| n.saturating_add(file.size));
        if let Some(first) = wanted.first() {
            let blobs = target.cache.blob(&first.hash);
            let blobs = blobs.parent().unwrap_or(&blobs).to_path_buf();
            std::fs::create_dir_all(&blobs).map_err(failed)?;
            let partial =
                |file: &&KnownFile| target.cache.partial(&file.hash).metadata().map_or(0, |m| m.len());
            let begun: u64 = wanted.iter().map(partial).sum();
            let (needed, free) = (total.saturating_sub(begun), fs4::available_space(&blobs).map_err(failed)?);
            if needed > free {
                let what = format!(
                    "the checkpoint needs {needed} bytes more, and its disk has {free} left; HF_HOME names another place"
                );
                return Err(Error::room(&self.settings.cache, what));
            }
        }
        let mut before = 0;
        for file in &missing {
            let _lock = target.cache.lock(&file.hash).map_err(failed)?;
            if !target.cache.has(file) {
                let mut told =
                    |done: u64| progress(TransferProgress { file: &file.name, done: before + done, total });
                self.bring_one(target, file, &mut told)?;
                before += file.size;
            }
            target.cache.link(target.commit, &file.name, &file.hash).map_err(failed)?;
            // Its parts in ranges are not needed any more.
            let _ = std::fs::remove_file(target.cache.ranges(&file.hash));
        }
        Ok(())
    }

    pub(super) fn file_address(&self, spec: &HubSpec, commit: &str, name: &str) -> Url {
        let head = [spec.owner.as_str(), &spec.name, "resolve", commit];
        let parts: Vec<&str> = head.into_iter().chain(name.split('/')).collect();
        self.address(&parts)
    }

    /// Returns the file at an address of a repository.
    pub(super) fn source<'a>(&'a self, spec: &'a HubSpec, name: &'a str, url: &'a Url) -> HttpSource<'a> {
        let refused = move |status: u16, code: Option<&str>| self.refused(spec, Some(name), status, code);
        let token = self.settings.token.as_ref();
        HttpSource { client: &self.client, url, token, refused: Box::new(refused) }
    }

    fn bring_one(&self, target: &Target, file: &KnownFile, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let url = self.file_address(target.spec, target.commit, &file.name);
        let source = self.source(target.spec, &file.name, &url);
        let (partial, blob) = (target.cache.partial(&file.hash), target.cache.blob(&file.hash));
        download(&source, &file.hash, file.size, &partial, &blob, progress).map_err(|failure| match failure {
            DownloadFailure::Disk(e) => Error::io(&partial, e),
            other => self.explain(target.spec, &file.name, other),
        })
    }

    /// Makes the error for a file, or a part of one, that did not come.
    pub(super) fn explain(&self, spec: &HubSpec, name: &str, failure: DownloadFailure) -> Error {
        match failure {
            DownloadFailure::Disk(e) => Error::io(&self.settings.cache, e),
            DownloadFailure::Refused(e) => e,
            DownloadFailure::WrongContents(what) => {
                Error::invalid(spec.to_string(), format!("{name}: {what}"))
            }
            DownloadFailure::Network(what) => {
                let what =
                    format!("{name}: {what}; what came stays, and the same command goes on from there");
                Error::io(spec.to_string(), io::Error::other(what))
            }
        }
    }

    /// Returns a file with its size and hash; asks the hub for them where its list tells neither.
    pub(super) fn known_file(&self, target: &Target, file: RemoteFile) -> Result<KnownFile> {
        let RemoteFile { name, size, hash } = file;
        if let (Some(size), Some(hash)) = (size, hash.clone()) {
            return Ok(KnownFile { name, size, hash });
        }
        let url = self.file_address(target.spec, target.commit, &name);
        let answer = self
            .ask("HEAD", &url, false)
            .map_err(|trouble| Error::io(target.spec.to_string(), io::Error::other(trouble.to_string())))?;
        if !(200..400).contains(&answer.status) {
            return Err(self.refused(target.spec, Some(&name), answer.status, answer.header("x-error-code")));
        }
        let told_size = answer.header("x-linked-size").or_else(|| answer.header("content-length"));
        let told_hash = answer.header("x-linked-etag").or_else(|| answer.header("etag"));
        match (size.or_else(|| told_size?.parse().ok()), hash.or_else(|| BlobHash::parse(told_hash?))) {
            (Some(size), Some(hash)) => Ok(KnownFile { name, size, hash }),
            _ => {
                let what = format!("{name}: the server does not tell its size and hash");
                Err(Error::invalid(target.spec.to_string(), what))
            }
        }
    }
}
