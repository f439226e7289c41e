//! Checkpoints of the Hugging Face hub: an argument that names a checkpoint may be `hf:OWNER/NAME`.

use crate::ui;
use anemoe_convert::checkpoint::check_quantization;
use anemoe_convert::models::check_family;
use anemoe_hub::{Hub, HubSettings, HubSpec, Peeked, TransferProgress};
use anemoe_io::{Error, RangedFiles, locked};
use indicatif::ProgressBar;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Largest `config.json` that is read, in bytes.
const MAX_CONFIG: u64 = 16 << 20;

/// True if the hub must not be asked.
static OFFLINE: AtomicBool = AtomicBool::new(false);
/// Fetched checkpoints by spec, so that a command that opens one twice gets the same commit.
static FETCHED: Mutex<BTreeMap<PathBuf, Fetched>> = Mutex::new(BTreeMap::new());

/// A checkpoint of the hub in the cache, complete or without the weights that are read in ranges.
#[derive(Clone)]
struct Fetched {
    path: PathBuf,
    pinned: HubSpec,
    weights: RangedFiles,
}

/// Part of a checkpoint that a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The whole checkpoint.
    Whole,
    /// Headers and small tensors.
    Headers,
}

/// Forbids requests to the hub, as `HF_HUB_OFFLINE` does.
pub fn stay_offline() {
    OFFLINE.store(true, Ordering::Relaxed);
}

/// A checkpoint that was located: on the disk, from the hub, or synthetic.
pub struct LocatedCheckpoint<'a> {
    /// Folder or file of the checkpoint; name of a synthetic model.
    pub path: Cow<'a, Path>,
    /// Name with commit, by which a checkpoint of the hub is found again on any machine; none for other checkpoints.
    pub pinned: Option<HubSpec>,
    /// Weight files that are read in ranges; empty if the whole checkpoint was asked for.
    pub weights: RangedFiles,
}

/// Locates a checkpoint. Fetches the extent of one of the hub into the cache; any other one stays in its place.
pub fn locate(spec: &Path, extent: Extent) -> anyhow::Result<LocatedCheckpoint<'_>> {
    let Some(parsed) = HubSpec::parse(spec) else {
        return Ok(LocatedCheckpoint { path: spec.into(), pinned: None, weights: RangedFiles::new() });
    };
    let parsed = parsed?;
    let mut fetched = locked(&FETCHED);
    let known = fetched.get(spec);
    let found = match known.filter(|f| extent == Extent::Headers || f.weights.is_empty()) {
        Some(found) => found.clone(),
        None => {
            // The weights come from the commit whose headers were fetched before.
            let wanted = known.map_or(parsed, |looked_at| looked_at.pinned.clone());
            let found = fetch(&wanted, extent)?;
            fetched.insert(spec.into(), found.clone());
            found
        }
    };
    Ok(LocatedCheckpoint { path: found.path.into(), pinned: Some(found.pinned), weights: found.weights })
}

fn fetch(spec: &HubSpec, extent: Extent) -> anyhow::Result<Fetched> {
    let mut settings = HubSettings::from_environment()?;
    settings.offline |= OFFLINE.load(Ordering::Relaxed);
    let hub = Hub::new(settings)?;
    let mut bar: Option<(u64, ProgressBar)> = None;
    let mut told = |progress: TransferProgress| {
        // Each group of files has its own total, and therefore its own bar.
        if bar.as_ref().is_none_or(|(total, _)| *total != progress.total) {
            bar = Some((progress.total, ui::byte_bar(progress.total, &spec.to_string())));
            if bar.as_ref().is_some_and(|(_, bar)| bar.is_hidden()) {
                ui::message(format!("{spec}: {} to fetch", ui::bytes(progress.total)));
            }
        }
        if let Some((_, bar)) = &bar {
            ui::advance(bar, progress.done, progress.total, progress.file);
        }
    };
    let fetched = match extent {
        Extent::Headers => hub.peek(spec, &check_model, &mut told),
        Extent::Whole => hub
            .fetch(spec, &check_model, &mut told)
            .map(|snapshot| Peeked { snapshot, weights: RangedFiles::new() }),
    };
    drop(bar);
    let Peeked { snapshot, weights } = fetched?;
    if let Some(warning) = &snapshot.warning {
        ui::message(format!("warning: {warning}"));
    }
    Ok(Fetched { path: snapshot.path, pinned: snapshot.pinned, weights })
}

/// Checks that `config.json` names a known family and no unknown quantization, before weights are fetched.
fn check_model(folder: &Path) -> anemoe_io::Result<()> {
    let path = folder.join("config.json");
    let text = anemoe_io::read_input(&path, MAX_CONFIG).map_err(|e| Error::io(&path, e))?;
    let config = anemoe_io::json::parse(&text).map_err(|e| Error::invalid(&path, format!("JSON: {e}")))?;
    check_family(&config, &path)?;
    check_quantization(&config, &path)
}
