//! `anemoe push`

use crate::args::store_args::{OpenStore, StoreArgs, transfer_bar};
use crate::bundle::Verify;
use crate::command::{Command, CommandReport};
use crate::part_store::push_part;
use crate::shell::quoted;
use crate::target::expect_begun_bundle;
use crate::ui::{self, Ui};
use anemoe_convert::build::{BundleFiles, PartFiles, bundle_files};
use anemoe_hub::{SendOptions, SendReport, send_files, write_manifest};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Send a bundle, or a part of one, to a folder or an object store.
///
/// Files are stored by their contents: what is there is not sent again, also where another bundle brought it. A push that broke off
/// goes on where it stopped. A folder in which parts were built (`build --shard I/N`) is sent as those parts; `assemble --pull`
/// puts the parts of all machines together. Object stores are reached by the usual variables: AWS_ACCESS_KEY_ID,
/// AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, AWS_ALLOW_HTTP.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe push small.anemoe s3://models/anemoe\n  anemoe push small.anemoe /mnt/share/models --name small-lut4\n  AWS_ENDPOINT_URL=https://minio.example:9000 anemoe push small.anemoe s3://models"
)]
pub struct Args {
    /// The bundle's folder.
    bundle: PathBuf,
    /// The store: a folder, file:///FOLDER, s3://BUCKET/PREFIX, gs:// or az://.
    #[arg(value_name = "STORE", value_hint = clap::ValueHint::DirPath)]
    store: PathBuf,
    #[command(flatten)]
    options: StoreArgs,
    /// Read what is there back, and send again what is damaged.
    #[arg(long)]
    verify: bool,
    /// Do not compare the bundle with the hashes of chain.json first.
    #[arg(long)]
    no_verify: bool,
}

impl Command for Args {
    type Report = PushReport;

    fn run(self, ui: &Ui) -> anyhow::Result<PushReport> {
        expect_begun_bundle(&self.bundle)?;
        let store = OpenStore::open(&self.store, self.options.name.as_deref(), &self.bundle)?;
        let files = bundle_files(&self.bundle)?;
        store.objects.prepare()?;
        let options = SendOptions { jobs: self.options.jobs, verify: self.verify };
        let mut pushed = PushReport::new(&store, SendReport::default());
        match &files {
            BundleFiles::Finished(_) => {
                // A damaged bundle is not sent.
                Verify { no_verify: self.no_verify }.open(&self.bundle, ui)?;
                pushed.sent = push_bundle(&self.bundle, &store, &files, &options)?.unwrap_or_default();
                pushed.next =
                    Some(format!("anemoe pull {} {}", quoted(&self.store), quoted(Path::new(&store.name))));
            }
            BundleFiles::Parts(all) => {
                for PartFiles { part, finished, .. } in all {
                    pushed.parts.push(PushedPart { index: part.index, of: part.of, finished: *finished });
                }
                for part in all {
                    pushed.sent.merge(&push_part(&self.bundle, &store, part, &options)?);
                }
            }
        }
        Ok(pushed)
    }
}

/// A bundle, or parts of one, in a store.
#[derive(Serialize)]
pub struct PushReport {
    pub store: String,
    pub name: String,
    parts: Vec<PushedPart>,
    #[serde(flatten)]
    sent: SendReport,
    /// Command that fetches the bundle.
    #[serde(skip)]
    next: Option<String>,
}

#[derive(Serialize)]
struct PushedPart {
    index: usize,
    of: usize,
    finished: bool,
}

impl PushReport {
    /// Makes the report of a push to `store`.
    pub fn new(store: &OpenStore, sent: SendReport) -> PushReport {
        PushReport {
            store: store.shown.clone(),
            name: store.name.clone(),
            parts: Vec::new(),
            sent,
            next: None,
        }
    }
}

impl CommandReport for PushReport {
    fn show(&self, out: &mut Vec<String>) {
        let PushReport { store, name, sent, .. } = self;
        let rate = sent.bytes_sent as f64 / sent.seconds.max(1e-9);
        out.push(format!(
            "{name} in {store}: {} files, {}; {} sent in {:.1} s ({}/s), {} there already",
            sent.files,
            ui::bytes(sent.bytes),
            ui::bytes(sent.bytes_sent),
            sent.seconds,
            ui::bytes(rate as u64),
            ui::bytes(sent.bytes_there)
        ));
        for PushedPart { index, of, finished } in &self.parts {
            out.push(format!("part {index}/{of}: {}", if *finished { "finished" } else { "not finished" }));
        }
        out.extend(self.next.clone());
    }
}

/// Sends a finished bundle; returns none if the bundle is not finished.
pub fn push_bundle(
    bundle: &Path,
    store: &OpenStore,
    files: &BundleFiles,
    options: &SendOptions,
) -> anyhow::Result<Option<SendReport>> {
    let BundleFiles::Finished(files) = files else { return Ok(None) };
    let (objects, show) = (store.objects.as_ref(), transfer_bar(&format!("pushing {}", store.name)));
    let (entries, report) = send_files(objects, bundle, files, options, &show)?;
    write_manifest(objects, &store.name, None, entries)?;
    Ok(Some(report))
}
