//! Removes private words from documents: folders, the user's name, the name of the machine.

use crate::energy::said;
use serde_json::Value;
use std::cmp::Reverse;
use std::path::{Path, PathBuf};

/// Folders that hold the home folders of users.
const HOMES: [&str; 2] = ["/Users/", "/home/"];
/// Names of users that tell nothing about anyone.
const COMMON: [&str; 5] = ["root", "user", "admin", "runner", "nobody"];
/// Length of the shortest word that is replaced, in characters: `/` is in every path.
const SHORTEST: usize = 2;

/// Private words with their replacements, the longest first.
#[derive(Clone, Debug, Default)]
pub struct PrivateWords(Vec<(String, &'static str)>);

impl PrivateWords {
    /// Collects the words of this machine, and the folders `more` with their replacements.
    pub fn of_this_machine(more: &[(&Path, &'static str)]) -> PrivateWords {
        let of_variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let folders = [
            (std::env::current_dir().ok(), "HERE"),
            (Some(std::env::temp_dir()), "TMP"),
            (of_variable("HOME"), "~"),
            (of_variable("XDG_CACHE_HOME"), "CACHE"),
        ];
        let more = more.iter().map(|(path, stands)| (Some(path.to_path_buf()), *stands));
        let mut words = PrivateWords::default();
        for (path, stands) in more.chain(folders) {
            let canonical = path.as_ref().and_then(|path| path.canonicalize().ok());
            for path in path.into_iter().chain(canonical).filter(|path| path.is_absolute()) {
                words.word(path.to_string_lossy().trim_end_matches('/'), stands);
            }
        }
        let users = ["USER", "LOGNAME", "SUDO_USER"].map(|name| (std::env::var(name).ok(), "USER"));
        let of_system = ["ComputerName", "LocalHostName"].map(|name| said("scutil", &["--get", name]).ok());
        let hosts = of_system.into_iter().chain([std::env::var("HOSTNAME").ok(), said("hostname", &[]).ok()]);
        for (name, stands) in users.into_iter().chain(hosts.map(|host| (host, "HOST"))) {
            let name = name.as_deref().unwrap_or_default().trim();
            // A host's name, and the same without its domain.
            let names = [name, name.split('.').next().unwrap_or_default()];
            names.into_iter().filter(|name| !COMMON.contains(name)).for_each(|name| words.word(name, stands));
        }
        words.0.sort_by_key(|(word, _)| Reverse(word.len()));
        words
    }

    fn word(&mut self, word: &str, stands: &'static str) {
        if word.chars().count() >= SHORTEST && !self.0.iter().any(|(known, _)| known == word) {
            self.0.push((word.into(), stands));
        }
    }

    /// Removes private words from a text.
    pub fn text(&self, text: &str) -> String {
        let out = self.0.iter().fold(text.to_string(), |text, (word, stands)| replace(&text, word, stands));
        HOMES.iter().fold(out, |text, home| without_home(&text, home))
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

/// Replaces `word` by `stands`, unless a letter or digit is beside it.
fn replace(text: &str, word: &str, stands: &str) -> String {
    let (mut out, mut end) = (String::with_capacity(text.len()), 0);
    for (at, _) in text.match_indices(word) {
        let beside = [text[..at].chars().next_back(), text[at + word.len()..].chars().next()];
        if !beside.into_iter().flatten().any(char::is_alphanumeric) {
            out += &text[end..at];
            out += stands;
            end = at + word.len();
        }
    }
    out + &text[end..]
}

/// Replaces the home folders of all users below `home` by `~`.
fn without_home(text: &str, home: &str) -> String {
    let mut parts = text.split(home);
    let before = parts.next().unwrap_or_default().to_string();
    let of_name = |c: char| c.is_alphanumeric() || "._-".contains(c);
    parts.fold(before, |out, part| out + "~" + part.trim_start_matches(of_name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_names_are_replaced_as_words() {
        let words =
            [("/Users/anna/x/work", "WORK"), ("/Users/anna", "~"), ("mac-7", "HOST"), ("anna", "USER")];
        let words = PrivateWords(words.map(|(word, stands)| (word.to_string(), stands)).to_vec());
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
