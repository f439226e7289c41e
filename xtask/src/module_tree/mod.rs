//! Reads the sources of a crate as a tree of modules, for the tasks that check how they hang together.

mod paths;
mod tree;

pub use paths::{ItemUse, find_references};
pub use tree::{Crate, Declared};

use std::path::{Path, PathBuf};

/// Every crate of the workspace that the product or its tasks are made of.
pub fn read_workspace(root: &Path) -> Result<Vec<Crate>, Box<dyn std::error::Error>> {
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(root.join("crates"))?.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
    folders.push(root.join("xtask"));
    folders.sort();
    folders.iter().filter(|f| f.join("Cargo.toml").is_file()).map(|f| Crate::read(f)).collect()
}
