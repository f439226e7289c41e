//! `cargo xtask names`: checks that one name has one meaning.
//!
//! Lists types that several files declare, public or not, and files of equal names in different crates or in different
//! folders of a crate. Intended duplicates are listed in `names.allow` with a reason; entries without need are listed,
//! too. Code for tests does not count. Doc comments and documents are checked as well, see [`texts`].

use crate::module_tree::{self, Declared};
use crate::task::{Passed, root};
use crate::texts;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

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

/// Prints names with several meanings, and texts with faults. Passes when there is none beyond the allowed names.
pub fn check() -> Passed {
    let workspace = module_tree::read_workspace(&root())?;
    let families: BTreeSet<&Path> =
        workspace.iter().flat_map(|read| &read.files).filter_map(|file| family_of(file)).collect();
    // Places by kind and name: `type Plan`, `file build`.
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for read in &workspace {
        let mut add = |kind: &str, name: &str, file: &Path| {
            let place = format!("{}/{}", read.name, file.display());
            places.entry(format!("{kind} {name}")).or_default().insert(place);
        };
        for module in &read.modules {
            let file = &read.files[module.file];
            for (name, declared) in &module.declared {
                let is_arguments = name == ARGUMENTS && file.starts_with(COMMANDS);
                if *declared == Declared::Type && !is_arguments {
                    add("type", name, file);
                }
            }
        }
        for file in &read.files {
            let folder = file.parent().and_then(Path::file_name).unwrap_or_default();
            let stem = file.file_stem().unwrap_or_default();
            let name = if stem == "mod" { folder } else { stem }.to_string_lossy();
            let is_reference = folder == REFERENCES && families.contains(Path::new(&*name));
            if COMMON.contains(&&*name) || is_of_command(file) || is_reference {
                continue;
            }
            // The same file of every family is one place.
            match family_of(file).filter(|_| stem != "mod") {
                Some(_) => add("file", &name, &Path::new(FAMILIES).join("FAMILY").join(&*name)),
                None => add("file", &name, file),
            }
        }
    }
    places.retain(|_, places| places.len() > 1);
    let allowed = parse_allowed(ALLOWED)?;
    let mut count = 0;
    for (name, places) in places.iter().filter(|(name, _)| !allowed.contains(name.as_str())) {
        println!("{name}: {}", Vec::from_iter(places.iter().map(String::as_str)).join(", "));
        count += 1;
    }
    for name in allowed.iter().filter(|name| !places.contains_key(**name)) {
        println!("{name}: is in names.allow, and in one place only");
        count += 1;
    }
    count += texts::print_faults(&root())?;
    match count {
        0 => println!("names, doc comments and the sources that documents name are as they should be"),
        _ => println!("{count} faults"),
    }
    Ok(count == 0)
}

/// Tells whether a file is a sub-command's own: `commands/check.rs` or `commands/bench/mod.rs`.
fn is_of_command(file: &Path) -> bool {
    let depth = if file.ends_with("mod.rs") { 3 } else { 2 };
    file.starts_with(COMMANDS) && file.components().count() == depth
}

/// Returns the name of the family that a file belongs to: `gemma4` for `models/gemma4/config.rs`.
fn family_of(file: &Path) -> Option<&Path> {
    file.strip_prefix(FAMILIES).ok()?.parent().filter(|folder| !folder.as_os_str().is_empty())
}

/// Parses lines `type NAME: reason` and `file NAME: reason`. Returns kinds and names.
fn parse_allowed(text: &str) -> Result<BTreeSet<&str>, String> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let parsed = lines.map(|line| match line.split_once(": ") {
        Some((what, reason))
            if !reason.is_empty() && (what.starts_with("type ") || what.starts_with("file ")) =>
        {
            Ok(what)
        }
        _ => Err(format!("names.allow: `{line}` is not `type NAME: reason` or `file NAME: reason`")),
    });
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_belongs_to_the_family_of_its_folder() {
        fn family(file: &str) -> Option<&Path> {
            family_of(Path::new(file))
        }
        assert_eq!(family("models/zaya/legacy.rs"), Some(Path::new("zaya")));
        assert_eq!(family("models/zaya/mod.rs"), Some(Path::new("zaya")));
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
