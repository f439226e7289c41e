//! Caches on this machine: compiled models, and what Core ML keeps for each program.

use anemoe_bundle::Chain;
use anemoe_coreml::{CompiledModels, this_system};
use anemoe_gates::integrity::cache_folder;
use anemoe_io::TEMPORARY;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Name of the folder of compiled models in the user's cache.
const COMPILED_FOLDER: &str = "compiled";
/// Name of this program's folder among the caches.
const OWN_FOLDER: &str = "anemoe";
/// Name of the cache that Core ML keeps for each program.
const OF_CORE_ML: &str = "com.apple.e5rt.e5bundlecache";

/// Shard, its package, the place of the compiled model, and the names of the functions.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelFiles {
    pub shard: String,
    pub package: PathBuf,
    pub compiled: PathBuf,
    pub functions: Vec<String>,
}

/// A cache on this machine.
#[derive(Debug, Serialize)]
pub struct CacheUse {
    /// Name for people.
    pub name: String,
    /// Program that fills it.
    pub owner: String,
    /// Folder.
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    pub path: PathBuf,
    /// Bytes of all files, without links.
    pub bytes: u64,
    /// True if `doctor --clean` may delete the cache.
    pub can_delete: bool,
}

/// Returns the places of a bundle's compiled models for this system, in `folder` or in the user's cache.
pub fn compiled_models(folder: Option<PathBuf>, bundle: &Path, chain: &Chain) -> CompiledModels {
    let cache = folder.or_else(|| Some(cache_folder()?.join(COMPILED_FOLDER)));
    let system = this_system();
    // Without the system's name, only compiled models beside the packages are known to fit.
    let cache = cache.filter(|_| system.is_some());
    CompiledModels::new(bundle, chain, cache.as_deref(), &system.unwrap_or_default())
}

/// Lists the caches that this program fills, or that Core ML fills for it and for others.
pub fn list_caches() -> Vec<CacheUse> {
    let own = cache_folder().map(|own| folders(&own.join(COMPILED_FOLDER))).unwrap_or_default();
    let compiled = |folder: PathBuf| {
        let name = format!("{COMPILED_FOLDER}/{}", name_of(&folder));
        let can_delete = is_compiled_folder(&folder);
        CacheUse { can_delete, ..CacheUse::foreign(name, OWN_FOLDER.into(), folder) }
    };
    own.into_iter().map(compiled).chain(of_core_ml(&core_ml_folders())).collect()
}

impl CacheUse {
    /// Makes the entry of a cache that is not to be deleted.
    pub fn foreign(name: String, owner: String, path: PathBuf) -> CacheUse {
        CacheUse { name, owner, bytes: size(&path), path, can_delete: false }
    }

    /// Tells whether the cache has compiled models for another system or chip than this one.
    pub fn is_stale(&self) -> bool {
        let system = self.name.strip_prefix(COMPILED_FOLDER).and_then(|rest| rest.strip_prefix('/'));
        self.can_delete && system.is_some_and(|system| this_system().is_none_or(|own| own != system))
    }
}

/// Lists the folders that have a subfolder for each program, in which Core ML keeps a cache: `~/Library/Caches` on macOS,
/// which no variable moves, and the parent of this program's cache folder.
fn core_ml_folders() -> Vec<PathBuf> {
    let own = cache_folder().and_then(|own| own.parent().map(Path::to_path_buf));
    let home = std::env::var_os("HOME").map(PathBuf::from).filter(|_| cfg!(target_os = "macos"));
    let home = home.map(|home| home.join("Library/Caches"));
    let own = own.filter(|own| Some(own) != home.as_ref());
    home.into_iter().chain(own).collect()
}

/// Lists the caches that Core ML keeps below some folders. Only this program's can be deleted.
fn of_core_ml(below: &[PathBuf]) -> Vec<CacheUse> {
    let programs = below.iter().flat_map(|path| folders(path));
    let cache = |program: PathBuf| {
        let (cache, owner) = (program.join(OF_CORE_ML), name_of(&program));
        let can_delete = owner == OWN_FOLDER;
        let name = if can_delete { OF_CORE_ML.into() } else { format!("{OF_CORE_ML} of {owner}") };
        let owner = if can_delete { "Core ML, for anemoe".into() } else { owner };
        is_folder(&cache).then(|| CacheUse { can_delete, ..CacheUse::foreign(name, owner, cache) })
    };
    programs.filter_map(cache).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Tells whether a path is a folder and no link.
pub fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_dir())
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = path.read_dir().into_iter().flatten().flatten().map(|e| e.path());
    let mut all: Vec<PathBuf> = entries.filter(|p| is_folder(p)).collect();
    all.sort();
    all
}

/// Tells whether a folder holds nothing but compiled models, their records and temporary files.
fn is_compiled_folder(path: &Path) -> bool {
    let is_own =
        |name: &str| name.ends_with(".mlmodelc") || name.ends_with(".json") || name.starts_with(TEMPORARY);
    path.read_dir().is_ok_and(|all| all.flatten().all(|e| is_own(&e.file_name().to_string_lossy())))
}

/// Returns the bytes of all files in a folder, without links.
fn size(folder: &Path) -> u64 {
    let of = |entry: std::fs::DirEntry| match entry.path().symlink_metadata() {
        Ok(m) if m.is_dir() => size(&entry.path()),
        Ok(m) if m.is_file() => m.len(),
        _ => 0,
    };
    folder.read_dir().into_iter().flatten().flatten().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_of_core_ml_are_found_in_the_systems_folder_too() {
        let dir = tempfile::tempdir().unwrap();
        let (system, moved) = (dir.path().join("Library/Caches"), dir.path().join("xdg"));
        for (folder, program, bytes) in
            [(&system, "anemoe", 1000), (&system, "com.others.app", 500), (&moved, "anemoe", 10)]
        {
            let cache = folder.join(program).join(OF_CORE_ML);
            std::fs::create_dir_all(&cache).unwrap();
            std::fs::write(cache.join("x"), vec![0; bytes]).unwrap();
        }
        std::fs::create_dir_all(system.join("without")).unwrap();
        let found = of_core_ml(&[system.clone(), moved, dir.path().join("none")]);
        let shown: Vec<(&str, u64, bool)> =
            found.iter().map(|c| (c.name.as_str(), c.bytes, c.can_delete)).collect();
        let name = |end: &str| format!("{OF_CORE_ML}{end}");
        let wanted = [(name(""), 1000, true), (name(" of com.others.app"), 500, false), (name(""), 10, true)];
        assert!(shown.iter().map(|(n, b, d)| (n.to_string(), *b, *d)).eq(wanted), "{shown:?}");
        assert_eq!(found[0].path, system.join("anemoe").join(OF_CORE_ML));
    }
}
