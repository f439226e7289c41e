//! `cargo xtask names`: checks that one name has one meaning.
//!
//! Lists types that several files declare, public or not, and files of equal names in different crates or in different
//! folders of a crate. Intended duplicates are listed in `names.allow` with a reason; entries without need are listed,
//! too. Code for tests does not count. The first words of doc comments are checked as well, see [`doc_openings`], and
//! the sources that documents name, see [`doc_paths`].

use crate::doc_openings;
use crate::doc_paths;
use crate::module_tree::{self, Declared};
use crate::task::{Passed, root};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Intended duplicates, with reasons.
const ALLOWED: &str = include_str!("names.allow");
/// Names of modules that every crate may have.
const COMMON: [&str; 4] = ["lib", "main", "error", "tests"];
/// Folder of the sub-commands: its files have the names that users type.
const COMMANDS: &str = "commands";
/// Folder of the model families: each has a folder in it, with files of equal names.
const FAMILIES: &str = "models";
/// Folder of the references: each has the name of its family.
const REFERENCES: &str = "reference";
/// Type of the arguments of every sub-command.
const ARGUMENTS: &str = "Args";

/// Prints names with several meanings, and doc comments with refused openings. Passes when there is none beyond the
/// allowed names.
pub fn check() -> Passed {
    let mut types: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let workspace = module_tree::read_workspace(&root())?;
    let files = || workspace.iter().flat_map(|read| &read.files);
    let families: BTreeSet<PathBuf> = files().filter_map(|file| family_of(file)).collect();
    for read in &workspace {
        for module in &read.modules {
            let place = format!("{}/{}", read.name, read.files[module.file].display());
            let is_command = read.files[module.file].starts_with(COMMANDS);
            let types_here = module.declared.iter().filter(|(_, d)| **d == Declared::Type);
            for (name, _) in types_here.filter(|(name, _)| !(is_command && *name == ARGUMENTS)) {
                types.entry(name.clone()).or_default().insert(place.clone());
            }
        }
        for file in &read.files {
            let folder = file.parent().and_then(|f| f.file_name());
            let name = match file.file_stem() {
                Some(stem) if stem == "mod" => folder,
                stem => stem,
            };
            let name = name.map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let is_reference = folder.is_some_and(|f| f == REFERENCES) && families.contains(Path::new(&name));
            if !COMMON.contains(&name.as_str()) && !is_of_command(file) && !is_reference {
                // The same file of every family is one place.
                let place = match (family_of(file), file.file_name()) {
                    (Some(_), Some(own)) if own != "mod.rs" => Path::new(FAMILIES).join("FAMILY").join(own),
                    _ => file.clone(),
                };
                let place = format!("{}/{}", read.name, place.display());
                modules.entry(name).or_default().insert(place);
            }
        }
    }
    let types = types.into_iter().map(|(name, places)| (name, Vec::from_iter(places)));
    let modules = modules.into_iter().map(|(name, places)| (name, Vec::from_iter(places)));
    let found: BTreeMap<(&str, String), Vec<String>> = types
        .map(|(name, places)| (("type", name), places))
        .chain(modules.map(|(name, places)| (("file", name), places)))
        .filter(|(_, places)| places.len() > 1)
        .collect();
    let allowed = parse_allowed(ALLOWED)?;
    let mut count = 0;
    for ((kind, name), places) in &found {
        if !allowed.contains(&(kind.to_string(), name.clone())) {
            println!("{kind} {name}: {}", places.join(", "));
            count += 1;
        }
    }
    for (kind, name) in &allowed {
        if !found.keys().any(|(k, n)| k == kind && n == name) {
            println!("{kind} {name}: is in names.allow, and in one place only");
            count += 1;
        }
    }
    match count {
        0 => println!("every name has one meaning; {} are allowed more places", allowed.len()),
        _ => println!("{count} names"),
    }
    let openings_pass = doc_openings::check(&root())?;
    let paths_pass = doc_paths::check(&root())?;
    Ok(count == 0 && openings_pass && paths_pass)
}

/// Tells whether a file is a sub-command's own: `commands/check.rs` or `commands/bench/mod.rs`.
fn is_of_command(file: &Path) -> bool {
    let depth = if file.ends_with("mod.rs") { 3 } else { 2 };
    file.starts_with(COMMANDS) && file.components().count() == depth
}

/// Returns the name of the family that a file belongs to: `gemma4` for `models/gemma4/config.rs`.
fn family_of(file: &Path) -> Option<PathBuf> {
    let inside = file.strip_prefix(FAMILIES).ok()?;
    let folder = inside.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    Some(folder.to_path_buf())
}

/// Parses lines `type NAME: reason` and `file NAME: reason`. Returns kinds and names.
fn parse_allowed(text: &str) -> Result<BTreeSet<(String, String)>, String> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let parsed = lines.map(|line| {
        let (what, reason) = line.split_once(": ").unwrap_or((line, ""));
        match what.split_once(' ') {
            Some((kind @ ("type" | "file"), name)) if !reason.is_empty() => {
                Ok((kind.to_string(), name.to_string()))
            }
            _ => Err(format!("names.allow: `{line}` is not `type NAME: reason` or `file NAME: reason`")),
        }
    });
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_belongs_to_the_family_of_its_folder() {
        let family = |file: &str| family_of(Path::new(file));
        assert_eq!(family("models/zaya/legacy.rs"), Some(PathBuf::from("zaya")));
        assert_eq!(family("models/zaya/mod.rs"), Some(PathBuf::from("zaya")));
        assert_eq!(family("models/checked.rs"), None);
        assert_eq!(family("lower/cca.rs"), None);
    }

    #[test]
    fn an_allowed_name_needs_a_reason() {
        assert!(parse_allowed("type A: two of one").is_ok());
        assert!(parse_allowed("type A").is_err());
        assert!(parse_allowed("types A: so").is_err());
    }
}
