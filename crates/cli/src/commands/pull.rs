//! `anemoe pull`

use crate::args::store_args::{OpenStore, StoreArgs, transfer_bar};
use crate::command::{Command, Page, extended};
use crate::shell::quoted;
use crate::ui::{self, Ui};
use anemoe_bundle::journal::JOURNAL_FILE;
use anemoe_bundle::{CHAIN_FILE, Chain, Error};
use anemoe_convert::build::{BundleFiles, bundle_files};
use anemoe_gates::integrity::{self, Hashes};
use anemoe_hub::{BundleManifest, bring_bundle, bundle_names, read_manifest};
use serde_json::json;
use std::io;
use std::path::{Path, PathBuf};

/// Most names of bundles in a message.
const MAX_NAMED: usize = 12;

/// Fetch a bundle from a folder or an object store.
///
/// Every file is hashed as it comes. The bundle gets its name when all of it is there; a pull that broke off goes on where it
/// stopped. A bundle that is there already and is the same costs nothing but its hashes.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe pull s3://models/anemoe small.anemoe\n  anemoe pull /mnt/share/models here.anemoe --name small-lut4"
)]
pub struct Args {
    /// The store: a folder, file:///FOLDER, s3://BUCKET/PREFIX, gs:// or az://.
    #[arg(value_name = "STORE", value_hint = clap::ValueHint::DirPath)]
    store: PathBuf,
    /// The folder to make.
    #[arg(value_hint = clap::ValueHint::DirPath)]
    bundle: PathBuf,
    #[command(flatten)]
    options: StoreArgs,
}

impl Command for Args {
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
        let store = OpenStore::open(&self.store, self.options.name.as_deref(), &self.bundle)?;
        let objects = store.objects.as_ref();
        let key = BundleManifest::key(&store.name, None);
        let Some(manifest) = read_manifest(objects, &key)? else { return Err(missing(&store, &self.bundle)) };
        if manifest.part.is_some() || !manifest.files.iter().any(|f| f.path == CHAIN_FILE) {
            return Err(
                Error::invalid(objects.place(&key), format!("manifest: it has no {CHAIN_FILE}")).into()
            );
        }
        let show = transfer_bar(&format!("pulling {}", store.name));
        let complete = |folder: &Path| -> Result<(), Error> {
            let BundleFiles::Finished(files) = bundle_files(folder)? else {
                return Err(Error::invalid(
                    objects.place(&key),
                    "manifest: it is one of an unfinished bundle",
                ));
            };
            let listed = |file: &&String| manifest.files.iter().any(|f| f.path == **file);
            if let Some(file) = files.iter().find(|file| !listed(file)) {
                return Err(Error::invalid(objects.place(&key), format!("manifest: it lacks {file}")));
            }
            // A package that lacks a file is smaller than the contract says. Contents were hashed as they came.
            integrity::verify(folder, &Chain::read(folder)?, Hashes::Skipped, &|| ()).map(drop)
        };
        let accept = |folder: &Path| {
            complete(folder).map_err(|e| match e.path().and_then(|path| path.strip_prefix(folder).ok()) {
                Some(inside) => {
                    let why = e.io_error().map_or(e.what().to_string(), ToString::to_string);
                    let what =
                        format!("manifest: its files are no whole bundle: {}: {why}", inside.display());
                    Error::invalid(objects.place(&key), what)
                }
                None => e,
            })
        };
        let own = [JOURNAL_FILE];
        let brought =
            bring_bundle(objects, &manifest, &self.bundle, &own, self.options.jobs, &accept, &show)?;
        let bundle = self.bundle.display().to_string();
        let rate = brought.bytes_fetched as f64 / brought.seconds.max(1e-9);
        let line = format!(
            "{bundle}: {} files, {}; {} fetched in {:.1} s ({}/s), {} there already",
            brought.files,
            ui::bytes(brought.bytes),
            ui::bytes(brought.bytes_fetched),
            brought.seconds,
            ui::bytes(rate as u64),
            ui::bytes(brought.bytes_there)
        );
        let document = json!({"store": store.shown, "name": store.name, "bundle": bundle});
        Ok(Page::new(extended(document, &brought)?, [line]))
    }
}

/// Lists the first names, and says whether there are more.
fn first_of(names: &[String]) -> String {
    let more = if names.len() > MAX_NAMED { ", .." } else { "" };
    names[..names.len().min(MAX_NAMED)].join(", ") + more
}

/// Makes the error for a missing bundle, with the parts or bundles that the store has.
fn missing(store: &OpenStore, bundle: &Path) -> anyhow::Error {
    let objects = store.objects.as_ref();
    let listed = objects.list(&format!("bundles/{}", store.name));
    let listed = listed.and_then(|parts| Ok((parts, bundle_names(objects)?)));
    let (there, names) = match listed {
        Ok(listed) => listed,
        Err(e) => {
            let what = format!("there is no bundle `{}`, and others cannot be listed: {e}", store.name);
            return Error::io(store.shown.as_str(), io::Error::other(what)).into();
        }
    };
    let mut parts: Vec<(usize, usize)> =
        there.iter().filter_map(|name| BundleManifest::part_of_key(name)).collect();
    parts.sort_unstable();
    let what = if parts.is_empty() {
        match names.is_empty() {
            true => format!("there is no bundle `{}`", store.name),
            false => {
                format!("there is no bundle `{}`; --name takes one of {}", store.name, first_of(&names))
            }
        }
    } else {
        let parts: Vec<String> = parts.iter().map(|(index, of)| format!("{index}/{of}")).collect();
        format!(
            "`{}` is there in parts only ({}); put them together: anemoe assemble {} --pull {}",
            store.name,
            first_of(&parts),
            quoted(bundle),
            store.shown
        )
    };
    Error::io(store.shown.as_str(), io::Error::new(io::ErrorKind::NotFound, what)).into()
}
