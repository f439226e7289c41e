//! Parts of a build in a store: each machine pushes its own part, and one machine pulls them all.

use crate::args::store_args::{OpenStore, TRANSFERS, transfer_bar};
use crate::target::expect_begun_bundle;
use crate::ui;
use anemoe_bundle::journal::{self, JOURNAL_FILE, MAX_JOURNAL_BYTES};
use anemoe_bundle::{Error, Result, file_sha256};
use anemoe_convert::build::{BuildPart, PartFiles, plan_file, shard_files, source_file};
use anemoe_convert::path_kind::PathKind;
use anemoe_convert::plan::PlannedShard;
use anemoe_hub::{
    BringReport, BundleManifest, ManifestFile, ManifestPart, SendOptions, SendReport, bring_bundle,
    bring_files, merge_parts, read_manifest, send_files, write_manifest,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// Sends the files that a part has made so far, and the part's manifest.
pub fn push_part(
    bundle: &Path,
    store: &OpenStore,
    part: &PartFiles,
    options: &SendOptions,
) -> Result<SendReport> {
    let show = transfer_bar(&format!("pushing part {}/{}", part.part.index, part.part.of));
    let objects = store.objects.as_ref();
    let (entries, report) = send_files(objects, bundle, &part.files, options, &show)?;
    let manifest = manifest_part(part.part, &part.plan_sha256, part.finished);
    write_manifest(objects, &store.name, Some(manifest), entries)?;
    Ok(report)
}

/// Makes the description of a part in its manifest.
pub fn manifest_part(part: BuildPart, plan_sha256: &str, finished: bool) -> ManifestPart {
    ManifestPart { index: part.index, of: part.of, plan_sha256: plan_sha256.into(), finished }
}

/// Reads the manifests of a bundle's parts in a store.
fn parts(store: &OpenStore) -> Result<Vec<BundleManifest>> {
    let objects = store.objects.as_ref();
    let names = objects.list(&format!("bundles/{}", store.name))?;
    let mut found = Vec::new();
    for part in names.iter().filter_map(|name| BundleManifest::part_of_key(name)) {
        let key = BundleManifest::key(&store.name, Some(part));
        // The manifest was deleted after it was listed.
        let Some(manifest) = read_manifest(objects, &key)? else { continue };
        if manifest.part.as_ref().map(|p| (p.index, p.of)) != Some(part) {
            return Err(Error::invalid(objects.place(&key), "manifest: it is that of another part"));
        }
        found.push(manifest);
    }
    Ok(found)
}

/// Results of earlier runs of a part, in a store.
#[derive(Default)]
pub struct ResumedPart {
    /// Bytes that were fetched.
    pub bytes: u64,
    /// True if the part was finished.
    pub finished: bool,
    /// Files that are in the store.
    pub files: Vec<ManifestFile>,
}

/// Checks, before a part is built, that the store takes it. If the part's folder is gone (another machine, a pod's disk),
/// fetches the files that an earlier run of the part had finished.
pub fn resume_part(
    store: &OpenStore,
    bundle: &Path,
    part: BuildPart,
    plan_sha256: &str,
) -> Result<ResumedPart> {
    store.objects.prepare()?;
    let parts = parts(store)?;
    for manifest in &parts {
        if let Some(other) = manifest.part.as_ref().filter(|p| p.plan_sha256 != plan_sha256) {
            return Err(Error::usage(format!(
                "{}: `{}` has a part {}/{} of a build with other options, of another checkpoint or by another version; give \
                 another --name, or remove {}",
                store.shown,
                store.name,
                other.index,
                other.of,
                store.objects.place(&format!("bundles/{}", store.name))
            )));
        }
    }
    let is_own =
        |m: &&BundleManifest| m.part.as_ref().is_some_and(|p| (p.index, p.of) == (part.index, part.of));
    let Some(own) = parts.iter().find(is_own) else { return Ok(ResumedPart::default()) };
    let finished = own.part.as_ref().is_some_and(|p| p.finished);
    let mut resumed = ResumedPart { bytes: 0, finished, files: own.files.clone() };
    if !matches!(PathKind::at(bundle), PathKind::Nothing | PathKind::EmptyFolder) {
        return Ok(resumed);
    }
    let show = transfer_bar(&format!("pulling part {}/{}", part.index, part.of));
    let report = bring_bundle(store.objects.as_ref(), own, bundle, &[], TRANSFERS, &|_| Ok(()), &show)?;
    resumed.bytes = report.bytes_fetched;
    Ok(resumed)
}

/// Fetches all parts of a bundle into one folder, which `assemble` completes.
pub fn pull_parts(store: &OpenStore, bundle: &Path) -> anyhow::Result<BringReport> {
    let objects = store.objects.as_ref();
    let place = PathKind::at(bundle);
    if !matches!(place, PathKind::Nothing | PathKind::EmptyFolder) {
        expect_begun_bundle(bundle)?;
    }
    let parts = parts(store)?;
    let plan = parts.first().and_then(|m| m.part.as_ref()).map(|p| p.plan_sha256.clone()).unwrap_or_default();
    let merged = merge_parts(parts, &[JOURNAL_FILE, &source_file()])
        .map_err(|what| Error::usage(format!("{}: `{}`: {what}", store.shown, store.name)))?;
    let of_journal = |f: &&ManifestFile| f.path == JOURNAL_FILE;
    let journals: Vec<ManifestFile> =
        merged.manifest.files.iter().chain(&merged.others).filter(of_journal).cloned().collect();
    let tell = transfer_bar(&format!("pulling the parts of {}", store.name));
    let merge_journals = |folder: &Path| {
        for file in &journals {
            let read = objects.read(&file.contents().key(), MAX_JOURNAL_BYTES);
            let merged = read.and_then(|text| text.map_or(Ok(()), |text| journal::merge(folder, &text)));
            // The journal decides nothing, so that an error is only a warning.
            if let Err(e) = merged {
                ui::message(format!("warning: the journal of a part is left out: {e}"));
            }
        }
        Ok(())
    };
    Ok(match place {
        PathKind::Nothing | PathKind::EmptyFolder => {
            let own = [];
            bring_bundle(objects, &merged.manifest, bundle, &own, TRANSFERS, &merge_journals, &tell)?
        }
        PathKind::Unfinished => {
            if file_sha256(&bundle.join(plan_file()))? != plan {
                let what = format!(
                    "{}: holds an unfinished build with other options or of another checkpoint than the parts in {}",
                    bundle.display(),
                    store.shown
                );
                return Err(Error::usage(what).into());
            }
            let is_own = |f: &ManifestFile| f.path == JOURNAL_FILE || f.path == source_file();
            let files: Vec<ManifestFile> =
                merged.manifest.files.iter().filter(|f| !is_own(f)).cloned().collect();
            let report = bring_files(objects, &files, bundle, TRANSFERS, &tell)?;
            merge_journals(bundle)?;
            report
        }
        _ => BringReport::default(),
    })
}

/// Thread that sends shards while others are built, so that a part whose machine is lost goes on elsewhere.
pub struct PartPusher {
    shards: Sender<PlannedShard>,
    thread: JoinHandle<()>,
}

impl PartPusher {
    /// Starts a thread that sends the shards of a part as they are finished. The part's manifest keeps the files of earlier
    /// runs.
    pub fn start(
        store: Arc<OpenStore>,
        bundle: PathBuf,
        part: ManifestPart,
        there: Vec<ManifestFile>,
    ) -> std::io::Result<PartPusher> {
        let (shards, finished) = channel();
        let entries = there.into_iter().map(|file| (file.path.clone(), file)).collect();
        let work = move || push_finished(&store, &bundle, &part, entries, &finished);
        Ok(PartPusher { shards, thread: std::thread::Builder::new().spawn(work)? })
    }

    /// Hands a finished shard to the thread.
    pub fn shard(&self, shard: &PlannedShard) {
        let _ = self.shards.send(shard.clone());
    }

    /// Waits until the shards that were handed over are sent.
    pub fn finish(self) {
        drop(self.shards);
        let _ = self.thread.join();
    }
}

fn push_finished(
    store: &OpenStore,
    bundle: &Path,
    part: &ManifestPart,
    mut entries: BTreeMap<String, ManifestFile>,
    finished: &Receiver<PlannedShard>,
) {
    let options = SendOptions { jobs: 1, verify: false };
    let mut waiting = vec![plan_file()];
    let mut warned = false;
    while let Ok(shard) = finished.recv() {
        // Shards that were finished meanwhile go with this one.
        for shard in std::iter::once(shard).chain(finished.try_iter()) {
            waiting.extend(shard_files(bundle, &shard).unwrap_or_default());
        }
        let objects = store.objects.as_ref();
        let pushed = send_files(objects, bundle, &waiting, &options, &|_| ()).and_then(|(more, _)| {
            waiting.clear();
            entries.extend(more.into_iter().map(|file| (file.path.clone(), file)));
            let all = entries.values().cloned().collect();
            write_manifest(objects, &store.name, Some(part.clone()), all)
        });
        // The push at the end sends missing files, or fails.
        if let Err(e) = pushed
            && !std::mem::replace(&mut warned, true)
        {
            ui::message(format!("warning: {e}; what is missing in the store is sent when the part is built"));
        }
    }
}
