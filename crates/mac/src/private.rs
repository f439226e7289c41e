//! Removes private words from documents: folders, the user's name, the name of the machine.

use serde_json::Value;
use std::cmp::Reverse;
use std::path::Path;
use std::process::{Command, Stdio};

/// Folders that hold the home folders of users.
const HOMES: [&str; 2] = ["/Users/", "/home/"];
/// Names of users that tell nothing about anyone.
const COMMON: [&str; 5] = ["root", "user", "admin", "runner", "nobody"];
/// Length of the shortest folder that is replaced, in bytes: `/` is in every path.
const SHORTEST: usize = 2;

/// Private words with their replacements, the longest first.
#[derive(Clone, Debug, Default)]
pub struct PrivateWords {
    folders: Vec<(String, String)>,
    /// Names that are replaced as whole words.
    names: Vec<(String, &'static str)>,
}

impl PrivateWords {
    /// Collects the words of this machine, and the folders `more` with their replacements.
    pub fn of_this_machine(more: &[(&Path, &str)]) -> PrivateWords {
        let mut words = PrivateWords::default();
        for (path, stands) in more {
            words.folder(path, stands);
        }
        if let Ok(here) = std::env::current_dir() {
            words.folder(&here, "HERE");
        }
        words.folder(&std::env::temp_dir(), "TMP");
        for (name, stands) in [("HOME", "~"), ("XDG_CACHE_HOME", "CACHE")] {
            if let Some(path) = std::env::var_os(name) {
                words.folder(Path::new(&path), stands);
            }
        }
        for (name, stands) in
            [("USER", "USER"), ("LOGNAME", "USER"), ("SUDO_USER", "USER"), ("HOSTNAME", "HOST")]
        {
            words.name(std::env::var(name).ok(), stands);
        }
        for command in
            [&["hostname"][..], &["scutil", "--get", "ComputerName"], &["scutil", "--get", "LocalHostName"]]
        {
            let said = said_by(command);
            words.name(said.as_ref().and_then(|s| s.split('.').next()).map(str::to_string), "HOST");
            words.name(said, "HOST");
        }
        words.folders.sort_by_key(|(folder, _)| Reverse(folder.len()));
        words.names.sort_by_key(|(name, _)| Reverse(name.len()));
        words
    }

    fn folder(&mut self, path: &Path, stands: &str) {
        let canonical = path.canonicalize().ok();
        for path in std::iter::once(path).chain(canonical.as_deref()) {
            let text = path.to_string_lossy().trim_end_matches('/').to_string();
            if path.is_absolute() && text.len() >= SHORTEST && !self.folders.iter().any(|(f, _)| *f == text) {
                self.folders.push((text, stands.into()));
            }
        }
    }

    fn name(&mut self, name: Option<String>, stands: &'static str) {
        let name = name.unwrap_or_default().trim().to_string();
        let is_known = COMMON.contains(&name.as_str()) || self.names.iter().any(|(n, _)| *n == name);
        if name.chars().count() >= 2 && !is_known {
            self.names.push((name, stands));
        }
    }

    /// Removes private words from a text.
    pub fn text(&self, text: &str) -> String {
        let mut out = text.to_string();
        for (folder, stands) in &self.folders {
            out = replace_bounded(&out, folder, stands, |c| c.is_alphanumeric() || c == '-' || c == '_');
        }
        for home in HOMES {
            out = without_home(&out, home);
        }
        for (name, stands) in &self.names {
            out = replace_bounded(&out, name, stands, char::is_alphanumeric);
        }
        out
    }

    /// Removes private words from a document, in keys and values.
    pub fn document(&self, value: Value) -> Value {
        match value {
            Value::String(text) => self.text(&text).into(),
            Value::Array(all) => all.into_iter().map(|v| self.document(v)).collect(),
            Value::Object(map) => map.into_iter().map(|(k, v)| (self.text(&k), self.document(v))).collect(),
            other => other,
        }
    }
}

/// Replaces `word` by `stands` unless a character that `of_word` accepts is beside it.
fn replace_bounded(text: &str, word: &str, stands: &str, of_word: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, behind) = (&rest[..at], &rest[at + word.len()..]);
        let left = before.chars().next_back().or_else(|| out.chars().next_back());
        let bounded = !left.is_some_and(&of_word) && !behind.chars().next().is_some_and(&of_word);
        out += before;
        out += if bounded { stands } else { word };
        rest = behind;
    }
    out + rest
}

/// Replaces the home folders of all users below `home` by `~`.
fn without_home(text: &str, home: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(home) {
        let name = rest[at + home.len()..].find(|c: char| !(c.is_alphanumeric() || "._-".contains(c)));
        let end = name.map_or(rest.len(), |n| at + home.len() + n);
        out += &rest[..at];
        out.push('~');
        rest = &rest[end..];
    }
    out + rest
}

fn said_by(command: &[&str]) -> Option<String> {
    let (program, arguments) = command.split_first()?;
    let output = Command::new(program).args(arguments).stderr(Stdio::null()).output().ok()?;
    String::from_utf8(output.stdout).ok().filter(|_| output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_names_are_replaced_as_words() {
        let words = PrivateWords {
            folders: vec![("/Users/anna/x/work".into(), "WORK".into()), ("/Users/anna".into(), "~".into())],
            names: vec![("anna".into(), "USER"), ("mac-7".into(), "HOST")],
        };
        for (text, wanted) in [
            ("/Users/anna/x/work/b: no", "WORK/b: no"),
            ("/Users/anna/Library", "~/Library"),
            ("/Users/annabel/y", "~/y"),
            ("/home/otto/y and /Users/z", "~/y and ~"),
            ("by anna on mac-7.local", "by USER on HOST.local"),
            ("savannah annas", "savannah annas"),
        ] {
            assert_eq!(words.text(text), wanted, "{text}");
        }
        let document = serde_json::json!({"/Users/anna/x": ["anna", 1, null, {"a": "mac-7"}]});
        assert_eq!(words.document(document), serde_json::json!({"~/x": ["USER", 1, null, {"a": "HOST"}]}));
    }
}
