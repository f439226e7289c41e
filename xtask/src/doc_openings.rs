//! Checks the first words of doc comments: they name the thing, "Bytes of a token" and not "What a token takes". Those of functions
//! begin with a verb, "Returns the bytes of a token".

use std::io;
use std::path::{Path, PathBuf};

/// Folders with sources.
const FOLDERS: [&str; 4] = ["crates", "xtask", "sim", "fuzz"];
/// Folder below them with build outputs instead of sources.
const SKIPPED: &str = "target";
/// Words that no doc comment may begin with: they put a clause where the thing's name belongs.
const REFUSED: [&str; 23] = [
    "What",
    "Where",
    "Which",
    "That",
    "Of",
    "As",
    "Whether",
    "Those",
    "How",
    "To",
    "By",
    "Into",
    "Both",
    "Something",
    "Everything",
    "With",
    "So",
    "Some",
    "At",
    "Who",
    "Why",
    "When",
    "From",
];

/// Prints file, line and word of every doc comment that begins with a word of [`REFUSED`]. Passes when there is none.
///
/// # Errors
/// A folder or file cannot be read.
pub fn check(root: &Path) -> io::Result<bool> {
    let mut files = Vec::new();
    for folder in FOLDERS {
        list_sources(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut count = 0;
    for file in &files {
        let text = std::fs::read_to_string(file)?;
        let shown = file.strip_prefix(root).unwrap_or(file).display();
        for (line, word) in find(&text) {
            println!("{shown}:{line}: a doc comment begins with `{word}`; name the thing first");
            count += 1;
        }
        for (line, word) in find_functions(&text) {
            println!(
                "{shown}:{line}: a function's doc comment begins with `{word}`; say what it does, as in `Returns ..`"
            );
            count += 1;
        }
    }
    match count {
        0 => println!("every doc comment names its thing first; {} files", files.len()),
        _ => println!("{count} doc comments"),
    }
    Ok(count == 0)
}

/// Adds the `.rs` files below a folder to the list.
fn list_sources(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (kind, path) = (entry.file_type()?, entry.path());
        if kind.is_dir() && entry.file_name() != SKIPPED {
            list_sources(&path, files)?;
        } else if kind.is_file() && path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Finds the doc comments of a text that begin with a word of [`REFUSED`]. Returns line numbers, from 1, and words.
fn find(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    let mut before = None;
    for (i, line) in text.lines().enumerate() {
        let doc = doc_text(line);
        // Consecutive lines with one marker are one comment; only its first line counts.
        if let Some((marker, words)) = doc.filter(|(marker, _)| before != Some(*marker)) {
            let first = words.trim_start().split(|c: char| !c.is_alphanumeric()).next();
            let refused = REFUSED.iter().find(|w| Some(**w) == first);
            found.extend(refused.map(|word| (i + 1, *word)));
            before = Some(marker);
        } else if doc.is_none() {
            before = None;
        }
    }
    found
}

/// Finds the doc comments of functions whose first word is no verb in the third person: it does not end in `s`. Returns line
/// numbers, from 1, and words.
fn find_functions(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    // First line of the comment above, behind which nothing but attributes came.
    let mut opening: Option<(usize, &str)> = None;
    let mut in_comment = false;
    for (i, line) in text.lines().enumerate() {
        let code = line.trim();
        match doc_text(line) {
            Some(("///", words)) => {
                if !in_comment {
                    opening = Some((i + 1, words.trim()));
                }
                in_comment = true;
                continue;
            }
            _ => in_comment = false,
        }
        if code.starts_with("#[") || code.is_empty() {
            continue;
        }
        if let Some((number, words)) = opening.take().filter(|_| is_function(code)) {
            let first =
                words.split(|c: char| c.is_whitespace() || ".,:;".contains(c)).next().unwrap_or_default();
            let is_verb = first.starts_with(char::is_uppercase) && first.ends_with('s');
            if !words.is_empty() && (!is_verb || matches!(first, "This" | "Its" | "Is")) {
                found.push((number, first));
            }
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
    (matches!(marker, "///" | "//!") && !text.starts_with('/')).then_some((marker, text))
}

#[cfg(test)]
mod tests {
    use super::{find, find_functions};

    #[test]
    fn a_comment_that_opens_with_a_clause_is_found() {
        let text = concat!(
            "//! What it is.\n\n/// Bytes.\n/// Of a token.\nfn f() {\n    //// Which.\n    // How.\n}\n",
            "struct S {\n    /// Of each row, its bytes.\n    a: u8,\n    /// Offset.\n    b: u8,\n",
            "    /// As: a name.\n    c: u8,\n}\n",
        );
        assert_eq!(find(text), [(1, "What"), (10, "Of"), (14, "As")]);
    }

    #[test]
    fn a_comment_that_names_its_thing_passes() {
        let text = concat!(
            "/// Offset of a row.\n///\n/// # Errors\n/// As before.\n/// Whatsoever.\nfn f() {}\n",
            "/// Ofen.\nfn g() {}\n///\n",
        );
        assert!(find(text).is_empty());
    }

    #[test]
    fn comments_of_two_markers_are_two() {
        assert_eq!(find("//! Words.\n/// Those of a line.\nfn f() {}\n"), [(2, "Those")]);
    }

    #[test]
    fn a_function_comment_without_a_verb_is_found() {
        let text = concat!(
            "/// The bytes.\n/// Of a token.\n#[inline]\npub(super) fn f() {}\n/// Returns bytes.\nconst fn g() {}\n",
            "/// `a + b`.\nfn h() {}\n/// Offset.\nstruct S;\n///\nfn i() {}\n/// This is.\nasync fn j() {}\n",
        );
        assert_eq!(find_functions(text), [(1, "The"), (7, "`a"), (13, "This")]);
    }
}
