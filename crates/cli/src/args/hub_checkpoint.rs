//! Checkpoints of the Hugging Face hub: `hf:OWNER/NAME` stands wherever a checkpoint is named.

use crate::ui;
use anemoe_convert::models::check_model_type;
use anemoe_hub::{DownloadProgress, Hub, HubSettings, HubSpec, Snapshot};
use anemoe_io::Error;
use indicatif::ProgressBar;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Largest `config.json` that is read.
const MAX_CONFIG: u64 = 16 << 20;

/// The hub is not to be asked.
static OFFLINE: AtomicBool = AtomicBool::new(false);
/// Snapshots that were fetched, so that a command that opens a checkpoint twice sees the same commit.
static FETCHED: Mutex<BTreeMap<PathBuf, Snapshot>> = Mutex::new(BTreeMap::new());

/// Forbids to ask the hub, as `HF_HUB_OFFLINE` does.
pub fn stay_offline() {
    OFFLINE.store(true, Ordering::Relaxed);
}

/// A checkpoint, wherever it is from.
pub struct LocatedCheckpoint<'a> {
    /// The folder or the file; a synthetic model's name.
    pub path: Cow<'a, Path>,
    /// The name by which it is found again anywhere, of one from the hub: with its commit.
    pub pinned: Option<HubSpec>,
}

/// Finds a checkpoint: one from the hub is fetched into the cache, every other one is where it is said to be.
///
/// # Errors
/// It is from the hub, and cannot be fetched.
pub fn locate(spec: &Path) -> anyhow::Result<LocatedCheckpoint<'_>> {
    let Some(parsed) = HubSpec::parse(spec) else {
        return Ok(LocatedCheckpoint { path: spec.into(), pinned: None });
    };
    let parsed = parsed?;
    let mut fetched = FETCHED.lock().unwrap_or_else(PoisonError::into_inner);
    let snapshot = match fetched.get(spec) {
        Some(snapshot) => snapshot.clone(),
        None => {
            let snapshot = fetch(&parsed)?;
            fetched.insert(spec.into(), snapshot.clone());
            snapshot
        }
    };
    Ok(LocatedCheckpoint { path: snapshot.path.into(), pinned: Some(snapshot.pinned) })
}

fn fetch(spec: &HubSpec) -> anyhow::Result<Snapshot> {
    let mut settings = HubSettings::from_environment()?;
    settings.offline |= OFFLINE.load(Ordering::Relaxed);
    let hub = Hub::new(settings)?;
    let mut bar: Option<(u64, ProgressBar)> = None;
    let mut told = |progress: DownloadProgress| {
        // Each group of files has a sum of its own.
        if bar.as_ref().is_none_or(|(total, _)| *total != progress.total) {
            bar = Some((progress.total, ui::byte_bar(progress.total, &spec.to_string())));
            if bar.as_ref().is_some_and(|(_, bar)| bar.is_hidden()) {
                ui::message(format!("{spec}: {} to fetch", ui::bytes(progress.total)));
            }
        }
        if let Some((_, bar)) = &bar {
            bar.set_position(progress.done);
            bar.set_message(progress.file.to_string());
        }
    };
    let fetched = hub.fetch(spec, &is_of_a_known_family, &mut told);
    if let Some((_, bar)) = bar {
        bar.finish_and_clear();
    }
    let snapshot = fetched?;
    if let Some(warning) = &snapshot.warning {
        ui::message(format!("warning: {warning}"));
    }
    Ok(snapshot)
}

/// Refuses a checkpoint before its weights come.
fn is_of_a_known_family(folder: &Path) -> anemoe_io::Result<()> {
    let path = folder.join("config.json");
    let text = anemoe_io::read_input(&path, MAX_CONFIG).map_err(|e| Error::io(&path, e))?;
    let config = anemoe_io::json::parse(&text).map_err(|e| Error::invalid(&path, format!("JSON: {e}")))?;
    check_model_type(&config, &path).map(|_| ())
}
