//! Checks texts: the first words of doc comments, and the sources that documents name.
//!
//! A doc comment names its thing, "Bytes of a token" and not "What a token takes"; that of a function begins with a verb,
//! "Returns the bytes of a token". Documents name sources that exist: `fused/row_loops.rs`,
//! `runtime/src/cpu/{tokens,batch.rs}`.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// Words that no doc comment may begin with: they put a clause where the thing's name belongs.
const REFUSED: &str = "What Where Which That Of As Whether Those How To By Into Both Something Everything With So Some At Who Why \
    When From";
/// Folder of build outputs.
const OUTPUTS: &str = "target";
/// Endings of sources. Documents also name scripts of Python's own library, as texts of measurements.
const ENDINGS: [&str; 2] = [".rs", ".sh"];

/// Prints file, line and fault of every doc comment with a wrong opening, and of every source that a document names and the
/// repository lacks. Returns their number.
///
/// # Errors
/// A folder or file cannot be read.
pub fn print_faults(root: &Path) -> io::Result<usize> {
    let mut files = BTreeSet::new();
    list(root, root, &mut files)?;
    let known: BTreeSet<&str> = files.iter().map(String::as_str).collect();
    let mut count = 0;
    for path in &known {
        let is_document = path.ends_with(".md") && (path.starts_with("docs/") || !path.contains('/'));
        let mut faults = Vec::new();
        if path.ends_with(".rs") {
            faults = wrong_openings(&std::fs::read_to_string(root.join(path))?);
        } else if is_document && *path != "CHANGELOG.md" {
            let named = named_sources(&std::fs::read_to_string(root.join(path))?).into_iter();
            let lacking = named.filter(|(_, named)| !exists(named, &known));
            faults.extend(lacking.map(|(line, named)| (line, format!("there is no `{named}`"))));
        }
        count += faults.len();
        faults.iter().for_each(|(line, what)| println!("{path}:{line}: {what}"));
    }
    Ok(count)
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

/// Finds doc comments whose first word is refused, and those of functions whose first word is no verb in the third person:
/// it does not end in `s`. Returns line numbers, from 1, and what is wrong.
fn wrong_openings(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut lines = text.lines().enumerate().peekable();
    while let Some((i, line)) = lines.next() {
        let Some((marker, words)) = doc_text(line) else { continue };
        // Consecutive lines with one marker are one comment; only its first line counts.
        while lines.next_if(|(_, next)| doc_text(next).is_some_and(|(m, _)| m == marker)).is_some() {}
        // Attributes stand between a comment and its item.
        let is_between = |line: &str| line.is_empty() || line.starts_with("#[");
        while marker == "///" && lines.next_if(|(_, next)| is_between(next.trim())).is_some() {}
        let is_of_function =
            marker == "///" && lines.peek().is_some_and(|(_, code)| is_function(code.trim()));
        let first = words.split(|c: char| c.is_whitespace() || ".,:;".contains(c)).next().unwrap_or_default();
        let is_verb = first.starts_with(char::is_uppercase) && first.ends_with('s');
        if REFUSED.split_whitespace().any(|word| word == first) {
            found.push((i + 1, format!("a doc comment begins with `{first}`; name the thing first")));
        } else if is_of_function && !words.is_empty() && (!is_verb || ["This", "Its", "Is"].contains(&first))
        {
            let what = format!(
                "a function's doc comment begins with `{first}`; say what it does, as in `Returns ..`"
            );
            found.push((i + 1, what));
        }
    }
    found
}

/// Tells whether a line of code begins a function.
fn is_function(code: &str) -> bool {
    let words = code.split_whitespace().skip_while(|word| {
        word.starts_with("pub")
            || matches!(*word, "const" | "unsafe" | "async" | "extern" | "\"C\"" | "in" | "super)" | "crate)")
    });
    words.take(1).any(|word| word == "fn")
}

/// Splits a line of a doc comment into its marker and its text; `None` for other lines.
fn doc_text(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let (marker, text) = line.split_at_checked(3)?;
    (matches!(marker, "///" | "//!") && !text.starts_with('/')).then_some((marker, text.trim()))
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

    fn lines(text: &str) -> Vec<usize> {
        wrong_openings(text).into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn a_comment_that_opens_with_a_clause_is_found() {
        let text = concat!(
            "//! What it is.\n\n/// Bytes.\n/// Of a token.\nfn f() {\n    //// Which.\n    // How.\n}\n",
            "struct S {\n    /// Of each row, its bytes.\n    a: u8,\n    /// Offset.\n    b: u8,\n",
            "    /// As: a name.\n    c: u8,\n}\n",
        );
        assert_eq!(lines(text), [1, 10, 14]);
    }

    #[test]
    fn a_comment_that_names_its_thing_passes() {
        let text = concat!(
            "/// Offset of a row.\n///\n/// # Errors\n/// As before.\n/// Whatsoever.\nstruct F;\n",
            "/// Ofen.\nstruct G;\n///\n",
        );
        assert!(lines(text).is_empty());
    }

    #[test]
    fn comments_of_two_markers_are_two() {
        assert_eq!(lines("//! Words.\n/// Those of a line.\nfn f() {}\n"), [2]);
    }

    #[test]
    fn a_function_comment_without_a_verb_is_found() {
        let text = concat!(
            "/// The bytes.\n/// Of a token.\n#[inline]\npub(super) fn f() {}\n/// Returns bytes.\nconst fn g() {}\n",
            "/// `a + b`.\nfn h() {}\n/// Offset.\nstruct S;\n///\nfn i() {}\n/// This is.\nasync fn j() {}\n",
        );
        assert_eq!(lines(text), [1, 7, 13]);
    }

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
