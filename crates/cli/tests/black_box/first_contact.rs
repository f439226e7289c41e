//! First contact: no command, mistyped commands, completions, manual pages, and the lists of the documents.

use crate::common::{anemoe_as_is, build, finish, fixture, json, refused, run};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn no_command_says_what_to_type_next() {
    let dir = tempfile::tempdir().unwrap();
    let alone = || finish(anemoe_as_is(&[]).current_dir(dir.path()).output().unwrap());
    let (code, out, err) = alone();
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("anemoe quickstart") && err.contains("anemoe help"), "{err}");
    assert!(err.lines().count() <= 10 && !err.contains("error"), "{err}");
    build(&fixture("tiny-gemma4-moe-text"), &dir.path().join("tiny.anemoe"), &["--no-journal"]);
    let (_, _, err) = alone();
    assert!(err.contains("anemoe chat tiny.anemoe") && !err.contains("quickstart"), "{err}");
    assert_eq!(json(2, &[])["error"]["kind"], "usage");
}

#[test]
fn mistyped_commands_and_words_of_other_tools_find_the_command() {
    for (said, meant) in [
        ("biuld", "build"),
        ("genrate", "generate"),
        ("run", "generate"),
        ("convert", "build"),
        ("server", "serve"),
        ("benchmark", "bench"),
        ("eval", "validate"),
        ("ps", "inspect"),
    ] {
        refused(&[said], &["a similar subcommand exists", &format!("'{meant}'")]);
    }
    refused(&["chat", "x", "--sesion", "f"], &["--session"]);
}

#[test]
fn options_of_other_tools_find_the_option() {
    refused(&["chat", "x", "--n-predict", "8"], &["'--n-predict'", "'--max-new'"]);
    refused(&["chat", "x", "--system-prompt=Be brief."], &["'--system'"]);
    refused(&["serve", "x", "--parallel", "4"], &["'--max-sequences'"]);
    refused(&["serve", "x", "--ctx-size", "4096"], &["tip: a bundle has the context that it was built for"]);
    refused(&["chat", "--model", "x"], &["tip: the checkpoint or bundle is named without an option"]);
    // A command without such an option gives no such tip.
    let (code, _, err) = run(&["inspect", "x", "--n-predict", "8"]);
    assert!(code == 2 && !err.contains("--max-new"), "{err}");
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    let (_, help, _) = run(&["--help"]);
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names: Vec<&str> = commands.lines().filter_map(|l| l.split_whitespace().next()).collect();
    let names: Vec<&str> = names.into_iter().filter(|n| *n != "help").collect();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let (code, script, err) = run(&["completions", shell]);
        assert_eq!(code, 0, "{err}");
        for name in &names {
            assert!(script.contains(name), "{shell}: {name}");
        }
        assert_eq!(json(0, &["completions", shell])["script"], script);
    }
    refused(&["completions", "tcsh"], &["tcsh", "bash"]);
    let (code, page, _) = run(&["man"]);
    assert_eq!(code, 0);
    assert!(page.contains(".TH anemoe 1") && page.contains("quickstart"), "{page}");
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("man1");
    let pages = json(0, &["man", "-o", folder.to_str().unwrap()]);
    let pages: BTreeSet<&str> =
        pages["pages"].as_array().unwrap().iter().filter_map(|p| p.as_str()).collect();
    for name in &names {
        let page = format!("anemoe-{name}.1");
        assert!(pages.contains(page.as_str()), "{page} is not in {pages:?}");
        assert!(std::fs::read_to_string(folder.join(page)).unwrap().contains(".SH OPTIONS"));
    }
    refused(&["man", "-o", folder.to_str().unwrap()], &["--force"]);
}

#[cfg(unix)]
#[test]
fn bash_reads_the_completions() {
    let (_, script, _) = run(&["completions", "bash"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("anemoe.bash");
    std::fs::write(&file, script).unwrap();
    let ask = r#"source "$1"; COMP_WORDS=(anemoe ch); COMP_CWORD=1; _anemoe anemoe ch anemoe; echo "${COMPREPLY[@]}""#;
    let Ok(output) = std::process::Command::new("bash").args(["-c", ask, "bash"]).arg(&file).output() else {
        return;
    };
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "check chat", "{output:?}");
}

#[test]
fn documents_name_every_command_and_every_page() {
    let (_, help, _) = run(&["--help"]);
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let page = std::fs::read_to_string(root().join("docs/commands.md")).unwrap();
    for name in commands.lines().filter_map(|l| l.split_whitespace().next()).filter(|n| *n != "help") {
        assert!(page.contains(&format!("| `anemoe {name}")), "docs/commands.md does not list {name}");
    }
    let summary = std::fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    for entry in std::fs::read_dir(root().join("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".md") && name != "SUMMARY.md" {
            assert!(summary.contains(&format!("({name})")), "docs/SUMMARY.md does not list {name}");
        }
    }
}

/// Checks that links of the documents to files of the repository lead to files.
#[test]
fn links_of_documents_lead_to_files() {
    let pages = std::fs::read_dir(root().join("docs")).unwrap().map(|e| e.unwrap().path());
    let top = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(|n| root().join(n));
    for page in pages.filter(|p| p.extension().is_some_and(|e| e == "md")).chain(top) {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains(':') || file.contains(' ') {
                continue;
            }
            assert!(page.parent().unwrap().join(file).exists(), "{}: {link}", page.display());
        }
    }
}

/// Checks that the sources contain every failure message of the page, piece by piece between the variable parts.
#[test]
fn failure_messages_of_the_page_are_those_of_the_sources() {
    fn collect(dir: &Path, text: &mut String) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, text);
            } else if path.extension().is_some_and(|e| e == "rs") {
                text.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let mut sources = String::new();
    for krate in std::fs::read_dir(root().join("crates")).unwrap() {
        collect(&krate.unwrap().path().join("src"), &mut sources);
    }
    // Joins texts that go on in the next line.
    let joined: String = sources.split("\\\n").map(str::trim_start).collect();
    let page = std::fs::read_to_string(root().join("docs/faq.md")).unwrap();
    let messages: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    assert!(messages.len() >= 25);
    for message in messages {
        // `this is {}` takes a name, and what follows is a sentence of its own.
        let parts = message.split('…').flat_map(|p| p.split("this is ")).flat_map(|p| p.split("; "));
        for part in parts.map(str::trim).filter(|part| part.len() > 3) {
            assert!(joined.contains(part), "`{part}` of `{message}` is in no source");
        }
    }
}
