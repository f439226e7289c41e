//! `anemoe push`

use crate::args::store_args::{OpenStore, StoreArgs, TransferBar, sending};
use crate::bundle::Verify;
use crate::outcome::Outcome;
use crate::part_store::push_part;
use crate::shell::quoted;
use crate::target::expect_begun_bundle;
use crate::ui::{self, Ui};
use anemoe_convert::build::{BundleFiles, bundle_files};
use anemoe_hub::{SendReport, send_files, write_manifest};
use serde_json::json;
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

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    expect_begun_bundle(&args.bundle)?;
    let store = OpenStore::open(&args.store, args.options.name.as_deref(), &args.bundle)?;
    let files = bundle_files(&args.bundle)?;
    store.objects.prepare()?;
    let options = sending(args.options.jobs, args.verify);
    let (mut parts, mut report) = (Vec::new(), SendReport::default());
    match &files {
        BundleFiles::Finished(_) => {
            // A damaged bundle is not sent.
            Verify { no_verify: args.no_verify }.open(&args.bundle, ui)?;
            report = push_bundle(&args.bundle, &store, &files, args.options.jobs, args.verify)?
                .unwrap_or_default();
        }
        BundleFiles::Parts(all) => {
            for part in all {
                report.merge(&push_part(&args.bundle, &store, part, &options)?);
                parts.push(json!({"index": part.part.index, "of": part.part.of, "finished": part.finished}));
            }
        }
    }
    ui.document(&document(&store, &report, &parts))?;
    print(&store, &report, ui)?;
    for part in &parts {
        let state = if part["finished"] == true { "finished" } else { "not finished" };
        ui.line(format!("part {}/{}: {state}", part["index"], part["of"]))?;
    }
    if parts.is_empty() {
        ui.line(format!("anemoe pull {} {}", quoted(&args.store), quoted(Path::new(&store.name))))?;
    }
    Ok(Outcome::Done)
}

/// Sends a finished bundle; returns none if the bundle is not finished.
///
/// # Errors
/// A file cannot be read, or the store refuses one.
pub fn push_bundle(
    bundle: &Path,
    store: &OpenStore,
    files: &BundleFiles,
    jobs: usize,
    verify: bool,
) -> anyhow::Result<Option<SendReport>> {
    let BundleFiles::Finished(files) = files else { return Ok(None) };
    let bar = TransferBar::new(&format!("pushing {}", store.name));
    let sent = send_files(store.objects.as_ref(), bundle, files, &sending(jobs, verify), &|p| bar.show(p));
    let (entries, report) = sent?;
    write_manifest(store.objects.as_ref(), &store.name, None, entries)?;
    Ok(Some(report))
}

/// Makes the document of a push.
pub fn document(store: &OpenStore, report: &SendReport, parts: &[serde_json::Value]) -> serde_json::Value {
    let mut document = json!({"store": store.shown, "name": store.name, "parts": parts});
    if let (Some(all), Ok(serde_json::Value::Object(figures))) =
        (document.as_object_mut(), serde_json::to_value(report))
    {
        all.extend(figures);
    }
    document
}

/// Prints the figures of a push.
pub fn print(store: &OpenStore, report: &SendReport, ui: &Ui) -> anyhow::Result<()> {
    let rate = report.bytes_sent as f64 / report.seconds.max(1e-9);
    ui.line(format!(
        "{} in {}: {} files, {}; {} sent in {:.1} s ({}/s), {} there already",
        store.name,
        store.shown,
        report.files,
        ui::bytes(report.bytes),
        ui::bytes(report.bytes_sent),
        report.seconds,
        ui::bytes(rate as u64),
        ui::bytes(report.bytes_there)
    ))?;
    Ok(())
}
