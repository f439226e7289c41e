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
use std::path::Path;

/// Intended duplicates, with reasons.
const ALLOWED: &str = include_str!("names.allow");
/// Names of modules that every crate may have.
const COMMON: [&str; 4] = ["lib", "main", "error", "tests"];
/// Folder of the sub-commands: its files have the names that users type.
const COMMANDS: &str = "commands";
/// Type of the arguments of every sub-command.
const ARGUMENTS: &str = "Args";

/// Prints names with several meanings, and doc comments with refused openings. Passes when there is none beyond the
/// allowed names.
pub fn check() -> Passed {
    let mut types: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for read in module_tree::read_workspace(&root())? {
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
            if !COMMON.contains(&name.as_str()) && !is_of_command(file) {
                let place = format!("{}/{}", read.name, file.display());
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
    fn an_allowed_name_needs_a_reason() {
        assert!(parse_allowed("type A: two of one").is_ok());
        assert!(parse_allowed("type A").is_err());
        assert!(parse_allowed("types A: so").is_err());
    }
}
