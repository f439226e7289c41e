//! Reads a crate's sources as a tree of modules, for tasks that check dependencies and names.

mod paths;
mod tree;

pub use paths::{ItemUse, find_references};
pub use tree::{Crate, Declared};

use std::path::{Path, PathBuf};

/// Reads the crates in `crates/` and xtask.
pub fn read_workspace(root: &Path) -> Result<Vec<Crate>, Box<dyn std::error::Error>> {
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(root.join("crates"))?.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
    folders.push(root.join("xtask"));
    folders.sort();
    folders.iter().filter(|f| f.join("Cargo.toml").is_file()).map(|f| Crate::read(f)).collect()
}
