//! Checks that the sources that documents name exist: `fused/row_loops.rs`, `runtime/src/cpu/{tokens,batch.rs}`.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// Folder of the documents.
const DOCS: &str = "docs";
/// Folder of build outputs.
const OUTPUTS: &str = "target";
/// Endings of sources. Documents also name scripts of Python's own library, as texts of measurements.
const ENDINGS: [&str; 2] = [".rs", ".sh"];

/// Prints file, line and path of every source that a document names and the repository lacks. Passes when there is none.
///
/// # Errors
/// A folder or document cannot be read.
pub fn check(root: &Path) -> io::Result<bool> {
    let mut found = BTreeSet::new();
    list(root, root, &mut found)?;
    let known: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    let documents = known.iter().filter(|path| {
        path.ends_with(".md") && (path.starts_with(DOCS) || !path.contains('/')) && **path != "CHANGELOG.md"
    });
    let mut count = 0;
    for path in documents {
        let text = std::fs::read_to_string(root.join(path))?;
        for (line, named) in named_sources(&text) {
            if !exists(&named, &known) {
                println!("{path}:{line}: there is no `{named}`");
                count += 1;
            }
        }
    }
    match count {
        0 => println!("every source that a document names exists"),
        n => println!("{n} sources that documents name do not exist"),
    }
    Ok(count == 0)
}

/// Adds the paths of all files below a folder, without build outputs and hidden folders.
fn list(root: &Path, folder: &Path, found: &mut BTreeSet<String>) -> io::Result<()> {
    for entry in folder.read_dir()? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if !name.starts_with('.') && name != OUTPUTS {
                list(root, &path, found)?;
            }
        } else if let Ok(relative) = path.strip_prefix(root) {
            found.insert(relative.to_string_lossy().into_owned());
        }
    }
    Ok(())
}

/// Tells whether a known file has this path, or ends in it. The folder `src` of a crate may be left out.
fn exists(named: &str, known: &BTreeSet<&str>) -> bool {
    let in_folder = format!("/{named}");
    let ends = |path: &str| path == named || path.ends_with(&in_folder);
    known.iter().any(|path| ends(path) || ends(&path.replacen("/src/", "/", 1)))
}

/// Returns the sources that a text names in code, with their lines; braces are expanded. Names with capitals stand for
/// files of the reader's, such as `models/NAME/config.rs`.
fn named_sources(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
        // Every second piece between backquotes is code.
        for code in line.split('`').skip(1).step_by(2) {
            for word in code.split_whitespace() {
                let is_path = |c: char| c.is_ascii_alphanumeric() || "/._-{},".contains(c);
                if !word.chars().all(is_path) || word.chars().any(|c| c.is_ascii_uppercase()) {
                    continue;
                }
                let sources = expanded(word).into_iter();
                let sources =
                    sources.filter(|path| ENDINGS.iter().any(|end| path.ends_with(end) && path != end));
                found.extend(sources.map(|path| (i + 1, path)));
            }
        }
    }
    found
}

/// Expands the first pair of braces of a path, and those behind it; a member without an ending takes the one behind.
fn expanded(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_string()] };
    let Some((members, behind)) = rest.split_once('}') else { return Vec::new() };
    members.split(',').flat_map(|member| expanded(&format!("{before}{member}{behind}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_found_in_code_and_nowhere_else() {
        let text = "see a/b.rs, `a/{b,c/d}.rs` and\n`models/NAME/config.rs` or `x.run(y)` and `z.sh --help`";
        let found = named_sources(text);
        let found: Vec<(usize, &str)> = found.iter().map(|(line, path)| (*line, path.as_str())).collect();
        assert_eq!(found, [(1, "a/b.rs"), (1, "a/c/d.rs"), (2, "z.sh")]);
    }

    #[test]
    fn a_path_may_leave_out_folders() {
        let known = BTreeSet::from(["crates/runtime/src/cpu/batch.rs"]);
        assert!(exists("batch.rs", &known) && exists("cpu/batch.rs", &known));
        assert!(exists("runtime/cpu/batch.rs", &known));
        assert!(!exists("atch.rs", &known) && !exists("gpu/batch.rs", &known));
    }
}
