//! A weight file on the hub that is read in ranges.

use super::fetch::{Hub, Target};
use super::hub_cache::HubCache;
use super::hub_spec::HubSpec;
use super::listing::KnownFile;
use super::range_log::RangeLog;
use crate::download::DownloadFailure;
use crate::{Error, Result};
use anemoe_io::{RangedFile, locked};
use std::io;
use std::sync::Mutex;
use url::Url;

/// Fewest bytes of a request: vectors of a layer often lie side by side.
const READ_AHEAD: u64 = 64 << 10;

/// A weight file that is read in ranges. Parts that came are kept in the cache.
pub struct HubFile {
    hub: Hub,
    spec: HubSpec,
    cache: HubCache,
    file: KnownFile,
    url: Url,
    parts: Mutex<ReceivedParts>,
}

/// Parts that came, and the address that served the last one.
struct ReceivedParts {
    log: RangeLog,
    redirect: Option<Url>,
}

impl HubFile {
    /// Makes access to a weight file of a repository.
    pub fn new(hub: &Hub, target: &Target, file: KnownFile) -> HubFile {
        let log = RangeLog::open(&target.cache.ranges(&file.hash));
        HubFile {
            url: hub.file_address(target.spec, target.commit, &file.name),
            hub: hub.clone(),
            spec: target.spec.clone(),
            cache: target.cache.clone(),
            file,
            parts: Mutex::new(ReceivedParts { log, redirect: None }),
        }
    }

    /// Fetches the missing parts of the first `bytes` bytes. Returns false where the server sends only whole files.
    ///
    /// # Errors
    /// A part does not come.
    pub fn bring_head(&self, bytes: u64) -> std::result::Result<bool, DownloadFailure> {
        let mut parts = locked(&self.parts);
        self.bring(&mut parts, 0, bytes.min(self.file.size))
    }

    fn bring(
        &self,
        parts: &mut ReceivedParts,
        start: u64,
        end: u64,
    ) -> std::result::Result<bool, DownloadFailure> {
        for gap in parts.log.gaps(start..end) {
            let source = self.hub.source(&self.spec, &self.file.name, &self.url);
            let bytes = source.bring_range(self.file.size, gap.clone(), &mut parts.redirect)?;
            let Some(bytes) = bytes else { return Ok(false) };
            // A cache that cannot be written costs the next command another download.
            let lock = self.cache.lock(&self.file.hash);
            let _ = parts.log.keep(gap.start, &bytes);
            drop(lock);
        }
        Ok(true)
    }
}

impl RangedFile for HubFile {
    fn bytes(&self) -> u64 {
        self.file.size
    }

    fn read_range(&self, start: u64, out: &mut [u8]) -> Result<()> {
        let KnownFile { name, size, .. } = &self.file;
        let end = start.saturating_add(out.len() as u64);
        if end > *size {
            let what = format!("use: bytes {start}..{end} of {name}, which has {size}");
            return Err(Error::invalid(self.spec.to_string(), what));
        }
        let mut parts = locked(&self.parts);
        if !parts.log.gaps(start..end).is_empty() {
            if self.hub.settings().offline {
                let part = format!("the part {start}..{end} of {name}");
                return Err(self.hub.not_asked(&self.spec, &part));
            }
            let ahead = start.saturating_add(READ_AHEAD).min(*size);
            let came = self.bring(&mut parts, start, end.max(ahead));
            if !came.map_err(|failure| self.hub.explain(&self.spec, name, failure))? {
                let what = format!(
                    "{name}: the server sends whole files alone, no part of one; `hf download` brings the checkpoint whole"
                );
                return Err(Error::io(self.spec.to_string(), io::Error::other(what)));
            }
        }
        parts.log.copy(start, out);
        Ok(())
    }
}
