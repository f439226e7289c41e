//! Places of compiled models: beside their packages, or in a cache by content, system and chip.
//!
//! ```text
//! BUNDLE/shards/L00.attn.mlmodelc                        beside the package, as `xcrun coremlcompiler` writes it
//! CACHE/BUILD-CHIP/SHA256.mlmodelc                       as `anemoe compile` writes it
//! ```

use crate::{Error, Result};
use anemoe_bundle::Chain;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Ending of a compiled model's name.
pub const COMPILED: &str = "mlmodelc";

/// File that every compiled model has. Core ML ends the process when asked for the plan of a folder without it.
const MARK: &str = "coremldata.bin";

/// Tells whether a folder is a compiled model.
#[cfg(any(target_vendor = "apple", feature = "sim"))]
pub(crate) fn is_compiled(path: &Path) -> bool {
    path.join(MARK).is_file()
}

/// Finds the compiled models of packages.
#[derive(Clone, Debug, Default)]
pub struct CompiledModels {
    /// Cache folder of this system and chip.
    folder: Option<PathBuf>,
    /// SHA-256 of the packages, from the bundle's `chain.json`.
    digests: BTreeMap<PathBuf, String>,
    /// Compiled models of packages for which both paths were given.
    named: BTreeMap<PathBuf, PathBuf>,
}

impl CompiledModels {
    /// Makes the places of a bundle's compiled models. `cache` is the folder of all compiled models; `system` names its
    /// folder for this system and chip, see [`crate::this_system`].
    pub fn new(bundle: &Path, chain: &Chain, cache: Option<&Path>, system: &str) -> CompiledModels {
        let digests = chain.shards.iter().map(|s| (bundle.join(&s.file), s.sha256.clone()));
        CompiledModels {
            folder: cache.map(|cache| cache.join(system)),
            digests: digests.collect(),
            named: BTreeMap::new(),
        }
    }

    /// Makes the places of compiled models from pairs of package and model, both paths.
    pub fn of_packages(packages: impl IntoIterator<Item = (PathBuf, PathBuf)>) -> CompiledModels {
        CompiledModels { named: packages.into_iter().collect(), ..CompiledModels::default() }
    }

    /// Returns the cache folder of this system and chip.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Returns the place in the cache for a package's model; `None` without a cache or for a package outside the bundle.
    pub fn place(&self, package: &Path) -> Option<PathBuf> {
        let digest = self.digests.get(package)?;
        Some(self.folder.as_ref()?.join(format!("{digest}.{COMPILED}")))
    }

    /// Tells whether the cache has a compiled model of a package for another system or chip.
    pub fn has_other(&self, package: &Path) -> bool {
        let (Some(own), Some(digest)) = (&self.folder, self.digests.get(package)) else { return false };
        let Some(others) = own.parent().and_then(|cache| cache.read_dir().ok()) else { return false };
        let name = format!("{digest}.{COMPILED}");
        others.flatten().any(|other| other.path() != *own && other.path().join(&name).join(MARK).is_file())
    }

    /// Returns the compiled model of a package, if one exists: a named model first, then the cache, then beside the package.
    pub fn find(&self, package: &Path) -> Option<PathBuf> {
        let beside = package.with_extension(COMPILED);
        let named = self.named.get(package).cloned();
        [named, self.place(package), Some(beside)]
            .into_iter()
            .flatten()
            .find(|path| path.join(MARK).is_file())
    }

    /// Returns the compiled model of a package.
    ///
    /// # Errors
    /// The package is not compiled for this system and chip.
    pub fn expect(&self, package: &Path) -> Result<PathBuf> {
        self.find(package).ok_or_else(|| {
            let what =
                "for Core ML: it is not compiled for this system and chip; `anemoe compile BUNDLE` does that";
            Error::unsupported(package, what)
        })
    }

    /// Tells whether every package of the bundle is compiled.
    pub fn is_complete(&self) -> bool {
        !self.digests.is_empty() && self.missing() == 0
    }

    /// Returns the number of packages of the bundle without a compiled model.
    pub fn missing(&self) -> usize {
        self.digests.keys().filter(|package| self.find(package).is_none()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_cache_comes_before_the_place_beside_the_package() {
        let dir = tempfile::tempdir().unwrap();
        let package = dir.path().join("a.mlpackage");
        let digests = BTreeMap::from([(package.clone(), "00ff".to_string())]);
        let models =
            CompiledModels { folder: Some(dir.path().join("24A-M4")), digests, named: BTreeMap::new() };
        assert!(models.expect(&package).unwrap_err().to_string().contains("anemoe compile"));
        assert!(!models.is_complete());
        let beside = dir.path().join("a.mlmodelc");
        fs::create_dir_all(&beside).unwrap();
        assert_eq!(models.find(&package), None, "a folder without its mark");
        fs::write(beside.join(MARK), b"").unwrap();
        assert_eq!(models.find(&package), Some(beside));
        let cached = models.place(&package).unwrap();
        fs::create_dir_all(&cached).unwrap();
        fs::write(cached.join(MARK), b"").unwrap();
        assert_eq!(models.find(&package), Some(cached));
        assert!(models.is_complete());
    }
}
