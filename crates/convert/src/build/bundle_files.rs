//! Files of a bundle, finished or not, for programs that copy a bundle elsewhere.

use super::bundle_layout::{
    self, GATES_PREFIX, HOST_RECORD, LOCK, PLAN_FILE, SOURCE_FILE, VECTORS_FILE, WORK_DIR,
};
use super::record::BuildPart;
use super::work_dir::WorkDir;
use crate::checkpoint::SIDE_FILES;
use crate::plan::{Plan, PlannedShard};
use crate::{Error, Result};
use anemoe_bundle::journal::JOURNAL_FILE;
use anemoe_bundle::{CHAIN_FILE, Chain, package_files};
use anemoe_io::OwnedDir;
use rayon::prelude::*;
use std::path::Path;

/// Files of a bundle's folder, as relative paths with slashes.
pub enum BundleFiles {
    /// A finished bundle.
    Finished(Vec<String>),
    /// An unfinished bundle, part by part.
    Parts(Vec<PartFiles>),
}

/// Files that one part of a build has made.
pub struct PartFiles {
    /// The part.
    pub part: BuildPart,
    /// Hash of the plan and its inputs, as [`plan_sha256`](super::plan_sha256) gives it.
    pub plan_sha256: String,
    /// True if all shards of the part are built and its gates passed or were left out.
    pub finished: bool,
    /// Files of the part; a shard that is not built, or is not what its record says, has none.
    pub files: Vec<String>,
}

/// Lists the files of a bundle. Files of others in its folder are left out.
///
/// # Errors
/// The folder is neither a bundle nor a build in parts, a package is missing, or something under a name of ours is
/// not ours.
pub fn bundle_files(bundle: &Path) -> Result<BundleFiles> {
    let Some((site, plan)) = WorkDir::shared(bundle)? else {
        return finished_files(bundle).map(BundleFiles::Finished);
    };
    let names = site.folder.names(WORK_DIR)?;
    let parts: Vec<BuildPart> = names.iter().filter_map(|name| part_of_lock(name)).collect();
    if parts.is_empty() {
        return Err(Error::usage(format!(
            "{}: is an unfinished build by one process; repeat its build command",
            bundle.display()
        )));
    }
    parts
        .into_iter()
        .map(|part| part_files(&site, &plan, part, &names))
        .collect::<Result<_>>()
        .map(BundleFiles::Parts)
}

/// Lists the files of a shard of an unfinished build: its package and its record.
///
/// # Errors
/// The package cannot be read.
pub fn shard_files(bundle: &Path, shard: &PlannedShard) -> Result<Vec<String>> {
    let mut files = inside(bundle, &shard.package_file())?;
    files.push(format!("{WORK_DIR}/{}.json", shard.name));
    Ok(files)
}

/// Returns the path of the note that says where the checkpoint is; each part writes its own.
pub fn source_file() -> String {
    format!("{WORK_DIR}/{SOURCE_FILE}")
}

/// Returns the path of the plan of an unfinished build.
pub fn plan_file() -> String {
    format!("{WORK_DIR}/{PLAN_FILE}")
}

fn part_of_lock(name: &str) -> Option<BuildPart> {
    let (index, of) = name.strip_prefix(LOCK)?.strip_prefix('.')?.split_once("of")?;
    let part = BuildPart { index: index.parse().ok()?, of: of.parse().ok()? };
    (part.index < part.of).then_some(part)
}

/// Lists the files of a package, by their paths in the bundle.
fn inside(bundle: &Path, package: &str) -> Result<Vec<String>> {
    let root = bundle.join(package);
    let relative = |file: std::path::PathBuf| {
        let parts = file.strip_prefix(bundle).unwrap_or(&file).iter();
        parts.map(|part| part.to_string_lossy().into_owned()).collect::<Vec<_>>().join("/")
    };
    Ok(package_files(&root)?.into_iter().map(relative).collect())
}

fn finished_files(bundle: &Path) -> Result<Vec<String>> {
    let chain = Chain::read(bundle)?;
    let folder = OwnedDir::new(bundle);
    bundle_layout::check(&folder, chain.shards.iter().map(|s| s.file.as_str()))?;
    let mut files = vec![CHAIN_FILE.to_string(), chain.embedding.file.clone()];
    files.extend(chain.vectors.as_ref().map(|v| v.file.clone()));
    let there = |name: &&str| folder.expect(name, false).is_ok_and(|path| path.exists());
    files.extend(
        SIDE_FILES.iter().chain(&[JOURNAL_FILE]).filter(|name| there(name)).map(|name| name.to_string()),
    );
    for shard in &chain.shards {
        files.extend(inside(bundle, &shard.file)?);
    }
    if let Some(drafter) = &chain.drafter {
        folder.expect(drafter, true)?;
        let inside = finished_files(&bundle.join(drafter))?.into_iter();
        files.extend(inside.map(|file| format!("{drafter}/{file}")));
    }
    files.sort();
    files.dedup();
    Ok(files)
}

fn part_files(site: &WorkDir, plan: &Plan, part: BuildPart, names: &[String]) -> Result<PartFiles> {
    let own: Vec<&PlannedShard> = plan.shards.iter().skip(part.index).step_by(part.of).collect();
    let built: Vec<&PlannedShard> = own.par_iter().copied().filter(|s| site.record(s).is_some()).collect();
    let gates = format!("{GATES_PREFIX}{}of{}", part.index, part.of);
    let has = |name: &str| names.iter().any(|n| n == name);
    let host = (part.index == 0).then(|| site.host_record(plan).ok()).flatten();
    let finished = built.len() == own.len() && has(&gates) && (part.index > 0 || host.is_some());
    let mut files = vec![plan_file()];
    for name in [SOURCE_FILE, &gates].into_iter().filter(|name| has(name)) {
        files.push(format!("{WORK_DIR}/{name}"));
    }
    if site.folder.expect(JOURNAL_FILE, false)?.exists() {
        files.push(JOURNAL_FILE.into());
    }
    if let Some(host) = host {
        files.push(format!("{WORK_DIR}/{HOST_RECORD}"));
        files.push(plan.chain.embedding.file.clone());
        files.extend(host.vectors.map(|_| VECTORS_FILE.to_string()));
        files.extend(host.files.into_iter().map(|(name, _)| name));
    }
    for shard in built {
        files.extend(shard_files(&site.bundle, shard)?);
    }
    Ok(PartFiles { part, plan_sha256: site.plan_sha256.clone(), finished, files })
}
