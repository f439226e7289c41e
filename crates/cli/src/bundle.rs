//! Opens the bundles that commands run or judge.

use crate::ui::{Ui, message};
use anemoe_bundle::Chain;
use anemoe_gates::integrity::{self, Hashes};
use std::path::Path;

/// Options of the verification of a bundle before it is used.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Verify {
    /// Do not compare the hashes of the bundle's files with chain.json; their sizes still are. Without this they are hashed
    /// once on each machine, and again after a change.
    #[arg(long)]
    pub no_verify: bool,
}

impl Verify {
    /// Reads the contract of a bundle and verifies its files.
    pub fn open(self, bundle: &Path, ui: &Ui) -> anyhow::Result<Chain> {
        let chain = Chain::read(bundle)?;
        let hashes = if self.no_verify { Hashes::Skipped } else { Hashes::Remembered };
        let bar = ui.bar(chain.shards.len() as u64, "hashes");
        for path in integrity::verify(bundle, &chain, hashes, &|| bar.inc(1))? {
            message(format!("{}: rewritten by another tool, same program and weights", path.display()));
        }
        Ok(chain)
    }
}
