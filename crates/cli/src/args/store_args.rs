//! Stores of bundles on the command line.

use crate::args::numbers::at_least_one;
use crate::ui;
use anemoe_hub::{ObjectStore, StoreLocation, TransferProgress, check_bundle_name, open_store};
use anemoe_io::Error;
use std::path::Path;

/// Files that are moved at a time; each upload holds a part of 16 MiB in memory.
pub const TRANSFERS: usize = 4;

/// Options of transfers to and from a store.
#[derive(clap::Args, Clone, Debug)]
pub struct StoreArgs {
    /// Name of the bundle in the store [default: that of its folder].
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Files that are moved at a time; each takes up to 16 MB of memory.
    #[arg(long, value_name = "N", default_value_t = TRANSFERS, value_parser = at_least_one)]
    pub jobs: usize,
}

/// An open store, and the name of a bundle in it.
pub struct OpenStore {
    /// The store.
    pub objects: Box<dyn ObjectStore>,
    /// Name of the store in messages and documents.
    pub shown: String,
    /// Name of the bundle in the store.
    pub name: String,
}

impl OpenStore {
    /// Opens a store for a bundle, whose folder gives the name in the store if `name` is none.
    ///
    /// # Errors
    /// `store` is no store, its settings are wrong, or the name cannot be a bundle's name in a store.
    pub fn open(store: &Path, name: Option<&str>, bundle: &Path) -> anyhow::Result<OpenStore> {
        let location = StoreLocation::parse(store)?;
        let absolute = std::path::absolute(bundle).unwrap_or_else(|_| bundle.to_path_buf());
        let folder = absolute.file_name().map(|n| n.to_string_lossy().into_owned());
        let name = name.map(str::to_string).or(folder);
        let name = name.ok_or_else(|| Error::usage("the bundle's folder has no name; give --name"))?;
        check_bundle_name(&name)?;
        refuse_inside(&location, bundle)?;
        let objects = open_store(&location, |name| std::env::var_os(name))?;
        Ok(OpenStore { objects, shown: location.to_string(), name })
    }
}

/// Refuses a store inside the bundle, since it would become a part of the bundle.
fn refuse_inside(location: &StoreLocation, bundle: &Path) -> anyhow::Result<()> {
    let StoreLocation::Folder(folder) = location else { return Ok(()) };
    // The existing part of the store's path: the rest is made below it.
    let there = std::path::absolute(folder)?;
    let there = there.ancestors().find_map(|path| path.canonicalize().ok());
    let inside =
        there.zip(bundle.canonicalize().ok()).is_some_and(|(there, bundle)| there.starts_with(bundle));
    anyhow::ensure!(
        !inside,
        Error::usage(format!("the store {} lies in the bundle {}", folder.display(), bundle.display()))
    );
    Ok(())
}

/// Makes a function that shows the progress of a transfer on a bar, which is cleared with it.
pub fn transfer_bar(what: &str) -> impl Fn(TransferProgress<'_>) + use<> {
    let bar = ui::byte_bar(0, what);
    move |p| ui::advance(&bar, p.done, p.total, p.file)
}
